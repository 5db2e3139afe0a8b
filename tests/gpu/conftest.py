"""Fixtures for ranks on a GPU."""

import pytest

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
