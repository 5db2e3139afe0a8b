"""Gated attention in the transformers class: against the oracle, and in every use of a model."""

from functools import partial
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kha_megatron.config import KHAConfig
from kha_megatron.heads import Gate
from kha_megatron.hf import read_kha
from kha_megatron.hf.modeling_kha import attention_class
from tests.hf import test_attention, test_family
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
from tests.hf.packed import check_packed

HEADS = {"output": 6, "query": 6, "key": 3, "value": 3}
EVERYWHERE = {"output": "head", "query": "element", "key": "shared", "value": "head"}
OTHERWISE = {"output": "shared", "query": "shared", "key": "element", "value": "element"}
CASES = {
    **{
        f"{position} {granularity}": {position: granularity}
        for position, granularity in product(HEADS, ("element", "shared"))
    },
    "output head": {"output": "head"},
    "dense": {"dense": "element"},
    "everywhere": EVERYWHERE | {"dense": "element"},
    "added": OTHERWISE | {"form": "add", "activation": "silu"},
    "half open": EVERYWHERE | {"activation": "half_sigmoid"},
    "without input": EVERYWHERE | {"dense": "element", "reads_input": False},
}
USED = {name: CASES[name] for name in ("everywhere", "added", "without input")}
"""Those in which every position and every granularity stands, for what does not look at either."""
every_use = pytest.mark.parametrize("gate", USED.values(), ids=list(USED))
KNOCKED = {"query": "linear", "value": "mlp"}


def gated_model(gate, **settings):
    return make_model(KNOCKED, kha_gate=gate, **settings)


def oracle_weights(layer, gate):
    """By position, as the oracle wants them."""
    found = {}
    for position, granularity in gate.positions.items():
        weight = getattr(layer, f"gate_{position}").weight
        if gate.reads_input and position != "dense" and granularity != "shared":
            heads = HEADS[position]
            weight = weight.unflatten(0, (heads, -1))
        found[position] = weight
    return found


def check_against_the_oracle(config, oracle, tolerance):
    """Output and every gradient of a layer, in float64."""
    config._attn_implementation = "sdpa"
    layer = attention_class(config)(config, layer_idx=0).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    hidden = torch.randn(2, TOKENS, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
    out_grad = torch.randn_like(hidden)
    leaves = {"hidden": hidden, **dict(layer.named_parameters())}
    expected = oracle(layer, hidden, gate_weights=oracle_weights(layer, read_kha(config).gate))
    expected_grads = torch.autograd.grad(expected, leaves.values(), out_grad)
    rotary = test_attention.rotary(10000.0, TOKENS, config.qk_rope_head_dim or config.head_dim)
    actual, _ = layer(hidden, rotary, None)
    actual_grads = torch.autograd.grad(actual, leaves.values(), out_grad)
    pairs = zip((actual, *actual_grads), (expected, *expected_grads), strict=True)
    for name, (ours, theirs) in zip(["output", *leaves], pairs, strict=True):
        assert theirs.abs().max() > 1e-4, f"{name} is too small to prove anything"
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_the_oracle(name):
    config = make_config(KNOCKED, kha_gate=CASES[name], use_qk_norm=False)

    def oracle(layer, hidden, **gates):
        return test_attention.oracle(layer, hidden, KNOCKED, gate=read_kha(config).gate, **gates)

    check_against_the_oracle(config, oracle, 1e-12)


@pytest.mark.parametrize("gate", [{"output": g} for g in ("element", "head", "shared")], ids=str)
def test_latent_attention_has_its_output_gated(gate):
    config = make_config({"key": "linear"}, kha_gate=gate, **LATENT, use_qk_norm=False)

    def oracle(layer, hidden, **gates):
        return test_family.oracle(layer, hidden, gate=read_kha(config).gate, **gates)

    check_against_the_oracle(config, oracle, 1e-12)


def test_gates_stand_before_qk_norm():
    config = make_config(KNOCKED, kha_gate=CASES["everywhere"])

    def oracle(layer, hidden, **gates):
        return test_attention.oracle(layer, hidden, KNOCKED, gate=read_kha(config).gate, **gates)

    check_against_the_oracle(config, oracle, 2e-6)  # transformers' norm computes in float32


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@every_use
def test_greedy_with_and_without_cache_agree(gate, cache):
    model = gated_model(gate, initializer_range=0.5)
    check_greedy(model, cache)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@every_use
def test_logits_with_a_cache_are_those_without(gate, static):
    """In pieces, down to one token; padding on the left of one sequence changes nothing either."""
    model = gated_model(gate, **MOE)
    check_pieces(model, static)


def test_the_cache_holds_gated_keys_and_values():
    model = gated_model({"value": "element"})
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 7), past_key_values=cache)
        before = cache.layers[1].values.clone()
        model.model.layers[1].self_attn.gate_value.weight.mul_(-1)
        model(tokens(1, 1), past_key_values=cache)
    assert torch.equal(cache.layers[1].values[:, :, :7], before)
    assert cache.layers[1].values.shape == (1, 3, 8, 10)


def test_generation_with_padding_on_the_left():
    model = gated_model(CASES["everywhere"], initializer_range=0.5)
    check_padding(model)


@every_use
def test_a_saved_folder_loads_to_the_same(gate, tmp_path):
    model = gated_model(gate)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, trust_remote_code=False
    )
    assert not any(info.values())
    assert read_kha(loaded.config) == KHAConfig(**KNOCKED, gate=Gate(**gate))
    assert loaded.config.base_model_tp_plan == model.config.base_model_tp_plan
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


@every_use
def test_gradient_checkpointing_gives_the_same_gradients(gate):
    check_checkpointing(lambda: gated_model(gate))


@every_use
def test_a_decoding_step_is_one_graph(gate):
    check_decoding_is_one_graph(gated_model(gate))


@every_use
def test_a_servers_attention_gets_gated_heads(gate):
    check_packed(partial(gated_model, gate))


def test_rows_have_the_biases_of_their_projection():
    """As in Megatron's ``linear_qkv``; what reads the input apart has none."""
    attention = gated_model(CASES["everywhere"], attention_bias=True).model.layers[0].self_attn
    biases = {name for name, _ in attention.named_parameters() if name.endswith(".bias")}
    gates = {"gate_output.bias", "gate_query.bias", "gate_value.bias"}
    assert biases == gates | {"q_proj.bias", "k_proj.bias", "v_proj.bias"}


def test_new_gates_are_drawn_or_zero():
    config = make_config(kha_gate=CASES["everywhere"], initializer_range=0.02)
    attention = AutoModelForCausalLM.from_config(config).model.layers[2].self_attn
    for position in ("output", "query", "key", "value"):
        assert 0.01 < getattr(attention, f"gate_{position}").weight.std() < 0.03
    config = make_config(kha_gate=CASES["without input"])
    attention = AutoModelForCausalLM.from_config(config).model.layers[2].self_attn
    assert not attention.gate_output.weight.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kha_gate": {"output": "row"}}, "gate output='row': choose one of element"),
        ({"kha_gate": {}}, "gate at no position"),
        ({"kha_gate": {"query": "head"}}, r"gate.query=head before QK-norm.*gate.query=element"),
        ({"kha_gate": {"value": "head"}, **LATENT}, "leave out value"),
        ({"kha_gate": {"output": "head"}, "kha_attention": "gta", "head_dim": 12}, "gate.*on gta"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_model(**settings)
