"""Registry of supported Hugging Face architectures."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from kha_megatron.conversion.file_format import STANDARD, FileFormat
from kha_megatron.conversion.hf_experts import DEEPSEEK, KHA, QWEN3, QWEN3_NEXT, ExpertFields
from kha_megatron.conversion.tensor_names import QWEN_LAYER_NAMES, QWEN_PREDICTION_NAMES
from kha_megatron.heads import Gate
from kha_megatron.hf import KHAModelConfig
from kha_megatron.model.config import ModelConfig


class Family(NamedTuple):
    """Everything we need to know about a transformers architecture."""

    config: type[PreTrainedConfig]
    causal_lm: str | None
    """Name of the causal LM class. None if transformers does not have one."""
    always: Mapping[str, Any] = {}
    """``ModelConfig`` fields with a fixed value."""
    only: Mapping[str, Any] = {}
    """Config fields where Megatron supports only this value."""
    experts: ExpertFields | None = None
    latent: bool | None = False
    """True for MLA/GLA. None if it depends on the config."""
    partial_rope: bool = False
    gate: Gate | None = None
    """Set if all models of this family have an output gate."""
    switches: Mapping[str, Gate] = {}
    """Boolean config fields that turn on a gate."""
    files: FileFormat = STANDARD
    extra: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    """Additional config fields."""
    rope: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    """Additional ``rope_parameters`` (these do not affect text)."""


def _full_attention(model: ModelConfig) -> dict[str, Any]:
    return {"layer_types": ["full_attention"] * model.layers}


def _predictions(model: ModelConfig) -> dict[str, Any]:
    return {"num_nextn_predict_layers": model.mtp_num_layers or 0}


def _sections(model: ModelConfig) -> dict[str, Any]:
    """Multimodal RoPE sections. The format requires them, but they do not matter for text."""
    pairs = int(model.kv_channels * model.rotary_percent) // 2
    sections = [(pairs + rest) // 3 for rest in (2, 1, 0)]
    return {"mrope_section": sections, "mrope_interleaved": True}


OUTPUT_GATE = Gate(output="element")
"""Same as ``--attention-output-gate`` in Megatron."""
_STANDARD = {"layernorm_zero_centered_gamma": False}
_QWEN3 = _STANDARD | {"qk_layernorm": True, "add_qkv_bias": False}
_QWEN3_NEXT = _QWEN3 | {"layernorm_zero_centered_gamma": True}
_QWEN2 = _STANDARD | {"qk_layernorm": False, "add_qkv_bias": True}
_LLAMA = _STANDARD | {"qk_layernorm": False, "add_qkv_bias": False}
_NO_BIAS = {"attention_bias": False}  # would also add a bias to o_proj
_QWEN3_5_FILES = FileFormat(layer_names=QWEN_LAYER_NAMES, gate_in_query="head")
_QWEN3_NEXT_FILES = FileFormat(
    layer_names=QWEN_LAYER_NAMES,
    prediction_names=QWEN_PREDICTION_NAMES,
    prediction_prefix="mtp.layers.0.",
    gate_in_query="head",
    predictions=1,
)
_DEEPSEEK_FILES = FileFormat(predictions=1000, shared=True)

FAMILIES: dict[str, Family] = {
    "kha": Family(KHAModelConfig, "KHAForCausalLM", experts=KHA, latent=None, partial_rope=True),
    "qwen3": Family(Qwen3Config, "Qwen3ForCausalLM", _QWEN3, _NO_BIAS),
    "qwen3_moe": Family(Qwen3MoeConfig, "Qwen3MoeForCausalLM", _QWEN3, _NO_BIAS, QWEN3),
    "glm4_moe": Family(
        Glm4MoeConfig,
        "Glm4MoeForCausalLM",
        _STANDARD,
        experts=DEEPSEEK,
        partial_rope=True,
        files=_DEEPSEEK_FILES,
        extra=_predictions,
    ),
    "deepseek_v3": Family(
        DeepseekV3Config,
        "DeepseekV3ForCausalLM",
        _QWEN3,  # for MLA, these are the norms of the compressed states
        # transformers hardcodes eps=1e-6 for these norms
        _NO_BIAS | {"rope_interleave": True, "rms_norm_eps": 1e-6},
        DEEPSEEK,
        latent=True,
        files=_DEEPSEEK_FILES,
        extra=_predictions,
    ),
    "qwen2": Family(Qwen2Config, "Qwen2ForCausalLM", _QWEN2),
    "llama": Family(LlamaConfig, "LlamaForCausalLM", _LLAMA, _NO_BIAS | {"mlp_bias": False}),
    "mistral": Family(
        MistralConfig, "MistralForCausalLM", _LLAMA, extra=lambda model: {"sliding_window": None}
    ),
    "qwen3_next": Family(
        Qwen3NextConfig,
        "Qwen3NextForCausalLM",
        _QWEN3_NEXT,
        _NO_BIAS,
        QWEN3_NEXT,
        partial_rope=True,
        gate=OUTPUT_GATE,
        files=_QWEN3_NEXT_FILES,
        extra=_full_attention,
    ),
    "qwen3_5_text": Family(
        Qwen3_5TextConfig,
        "Qwen3_5ForCausalLM",
        _QWEN3_NEXT,
        _NO_BIAS,
        partial_rope=True,
        gate=OUTPUT_GATE,
        files=_QWEN3_5_FILES,
        extra=_full_attention,
        rope=_sections,
    ),
}
"""Keyed by ``model_type``."""


@strict
class PublishedConfig(Qwen3Config):
    """Config of the gated-attention models from https://github.com/qiuzh20/gated_attention.

    Note: their ``model_type`` is ``qwen3``, and ``qkv_bias`` also adds a bias to ``o_proj``.
    """

    elementwise_attn_output_gate: bool = False
    headwise_attn_output_gate: bool = False
    use_qk_norm: bool = True
    qkv_bias: bool = False


PUBLISHED = Family(
    PublishedConfig,
    None,
    _STANDARD | {"add_qkv_bias": False},
    _NO_BIAS | {"qkv_bias": False},
    switches={
        "headwise_attn_output_gate": Gate(output="head"),
        "elementwise_attn_output_gate": OUTPUT_GATE,
    },
    files=FileFormat(gate_in_query="group"),
)
"""Published gated-attention models (import only)."""
