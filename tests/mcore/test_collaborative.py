"""Collaborative heads compared with the float64 oracle, and folded into ordinary heads."""

from unittest import mock

import pytest
import torch

from kha_megatron.heads import CollaborativeHeads
from kha_megatron.heads.collaborative import fold_mixing
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.initial import initial_weight
from tests import oracle
from tests.mcore.sharded_layer import differences
from tests.mcore.test_talking import ALL, SOME

DIM = 10
HEAD_DIM = 8
WITHOUT_NORM = {"kv_channels": HEAD_DIM, "qk_layernorm": False}


def kha_of(**settings):
    return HeadsConfig(CollaborativeHeads(dim=DIM)).updated(**settings)


@pytest.mark.fast
@pytest.mark.parametrize(("groups", "qk_norm"), [(6, False), (3, True), (1, True)])
def test_equals_the_oracle(ranks, groups, qk_norm):
    sizes = {
        "num_query_groups": groups,
        "kv_channels": HEAD_DIM,
        "qk_layernorm": qk_norm,
    }
    assert not differences(ranks, kha_of(), **sizes)


@pytest.mark.parametrize(("tp", "sp", "groups"), SOME + ALL)
def test_equals_the_oracle_on_ranks(ranks, tp, sp, groups):
    assert not differences(ranks, kha_of(), tp, sp, num_query_groups=groups, **WITHOUT_NORM)


def shared_projection_not_summed():
    from kha_megatron.mcore import head_inputs

    return mock.patch.object(
        head_inputs, "copy_to_tensor_model_parallel_region", lambda x, group=None: x
    )


@pytest.mark.parametrize("sp", [False, True])
def test_without_the_sum_over_heads_replicas_of_the_shared_projections_differ(ranks, sp):
    assert not differences(ranks, kha_of(), 2, sp, **WITHOUT_NORM)
    mutate = shared_projection_not_summed
    assert "replicas of" in differences(ranks, kha_of(), 2, sp, mutate=mutate, **WITHOUT_NORM)


def test_folded_collaborative_heads_equal_ordinary_heads_with_one_key():
    """``W_Q diag(m_i)``: multi-query attention whose keys are as wide, in the oracle."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads = 6
    hidden = 28
    x = draw(2, 7, 28)
    w_query = draw(DIM, hidden)
    w_key = draw(DIM, hidden)
    mixing = draw(heads, DIM)
    w_value = draw(hidden, HEAD_DIM)
    w_output = draw(heads * HEAD_DIM, hidden)
    options = {
        "num_query_groups": 1,
        "rotary_base": 10000.0,
        "rotary_dim": HEAD_DIM,
        "q_norm": draw(DIM),
        "k_norm": draw(DIM),
    }
    shared = oracle.mixed_attention(
        x,
        w_query.T,
        w_key.T,
        w_value,
        w_output,
        mixing=mixing,
        **options,
    )
    folded = fold_mixing(w_query, mixing)
    assert folded.shape == (heads * DIM, hidden)
    ordinary = oracle.mixed_attention(
        x,
        folded.T,
        w_key.T,
        w_value,
        w_output,
        **options,
    )
    assert (shared - ordinary).norm() / shared.norm() < 1e-14


@pytest.mark.parametrize(("heads", "dim"), [(4, 12), (3, 10), (6, 6)])
def test_each_head_begins_with_features_of_its_own(heads, dim):
    weight = initial_weight(torch.empty(1, heads, dim), ("blocks",))[0]
    assert (weight.count_nonzero(0) == 1).all()
    assert weight.count_nonzero(1).min() >= dim // heads
    # logits of dim features and dim ** -0.5 are then those of dim / heads features at their own
    torch.testing.assert_close(weight.square().mean(1), torch.ones(heads))
