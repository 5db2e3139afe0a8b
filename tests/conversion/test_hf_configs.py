"""Translate ``config.json`` to an architecture and back."""

import json
from dataclasses import replace

import pytest
import torch

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.hf_configs import (
    FAMILIES,
    fill_missing_tensors,
    from_hf_config,
    stock_type,
    to_hf_config,
)
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import Gate
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import KHAModelConfig
from kha_megatron.model.megatron import model_from_checkpoint, to_arguments
from tests.conversion.models import CONFIGS, SIZES, YARN, edit_config, edit_tensors, make

REFUSED = {
    "qwen3": {
        "attention_bias": True,
        "hidden_act": "gelu",
        "partial_rotary_factor": 0.5,
        "quantization_config": {"quant_method": "fp8"},
        "num_key_value_heads": 4,
        "model_type": "gemma3_text",
    },
    "llama": {
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    },
    "mistral": {"sliding_window": 8},
    "qwen3_moe": {"attention_bias": True, "shared_expert_gate": 2},
    "glm4_moe": {"norm_topk_prob": False, "yarn": YARN},
    "deepseek_v3": {
        "rope_interleave": False,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "topk_group": 1,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "yarn": YARN | {"beta_fast": 16},
        "topk_method": "greedy",
        "scoring_func": "softmax",
    },
}
NAMED = {
    "norm_topk_prob": "normalizes_topk=False",
    "yarn": "(scaling=Yarn|rotary_percent=0.5)",
    "topk_group": "n_group=4 with topk_group=1",
}
"""Names of fields in the error message, where they differ."""


@pytest.fixture(scope="module")
def raw():
    """``config.json`` of each model."""
    return {name: json.loads(config.to_json_string()) for name, config in CONFIGS.items()}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in REFUSED.items() for field in fields]
)
def test_unsupported_fields_are_refused(raw, name, field):
    to_arguments(from_hf_config(raw[name]))
    key = "rope_parameters" if field == "yarn" else field
    with pytest.raises(CheckpointError, match=NAMED.get(field, field)):
        to_arguments(from_hf_config(raw[name] | {key: REFUSED[name][field]}))


@pytest.mark.parametrize("name", ["qwen2, tied, yarn", "deepseek_v3, yarn"])
def test_scaled_attention_of_yarn_is_refused(raw, name):
    """Megatron has no argument for ``attention_factor``, and always rounds the ramp."""
    rope = raw[name]["rope_parameters"]

    def parse(**changes):
        return from_hf_config(raw[name] | {"rope_parameters": rope | changes})

    assert parse(attention_factor=None, truncate=True) == parse()
    for changes in ({"attention_factor": 1.2}, {"attention_factor": 1.0}, {"truncate": False}):
        with pytest.raises(CheckpointError, match="does not support attention_factor or truncate"):
            parse(**changes)


def test_both_scales_of_yarn_are_imported(raw):
    """They change the softmax scale of latent attention, each in another way."""
    rope = raw["deepseek_v3, yarn"]["rope_parameters"] | {"mscale": 0.7, "mscale_all_dim": 0.4}
    model = from_hf_config(raw["deepseek_v3, yarn"] | {"rope_parameters": rope})
    given = to_arguments(model)
    assert (given["mscale"], given["mscale_all_dim"]) == (0.7, 0.4)


def test_windows_of_the_whole_sequence_are_accepted(raw):
    model = from_hf_config(raw["mistral"])
    assert from_hf_config(raw["mistral"] | {"sliding_window": 24}) == model
    assert from_hf_config(raw["qwen3"] | {"sliding_window": 8}) == from_hf_config(raw["qwen3"])
    for name in ("qwen2, tied, yarn", "qwen3"):
        with pytest.raises(CheckpointError, match="sliding_window=8"):
            from_hf_config(raw[name] | {"sliding_window": 8, "use_sliding_window": True})
    kinds = ["full_attention", "sliding_attention"]
    with pytest.raises(CheckpointError, match=r"layer_types=.*sliding_attention"):
        from_hf_config(raw["qwen3"] | {"layer_types": kinds})


@pytest.mark.parametrize("name", CONFIGS)
def test_megatron_arguments_keep_the_architecture(raw, name):
    model = from_hf_config(raw[name])
    assert model_from_checkpoint(to_arguments(model), model.kha, 51) == model


SAME = {("llama", "mistral"), ("mistral", "llama")}
"""Equivalent architectures."""
WITH_GATE = {
    (Gate(output="element"), False): ("qwen3_next", "qwen3_5_text"),
    (Gate(output="element"), True): ("qwen3_next",),
}
"""By gate, and whether the layers have experts."""


