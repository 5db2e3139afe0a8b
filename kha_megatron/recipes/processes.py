"""Find and terminate all processes of a launch.

We identify processes by an environment variable. Process groups do not work because torchrun starts
each rank in its own session.

When run as a script, this module waits for stdin to be closed and then terminates the processes.
This also works if the launcher gets killed.
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
"""Environment variable with the launch ID. Set in all processes of a launch."""

_GRACE_SECONDS = 20.0
"""Time between SIGTERM and SIGKILL, e.g. to save a checkpoint."""


@contextmanager
def terminating_on_exit(launch_id: str) -> Iterator[None]:
    """Terminate all processes of a launch on exit, even if the current process gets killed."""
    guard = subprocess.Popen(
        [sys.executable, "-I", __file__, launch_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # do not forward SIGINT and SIGHUP
    )
    try:
        yield
    finally:
        try:
            guard.communicate()
        except KeyboardInterrupt:  # do not wait after a second Ctrl-C
            end_processes(launch_id, grace=0)
            raise


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP. Yields a list of the received signals.

    If the same signal is sent again, it is ignored so that cleanup can finish. Existing handlers
    (e.g. nohup's) are left alone. Has no effect outside of the main thread.
    """
    received: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        received.append(number)
        raise KeyboardInterrupt

    original_handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                original_handlers[number] = signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number, handler in original_handlers.items():
            signal.signal(number, handler)


def end_processes(launch_id: str, grace: float = _GRACE_SECONDS) -> None:
    """Send SIGTERM to torchrun (it forwards the signal), and SIGKILL after ``grace`` seconds."""
    deadline = time.monotonic() + grace
    parents = find_processes(launch_id)
    torchrun_pids = [pid for pid, parent in parents.items() if parent not in parents]
    _signal(torchrun_pids, signal.SIGTERM)
    while find_processes(launch_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal(find_processes(launch_id), signal.SIGKILL)


def find_processes(launch_id: str) -> dict[int, int]:
    """Return ``{pid: parent_pid}`` for all processes of a launch."""
    parents = {}
    for process in psutil.process_iter(["pid", "ppid", "environ"]):
        environment = process.info["environ"] or {}  # None for processes of other users
        if environment.get(LAUNCH_VARIABLE) == launch_id:
            parents[process.info["pid"]] = process.info["ppid"]
    return parents


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.stdin.read()
    end_processes(sys.argv[1])
