"""Gated attention in the transformers class."""

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kha_megatron.hf import read_kha
from tests.hf import test_attention, test_family
from tests.hf.conftest import LATENT, check_layer_against_oracle, make_config, make_model, tokens

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
KNOCKED = {"query": "linear", "value": "mlp"}


def oracle_weights(layer, gate):
    """Return the weights by position, as the oracle expects them."""
    found = {}
    for position, granularity in gate.positions.items():
        weight = getattr(layer, f"gate_{position}").weight
        if gate.reads_input and position != "dense" and granularity != "shared":
            weight = weight.unflatten(0, (HEADS[position], -1))
        found[position] = weight
    return found


def oracle_of(config, module, *given):
    """Return the oracle of a gated layer."""

    def oracle(layer, hidden):
        gate = read_kha(config).gate
        return module.oracle(
            layer, hidden, *given, gate=gate, gate_weights=oracle_weights(layer, gate)
        )

    return oracle


@pytest.mark.parametrize(
    ("name", "use_qk_norm"), [*((name, False) for name in CASES), ("everywhere", True)]
)
def test_output_and_gradients_equal_the_oracle(name, use_qk_norm):
    config = make_config(KNOCKED, kha_gate=CASES[name], use_qk_norm=use_qk_norm)
    # transformers' norm computes in float32.
    tolerance = 2e-6 if use_qk_norm else 1e-12
    check_layer_against_oracle(config, oracle_of(config, test_attention, KNOCKED), tolerance)


@pytest.mark.parametrize("gate", [{"output": g} for g in ("element", "head", "shared")], ids=str)
def test_gated_output_of_latent_attention_equals_the_oracle(gate):
    config = make_config({"key": "linear"}, kha_gate=gate, **LATENT, use_qk_norm=False)
    check_layer_against_oracle(config, oracle_of(config, test_family))


def test_the_cache_holds_gated_keys_and_values():
    model = make_model(KNOCKED, kha_gate={"value": "element"})
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 7), past_key_values=cache)
        before = cache.layers[1].values.clone()
        model.model.layers[1].self_attn.gate_value.weight.mul_(-1)
        model(tokens(1, 1), past_key_values=cache)
    assert torch.equal(cache.layers[1].values[:, :, :7], before)
    assert cache.layers[1].values.shape == (1, 3, 8, 10)


def test_gates_per_head_have_the_bias_of_their_projection():
    """As in Megatron's ``linear_qkv``. Gates that all heads share have no bias."""
    model = make_model(KNOCKED, kha_gate=CASES["everywhere"], attention_bias=True)
    attention = model.model.layers[0].self_attn
    biases = {name for name, _ in attention.named_parameters() if name.endswith(".bias")}
    gates = {"gate_output.bias", "gate_query.bias", "gate_value.bias"}
    assert biases == gates | {"q_proj.bias", "k_proj.bias", "v_proj.bias"}


def test_initial_gates_are_random_or_zero():
    config = make_config(kha_gate=CASES["everywhere"], initializer_range=0.02)
    attention = AutoModelForCausalLM.from_config(config).model.layers[2].self_attn
    for position in ("output", "query", "key", "value"):
        assert 0.01 < getattr(attention, f"gate_{position}").weight.std() < 0.03
    config = make_config(kha_gate=CASES["without input"])
    attention = AutoModelForCausalLM.from_config(config).model.layers[2].self_attn
    assert not attention.gate_output.weight.any()
