"""Every parallelism equals the unsharded run, with mixture-of-head attention in every layer.

Tolerance and quantities are those of ``test_parallelism.py``. The weight of the load-balance loss
is 5: at the paper's 0.01 one that counts twice moves no gradient by more than 1e-4.
"""

from contextlib import contextmanager
from unittest import mock

import pytest

from kha_megatron.config import KHAConfig
from kha_megatron.heads.moh import MixtureOfHeads
from tests.distributed.test_parallelism import (
    FULL,
    OVERLAP_ALL,
    SELECTIVE,
    ZERO,
    case,
    check_case,
    mutated,
    unsharded,  # noqa: F401  # a fixture
)

MOH = KHAConfig(moh=MixtureOfHeads(shared=3, active=[2, 3, 1, 2], balance=5.0))
"""Each layer with another number of heads, so that one in a wrong place is seen."""
QUANTIZED = KHAConfig(
    query="linear",
    key="linear",
    value="linear",
    moh=MixtureOfHeads(shared=3, active=2, router="query_norm", quantized=True, balance=5.0),
)
BOTH = (MOH, QUANTIZED)


def cases():
    yield case(khas=BOTH, layers=4, tp=2, sp=True, pp=2, vpp=2, groups=1)
    yield case(khas=BOTH, layers=4, cp=2, per_token_loss=True)


def whole_cases():
    for fields in (
        {"tp": 2, "cp": 2},
        {"dp": 2, "ep": 2, "model": "moe", "ddp": OVERLAP_ALL},
        {"tp": 2, "sp": True, "savings": FULL},
        {"tp": 4, "sp": True, "groups": 2},
        {"pp": 4},
        {"cp": 2, "savings": FULL},
        {"dp": 2, "ddp": ZERO},
        {"dp": 2, "per_token_loss": True},
        {"tp": 2, "sp": True, "dp": 2, "ddp": OVERLAP_ALL, "per_token_loss": True},
        {"tp": 2, "sp": True, "ep": 2, "model": "moe"},
        {"tp": 2, "sp": True, "savings": SELECTIVE},
        {"dp": 2, "fsdp": "torch"},
    ):
        yield case(khas=BOTH, layers=4, **fields)


@pytest.mark.parametrize(
    "case",
    [*cases(), *(pytest.param(c, marks=pytest.mark.whole) for c in whole_cases())],
    ids=str,
)
def test_equals_the_unsharded_run(ranks, unsharded, parallelism_table, case):  # noqa: F811
    check_case(ranks, unsharded, parallelism_table, case)


def with_the_load_of_each_context_parallel_rank():
    from kha_megatron.heads.ranks import Ranks
    from kha_megatron.mcore.head_ranks import HeadRanks

    return mock.patch.object(HeadRanks, "token_mean", Ranks.token_mean)


@contextmanager
def with_megatrons_scaler_of_experts_losses():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from kha_megatron.mcore import head_ranks

    def without_scale(carrier, loss, scale):
        return MoEAuxLossAutoScaler.apply(carrier, loss)

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    with mock.patch.object(head_ranks, "with_loss", without_scale):
        yield
    MoEAuxLossAutoScaler.main_loss_backward_scale = scale


def with_each_sequence_counted_by_every_context_parallel_rank():
    from kha_megatron.mcore import head_ranks

    add = head_ranks.with_loss
    return mock.patch.object(
        head_ranks, "with_loss", lambda x, loss, scale: add(x, loss * 2, scale)
    )


@pytest.mark.parametrize(
    ("mutate", "layout"),
    [
        (with_the_load_of_each_context_parallel_rank, {"cp": 2}),
        (with_each_sequence_counted_by_every_context_parallel_rank, {"cp": 2}),
        (with_megatrons_scaler_of_experts_losses, {}),
    ],
)
def test_a_loss_counted_otherwise_is_seen(ranks, unsharded, mutate, layout):  # noqa: F811
    wrong = mutated(ranks, unsharded, case(khas=(MOH,), layers=4, **layout), mutate)
    assert "gradients decoder.layers.self_attention.moh_router.weight" in wrong, wrong
    assert not any(name.startswith("loss") for name in wrong)
