"""What ``make gpu-check`` found: results, and the two files that hold them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal[
    "passed", "failed", "stopped", "skipped", "missing", "not reached", "measured", "missed"
]
WRONG: tuple[Status, ...] = ("failed", "stopped")
"""What proves nothing or proves the contrary; a target that is missed is no fault."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one test file, training or benchmark of a stage ended."""

    stage: str
    name: str
    status: Status
    detail: str = ""
    """Why it was skipped or failed, or what it measured, in a line."""

    seconds: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    table: str = ""
    """Markdown that a benchmark printed."""

    @property
    def line(self) -> str:
        """For the terminal."""
        time = "" if self.seconds is None else f" ({self.seconds:.0f} s)"
        return f"{self.stage}: {self.name}: {self.status}{time}" + (
            f": {self.detail}" if self.detail else ""
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of the check."""

    command: str
    date: str
    dry: bool
    machine: Mapping[str, str]
    results: Sequence[Result]
    seconds: float

    @property
    def is_sound(self) -> bool:
        """Whether no correctness stage failed or ran out of time."""
        return not any(result.status in WRONG for result in self.results)

    def write(self, folder: Path, copy: Path | None = None) -> None:
        """``report.json`` and ``report.md``; ``copy`` is one more place for the former."""
        content = asdict(self) | {"sound": self.is_sound}
        text = json.dumps(content, indent=1, default=str) + "\n"
        for path in filter(None, (folder / "report.json", copy)):
            path.write_text(text, encoding="utf-8")
        (folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def summary(self) -> str:
        """Counts of the ways in which things ended."""
        counts = Counter(result.status for result in self.results)
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    def markdown(self) -> str:
        """The whole report for a reader."""
        what = "Dry run on the CPU: nothing below was measured" if self.dry else "On a GPU"
        parts = [
            "# GPU check",
            f"{what}. `{self.command}`, {self.date}, {self.seconds:.0f} s: {self.summary()}.",
            _table(["component", "found"], [list(item) for item in self.machine.items()]),
        ]
        for stage in dict.fromkeys(result.stage for result in self.results):
            mine = [result for result in self.results if result.stage == stage]
            rows = [[r.name, r.status, _seconds(r.seconds), r.detail] for r in mine]
            parts += [f"## {stage}", _table(["what", "result", "seconds", "detail"], rows)]
            parts += [f"### {result.name}\n\n{result.table}" for result in mine if result.table]
        return "\n\n".join(parts) + "\n"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header)]
    lines += [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
