"""The table of the parallelism grid."""

import os
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest


class Table:
    """The largest relative error of every case, as Markdown."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float, str]] = []

    def add(self, case: object, kha: object, errors: dict[str, float]) -> None:
        """One run and the relative error of each of its quantities."""
        where = max(errors, key=errors.get)
        self.rows.append((str(case), str(kha), errors[where], where))

    def write(self, file: Path) -> None:
        """All rows, below a heading that says what made them."""
        worst = {True: 0.0, False: 0.0}
        for case, _, error, _ in self.rows:
            worst["bf16" in case] = max(worst["bf16" in case], error)
        heading = _HEADING.format(
            date=date.today(),
            cores=os.cpu_count(),
            megatron=version("megatron-core"),
            torch=version("torch"),
            rows=len(self.rows),
            fp32=worst[False],
            bf16=worst[True],
        )
        lines = [heading, *(f"| {c} | {k} | {e:.1e} | {w} |" for c, k, e, w in self.rows)]
        file.write_text("\n".join(lines) + "\n")


_HEADING = """# Parallelism against the unsharded run

Written by `make test-all`: relative error (of norms) of the quantity that differs most between a
sharded run of ten optimizer steps and the same run in one process. Compared are losses, outputs,
input gradients, every weight gradient, the gradient norm, the first clipped update, and the weights
after the last step; places that two ranks hold must be the same bits.
`tests/distributed/test_parallelism.py` says what each word of a case means and why the tolerances
are what they are.

Run on {date}, {cores} CPU cores, megatron-core {megatron}, torch {torch}: {rows} runs, the largest
error {fp32:.1e} in float32 (bound 1e-5) and {bf16:.1e} in bf16 (bounds in the test).

| case | knocked | largest error | in |
|---|---|---|---|"""


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest):
    """Collects rows, and writes them where ``--parallelism-table`` says."""
    rows = Table()
    yield rows
    if file := request.config.getoption("--parallelism-table"):
        rows.write(Path(file))
