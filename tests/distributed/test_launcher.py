"""The launcher must not hide a failure: every test of this folder stands on it."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import RankError


def rank_and_size():
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def raise_on_rank(rank):
    if dist.get_rank() == rank:
        raise ValueError("a deliberate mistake")
    dist.barrier()


def die_on_rank(rank):
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def sleep_for(seconds):
    time.sleep(seconds)


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
        ranks(raise_on_rank, 2, 1)
    with pytest.raises(RankError, match=r"without an answer: \[0?,? ?1\]"):
        ranks(die_on_rank, 2, 1)
    with pytest.raises(RankError, match="without an answer"):
        ranks(sleep_for, 1, 30, timeout=1)
    assert [r for r, _, _ in ranks(rank_and_size, 2)] == [0, 1]
