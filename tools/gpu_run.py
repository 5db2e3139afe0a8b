"""One run of ``make gpu-check``: what its stages share."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpu_processes import Process, Task, run_all
from gpu_report import Result, Status
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

UNTIL = {"machine": 0.1, "kernels": 0.25, "modules": 0.4, "losses": 0.72, "benchmarks": 1.0}
"""The part of the whole time by which each stage must end; what one leaves, the next may use."""


@dataclass
class Check:
    """One run of the check: where it writes, until when, and what it has found."""

    folder: Path
    dry: bool
    seconds: float
    jobs: int
    console: Console
    machine: dict[str, str] = field(default_factory=dict)
    has: dict[str, bool] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, stage: str, name: str, status: Status, detail: str = "", **more: object) -> None:
        """Keep a result, and say it."""
        result = Result(stage=stage, name=name, status=status, detail=detail, **more)
        self.results.append(result)
        colour = {"passed": "green", "measured": "green"}.get(status, "yellow")
        colour = "red" if status in ("failed", "stopped") else colour
        self.console.print(result.line, style=colour, markup=False, highlight=False)

    def ends(self, stage: str) -> float:
        """When the stage must end, by ``time.monotonic``."""
        return self.started + UNTIL.get(stage, 1.0) * self.seconds

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self.folder / "logs" / f"{name}.log"

    def run(
        self,
        stage: str,
        tasks: list[Task],
        on_end: Callable[[Process], object],
        *,
        at_once: int = 1,
        least: float = 0.0,
    ) -> list[Task]:
        """Run tasks until the stage's end, each with a line while it runs; those not started."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        lines: dict[str, TaskID] = {}
        with Progress(*columns, console=self.console, transient=True) as progress:

            def start(task: Task) -> None:
                left = self.ends(stage) - time.monotonic()
                words = f"{stage}: {task.name} (at most {min(left, task.limit):.0f} s)"
                lines[task.name] = progress.add_task(words)
                if not self.console.is_terminal:
                    self.console.print(words, markup=False, highlight=False)

            def end(process: Process) -> None:
                progress.remove_task(lines[process.task.name])
                on_end(process)

            return run_all(
                tasks,
                at_once=at_once,
                deadline=self.ends(stage),
                least=least,
                on_start=start,
                on_end=end,
            )
