"""Fixtures for ranks on a GPU."""

import pytest

from kha_megatron.mcore import compat
from tests.distributed.launcher import RankPool


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
def gpu_engine(engine) -> None:
    """Skip if Transformer Engine's compiled extension is not installed."""
    if compat.lacks_te_extension():
        pytest.skip(
            "NOT TESTED: Transformer Engine's extension is not installed "
            "(pip install '.[te]' with a CUDA toolkit)"
        )
