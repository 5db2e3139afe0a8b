"""Find and end the processes of one launch by a mark in their environment.

torchrun starts each rank in its own session, so no process group contains them all. Run as a
script, this module is the guard that outlives a killed launch: it waits until stdin is closed.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MARK = "KHA_MEGATRON_LAUNCH"
"""Environment variable of every process of a launch; each launch has its own value."""
_GRACE_SECONDS = 20.0
"""Time between SIGTERM and SIGKILL, for instance to write a checkpoint."""


@contextmanager
def guarded(mark: str) -> Iterator[None]:
    """End all processes with the mark when the block ends or this process is killed."""
    guard = subprocess.Popen(
        [sys.executable, "-I", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # out of reach of Ctrl-C and of a closing terminal
    )
    try:
        yield
    finally:
        try:
            guard.communicate()
        except KeyboardInterrupt:  # a second Ctrl-C: at once
            end(mark, grace=0)
            raise


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP act like Ctrl-C in the block; yield the list of received signals.

    A second signal is ignored so that cleaning up can finish. Existing handlers, signals ignored by
    nohup, and threads other than the main one are left alone.

    Raises:
        KeyboardInterrupt: at the first signal.
    """
    received: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        received.append(number)
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(mark: str, grace: float = _GRACE_SECONDS) -> None:
    """Send SIGTERM to parents (torchrun forwards it), then SIGKILL to what is left."""
    deadline = time.monotonic() + grace
    found = marked(mark)
    _signal(pid for pid, parent in found.items() if parent not in found)
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal(marked(mark), signal.SIGKILL)


def marked(mark: str) -> dict[int, int]:
    """Return the live processes with the mark, each with its parent."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = int(fields[1])
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def _signal(pids: Iterable[int], number: signal.Signals = signal.SIGTERM) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    sys.stdin.read()
    end(sys.argv[1])
