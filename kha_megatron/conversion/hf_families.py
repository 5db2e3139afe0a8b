"""Registry of supported Hugging Face architectures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
from kha_megatron.conversion.hf_experts import (
    DEEPSEEK_EXPERTS,
    KHA_EXPERTS,
    QWEN3_EXPERTS,
    QWEN3_NEXT_EXPERTS,
    ExpertFields,
    no_fields,
)
from kha_megatron.conversion.tensor_names import QWEN_LAYER_NAMES, QWEN_PREDICTION_NAMES
from kha_megatron.heads import Gate
from kha_megatron.hf import KHAModelConfig
from kha_megatron.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything we need to know about a transformers architecture."""

    config_class: type[PreTrainedConfig]
    causal_lm: str | None
    """Name of the causal LM class. None if transformers does not have one."""
    fixed_model_fields: Mapping[str, Any] = field(default_factory=dict)
    """``ModelConfig`` fields that are the same in all models of this family."""
    required_config_values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Hugging Face config where Megatron supports only this value."""
    experts: ExpertFields | None = None
    """How the config stores MoE settings. None if there are only dense models."""
    has_latent_fields: bool = False
    """True if the config has fields for MLA or GLA. Models use it if ``kv_lora_rank`` is set."""
    supports_partial_rope: bool = False
    output_gate: Gate | None = None
    """Set if all models of this family have an output gate."""
    gate_switches: Mapping[str, Gate] = field(default_factory=dict)
    """Boolean config fields that turn on a gate."""
    file_format: FileFormat = STANDARD
    extra_fields: Callable[[ModelConfig], dict[str, Any]] = no_fields
    """Returns additional config fields to write."""
    extra_rope_parameters: Callable[[ModelConfig], dict[str, Any]] = no_fields
    """Returns additional ``rope_parameters`` to write (these do not affect text)."""

    @property
    def has_zero_centered_norms(self) -> bool:
        """Whether all models of this family have norms that multiply by ``1 + weight``."""
        return self.fixed_model_fields.get("layernorm_zero_centered_gamma", False)


def _full_attention_layers(model: ModelConfig) -> dict[str, Any]:
    return {"layer_types": ["full_attention"] * model.layers}


def _no_sliding_window(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": None}


def _number_of_predictions(model: ModelConfig) -> dict[str, Any]:
    return {"num_nextn_predict_layers": model.mtp_num_layers or 0}


def _multimodal_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the sections of multimodal RoPE, which rotate by time, height and width.

    The format requires them. In text, all three positions are equal, so the sizes of the sections
    do not matter. Like Qwen, we use three equal sections, e.g. 11, 11 and 10 of 32 pairs.
    """
    rotary_pairs = int(model.kv_channels * model.rotary_percent) // 2
    width_pairs = rotary_pairs // 3
    height_pairs = (rotary_pairs - width_pairs) // 2
    time_pairs = rotary_pairs - width_pairs - height_pairs
    return {
        "mrope_section": [time_pairs, height_pairs, width_pairs],
        "mrope_interleaved": True,
    }


OUTPUT_GATE = Gate(output="element")
"""Same as ``--attention-output-gate`` in Megatron."""

_NO_ATTENTION_BIAS = {"attention_bias": False}
"""Required, because ``attention_bias`` also adds a bias to ``o_proj``."""

_QWEN3_5_FORMAT = FileFormat(layer_names=QWEN_LAYER_NAMES, gate_in_query="after_each_head")
_QWEN3_NEXT_FORMAT = FileFormat(
    layer_names=QWEN_LAYER_NAMES,
    prediction_names=QWEN_PREDICTION_NAMES,
    prediction_prefix="mtp.layers.0.",
    gate_in_query="after_each_head",
    max_predictions=1,
)
_DEEPSEEK_FORMAT = FileFormat(max_predictions=None, copies_embeddings=True)

