"""Convert a ``kha`` configuration of Hugging Face to the fields of a Bridge provider, and back.

This does not import Megatron-Bridge. A provider is any dataclass with the fields of Megatron's
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
                f"{name}={getattr(config, name)!r} of the kha configuration cannot be computed by "
                "Megatron-Bridge's layers (only plain RoPE and grouped-query attention, knocked): "
                "use kha-megatron convert"
            )
    arguments = to_arguments(model)
    heads = model.kha.to_dict().items()
    arguments.pop("moe_router_load_balancing_type", None)  # a choice of the training
    named = (row for row in ROWS.values() if row.argument in arguments)
    return {row.attribute: arguments[row.argument] for row in named if row.attribute} | {
        **{name: arguments[name] for name in _NO_ATTRIBUTES if name in arguments},
        "share_embeddings_and_output_weights": model.tied_embeddings,
        **{f"kha_{name}": value for name, value in heads if name not in _OF_NO_PROVIDER},
    }


def hf_config_of(provider: Any) -> KHAModelConfig:
    """Return the Hugging Face configuration of the models that ``provider`` builds.

    Raises:
        CheckpointError: The architecture cannot express a field, or a field is missing.
    """
    try:
        if (scale := provider.softmax_scale) is not None:  # no argument of Megatron's command line
            raise CheckpointError(
                f"the provider has softmax_scale={scale!r}, which the kha configuration cannot "
                "express (only None, one over the root of kv_channels)"
            )
        arguments = _arguments(provider)
        rows = provider.vocab_size
    except AttributeError as error:
        raise CheckpointError(
            f"{type(provider).__name__} has no {error.name}: the model was not built by a "
            "KHAModelProvider (kha_megatron.bridge.provider)"
        ) from error
    return to_hf_config(from_arguments(arguments, read_kha(provider), rows), "kha")


def check_agreement(provider: Any, config: KHAModelConfig) -> None:
    """Check that a Megatron model and a Hugging Face directory describe the same model.

    Raises:
        CheckpointError: Some fields differ.
    """
    ours, theirs = provider_fields(hf_config_of(provider)), provider_fields(config)
    if differing := [
        f"{name} {ours.get(name)!r} against {theirs.get(name)!r}"
        for name in sorted((ours.keys() | theirs.keys()) - _TRAINING)
        if ours.get(name) != theirs.get(name)
    ]:
        raise CheckpointError(
            f"the Megatron model and the Hugging Face configuration differ: {', '.join(differing)}"
        )


def _arguments(provider: Any) -> dict[str, Any]:
    """Return the fields of a provider by Megatron's argument names, as checkpoints record them.

    Raises:
        AttributeError: A field of ``GPTModelProvider`` is missing.
    """
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
