"""Saved models: exact round trips, tensor names, the dtype of the correction bias."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from kha_megatron.hf import KHAForCausalLM, KHAModel, KHAModelConfig, read_kha
from tests.hf.conftest import MIXED, MOE, every_projection, load, make_config, make_model


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"tie_word_embeddings": True, "use_qk_norm": False}, torch.float32),
        ({"tie_word_embeddings": True}, torch.bfloat16),
        (MOE, torch.bfloat16),
    ],
)
def test_round_trip_is_exact(settings, dtype, tmp_path):
    model = make_model(MIXED, dtype=dtype, **settings)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert type(loaded) is KHAForCausalLM
    assert loaded.dtype == dtype
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name
        assert tensor.dtype == state[name].dtype, name
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == settings.get("tie_word_embeddings", False)


def test_tensor_names_and_shapes_on_disk(tmp_path):
    make_model(MIXED, **MOE).save_pretrained(tmp_path)
    stored = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    swiglu = {"gate_proj": (0, 1), "up_proj": (0, 1), "down_proj": (1, 0)}

    def mlp(prefix, width):
        sizes = (width, 22)
        return {f"{prefix}.{n}.weight": (sizes[a], sizes[b]) for n, (a, b) in swiglu.items()}

    expected = {
        "model.embed_tokens.weight": (97, 22),
        "model.norm.weight": (22,),
        "lm_head.weight": (97, 22),
    }
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        heads = {"q_proj": (60, 22), "k_proj": (30, 22), "v_proj": (30, 22), "o_proj": (22, 60)}
        knocks = ["q_knock.proj", "k_knock.gate_proj"]
        knocks += ["v_knock.up_proj", "v_knock.gate_proj", "v_knock.down_proj"]
        expected |= {f"{prefix}.self_attn.{name}.weight": size for name, size in heads.items()}
        expected |= {f"{prefix}.self_attn.{name}.weight": (10, 10) for name in knocks}
        expected |= {f"{prefix}.self_attn.{name}_norm.weight": (10,) for name in "qk"}
        expected |= {
            f"{prefix}.{name}_layernorm.weight": (22,) for name in ("input", "post_attention")
        }
        if layer == 0:
            expected |= mlp(f"{prefix}.mlp", 37)
            continue
        expected |= mlp(f"{prefix}.mlp.shared_experts", 9)
        for expert in range(5):
            expected |= mlp(f"{prefix}.mlp.experts.{expert}", 14)
        expected |= {
            f"{prefix}.mlp.gate.weight": (5, 22),
            f"{prefix}.mlp.gate.e_score_correction_bias": (5,),
            f"{prefix}.mlp.shared_expert_gate.weight": (1, 22),
        }
    assert stored == expected


def test_correction_bias_stays_float32_in_a_bfloat16_model(tmp_path):
    model = make_model(**MOE)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.tensor([1 / 3, -0.1, 0.7, 1e-3, 0.2]))  # no bfloat16 numbers
    model.save_pretrained(tmp_path)
    loaded = KHAForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    gate = loaded.model.layers[1].mlp.gate
    assert gate.weight.dtype == torch.bfloat16
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(gate.e_score_correction_bias, bias)
    logits, weights, _ = gate(torch.randn(3, 22, dtype=torch.bfloat16))
    assert logits.dtype == weights.dtype == torch.float32


def test_auto_classes_find_the_architecture(tmp_path):
    config = make_config(every_projection("linear"))
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(read) is KHAModelConfig
    assert type(AutoModel.from_config(read)) is KHAModel
    assert read_kha(read).variants == every_projection("linear")


def test_an_additional_layer_on_disk_is_reported(tmp_path):
    """The parent architecture silently drops its MTP layers 46 and 92."""
    make_model().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.46.input_layernorm.weight"] = torch.ones(22)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, info = KHAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {"model.layers.46.input_layernorm.weight"}
