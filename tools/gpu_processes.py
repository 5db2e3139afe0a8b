"""Child processes with a log and a time limit, several at once."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be run."""

    name: str
    command: Sequence[str]
    log: Path
    limit: float
    """Seconds that it may take."""

    environment: Mapping[str, str]
    """On top of this process's."""


class Process:
    """A task that runs, in a session of its own so that its children can be ended with it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.started = time.monotonic()
        task.log.parent.mkdir(parents=True, exist_ok=True)
        with task.log.open("wb") as log:
            self._process = subprocess.Popen(
                list(task.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(task.environment),
                start_new_session=True,
            )
        self.timed_out = False
        self.seconds = 0.0

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def finished(self, deadline: float = float("inf")) -> bool:
        """Whether it has ended; beyond its limit or ``deadline`` (``time.monotonic``) it is."""
        now = time.monotonic()
        self.timed_out = self.timed_out or (
            self.code is None and now > min(self.started + self.task.limit, deadline)
        )
        if self.timed_out:
            self.kill()
        self.seconds = self.seconds or (now - self.started if self.code is not None else 0.0)
        return self.code is not None

    def kill(self) -> None:
        """End it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self, lines: int = 1) -> str:
        """The last lines of its log that say something."""
        text = self.task.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])


def run_all(
    tasks: Iterable[Task],
    *,
    at_once: int,
    deadline: float,
    least: float = 0.0,
    on_start: Callable[[Task], Any] = lambda task: None,
    on_end: Callable[[Process], Any],
) -> list[Task]:
    """Run tasks in their order, ``at_once`` together, until ``deadline``.

    Args:
        deadline: by ``time.monotonic``; what runs then is ended, with ``timed_out`` set.
        least: seconds that must be left for another one to be started.

    Returns:
        Those that were not started.
    """
    waiting, running = list(tasks), []
    try:
        while waiting or running:
            while waiting and len(running) < at_once and time.monotonic() + least <= deadline:
                on_start(waiting[0])
                running.append(Process(waiting.pop(0)))
            if not running:
                break
            time.sleep(_POLL_SECONDS)
            for process in [p for p in running if p.finished(deadline)]:
                running.remove(process)
                on_end(process)
    finally:
        for process in running:
            process.kill()
    return waiting