@pytest.mark.parametrize("target", FAMILIES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_pair_of_architectures_is_exact_or_refused(raw, name, target):
    model, family = from_hf_config(raw[name]), CONFIGS[name].model_type
    plain = not model.multi_latent_attention and model.kha == HeadsConfig()
    gate, same = model.kha.get(Gate), (family, target) in SAME
    possible = target == family or (same and not model.kha.mechanisms)
    possible |= target == "kha"
    if not model.multi_latent_attention and not model.add_qkv_bias:
        gated = WITH_GATE.get((gate, bool(model.num_experts)), ())
        possible |= target in gated and model.kha.mechanisms == (gate,)
    possible |= target == "glm4_moe" and plain and not model.num_experts  # all layers dense
    if possible and target in ("qwen3_next", "qwen3_5_text"):
        model = replace(model, layernorm_zero_centered_gamma=True)
    if not possible:
        with pytest.raises(CheckpointError, match=r"(not supported|cannot be exported)"):
            to_hf_config(model, target)
        return
    back = from_hf_config(json.loads(to_hf_config(model, target).to_json_string()))
    assert back == model


UNUSUAL = {
    "softmax, biases": ("qwen3_moe", {"add_qkv_bias": True}),
    "softmax, shared expert": ("qwen3_moe", {"moe_shared_expert_intermediate_size": 20}),
    "sigmoid, no bias of experts": ("glm4_moe", {"moe_router_enable_expert_bias": False}),
    "sigmoid, later dense layer": ("glm4_moe", {"moe_layer_freq": (1, 0)}),
    "MLA, other epsilon": ("deepseek_v3", {"layernorm_epsilon": 1e-5}),
    "gate, biases": ("qwen3_next", {"add_qkv_bias": True}),
    "biases, partial RoPE": ("qwen2, tied, yarn", {"rotary_percent": 0.5}),
    "QK-norm, partial RoPE": ("qwen3", {"rotary_percent": 0.5}),
    "partial RoPE": ("llama", {"rotary_percent": 0.5}),
    "QK-norm and biases": ("qwen3", {"add_qkv_bias": True}),
    "epsilon": ("llama", {"layernorm_epsilon": 1e-5}),
}
"""Models between the stock architectures."""


@pytest.mark.parametrize("name", [*CONFIGS, *UNUSUAL])
def test_auto_only_picks_architectures_that_represent_the_model(raw, name):
    base, changes = UNUSUAL.get(name, (name, {}))
    model = replace(from_hf_config(raw[base]), **changes)
    fitting = [target for target in FAMILIES if target != "kha" and _fits(model, target)]
    if fitting:
        assert stock_type(model) in fitting
    else:
        with pytest.raises(CheckpointError, match=r"^No stock .* Please use --architecture kha\b"):
            stock_type(model)
        to_hf_config(model, "kha")


def _fits(model, target):
    if target in ("qwen3_next", "qwen3_5_text"):  # exports convert the norms
        model = replace(model, layernorm_zero_centered_gamma=True)
    try:
        config = to_hf_config(model, target)
    except CheckpointError:
        return False
    back = from_hf_config(json.loads(config.to_json_string()))
    return not fill_missing_tensors(model, target).differences(back, ("mtp_num_layers",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"\(11 tensors\): missing model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"\(11 tensors\): unexpected model\.layers\.1"),
        ({"num_key_value_heads": 3}, r"k_proj.weight has shape \(12, 36\) instead of \(18, 36\)"),
        ({"hidden_size": 42}, r"match its config\.json .*shape \(51, 36\) instead of \(51, 42\)"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        ({"vocab_size": 52}, r"instead of \(52, 36\)"),
    ],
)
def test_a_config_that_disagrees_with_its_tensors_is_refused(tmp_path, changes, message):
    make(CONFIGS["qwen3"]).save_pretrained(tmp_path / "hf")
    edit_config(tmp_path / "hf", layer_types=None, **changes)
    for plan in (to_megatron.plan_import, to_hf.plan_export):
        with pytest.raises(CheckpointError, match=message):
            plan(tmp_path / "hf")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_unexpected_tensors_are_named_next_to_missing_ones(tmp_path, name):
    make(CONFIGS[name]).save_pretrained(tmp_path / "hf")

    def rename(tensors):
        for key in [key for key in tensors if ".mlp." in key]:
            tensors[key.replace(".mlp.", ".feed_forward.")] = tensors.pop(key)

    edit_tensors(tmp_path / "hf", rename)
    for plan in (to_megatron.plan_import, to_hf.plan_export):
        with pytest.raises(
            CheckpointError,
            match=r"missing \S+\.mlp\.\S+, .* and \d+ more; "
            r"unexpected \S+\.feed_forward\.\S+, .* and \d+ more\.$",
        ):
            plan(tmp_path / "hf")


def test_a_tied_model_may_repeat_its_embedding(tmp_path):
    make(CONFIGS["qwen3, tied"]).save_pretrained(tmp_path / "hf")

    def repeat(tensors):
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(tmp_path / "hf", repeat)
    to_megatron.plan_import(tmp_path / "hf")


def test_quantised_tensors_are_refused(tmp_path):
    make(CONFIGS["qwen3"]).save_pretrained(tmp_path / "hf")
    quantised = {"model.norm.weight": torch.ones(36).to(torch.float8_e4m3fn)}
    edit_tensors(tmp_path / "hf", lambda tensors: tensors.update(quantised))
    for plan in (to_hf.plan_export, to_megatron.plan_import):
        with pytest.raises(
            CheckpointError, match=r"model\.norm\.weight has unsupported dtype torch\.float8_e4m3fn"
        ):
            plan(tmp_path / "hf")


def test_biases_with_collaborative_heads_are_refused():
    config = KHAModelConfig(**SIZES, attention_bias=True, kha_collaborative={"dim": 16})
    with pytest.raises(CheckpointError, match=r"collaborative.* do not support attention_bias"):
        from_hf_config(json.loads(config.to_json_string()))
