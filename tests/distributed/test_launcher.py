"""The launcher reports every failure of a rank, which all tests of this directory rely on."""

import os
import time

import pytest
import torch.distributed as dist

from tests.distributed.launcher import RankError


def fail_on_rank_1(error):
    if dist.get_rank() == 1:
        if error:
            raise error
        os._exit(3)
    dist.barrier()


def test_failures_are_reported_and_the_pool_recovers(ranks):
    with pytest.raises(RankError, match="a deliberate mistake"):
        ranks(fail_on_rank_1, 2, ValueError("a deliberate mistake"))
    with pytest.raises(RankError, match=r"without an answer: \[0?,? ?1\]"):
        ranks(fail_on_rank_1, 2, None)
    with pytest.raises(RankError, match="without an answer"):
        ranks(time.sleep, 1, 30, timeout=1)
    assert ranks(dist.get_rank, 2) == [0, 1]
