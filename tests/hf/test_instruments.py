"""Attention sinks, peaks, gates and head load against direct computation."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3_next import Qwen3NextConfig

from kha_megatron.hf.instruments import measure_layers
from tests.hf.conftest import FAMILY, SIZES, make_config, tokens

MODELS = {
    "kha": lambda: make_config({"value": "mlp"}),
    "gates": lambda: make_config(kha_gate={"output": "head", "value": "element"}),
    "moh": lambda: make_config(kha_moh={"shared": 2, "active": 2}),
    "collaborative": lambda: make_config(kha_collaborative={"dim": 14}),
    "mla": lambda: make_config(FAMILY["mla"][0], **FAMILY["mla"][1]),
    "gta": lambda: make_config(FAMILY["gta"][0], **FAMILY["gta"][1]),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES,
        layer_types=["full_attention"] * 3,
        mlp_only_layers=[0, 1, 2],
        partial_rotary_factor=1.0,
    ),
}


def build(name, attention="sdpa"):
    torch.manual_seed(1)
    config = MODELS[name]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_sinks_and_peaks_equal_those_of_eager_attention(name):
    ids = tokens(1, 9)
    found = measure_layers(build(name), ids)
    model = build(name, "eager")
    outputs = []

    def keep_output(module, inputs, output):
        if isinstance(output, tuple):
            output = output[0]
        outputs.append(output[0])

    for layer in model.get_decoder().layers:
        layer.register_forward_hook(keep_output)
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    assert [figures.layer for figures in found] == [0, 1, 2]
    for figures, weights, hidden in zip(found, attentions, outputs, strict=True):
        expected = weights[0, :, 1:, 0].mean(-1)
        assert expected.std() > 1e-4
        torch.testing.assert_close(
            torch.tensor(figures.sinks),
            expected,
            rtol=1e-5,
            atol=1e-5,
        )
        assert figures.peak == pytest.approx(hidden.abs().max().item(), rel=1e-5)
        place = hidden[figures.peak_token, figures.peak_feature]
        assert abs(place.item()) == pytest.approx(figures.peak, rel=1e-5)
        assert figures.median == pytest.approx(hidden.abs().median().item(), rel=1e-4)


@pytest.mark.parametrize("name", ["gates", "qwen3_next"])
def test_gates_of_kha_and_stock_models_are_measured(name):
    model = build(name)
    for parameter in model.parameters():  # Wide enough that some gates are closed.
        parameter.data *= 3
    inputs = []

    def keep_input(module, args, kwargs):
        inputs.append(args[0] if args else kwargs["hidden_states"])

    layers = model.get_decoder().layers
    for layer in layers:
        layer.self_attn.register_forward_pre_hook(keep_input, with_kwargs=True)
    found = measure_layers(model, tokens(1, 9))
    for figures, layer, hidden in zip(found, layers, inputs, strict=True):
        attention = layer.self_attn
        with torch.no_grad():
            if name == "qwen3_next":
                score = attention.q_proj(hidden).view(1, 9, 6, 20)[..., 10:]
            else:
                score = attention.gate_output(hidden)
        score = 1 / (1 + torch.exp(-score.double()))
        mean = score.mean().item()
        shut = (score < 0.1).double().mean().item()
        assert 0 < shut < 1
        measured = figures.figures
        assert measured["gate-score/output"] == pytest.approx(mean, rel=1e-5)
        assert measured["gate-shut/output"] == pytest.approx(shut, rel=1e-5)
        assert ("gate-shut/value" in measured) == (name == "gates")


def test_the_load_of_heads_is_measured():
    for figures in measure_layers(build("moh"), tokens(1, 9)):
        load = figures.figures["moh-load"]
        assert load[:2] == [1, 1]
        assert sum(load) == pytest.approx(4)
        assert 0 < figures.figures["moh-entropy"] <= 1
