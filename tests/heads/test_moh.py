"""Mixture-of-head attention on paper: numbers of heads, what is recorded, what is refused."""

import pytest

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadFacts, HeadSizes
from kha_megatron.heads.moh import MixtureOfHeads


def test_a_share_is_rounded_and_half_of_it_shared():
    for share, heads, shared, active in (
        (0.75, 12, 4, 5),  # LLM-S of the paper's Table 4
        (0.75, 16, 6, 6),
        (0.5, 12, 3, 3),
        (0.9, 32, 14, 15),
        (1, 7, 3, 4),
    ):
        moh = MixtureOfHeads(share=share)
        assert (moh.shared_heads(heads), moh.active_heads(heads)) == (shared, active)
    llama = MixtureOfHeads(share=0.75, shared=16)
    assert llama.active_heads(32) == 8
    assert MixtureOfHeads(share=0.75, active=8).shared_heads(32) == 16


def test_heads_are_turned_off_one_after_the_other():
    moh = MixtureOfHeads(shared=1, active=2, anneal=3)
    assert [moh.active_heads(8, i) for i in range(5)] == [7, 6, 4, 2, 2]
    assert moh.active_heads(8) == 2
    assert MixtureOfHeads(shared=1, active=2).active_heads(8, 0) == 2


def test_each_layer_has_its_number():
    kha = KHAConfig(moh=MixtureOfHeads(shared=1, active=[2, 3]))
    assert [kha.moh.for_layer(layer).active_heads(8) for layer in (0, 1)] == [2, 3]
    assert kha.to_dict()["moh"]["active"] == [2, 3]
    assert KHAConfig.from_dict(kha.to_dict()) == kha == KHAConfig.from_options(kha.to_options())
    assert hash(kha) == hash(
        KHAConfig.from_options({"heads": ["moh.shared=1", "moh.active=[2,3]"]})
    )


def test_what_the_router_costs():
    sizes = HeadSizes(query_heads=16, kv_heads=16, head_dim=96, hidden_size=1536)
    kha = KHAConfig.from_preset("moh_75")
    assert kha.parameters(sizes) == kha.parameters(sizes, tp=4) == 18 * 1536
    assert kha.flops(sizes) == 2 * 18 * 1536
    norms = KHAConfig(moh=MixtureOfHeads(share=0.75, router="query_norm"))
    assert norms.parameters(sizes) == norms.flops(sizes) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["no number of heads", "moh.shared and moh.active", "moh.share=0.75"]),
        ({"shared": 4}, ["moh with shared", "moh.share=0.75"]),
        ({"share": 1.5}, ["share=1.5", "at most 1"]),
        ({"share": 0.5, "shared": 1, "active": 2}, ["shared, active, share"]),
        ({"share": 0.5, "active": [2, 3]}, ["moh with active, share"]),
        ({"shared": -1, "active": 2}, ["-1", "whole numbers"]),
        ({"shared": 1, "active": 2.5}, ["2.5", "whole numbers"]),
        ({"shared": 1, "active": 0}, ["active=0", "1 or more"]),
        ({"shared": 0, "active": 2}, ["shared=0", "router=query_norm"]),
        ({"share": 0.5, "router": "noisy"}, ["'noisy'", "learned, query_norm"]),
        ({"share": 0.5, "scale": "mean"}, ["'mean'", "code, paper"]),
        ({"share": 0.5, "balance": -1}, ["balance=-1", "0 or more"]),
        ({"share": 0.5, "balance": float("nan")}, ["balance=nan", "0 or more"]),
        ({"share": 0.5, "anneal": 1.5}, ["anneal=1.5", "0 or more"]),
        ({"share": 0.5, "quantized": 1}, ["quantized=1", "true or false"]),
        ({"share": 0.5, "router": "query_norm", "start": "zeros"}, ["start=zeros", "leave it out"]),
    ],
)
def test_settings_that_are_none(settings, words):
    with pytest.raises(ConfigError) as caught:
        MixtureOfHeads(**settings)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("settings", "facts", "words"),
    [
        ({"shared": 8, "active": 1}, {"query_heads": 8}, ["8 of 8 heads", "from 1 to 7"]),
        ({"shared": 3, "active": 6}, {"query_heads": 8}, ["6 active of 5 routed", "from 1 to 5"]),
        ({"shared": 3, "active": [5, 6]}, {"query_heads": 8}, ["6 active of 5", "from 1 to 5"]),
        ({"shared": 3, "active": [5, 5]}, {"layers": 3}, ["2 layers", "has 3", "one number"]),
        ({"share": 0.1}, {"query_heads": 8}, ["0 of 8 heads", "from 1 to 7"]),
        ({"share": 0.5}, {"multi_latent": True}, ["multi-latent", "use MHA, MQA or GQA"]),
    ],
)
def test_models_that_cannot_have_it(settings, facts, words):
    with pytest.raises(ConfigError) as caught:
        KHAConfig(moh=MixtureOfHeads(**settings)).check(HeadFacts(**facts))
    assert all(word in str(caught.value) for word in words), caught.value