FAMILIES: dict[str, Family] = {
    "kha": Family(
        config_class=KHAModelConfig,
        causal_lm="KHAForCausalLM",
        experts=KHA_EXPERTS,
        has_latent_fields=True,
        supports_partial_rope=True,
    ),
    "qwen3": Family(
        config_class=Qwen3Config,
        causal_lm="Qwen3ForCausalLM",
        fixed_model_fields={
            "layernorm_zero_centered_gamma": False,
            "qk_layernorm": True,
            "add_qkv_bias": False,
        },
        required_config_values=_NO_ATTENTION_BIAS,
    ),
    "qwen3_moe": Family(
        config_class=Qwen3MoeConfig,
        causal_lm="Qwen3MoeForCausalLM",
        fixed_model_fields={
            "layernorm_zero_centered_gamma": False,
            "qk_layernorm": True,
            "add_qkv_bias": False,
        },
        required_config_values=_NO_ATTENTION_BIAS,
        experts=QWEN3_EXPERTS,
    ),
    "glm4_moe": Family(
        config_class=Glm4MoeConfig,
        causal_lm="Glm4MoeForCausalLM",
        fixed_model_fields={"layernorm_zero_centered_gamma": False},
        experts=DEEPSEEK_EXPERTS,
        supports_partial_rope=True,
        file_format=_DEEPSEEK_FORMAT,
        extra_fields=_number_of_predictions,
    ),
    "deepseek_v3": Family(
        config_class=DeepseekV3Config,
        causal_lm="DeepseekV3ForCausalLM",
        # for MLA, QK-norm means the norms of the compressed states
        fixed_model_fields={
            "layernorm_zero_centered_gamma": False,
            "qk_layernorm": True,
            "add_qkv_bias": False,
        },
        required_config_values={
            **_NO_ATTENTION_BIAS,
            "rope_interleave": True,
            "rms_norm_eps": 1e-6,  # transformers hardcodes this for the compressed states
        },
        experts=DEEPSEEK_EXPERTS,
        has_latent_fields=True,
        file_format=_DEEPSEEK_FORMAT,
        extra_fields=_number_of_predictions,
    ),
    "qwen2": Family(
        config_class=Qwen2Config,
        causal_lm="Qwen2ForCausalLM",
        fixed_model_fields={
            "layernorm_zero_centered_gamma": False,
            "qk_layernorm": False,
            "add_qkv_bias": True,
        },
    ),
    "llama": Family(
        config_class=LlamaConfig,
        causal_lm="LlamaForCausalLM",
        fixed_model_fields={
            "layernorm_zero_centered_gamma": False,
            "qk_layernorm": False,
            "add_qkv_bias": False,
        },
        required_config_values={**_NO_ATTENTION_BIAS, "mlp_bias": False},
    ),
    "mistral": Family(
        config_class=MistralConfig,
        causal_lm="MistralForCausalLM",
        fixed_model_fields={
            "layernorm_zero_centered_gamma": False,
            "qk_layernorm": False,
            "add_qkv_bias": False,
        },
        extra_fields=_no_sliding_window,
    ),
    "qwen3_next": Family(
        config_class=Qwen3NextConfig,
        causal_lm="Qwen3NextForCausalLM",
        fixed_model_fields={
            "layernorm_zero_centered_gamma": True,
            "qk_layernorm": True,
            "add_qkv_bias": False,
        },
        required_config_values=_NO_ATTENTION_BIAS,
        experts=QWEN3_NEXT_EXPERTS,
        supports_partial_rope=True,
        output_gate=OUTPUT_GATE,
        file_format=_QWEN3_NEXT_FORMAT,
        extra_fields=_full_attention_layers,
    ),
    "qwen3_5_text": Family(
        config_class=Qwen3_5TextConfig,
        causal_lm="Qwen3_5ForCausalLM",
        fixed_model_fields={
            "layernorm_zero_centered_gamma": True,
            "qk_layernorm": True,
            "add_qkv_bias": False,
        },
        required_config_values=_NO_ATTENTION_BIAS,
        supports_partial_rope=True,
        output_gate=OUTPUT_GATE,
        file_format=_QWEN3_5_FORMAT,
        extra_fields=_full_attention_layers,
        extra_rope_parameters=_multimodal_rope,
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


PUBLISHED_GATED_ATTENTION = Family(
    config_class=PublishedConfig,
    causal_lm=None,
    fixed_model_fields={
        "layernorm_zero_centered_gamma": False,
        "add_qkv_bias": False,
    },
    required_config_values={**_NO_ATTENTION_BIAS, "qkv_bias": False},
    gate_switches={
        "headwise_attn_output_gate": Gate(output="head"),
        "elementwise_attn_output_gate": OUTPUT_GATE,
    },
    file_format=FileFormat(gate_in_query="after_each_group"),
)
"""Can only be imported."""
