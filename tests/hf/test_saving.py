"""Saved models: exact round trips and the dtype of the correction bias."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import KHAForCausalLM, read_kha
from tests.hf.conftest import MIXED, MOE, load, make_model, mark_whole, tokens
from tests.hf.test_uses import MODELS, VARIATIONS

CASES = {
    **MODELS,
    "tied": (MIXED, {"tie_word_embeddings": True, "use_qk_norm": False}),
    "tied, bfloat16": (MIXED, {"tie_word_embeddings": True}),
    "moe, bfloat16": (MIXED, MOE),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", mark_whole(CASES, VARIATIONS))
def test_round_trip_is_exact(name, tmp_path):
    kha, sizes = CASES[name]
    dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    model = make_model(kha, dtype=dtype, **sizes)
    ids = tokens()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert type(loaded) is KHAForCausalLM
    assert loaded.dtype == dtype
    settings = {}
    for key, value in sizes.items():
        if key.startswith("kha_") and key != "kha_folded":
            settings[key.removeprefix("kha_")] = value
    assert read_kha(loaded.config) == HeadsConfig.from_dict(kha | settings)
    assert loaded.config.kha_folded == sizes.get("kha_folded")
    state = model.state_dict()
    loaded_state = loaded.state_dict()
    assert loaded_state.keys() == state.keys()
    for key, tensor in loaded_state.items():
        assert torch.equal(tensor, state[key]), key
        assert tensor.dtype == state[key].dtype, key
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == sizes.get("tie_word_embeddings", False)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


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


def test_an_additional_layer_on_disk_is_reported(tmp_path):
    """The parent architecture silently drops its MTP layers 46 and 92."""
    make_model().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.46.input_layernorm.weight"] = torch.ones(22)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, info = KHAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {"model.layers.46.input_layernorm.weight"}


@pytest.mark.versions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accelerate_saves_all_tensors(dtype, tmp_path):
    """Of several tensors in the same memory, it would save only one."""
    accelerate = pytest.importorskip(
        "accelerate", reason="needs accelerate: make setup installs it"
    )
    make_model({"key": "mlp", "value": "mlp"}).save_pretrained(tmp_path / "first")
    model = load(tmp_path / "first").to(dtype)
    addresses = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(addresses)) == len(addresses)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "again")
    stored = load_file(tmp_path / "again" / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(stored[key], tensor), key
