"""Kill conversions at every step, in forks of a process that has imported torch."""

import contextlib
import functools
import gc
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from kha_megatron.checkpoint.staging import check_output_folder
from kha_megatron.errors import OutputError
from tests.faults import writes

Tree = dict[str, bytes]


def tree(folder: Path) -> Tree:
    """Return the content of every file below a directory by its path."""
    contents = {}
    for path in folder.rglob("*"):
        if path.is_file():
            contents[str(path.relative_to(folder))] = path.read_bytes()
    return contents


def convert(kind: str, source: Path, target: Path) -> None:
    """Convert in one thread, so that the output is the same byte for byte."""
    from kha_megatron.conversion import to_hf, to_megatron

    if kind == "to-hf":
        to_hf.plan_export(source, max_shard_bytes=3000).write(target, workers=1)
    else:
        to_megatron.plan_import(source, divisible_by=8).write(target, workers=1)


def kill_at_every_step(kind: str, source: Path, target: Path, most: int) -> tuple[int, list[str]]:
    """Kill a conversion over an old directory at about ``most`` of its steps.

    Returns:
        The number of kills, and a line for each one after which the old output was not there.
    """
    first = target.with_name("first")
    note = target.parent.with_name("steps")
    old_copy = shutil.copytree(target, target.parent.with_name("old"))
    convert(kind, source, first)  # imports what the children would import one by one
    gc.collect()  # forks have no threads
    old = tree(target)
    new = tree(first)
    assert not _forked(lambda: note.write_text(_follow(kind, source, first)))
    assert tree(first) == new
    steps = note.read_text().splitlines()
    count = len(steps)
    stride = math.ceil(count / most)
    chosen = {*range(0, count, stride), *range(max(0, count - 8), count)}
    wrong = []
    for number in sorted(chosen):
        status = _forked(functools.partial(_follow, kind, source, target, number))
        place = f"step {number} ({steps[number]})"
        if status != -signal.SIGKILL:
            wrong.append(f"{place}: it ended with {status}")
        with contextlib.suppress(OutputError):
            check_output_folder(target, overwrite=False)  # as the next command does
            wrong.append(f"{place}: the directory would be replaced without --overwrite")
        if tree(target) == new:
            shutil.rmtree(target)
            shutil.copytree(old_copy, target)
        elif tree(target) != old:
            wrong.append(f"{place}: neither the old directory nor the new one is there")
    status = _forked(functools.partial(convert, kind, source, target))
    if status or tree(target) != new:
        wrong.append("the conversion without a kill failed")
    names = {path.name for path in target.parent.iterdir()}
    if names != {target.name, first.name}:
        wrong.append(f"left behind: {sorted(names)}")
    return len(chosen), wrong


def _follow(kind: str, source: Path, target: Path, number: int | None = None) -> str:
    """Convert and return a line for each step, or kill this process at step ``number``."""
    steps: list[str] = []

    def at(step: writes.Step) -> None:
        if len(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        steps.append(" ".join(step))

    writes.watch(target.parent, at)
    convert(kind, source, target)
    return "\n".join(steps)


def _forked(function: Callable[[], object]) -> int:
    """Run a function in a child. Return its exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
