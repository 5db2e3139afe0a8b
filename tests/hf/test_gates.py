"""Gated attention in the transformers class."""

from itertools import product

import pytest

from kha_megatron.heads import Gate
from kha_megatron.hf import read_kha
from tests.hf import test_attention, test_family
from tests.hf.conftest import (
    ADDED,
    EVERYWHERE,
    LATENT,
    check_layer_against_oracle,
    make_config,
    make_model,
)

HEADS = {"output": 6, "query": 6, "key": 3, "value": 3}
CASES = {
    **{
        f"{position} {granularity}": {position: granularity}
        for position, granularity in product(HEADS, ("element", "shared"))
    },
    "output head": {"output": "head"},
    "dense": {"dense": "element"},
    "everywhere": EVERYWHERE | {"dense": "element"},
    "added": ADDED,
    "half open": EVERYWHERE | {"activation": "half_sigmoid"},
    "without input": EVERYWHERE | {"dense": "element", "reads_input": False},
}
KNOCKED = {"query": "linear", "value": "mlp"}


def oracle_of(config, module, *given):
    """Return the oracle of a gated layer."""
    gate = read_kha(config).get(Gate)

    def oracle(layer, hidden):
        weights = {}
        for position, granularity in gate.positions.items():
            weight = getattr(layer, f"gate_{position}").weight
            if gate.reads_input and position != "dense" and granularity != "shared":
                weight = weight.unflatten(0, (HEADS[position], -1))
            weights[position] = weight
        return module.oracle(
            layer,
            hidden,
            *given,
            gate=gate,
            gate_weights=weights,
        )

    return oracle


@pytest.mark.parametrize(
    ("name", "use_qk_norm"),
    [*((name, False) for name in CASES), ("everywhere", True)],
)
def test_output_and_gradients_equal_the_oracle(name, use_qk_norm):
    config = make_config(KNOCKED, kha_gate=CASES[name], use_qk_norm=use_qk_norm)
    check_layer_against_oracle(config, oracle_of(config, test_attention, KNOCKED))


@pytest.mark.parametrize("gate", [{"output": g} for g in ("element", "head", "shared")], ids=str)
def test_gated_output_of_latent_attention_equals_the_oracle(gate):
    config = make_config(
        {"key": "linear"},
        kha_gate=gate,
        **LATENT,
        use_qk_norm=False,
    )
    check_layer_against_oracle(config, oracle_of(config, test_family))


def test_gates_per_head_have_the_bias_of_their_projection():
    """Compare with Megatron's ``linear_qkv``. Gates that all heads share have no bias."""
    model = make_model(KNOCKED, kha_gate=CASES["everywhere"], attention_bias=True)
    attention = model.model.layers[0].self_attn
    biases = {name for name, _ in attention.named_parameters() if name.endswith(".bias")}
    gates = {"gate_output.bias", "gate_query.bias", "gate_value.bias"}
    assert biases == gates | {"q_proj.bias", "k_proj.bias", "v_proj.bias"}
