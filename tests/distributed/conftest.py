"""The table of the parallelism grid."""

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
        lines = [_HEADING, *(f"| {c} | {k} | {e:.1e} | {w} |" for c, k, e, w in self.rows)]
        file.write_text("\n".join(lines) + "\n")


_HEADING = """# Parallelism against the unsharded run

Written by `make test-all`: relative error (of norms) of the quantity that differs most between a
sharded run of ten optimizer steps and the same run in one process. Compared are losses, outputs,
input gradients, every weight gradient, the gradient norm, the first clipped update, and every
weight after each; places that two ranks hold must be the same bits. `tests/distributed/
test_parallelism.py` says what each word of a case means and why the tolerances are what they are.

| case | knocked | largest error | in |
|---|---|---|---|"""


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest):
    """Collects rows, and writes them where ``--parallelism-table`` says."""
    rows = Table()
    yield rows
    if file := request.config.getoption("--parallelism-table"):
        rows.write(Path(file))
