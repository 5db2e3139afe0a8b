"""Tables of test results in ``benchmarks/``.

Tests add rows with the fixtures ``parallelism_table`` and ``faults_table``. The rows travel in the
test reports to the main process of pytest, which writes the tables.
"""

import os
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest

Row = list[str | float]
Rows = list[Row]
Location = tuple[str, int | None, str]
"""File, line and name of a test."""


class Tables:
    """Collect the rows of all tables, and write the tables whose option names a file."""

    def __init__(self, config: pytest.Config) -> None:
        self._files = {name: config.getoption(f"--{name}-table") for name in TABLES}
        self._rows: dict[str, list[tuple[Location, Row]]] = {name: [] for name in TABLES}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the rows of a test."""
        if report.when != "teardown":
            return
        for name, row in report.user_properties:
            if name in self._rows:
                self._rows[name].append((report.location, row))

    def pytest_sessionfinish(self) -> None:
        """Write the requested tables, in the order of the tests."""
        for name, file in self._files.items():
            if file and self._rows[name]:
                path = Path(file)
                in_order = sorted(self._rows[name], key=lambda entry: entry[0])
                rows = [row for _, row in in_order]
                text = TABLES[name](rows) + "\n"
                old = path.read_text() if path.exists() else ""
                head, mark, nodes = old.partition(NODES)
                path.write_text(head + text if name == "nodes" else text + mark + nodes)


def _machine() -> str:
    versions = f"megatron-core {version('megatron-core')}, torch {version('torch')}"
    return f"Measured on {date.today()} with {versions} on {os.cpu_count()} CPU cores"


def _parallelism(rows: Rows) -> str:
    """Format rows of case, KHA settings, largest relative error, and the quantity that has it."""
    worst = {True: 0.0, False: 0.0}
    for case, _, error, _ in rows:
        worst["bf16" in case] = max(worst["bf16" in case], error)
    heading = _PARALLELISM.format(
        machine=_machine(),
        rows=len(rows),
        fp32=worst[False],
        bf16=worst[True],
    )
    lines = [heading]
    for case, kha, error, quantity in rows:
        lines.append(f"| {case} | {kha} | {error:.1e} | {quantity} |")
    return "\n".join(lines)


_PARALLELISM = """# Parallel runs compared with an unsharded run

Sharding a model must not change what it computes. To verify this, we train for ten optimizer steps
with and without sharding, and compare losses, outputs, gradients, the first update and the final
weights. Each row of the table shows the quantity with the largest relative error. Replicated
tensors must even be bitwise equal. If you wonder how we chose the tolerances, see
`tests/distributed/test_parallelism.py`. To update this page, run `make test-all`.

{machine}. In {rows} runs,
the largest error is {fp32:.1e} in float32 (tolerance 1e-5) and {bf16:.1e} in bf16.

| case | KHA | largest error | quantity |
|---|---|---|---|"""

SECTIONS = {
    "Kills": (
        "We kill one or both ranks with `kill -9` while they write a checkpoint. If this "
        "checkpoint isn't complete, the next run must load the one before.",
        ("checkpointing", "killed", "during", "checkpoint complete", "next run loads"),
    ),
    "Full disks": (
        "If the disk is full (ENOSPC), the second checkpoint can't be saved and the run exits with "
        "an error. After that, you can still resume from the first checkpoint.",
        ("failing write", "exit codes", "next run loads"),
    ),
    "Writers": ("Several processes try to write to one directory.", ("situation", "result")),
    "Hashes": (
        "We slow down the hashing of shards. It must not delay training.",
        ("job", "added", "slowest iteration"),
    ),
    "Rollbacks": (
        "A run goes back to an earlier iteration and trains on from there.",
        ("situation", "result"),
    ),
    "Datasets": ("The dataset does not fit the tokenizer.", ("situation", "result")),
    "Fuzz": (
        "We damage files at random, e.g. by inserting bytes or changing values. Each file must "
        "then be rejected with an error or read correctly.",
        ("input", "cases", "refused", "read"),
    ),
    "Hostile inputs": (
        "A model from an untrusted source could contain files like these. All of them are "
        "rejected.",
        ("input", "danger", "result"),
    ),
}
"""Introduction and columns of each section of the page of faults."""


def _faults(rows: Rows) -> str:
    """Format rows of the name of a section and its cells."""
    lines = ["# Fault tests", ""]
    lines += ["We kill training runs, fill up disks and corrupt files to see what happens."]
    lines += ["A run should always resume from a complete checkpoint, and corrupted files should"]
    lines += ["be rejected or read correctly. To update this page, run `make test-all`."]
    lines += [f"{_machine()}."]
    for name, (text, columns) in SECTIONS.items():
        rows_of_section = [tuple(cells) for section, *cells in rows if section == name]
        rows_of_section = list(dict.fromkeys(rows_of_section))  # without repetitions
        lines += ["", f"## {name}: {len(rows_of_section)}", "", text, ""]
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(map(str, cells))} |" for cells in rows_of_section]
    return "\n".join(lines)


NODES = "\n## Nodes: "
"""Start of the last section of the page of faults, which ``make test-slurm`` writes."""


def _nodes(rows: Rows) -> str:
    """Format rows of what happens to a node and the result."""
    heading = _NODES.format(start=NODES, rows=len(rows), machine=_machine())
    return "\n".join([heading, *(f"| {fault} | {result} |" for fault, result in rows)])


_NODES = """{start}{rows}

A job trains on two of three Slurm nodes, which are namespaces on one machine: each has its own
network, processes and `/tmp`, and they share one directory. Every loss is compared with a run of
two ranks on one node. To update this section, run `make test-slurm`.
{machine}.

| fault | result |
|---|---|"""

TABLES: dict[str, Callable[[Rows], str]] = {
    "parallelism": _parallelism,
    "faults": _faults,
    "nodes": _nodes,
}
