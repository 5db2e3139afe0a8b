"""Settings of mixture-of-head attention: numbers of heads, round trips, costs and errors."""

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadFacts, MixtureOfHeads
from kha_megatron.heads.config import HeadsConfig


def test_a_share_is_rounded_and_half_of_it_is_shared():
    for share, heads, shared, active in (
        (0.75, 12, 4, 5),  # LLM-S of the paper's Table 4
        (0.75, 16, 6, 6),
        (0.5, 12, 3, 3),
        (0.9, 32, 14, 15),
        (1, 7, 3, 4),
    ):
        moh = MixtureOfHeads(share=share)
        assert moh.shared_heads(heads) == shared
        assert moh.active_heads(heads) == active
    llama = MixtureOfHeads(share=0.75, shared=16)
    assert llama.active_heads(32) == 8
    assert MixtureOfHeads(share=0.75, active=8).shared_heads(32) == 16


def test_annealing_reduces_active_heads_linearly():
    moh = MixtureOfHeads(shared=1, active=2, anneal=3)
    assert [moh.active_heads(8, i) for i in range(5)] == [7, 6, 4, 2, 2]
    assert moh.active_heads(8) == 2
    assert MixtureOfHeads(shared=1, active=2).active_heads(8, 0) == 2


def test_each_layer_may_have_its_own_number():
    kha = HeadsConfig(MixtureOfHeads(shared=1, active=[2, 3]))
    assert [kha.get(MixtureOfHeads).for_layer(layer).active_heads(8) for layer in (0, 1)] == [2, 3]
    assert kha.to_dict()["moh"]["active"] == [2, 3]
    assert HeadsConfig.from_dict(kha.to_dict()) == kha == HeadsConfig.from_options(kha.to_options())
    assert hash(kha) == hash(
        HeadsConfig.from_options({"heads": ["moh.shared=1", "moh.active=[2,3]"]})
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "got none of them. For example, use moh.share=0.75"),
        ({"share": 0.5, "shared": 1, "active": 2}, "got shared, active, share"),
        ({"share": 1.5}, r"in \(0, 1\].*share=1.5"),
        ({"shared": 1, "active": 0}, "at least 1.*got active=0"),
        ({"shared": 1, "active": [2, 2.5]}, "a list of integers.*2.5"),
        ({"share": 0.5, "router": "noisy"}, "learned or query_norm, got 'noisy'"),
        (
            {"share": 0.5, "router": "query_norm", "start": "zeros"},
            "start=zeros requires moh.router=learned",
        ),
        ({"share": 0.5, "balance": 0, "balance_scale": "paper"}, "no effect with moh.balance=0"),
        ({"share": 0.5, "quantized": True, "scale": "paper"}, "no effect with moh.quantized=true"),
    ],
)
def test_invalid_settings_raise_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        MixtureOfHeads(**settings)


@pytest.mark.parametrize(
    ("settings", "facts", "message"),
    [
        ({"shared": 8, "active": 1}, {"query_heads": 8}, "8 shared and 1 active of 8 heads"),
        ({"shared": 3, "active": [5, 6]}, {"query_heads": 8}, "3 shared and 6 active of 8 heads"),
        ({"shared": 3, "active": [5, 5]}, {"layers": 3}, "each of the 3 layers, got 2"),
        ({"share": 0.1}, {"query_heads": 8}, "0 shared and .*at least 1 shared"),
        ({"shared": 0, "active": 2}, {"query_heads": 8}, "0 shared and .*at least 1 shared"),
        (
            {"shared": 7, "active": 1, "router": "query_norm"},
            {"query_heads": 8},
            "no effect with a single routed head",
        ),
        ({"share": 1, "anneal": 9}, {"query_heads": 8}, "anneal has no effect"),
        ({"share": 0.5}, {"multi_latent": True}, "multi-latent attention. Use MHA, MQA or GQA"),
    ],
)
def test_unsupported_models_raise_an_error(settings, facts, message):
    with pytest.raises(ConfigError, match=message):
        HeadsConfig(MixtureOfHeads(**settings)).check(HeadFacts(**facts))
