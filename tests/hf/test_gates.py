"""Gated attention in the transformers class: against the oracle, and in every use of a model."""

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


def oracle_of(config, module, *given):
    """Return the oracle of a gated layer."""

    def oracle(layer, hidden):
        gate = read_kha(config).gate
        return module.oracle(
            layer, hidden, *given, gate=gate, gate_weights=oracle_weights(layer, gate)
        )

    return oracle


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_the_oracle(name):
    config = make_config(KNOCKED, kha_gate=CASES[name], use_qk_norm=False)
    check_layer_against_oracle(config, oracle_of(config, test_attention, KNOCKED))


@pytest.mark.parametrize("gate", [{"output": g} for g in ("element", "head", "shared")], ids=str)
def test_the_output_of_latent_attention_is_gated(gate):
    config = make_config({"key": "linear"}, kha_gate=gate, **LATENT, use_qk_norm=False)
    check_layer_against_oracle(config, oracle_of(config, test_family))


def test_gates_act_before_qk_norm():
    config = make_config(KNOCKED, kha_gate=CASES["everywhere"])
    # transformers' norm always computes in float32.
    check_layer_against_oracle(config, oracle_of(config, test_attention, KNOCKED), 2e-6)


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
