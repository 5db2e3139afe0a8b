"""Tables of what tests found, written by the process that collects all reports.

A test leaves rows with the fixture ``parallelism_table`` or ``faults_table`` of
``tests/conftest.py``; they travel with its report, in whatever process it ran.
"""

import os
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest

Rows = list[list[str | float]]


class Tables:
    """Collects the rows of every table, and writes those whose option names a file."""

    def __init__(self, config: pytest.Config) -> None:
        self._files = {name: config.getoption(f"--{name}-table") for name in TABLES}
        self._rows: dict[str, Rows] = {name: [] for name in TABLES}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the rows that a test left."""
        for name, row in report.user_properties if report.when == "teardown" else ():
            self._rows.get(name, []).append(row)

    def pytest_sessionfinish(self) -> None:
        """Write them."""
        for name, file in self._files.items():
            if file:
                Path(file).write_text(TABLES[name](self._rows[name]) + "\n")


def _machine() -> str:
    versions = f"megatron-core {version('megatron-core')}, torch {version('torch')}"
    return f"Run on {date.today()}, {os.cpu_count()} CPU cores, {versions}"


def _parallelism(rows: Rows) -> str:
    """Rows of case, what is knocked, the largest relative error of its quantities, and of which."""
    worst = {True: 0.0, False: 0.0}
    for case, _, error, _ in rows:
        worst["bf16" in case] = max(worst["bf16" in case], error)
    heading = _PARALLELISM.format(
        machine=_machine(), rows=len(rows), fp32=worst[False], bf16=worst[True]
    )
    return "\n".join([heading, *(f"| {c} | {k} | {e:.1e} | {w} |" for c, k, e, w in rows)])


_PARALLELISM = """# Parallelism against the unsharded run

Written by `make test-all`: relative error (of norms) of the quantity that differs most between a
sharded run of ten optimizer steps and the same run in one process. Compared are losses, outputs,
input gradients, every weight gradient, the gradient norm, the first clipped update, and the weights
after the last step; places that two ranks hold must be the same bits.
`tests/distributed/test_parallelism.py` says what each word of a case means and why the tolerances
are what they are.

{machine}: {rows} runs, the largest
error {fp32:.1e} in float32 (bound 1e-5) and {bf16:.1e} in bf16 (bounds in the test).

| case | knocked | largest error | in |
|---|---|---|---|"""

SECTIONS = {
    "Kills": (
        "`kill -9` of one rank or of all, in the middle of a checkpoint: the next run of the same "
        "command goes on from the last complete iteration.",
        ("save", "killed", "in the middle of", "the save was complete", "the next run loads"),
    ),
    "Full disks": (
        "A write of the second checkpoint fails with ENOSPC: the run ends with one line, and the "
        "next one goes on from the first.",
        ("what fails", "exit codes", "the next run loads"),
    ),
    "Fuzz": (
        "Seeded damage to what is read: refused in one line, or read as what it is.",
        ("input", "cases", "refused in one line", "read"),
    ),
    "Hostile inputs": (
        "What somebody else may have made: what it could do, and what it is answered.",
        ("input", "danger", "answer"),
    ),
}
"""By name: what a section of the table of faults shows, and its columns."""


def _faults(rows: Rows) -> str:
    """Rows of the name of a section and its cells."""
    lines = ["# What is done to runs and files, and what becomes of them", ""]
    lines += ["Written by `make test-all`, or"]
    lines += ["`pytest --whole tests/faults tests/conversion --faults-table FILE`."]
    lines += [f"{_machine()}."]
    for name, (text, columns) in SECTIONS.items():
        found = [tuple(cells) for section, *cells in rows if section == name]
        found = list(dict.fromkeys(found))  # of each kind once
        lines += ["", f"## {name}: {len(found)}", "", text, ""]
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(map(str, cells))} |" for cells in found]
    return "\n".join(lines)


TABLES: dict[str, Callable[[Rows], str]] = {"parallelism": _parallelism, "faults": _faults}
