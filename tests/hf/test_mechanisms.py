"""Mixture-of-head, talking and collaborative heads in the transformers class."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kha_megatron.hf import attention_kha
from tests import oracle as reference
from tests.hf import test_attention
from tests.hf.conftest import ROUTED, check_layer_against_oracle, make_config, make_model, tokens

MIXTURES = {
    "learned": ROUTED,
    "learned, as printed": ROUTED | {"scale": "paper"},
    "query norms": ROUTED | {"router": "query_norm"},
    "query norms, as printed": ROUTED | {"router": "query_norm", "scale": "paper"},
    "quantized": ROUTED | {"router": "query_norm", "quantized": True},
    "quantized and learned": ROUTED | {"quantized": True},
}
LAYERED = {"shared": 1, "active": [1, 3, 2]}
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


@pytest.mark.parametrize("missing", [{}, {"pre": False}, {"post": False}], ids=str)
def test_talking_heads_equal_the_oracle(missing):
    config = make_config(kha_talking=missing, use_qk_norm=False)

    def oracle(layer, hidden):
        mixings = {mixing: getattr(layer, f"talking_{mixing}", None) for mixing in ("pre", "post")}
        return reference.mixed_attention(
            hidden,
            *(w.weight.T for w in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)),
            num_query_groups=3,
            rotary_base=10000.0,
            **{mixing: m and m.weight for mixing, m in mixings.items()},
        )

    check_layer_against_oracle(config, oracle)


@pytest.mark.parametrize("use_qk_norm", [False, True], ids=["no_norm", "qk_norm"])
def test_collaborative_heads_equal_the_oracle(use_qk_norm):
    config = make_config(kha_collaborative=COLLABORATIVE, use_qk_norm=use_qk_norm)

    def oracle(layer, hidden):
        norms = {}
        if use_qk_norm:
            norms = {"q_norm": layer.q_norm.weight, "k_norm": layer.k_norm.weight}
        shared = (layer.collaborative_query, layer.collaborative_key)
        return reference.mixed_attention(
            hidden,
            *(w.weight.T for w in (*shared, layer.v_proj, layer.o_proj)),
            mixing=layer.collaborative_mixing.weight,
            num_query_groups=3,
            rotary_base=10000.0,
            rotary_dim=10,
            **norms,
        )

    check_layer_against_oracle(config, oracle)


def test_training_warns_of_the_missing_load_balance_loss(monkeypatch):
    warned = []
    monkeypatch.setattr(attention_kha.logger, "warning_once", warned.append)
    make_model(kha_moh=ROUTED | {"balance": 0}).train()
    assert not warned
    make_model(kha_moh=LAYERED).train()
    assert "without the load-balance loss" in warned[0]


def test_initial_mixing_matrices():
    blocks = make_model(learnt=False, kha_collaborative=COLLABORATIVE).model.layers[1].self_attn
    mixing = blocks.collaborative_mixing.weight
    assert torch.equal((mixing != 0).sum(0), torch.ones(14, dtype=torch.long))
    torch.testing.assert_close(mixing.square().mean(1), torch.ones(6))
    talking = make_model(learnt=False, attention="eager", kha_talking={})
    plain = make_model(learnt=False, attention="eager")
    assert not plain.load_state_dict(talking.state_dict(), strict=False).missing_keys
    ids = tokens()
    with torch.no_grad():
        torch.testing.assert_close(talking(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)


def test_talking_heads_need_eager_attention():
    config = make_config(kha_talking={})
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        AutoModelForCausalLM.from_config(make_config(kha_talking={}), attn_implementation="sdpa")
