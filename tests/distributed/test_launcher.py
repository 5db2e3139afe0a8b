"""The launcher reports every failure of a rank, which all tests of this directory rely on."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import RankError


def rank_and_size():
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def fail_on_rank_1(error):
    if dist.get_rank() == 1:
        if error:
            raise error
        os._exit(3)
    dist.barrier()


def leave_while_another_sends():
    if dist.get_rank() == 1:
        dist.irecv(torch.empty(1), 0)
    else:
        time.sleep(1)
        dist.send(torch.ones(1), 1)


def test_ranks_live_through_cases(ranks):
    first = ranks(rank_and_size, 2)
    assert [(r, n) for r, n, _ in first] == [(0, 2), (1, 2)]
    assert ranks(rank_and_size, 2) == first


def test_no_rank_leaves_a_group_that_another_still_uses(ranks):
    assert ranks(leave_while_another_sends, 2) == [None, None]


@pytest.mark.whole
def test_failures_are_reported_and_the_pool_recovers(ranks):
    with pytest.raises(RankError, match="a deliberate mistake"):
        ranks(fail_on_rank_1, 2, ValueError("a deliberate mistake"))
    with pytest.raises(RankError, match=r"without an answer: \[0?,? ?1\]"):
        ranks(fail_on_rank_1, 2, None)
    with pytest.raises(RankError, match="without an answer"):
        ranks(time.sleep, 1, 30, timeout=1)
    assert [r for r, _, _ in ranks(rank_and_size, 2)] == [0, 1]
