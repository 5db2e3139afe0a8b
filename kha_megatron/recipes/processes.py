"""Find and end the processes of one launch by a mark in their environment.

torchrun starts each rank in its own session, so no process group contains them all. Run as a
script, this module waits until stdin is closed, which happens even if the launcher is killed, and
then ends the processes.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

LAUNCH_VARIABLE = "KHA_MEGATRON_LAUNCH"
"""Environment variable of every process of a launch; each launch has its own value."""

_GRACE_SECONDS = 20.0
"""Time between SIGTERM and SIGKILL, for instance to write a checkpoint."""


@contextmanager
def guarded(launch_id: str) -> Iterator[None]:
    """End all processes with the mark when the block ends or this process is killed."""
    guard = subprocess.Popen(
        [sys.executable, "-I", __file__, launch_id],
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
            end_processes(launch_id, grace=0)
            raise


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Handle SIGTERM and SIGHUP like Ctrl-C in the block; yield the list of received signals.

    A second signal is ignored so that cleanup can finish. Existing handlers, signals ignored by
    nohup, and threads other than the main thread are not changed.

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


def end_processes(launch_id: str, grace: float = _GRACE_SECONDS) -> None:
    """Send SIGTERM to parents (torchrun forwards it), then SIGKILL to what is left."""
    deadline = time.monotonic() + grace
    found = find_processes(launch_id)
    _signal((pid for pid, parent in found.items() if parent not in found), signal.SIGTERM)
    while find_processes(launch_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal(find_processes(launch_id), signal.SIGKILL)


def find_processes(launch_id: str) -> dict[int, int]:
    """Return the process ids with the launch_id, each with its parent's."""
    processes = psutil.process_iter(["ppid", "environ"])  # environ is None for other users'
    return {p.pid: p.info["ppid"] for p in processes if (p.info["environ"] or {}).get(LAUNCH_VARIABLE) == launch_id}


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.stdin.read()
    end_processes(sys.argv[1])
