"""Mixture-of-head, talking and collaborative heads in the transformers class."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kha_megatron.config import KHAConfig
from kha_megatron.hf import attention_kha, read_kha
from kha_megatron.hf.modeling_kha import attention_class
from tests import oracle as reference
from tests.hf import test_attention
from tests.hf.conftest import (
    LATENT,
    MOE,
    SIZES,
    TOKENS,
    check_checkpointing,
    check_decoding_is_one_graph,
    make_config,
    make_model,
    tokens,
)
from tests.hf.generating import check_greedy, check_padding, check_pieces

ROUTED = {"shared": 2, "active": 2}
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
GATE = {"output": "head", "value": "element"}
CASES = {
    "moh": {"kha_moh": LAYERED},
    "moh by norms, gates": {"kha_moh": MIXTURES["quantized"], "kha_gate": GATE},
    "talking": {"kha_talking": {}},
    "collaborative": {"kha_collaborative": COLLABORATIVE, "kha_gate": GATE},
}
every_case = pytest.mark.parametrize("name", CASES)


def model_of(name, **settings):
    attention = "eager" if name == "talking" else "sdpa"
    return make_model({"value": "mlp"}, attention=attention, **CASES[name], **settings)


def check_against_the_oracle(config, oracle, tolerance=1e-12):
    """Output and every gradient of a layer, in float64; eager attention wants a causal mask."""
    eager = read_kha(config).talking is not None
    config._attn_implementation = "eager" if eager else "sdpa"
    layer = attention_class(config)(config, layer_idx=0).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    hidden = torch.randn(2, TOKENS, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
    mask = torch.full((1, 1, TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)
    out_grad = torch.randn_like(hidden)
    leaves = {"hidden": hidden, **dict(layer.named_parameters())}
    rotary = test_attention.rotary(10000.0, TOKENS, config.head_dim)
    results = []
    for output in (oracle(layer, hidden), layer(hidden, rotary, mask if eager else None)[0]):
        results.append((output, *torch.autograd.grad(output, leaves.values(), out_grad)))
    for name, theirs, ours in zip(["output", *leaves], *results, strict=True):
        assert theirs.abs().max() > 1e-4, f"{name} is too small to prove anything"
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_equal_the_oracle(name):
    settings = MIXTURES[name]
    config = make_config({"query": "linear"}, kha_moh=settings, use_qk_norm=False)

    def oracle(layer, hidden):
        def weigh(queries):
            router = layer.moh_router.weight if hasattr(layer, "moh_router") else None
            words = {k: v for k, v in settings.items() if k != "router"}
            return reference.mixture_weights(hidden, queries, router, **words)[0]

        return test_attention.oracle(layer, hidden, {"query": "linear"}, weigh=weigh)

    check_against_the_oracle(config, oracle)


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

    check_against_the_oracle(config, oracle)


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

    # transformers' norm computes in float32
    check_against_the_oracle(config, oracle, 2e-6 if use_qk_norm else 1e-12)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@every_case
def test_greedy_with_and_without_cache_agree(name, cache):
    model = model_of(name, initializer_range=0.5)
    check_greedy(model, cache)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@every_case
def test_logits_with_a_cache_are_those_without(name, static):
    """In pieces, down to one token; padding on the left of one sequence changes nothing either."""
    model = model_of(name, **MOE)
    check_pieces(model, static)


@every_case
def test_generation_with_padding_on_the_left(name):
    model = model_of(name, initializer_range=0.5)
    check_padding(model)


@every_case
def test_a_saved_folder_loads_to_the_same(name, tmp_path):
    model = model_of(name)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, trust_remote_code=False
    )
    assert not any(info.values())
    fields = {field.removeprefix("kha_"): value for field, value in CASES[name].items()}
    assert read_kha(loaded.config) == KHAConfig.from_dict({"value": "mlp", **fields})
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in loaded.state_dict().items())


@every_case
def test_gradient_checkpointing_gives_the_same_gradients(name):
    check_checkpointing(lambda: model_of(name))


@every_case
def test_a_decoding_step_is_one_graph(name):
    check_decoding_is_one_graph(model_of(name))


def test_training_says_that_no_load_is_balanced(monkeypatch):
    said = []
    monkeypatch.setattr(attention_kha.logger, "warning_once", said.append)
    make_model(kha_moh=ROUTED | {"balance": 0}).train()
    make_model(kha_gate=GATE).train()
    assert not said
    model_of("moh").eval().train()
    assert "without the load-balance loss" in said[0]


def test_every_layer_has_its_own_number_of_heads():
    model = model_of("moh")
    found = [layer.self_attn.mechanisms[0][0].active for layer in model.model.layers]
    assert found == LAYERED["active"]


def test_new_mixings_begin_as_they_should():
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


def test_the_cache_of_collaborative_heads_has_one_key():
    model = make_model(kha_collaborative=COLLABORATIVE)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 7), past_key_values=cache)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert held == 3 * 7 * (14 + 3 * 10)


def test_talking_heads_take_eager_attention_and_no_other():
    config = make_config(kha_talking={})
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        AutoModelForCausalLM.from_config(make_config(kha_talking={}), attn_implementation="sdpa")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kha_moh": {"shared": 6, "active": 1}}, "shares 6 of 6 heads"),
        ({"kha_moh": {"shared": 2, "active": 5}}, "5 active of 4 routed heads"),
        ({"kha_moh": {"shared": 2, "active": [1, 2]}}, "names 2 layers, and the model has 3"),
        ({"kha_moh": ROUTED, **LATENT}, "moh.*on multi-latent attention"),
        ({"kha_talking": {}, **LATENT}, "talking on multi-latent attention"),
        ({"kha_collaborative": {"dim": 8}}, "dim=8, and .* turns 10 features: give"),
        ({"kha_unknown": {}}, "Unknown fields kha_unknown"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_model(**settings)
