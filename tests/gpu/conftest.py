"""Ranks that compute on a GPU, and ranks that only construct what Transformer Engine has."""

import importlib.util

import pytest

from tests.distributed.launcher import RankPool

NO_ENGINE = (
    "NOT TESTED: Transformer Engine is not installed (pip install 'kha-megatron[te]' with a CUDA "
    "toolkit)"
)


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips where Transformer Engine cannot be imported."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip(NO_ENGINE)


@pytest.fixture(scope="session")
def gpu_rank():
    """Run a function in a process with one GPU: ``gpu_rank(case, *args) -> its result``."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("NOT TESTED: needs a CUDA device, and none was found")
    pool = RankPool(device="cuda")
    yield lambda case, *args: pool(case, 1, *args)[0]
    pool.close()


@pytest.fixture(scope="session")
def ranks_with_engine(engine):
    """Ranks on the CPU that see Transformer Engine: they construct its modules, no more."""
    pool = RankPool(hide_cuda_only=False)
    yield pool
    pool.close()
