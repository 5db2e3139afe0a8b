"""Convert ``kha`` configurations to the fields of a Megatron-Bridge provider and back.

This module does not import Megatron-Bridge. A provider can therefore be any dataclass that has the
fields of ``TransformerConfig`` and ``GPTModelProvider``.
"""

from dataclasses import fields
from typing import Any

from torch.nn.functional import silu

from kha_megatron.conversion.architecture import ROWS
from kha_megatron.conversion.hf_configs import from_hf_config, to_hf_config
from kha_megatron.conversion.megatron_arguments import from_arguments, to_arguments
from kha_megatron.errors import CheckpointError
from kha_megatron.hf import KHAModelConfig, read_kha

_TRAINING = {"seq_length", "init_method_std", "attention_dropout", "kha_init", "kha_init_seed"}
"""Fields that do not affect the output of a trained model."""
_UNSUPPORTED = ("attention", "latent_heads")
_SAME_NAME = ("vocab_size", "seq_length", "moe_router_pre_softmax")
"""Arguments that are also provider fields, but have no attribute in ``ROWS``."""


def to_provider_fields(config: KHAModelConfig) -> dict[str, Any]:
    """Convert a Hugging Face configuration to provider fields, or raise CheckpointError."""
    model = from_hf_config(config.to_dict())
    for name, value in (
        ("rope_parameters", model.scaling),
        ("kha_attention", model.kha.attention),
        ("kv_lora_rank", model.multi_latent_attention or None),
    ):
        if value is not None:
            raise CheckpointError(
                f"{name}={getattr(config, name)!r} is not supported in Megatron-Bridge, only MHA, "
                "MQA and GQA with unscaled RoPE. Please use `kha-megatron convert` instead."
            )
    arguments = to_arguments(model)
    heads = model.kha.to_dict().items()
    arguments.pop("moe_router_load_balancing_type", None)  # only for training
    named = (row for row in ROWS.values() if row.argument in arguments)
    return {row.attribute: arguments[row.argument] for row in named if row.attribute} | {
        **{name: arguments[name] for name in _SAME_NAME if name in arguments},
        "share_embeddings_and_output_weights": model.tied_embeddings,
        **{f"kha_{name}": value for name, value in heads if name not in _UNSUPPORTED},
    }


def provider_to_hf_config(provider: Any) -> KHAModelConfig:
    """Convert a provider to a Hugging Face configuration, or raise CheckpointError."""
    if (scale := provider.softmax_scale) is not None:  # has no command-line argument in Megatron
        raise CheckpointError(f"softmax_scale={scale!r} is not supported for kha models.")
    model = from_arguments(_arguments(provider), read_kha(provider), provider.vocab_size)
    return to_hf_config(model, "kha")


def compare_fields(provider: Any, config: KHAModelConfig) -> list[str]:
    """Describe the fields in which a provider and a Hugging Face configuration differ."""
    ours, theirs = to_provider_fields(provider_to_hf_config(provider)), to_provider_fields(config)
    return [
        f"{name} is {ours.get(name)!r} and {theirs.get(name)!r}"
        for name in sorted((ours.keys() | theirs.keys()) - _TRAINING)
        if ours.get(name) != theirs.get(name)
    ]


def _arguments(provider: Any) -> dict[str, Any]:
    """Convert the fields of a provider to Megatron's checkpoint arguments."""
    same = {field.name: getattr(provider, field.name) for field in fields(provider)}
    return same | {
        "swiglu": provider.gated_linear_unit and provider.activation_func is silu,
        "num_experts": provider.num_moe_experts,
        "group_query_attention": provider.num_query_groups is not None,
        "kv_channels": provider.kv_channels or provider.hidden_size // provider.num_attention_heads,
        "untie_embeddings_and_output_weights": not provider.share_embeddings_and_output_weights,
        "max_position_embeddings": provider.seq_length,
        "rotary_seq_len_interpolation_factor": provider.seq_len_interpolation_factor,
        "use_rope_scaling": provider.rope_scaling,
    }
