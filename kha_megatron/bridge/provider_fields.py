"""Convert a ``kha`` configuration to the fields of a Bridge provider and back.

Megatron-Bridge is not imported. A provider is any dataclass with the fields of Megatron's
``TransformerConfig`` and ``GPTModelProvider``.
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
"""Fields that do not change the outputs of a trained model."""
_OF_NO_PROVIDER = ("attention", "latent_heads")
_NO_ATTRIBUTES = ("vocab_size", "seq_length", "moe_router_pre_softmax")
"""Fields of a provider without an attribute in the table of fields."""


def provider_fields(config: KHAModelConfig) -> dict[str, Any]:
    """Return the provider fields that describe the same model as ``config``.

    Raises:
        CheckpointError: Megatron-Bridge has no layer for a field of ``config``.
    """
    model = from_hf_config(config.to_dict())
    for name, value in (
        ("rope_parameters", model.scaling),
        ("kha_attention", model.kha.attention),
        ("kv_lora_rank", model.multi_latent_attention or None),
    ):
        if value is not None:
            raise CheckpointError(
                f"Megatron-Bridge does not support {name}={getattr(config, name)!r}, only MHA, MQA "
                "and GQA with unscaled RoPE. Use kha-megatron convert."
            )
    arguments = to_arguments(model)
    heads = model.kha.to_dict().items()
    arguments.pop("moe_router_load_balancing_type", None)  # only for training
    named = (row for row in ROWS.values() if row.argument in arguments)
    return {row.attribute: arguments[row.argument] for row in named if row.attribute} | {
        **{name: arguments[name] for name in _NO_ATTRIBUTES if name in arguments},
        "share_embeddings_and_output_weights": model.tied_embeddings,
        **{f"kha_{name}": value for name, value in heads if name not in _OF_NO_PROVIDER},
    }


def hf_config_of(provider: Any) -> KHAModelConfig:
    """Return the Hugging Face configuration of the models that ``provider`` builds.

    Raises:
        CheckpointError: The architecture does not support the value of a field.
    """
    if (scale := provider.softmax_scale) is not None:  # Not a command-line argument of Megatron.
        raise CheckpointError(
            f"Expected softmax_scale=None, got {scale!r}, which the kha configuration does not "
            "support."
        )
    model = from_arguments(_arguments(provider), read_kha(provider), provider.vocab_size)
    return to_hf_config(model, "kha")


def differing_fields(provider: Any, config: KHAModelConfig) -> list[str]:
    """Describe the fields in which a Megatron model and a Hugging Face configuration differ."""
    ours, theirs = provider_fields(hf_config_of(provider)), provider_fields(config)
    return [
        f"{name} is {ours.get(name)!r} and {theirs.get(name)!r}"
        for name in sorted((ours.keys() | theirs.keys()) - _TRAINING)
        if ours.get(name) != theirs.get(name)
    ]


def _arguments(provider: Any) -> dict[str, Any]:
    """Return the fields of a provider by the names of Megatron's arguments in checkpoints."""
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
