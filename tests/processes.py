"""Wait for processes that a test started."""

import time

import psutil


def wait_until(condition, seconds: float = 200.0) -> None:
    """Wait until ``condition()`` is true, or fail after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
