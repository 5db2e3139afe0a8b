"""Kill conversions at every step, in forks of a process that has imported torch."""

import gc
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

from kha_megatron.checkpoint.staging import check_output_folder
from kha_megatron.errors import OutputError
from tests.faults import writes

Tree = dict[str, bytes]


def tree(folder: Path) -> Tree:
    """Return the content of every file below a directory by its path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def convert(kind: str, source: Path, target: Path) -> None:
    """Convert in one thread, so that the output is the same byte for byte."""
    from kha_megatron.conversion import to_hf, to_megatron

    if kind == "to-hf":
        to_hf.plan(source, max_shard_bytes=3000).write(target, workers=1)
    else:
        to_megatron.plan(source, divisible_by=8).write(target, workers=1)


def kill_at_every_step(kind: str, source: Path, target: Path, most: int) -> tuple[int, list[str]]:
    """Kill a conversion over an old directory at about ``most`` of its steps.

    Returns:
        The number of kills, and a line for each one after which the old output was not there.
    """
    old, first = tree(target), target.with_name("first")
    convert(kind, source, first)  # imports what the children would import one by one
    gc.collect()  # forks have no threads
    new = tree(first)
    steps = _steps(kind, source, first)
    assert tree(first) == new
    last = range(max(0, len(steps) - 8), len(steps))
    chosen = sorted({*range(0, len(steps), -(-len(steps) // most)), *last})
    wrong = []
    for number in chosen:
        status = _forked(lambda n=number: _killed(kind, source, target, n))
        place = f"step {number} ({' '.join(steps[number])})"
        if status != -signal.SIGKILL:
            wrong.append(f"{place}: it ended with {status}")
        _recover(target)
        if tree(target) == new:
            _forked(lambda: _restore(target, old))
        elif tree(target) != old:
            wrong.append(f"{place}: neither the old directory nor the new one is there")
    if _forked(lambda: convert(kind, source, target)) or tree(target) != new:
        wrong.append("the conversion without a kill failed")
    left = sorted(path.name for path in target.parent.iterdir())
    if left != sorted([target.name, "first"]):
        wrong.append(f"left behind: {left}")
    return len(chosen), wrong


def _recover(target: Path) -> None:
    """Check the output directory as the next command does."""
    try:
        check_output_folder(target, overwrite=False)
    except OutputError:
        return
    raise AssertionError(f"{target} would be replaced without --overwrite")


def _restore(target: Path, old: Tree) -> None:
    from kha_megatron.checkpoint.staging import staged_folder

    with staged_folder(target) as staged:
        for name, content in old.items():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).write_bytes(content)


def _steps(kind: str, source: Path, target: Path) -> list[writes.Step]:
    note = target.with_name("steps")

    def listed() -> None:
        steps: list[writes.Step] = []
        writes.watch(target.parent, steps.append)
        convert(kind, source, target)
        note.write_text("\n".join(" ".join(step) for step in steps))

    assert _forked(listed) == 0
    steps = [tuple(line.split(" ", 1)) for line in note.read_text().splitlines()]
    note.unlink()
    return steps


def _killed(kind: str, source: Path, target: Path, number: int) -> None:
    counter = itertools.count()

    def at(step: writes.Step) -> None:
        if next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    writes.watch(target.parent, at)
    convert(kind, source, target)


def _forked(function: Callable[[], object]) -> int:
    """Run a function in a child. Return its exit code, or minus the signal that killed it."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
