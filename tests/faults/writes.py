"""Call a function at every step by which a process writes below a directory.

Python's file functions are replaced, so that each system call is one step.
"""

import builtins
import io
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Step = tuple[str, str]
"""An action (open, half, write, fsync, close, rename, mkdir, unlink), and its file."""


def watch(folder: Path, at: Callable[[Step], None]) -> None:
    """Call ``at`` right after each step below ``folder``; ``half`` is after half of a write."""
    root = str(folder)

    def tell(what: str, path: Any) -> None:
        if isinstance(path, str | Path) and str(path).startswith(root):
            at((what, os.path.relpath(path, root)))

    class Raw(io.FileIO):
        def __init__(self, path: Any, mode: str) -> None:
            super().__init__(path, mode)
            tell("open", path)

        def write(self, data: Any) -> int:
            half = bytes(data)[: len(data) // 2]
            done = super().write(half) if half else 0
            tell("half", self.name)
            done += super().write(bytes(data)[done:])
            tell("write", self.name)
            return done

        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open:
                tell("close", self.name)

    plain_open = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if (
            not isinstance(file, str | Path)
            or not str(file).startswith(root)
            or not set(mode) & set("w+")
        ):
            return plain_open(file, mode, *args, **kwargs)
        buffer = io.BufferedWriter(Raw(str(file), mode.replace("b", "").replace("t", "")))
        return buffer if "b" in mode else io.TextIOWrapper(buffer)

    def followed(name: str, function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            tell(name, args[-1] if name == "rename" else args[0])
            return result

        return run

    def fsync(descriptor: int) -> None:
        plain_fsync(descriptor)
        tell("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))

    plain_fsync = os.fsync
    os.fsync = fsync
    builtins.open = io.open = opened
    for name, function in (("rename", "rename"), ("rename", "replace"), ("mkdir", "mkdir")):
        setattr(os, function, followed(name, getattr(os, function)))
    os.unlink = followed("unlink", os.unlink)


def is_step(wanted: Step, step: Step) -> bool:
    """Return whether ``step`` is the wanted action on a file that matches the wanted pattern."""
    return step[0] == wanted[0] and Path(step[1]).match(wanted[1])


def kill_at(
    folder: Path,
    wanted: Step,
    count: int,
    victim: int,
    everyone: bool,
    note: Path,
    rank: int,
) -> None:
    """Kill the rank ``victim``, or ``everyone``, at its ``count``-th ``wanted`` step."""
    if rank != victim:
        return
    left = count

    def at(step: Step) -> None:
        nonlocal left
        if is_step(wanted, step):
            left -= 1
            if not left:
                note.touch()  # tells the test that the step was reached
                kill = partial(os.killpg, 0) if everyone else partial(os.kill, os.getpid())
                kill(signal.SIGKILL)

    watch(folder, at)
