"""Collaborative heads against the float64 oracle on any number of ranks, and folded into others.

Tolerance: results travel in float32, and Megatron's rotary frequencies are float32 too.
"""

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import CollaborativeHeads, Gate, TalkingHeads
from kha_megatron.heads.collaborative import fold_mixing
from kha_megatron.heads.initial import initial_weight
from tests import oracle
from tests.mcore import sharded_layer
from tests.mcore.test_talking import ALL, SOME, replaced

TOLERANCE = 1e-6
DIM, HEAD_DIM = 10, 8


def kha_of(**settings):
    return KHAConfig(collaborative=CollaborativeHeads(dim=DIM), **settings)


def twin(groups):
    def layer(hidden, weights):
        return oracle.mixed_attention(
            hidden,
            weights["collaborative_query.weight"].T,
            weights["collaborative_key.weight"].T,
            weights["linear_qkv.weight"].T,
            weights["linear_proj.weight"].T,
            num_query_groups=groups,
            mixing=weights["collaborative_mixing.weight"],
            pre=weights.get("talking_pre.weight"),
            post=weights.get("talking_post.weight"),
            q_norm=weights.get("q_layernorm.weight"),
            k_norm=weights.get("k_layernorm.weight"),
            rotary_base=sharded_layer.BASE,
            rotary_dim=HEAD_DIM,
        )

    return layer


def wrong(ranks, kha, tp, sp, groups, qk_norm=False, mutate=None):
    """What differs from the oracle, and by how much; or what ranks disagree on."""
    heads, tokens = (6, 7) if tp == 1 else (8, 12 if sp else 7)
    sizes = {
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": HEAD_DIM,
        "qk_layernorm": qk_norm,
    }
    parts = ranks(sharded_layer.on_rank, tp, kha, tp, sp, tokens, sizes, mutate)
    try:
        found = sharded_layer.errors(sharded_layer.put_together(parts, tokens), twin(groups))
    except AssertionError as difference:
        return str(difference)
    talking = len(kha.talking.mixings) if kha.talking else 0
    assert len(found) == 7 + talking + 2 * qk_norm, sorted(found)
    return {name: error for name, error in found.items() if not error < TOLERANCE}


@pytest.mark.parametrize(("groups", "qk_norm"), [(6, False), (3, True), (1, True)])
def test_equals_the_oracle(ranks, groups, qk_norm):
    assert not wrong(ranks, kha_of(), 1, False, groups, qk_norm)


@pytest.mark.parametrize(("tp", "sp", "groups"), SOME + ALL)
def test_equals_the_oracle_on_ranks(ranks, tp, sp, groups):
    assert not wrong(ranks, kha_of(), tp, sp, groups)


@pytest.mark.parametrize("tp", [1, 2])
def test_decodes_with_megatrons_static_cache(ranks, tp):
    """Talking too, where one query token is turned over two ranks."""
    kha = kha_of(talking=TalkingHeads())
    for whole, steps in ranks(sharded_layer.decoded, tp, kha, tp, {"kv_channels": HEAD_DIM}):
        torch.testing.assert_close(steps, whole, rtol=1e-9, atol=1e-9)


def shared_projection_not_summed():
    from kha_megatron.mcore import head_inputs

    return replaced(head_inputs, copy_to_tensor_model_parallel_region=lambda x, group=None: x)


@pytest.mark.parametrize("sp", [False, True])
def test_without_the_sum_over_heads_replicas_of_the_shared_projections_drift(ranks, sp):
    found = wrong(ranks, kha_of(), 2, sp, 4, mutate=shared_projection_not_summed)
    assert "replicas of" in found


def test_folded_they_are_ordinary_heads_with_one_key():
    """``W_Q diag(m_i)``: multi-query attention whose keys are as wide, in the oracle."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, hidden, x = 6, 28, draw(2, 7, 28)
    w_query, w_key, mixing = draw(DIM, hidden), draw(DIM, hidden), draw(heads, DIM)
    others = draw(hidden, HEAD_DIM), draw(heads * HEAD_DIM, hidden)
    placed = {"num_query_groups": 1, "rotary_base": 10000.0, "rotary_dim": HEAD_DIM}
    placed |= {"q_norm": draw(DIM), "k_norm": draw(DIM)}
    shared = oracle.mixed_attention(x, w_query.T, w_key.T, *others, mixing=mixing, **placed)
    folded = fold_mixing(w_query, mixing)
    assert folded.shape == (heads * DIM, hidden)
    ordinary = oracle.mixed_attention(x, folded.T, w_key.T, *others, **placed)
    assert (shared - ordinary).norm() / shared.norm() < 1e-14


@pytest.mark.parametrize(("heads", "dim"), [(4, 12), (3, 10), (6, 6)])
def test_each_head_begins_with_features_of_its_own(heads, dim):
    weight = initial_weight(torch.empty(1, heads, dim), ("blocks",))[0]
    assert (weight.count_nonzero(0) == 1).all()
    assert weight.count_nonzero(1).min() >= dim // heads
    # logits of dim features and dim ** -0.5 are then those of dim / heads features at their own
    torch.testing.assert_close(weight.square().mean(1), torch.ones(heads))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"query": "linear"}, "collaborative.* shares .*--kha-query"),
        ({"key": "mlp"}, "collaborative.* shares .*--kha-key"),
        ({"gate": Gate(query="element")}, r"collaborative.* shares .*gate\.query"),
        ({"attention": "gta"}, "Use MHA, MQA or GQA"),
    ],
    ids=str,
)
def test_what_acts_on_queries_and_keys_of_other_widths_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        kha_of(**settings)


@pytest.mark.parametrize("settings", [{"dim": 0}, {"dim": 7}, {"start": "random"}], ids=str)
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ConfigError, match="collaborative"):
        CollaborativeHeads(**settings)
