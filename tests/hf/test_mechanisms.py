"""Mixture-of-head, talking and collaborative heads in the transformers class."""

import pytest
from transformers import AutoModelForCausalLM

from tests import oracle as reference
from tests.hf import test_attention
from tests.hf.conftest import (
    ROUTED,
    check_layer_against_oracle,
    make_config,
    norm_weights,
    transposed_weights,
)

MIXTURES = {
    "learned": ROUTED,
    "learned, as printed": ROUTED | {"scale": "paper"},
    "query norms": ROUTED | {"router": "query_norm"},
    "query norms, as printed": ROUTED | {"router": "query_norm", "scale": "paper"},
    "quantized": ROUTED | {"router": "query_norm", "quantized": True},
    "quantized and learned": ROUTED | {"quantized": True},
}
COLLABORATIVE = {"dim": 14}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_equal_the_oracle(name):
    settings = MIXTURES[name]
    config = make_config({"query": "linear"}, kha_moh=settings, use_qk_norm=False)

    def oracle(layer, hidden):
        def weigh(queries):
            router = layer.moh_router.weight if hasattr(layer, "moh_router") else None
            options = {k: v for k, v in settings.items() if k != "router"}
            return reference.mixture_weights(hidden, queries, router, **options)[0]

        return test_attention.oracle(layer, hidden, {"query": "linear"}, weigh=weigh)

    check_layer_against_oracle(config, oracle)


MIXED_HEADS = {
    "talking": {"kha_talking": {}, "use_qk_norm": False},
    "talking, before the softmax": {"kha_talking": {"post": False}, "use_qk_norm": False},
    "talking, after the softmax": {"kha_talking": {"pre": False}, "use_qk_norm": False},
    "collaborative": {"kha_collaborative": COLLABORATIVE, "use_qk_norm": False},
    "collaborative, qk_norm": {"kha_collaborative": COLLABORATIVE, "use_qk_norm": True},
}


@pytest.mark.parametrize("name", MIXED_HEADS)
def test_talking_and_collaborative_heads_equal_the_oracle(name):
    config = make_config(**MIXED_HEADS[name])
    own = ("collaborative_query", "collaborative_key")
    query_key = own if "kha_collaborative" in MIXED_HEADS[name] else ("q_proj", "k_proj")
    names = {
        "pre": "talking_pre",
        "post": "talking_post",
        "mixing": "collaborative_mixing",
    }

    def oracle(layer, hidden):
        mixings = {argument: getattr(layer, name, None) for argument, name in names.items()}
        return reference.mixed_attention(
            hidden,
            *transposed_weights(layer, *query_key, "v_proj", "o_proj"),
            num_query_groups=3,
            rotary_base=10000.0,
            rotary_dim=10,
            **{argument: mixing and mixing.weight for argument, mixing in mixings.items()},
            **norm_weights(layer),
        )

    check_layer_against_oracle(config, oracle)


def test_talking_heads_need_eager_attention():
    config = make_config(kha_talking={})
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        AutoModelForCausalLM.from_config(make_config(kha_talking={}), attn_implementation="sdpa")
