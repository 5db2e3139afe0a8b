"""Fixtures for all tests."""

import sys
from pathlib import Path

import pytest

from tests.conversion.fixtures import copy, dense, run, sparse, tokenizer  # noqa: F401
from tests.distributed.launcher import RankPool
from tests.tables import SECTIONS, TABLES, Tables
from tests.versions import needs_training_package

sys.path.append(str(Path(__file__).parents[1] / "tools"))  # programs, not a package


def pytest_addoption(parser):
    group = parser.getgroup("kha_megatron")
    group.addoption("--whole", action="store_true", help="every case of the grids")
    for name in TABLES:
        group.addoption(f"--{name}-table", metavar="FILE", help="write that table there")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the process that hears of every test
        config.pluginmanager.register(Tables(config))


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if item.get_closest_marker("whole")]
    if left_out and not config.getoption("--whole"):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def whole(request) -> bool:
    """Whether to run what ``make test`` leaves out for want of time."""
    return request.config.getoption("--whole")


@pytest.fixture
def parallelism_table(record_property):
    """``parallelism_table(case, knocked, error, quantity)`` adds a row."""
    return lambda *row: record_property("parallelism", row)


@pytest.fixture
def faults_table(record_property):
    """``faults_table(section, *cells)`` adds a row to a section of ``tests.tables.SECTIONS``."""

    def add(section, *cells):
        assert len(cells) == len(SECTIONS[section][1])
        record_property("faults", (section, *cells))

    return add


@pytest.fixture
def training_package() -> None:
    """Skips where Megatron's training package is of a version that we do not run."""
    needs_training_package()


@pytest.fixture(scope="session")
def ranks():
    """Run a function on n gloo ranks: ``ranks(case, n, *args) -> [result of each rank]``."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gpu_ranks():
    """The same on NCCL, one GPU each; skips where there are fewer than two."""
    import torch

    if (found := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs two GPUs and NCCL, {found} found")
    pool = RankPool(device="cuda")
    yield pool
    pool.close()
