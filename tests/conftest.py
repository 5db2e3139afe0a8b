"""Fixtures for all tests."""

import tests.surroundings  # noqa: F401  # before all others

# isort: split
import gc
import random
import sys
from pathlib import Path

import pytest
import torch

import kha_megatron.mcore  # noqa: F401  # before Megatron, which takes half a Transformer Engine
from kha_megatron.conversion import megatron_model
from kha_megatron.heads.registry import FILES_VARIABLE
from kha_megatron.mcore.compat import lacks_te_extension, version_of
from tests.conversion.fixtures import copy, dense, run, sparse, tokenizer  # noqa: F401
from tests.conversion.forked import run_in_fork
from tests.distributed.launcher import RankPool
from tests.interpreting import interpret
from tests.tables import SECTIONS, TABLES, Tables

sys.path.append(str(Path(__file__).parents[1] / "tools"))  # programs, not a package
torch.set_num_threads(1)  # as in ranks; more would only wait for one another

LONG = ("training", "distributed", "faults", "mcore", "conversion", "cli", "recipes")
LONG += ("mechanisms", "kernels", "hf", "tests")
"""Directories that run first, so that the two processes of ``make test`` end at the same time."""


RANK_OPTIONS = (
    ("device", "cuda", ["cuda", "cpu"], "cpu: test double of Transformer Engine instead of GPUs"),
    ("backend", "nccl", ["nccl", "gloo"], "of tests on several GPUs"),
    ("per-gpu", "1", list("1234"), "NCCL 2.30 needs NCCL_MULTI_RANK_GPU_ENABLE=1 for several"),
)
"""Name, default, choices and help of the options ``--ranks-...`` of tests on several GPUs."""


def pytest_addoption(parser):
    group = parser.getgroup("kha_megatron")
    group.addoption("--whole", action="store_true", help="every case of the grids")
    for name in TABLES:
        group.addoption(
            f"--{name}-table",
            metavar="FILE",
            help="write that table there",
        )
    for name, default, choices, text in RANK_OPTIONS:
        group.addoption(f"--ranks-{name}", default=default, choices=choices, help=text)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the main process, which receives all reports
        config.pluginmanager.register(Tables(config))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if item.get_closest_marker("whole")]
    if left_out and not config.getoption("--whole"):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path.parent.name not in LONG)
    unmark_further_cases(items)


def unmark_further_cases(items):
    """Remove the marker ``fast`` of a parametrized test from all cases but the first.

    Markers of single cases, which ``pytest.param`` sets, remain.
    """
    tests = set()
    for item in items:
        marks_of_test = getattr(item.function, "pytestmark", [])
        if not any(mark.name == "fast" for mark in marks_of_test):
            continue
        test = item.nodeid.partition("[")[0]
        if test in tests:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "fast"]
        tests.add(test)


def pytest_collection_finish():
    """Exclude the imported modules and the tests from garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed the global generators before each test."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_mechanisms_of_files(monkeypatch) -> None:
    """Forget after each test the files that it passed to ``--heads-from``."""
    monkeypatch.setenv(FILES_VARIABLE, "")


@pytest.fixture(scope="session", autouse=True)
def run_megatron_in_forks():
    """Start no process that imports Megatron for each comparison of logits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_model, "run_megatron", run_in_fork)
        yield


@pytest.fixture(scope="session")
def whole(request) -> bool:
    """Return True if all cases run, as in ``make test-all``."""
    return request.config.getoption("--whole")


@pytest.fixture
def parallelism_table(record_property):
    """Return a function ``(case, knocked, error, quantity)`` that adds a row."""
    return lambda *row: record_property("parallelism", row)


@pytest.fixture
def faults_table(record_property):
    """Return a function ``(section, *cells)`` that adds a row to one of ``SECTIONS``."""

    def add(section, *cells):
        assert len(cells) == len(SECTIONS[section][1])
        record_property("faults", (section, *cells))

    return add


@pytest.fixture
def nodes_table(record_property):
    """Return a function ``(fault, result)`` that adds a row."""
    return lambda *row: record_property("nodes", row)


@pytest.fixture(scope="session")
def ranks():
    """Run a function on n gloo ranks: ``ranks(case, n, *args) -> [result of each rank]``."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def engine() -> None:
    """Skip the test if Transformer Engine is not installed."""
    if version_of("transformer-engine") is None:
        pytest.skip("NOT TESTED: Transformer Engine is not installed: run `make setup`")


@pytest.fixture(scope="session")
def ranks_with_engine(engine):
    """Run a function on ranks that use the test double of Transformer Engine."""
    from tests import transformer_engine

    pool = RankPool(install=transformer_engine.install)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def interpreting_rank():
    """Run a function on a rank with Triton's interpreter: ``interpreting_rank(case, *args)``."""
    pytest.importorskip("triton", reason="Triton is not installed: its kernels were not tested")
    pool = RankPool(prepare=interpret)
    yield lambda case, *args: pool(case, 1, *args, timeout=300)[0]
    pool.close()


@pytest.fixture(scope="session")
def gpu():
    """Return a CUDA device that the kernels support, or skip the test."""
    from kha_megatron.heads.kernels import fused

    if not torch.cuda.is_available():
        pytest.skip("NOT TESTED: needs a CUDA device, and none was found")
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.empty(1, 128, device=device)
    if why := fused.unsupported_reason(x, x.new_empty(1, 128, 128)):
        pytest.skip(f"NOT TESTED: the kernels do not run here: {why}")
    return device


@pytest.fixture(scope="session")
def most_gpu_ranks(request) -> int:
    """Return how many ranks ``gpu_ranks`` may have."""
    if request.config.getoption("--ranks-device") == "cpu":
        return 4
    return torch.cuda.device_count() * int(request.config.getoption("--ranks-per-gpu"))


@pytest.fixture(scope="session")
def gpu_ranks(request, most_gpu_ranks):
    """Run a function on ranks with GPUs, or skip the test if there are fewer than two ranks.

    By default, each rank has a GPU and NCCL. See ``--ranks-device``, ``--ranks-backend`` and
    ``--ranks-per-gpu``.
    """
    if request.config.getoption("--ranks-device") == "cpu":
        pool = request.getfixturevalue("ranks_with_engine")
        yield pool
        return
    if most_gpu_ranks < 2:
        pytest.skip(f"needs two GPUs and NCCL, {most_gpu_ranks} found")
    pool = RankPool(device="cuda", backend=request.config.getoption("--ranks-backend"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gpu_engine(request, engine) -> None:
    """Skip if Transformer Engine's compiled extension is not installed."""
    if request.config.getoption("--ranks-device") == "cpu":
        return
    if lacks_te_extension():
        pytest.skip(
            "NOT TESTED: Transformer Engine's extension is not installed "
            "(pip install '.[te]' with a CUDA toolkit)"
        )
