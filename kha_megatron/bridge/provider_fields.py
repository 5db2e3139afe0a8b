"""Conversion between Hugging Face configs and Megatron-Bridge providers.

This module does not import Megatron-Bridge. Any dataclass with the fields of ``GPTModelProvider``
(and ``TransformerConfig``) can be used as a provider.
"""

from dataclasses import fields, replace
from typing import Any

from torch.nn.functional import silu

from kha_megatron.conversion.hf_configs import from_hf_config, to_hf_config
from kha_megatron.errors import CheckpointError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.registry import mechanism_types, provider_of
from kha_megatron.hf import KHAModelConfig
from kha_megatron.model.config import MODEL_FIELDS, ModelConfig, is_moe_layer
from kha_megatron.model.megatron import model_from_checkpoint, to_arguments
from kha_megatron.model.pattern import LayerPattern

_TRAINING_FIELDS = {
    "seq_length",
    "init_method_std",
    "attention_dropout",
    "kha_init",
    "kha_init_seed",
}
"""Only relevant for training, so these fields may differ between two formats."""
_UNSUPPORTED_HEADS = ("attention", "latent_heads")
"""Entries of ``HeadsConfig`` without a field in the provider. See :func:`_check_supported`."""
_SAME_NAME = ("vocab_size", "seq_length", "moe_router_pre_softmax")
"""Arguments without an attribute in ``MODEL_FIELDS`` that have the same name in the provider."""


def to_provider_fields(config: KHAModelConfig) -> dict[str, Any]:
    """Convert a Hugging Face config to keyword arguments for the provider."""
    model = from_hf_config(config.to_dict())
    _check_supported(config, model)
    arguments = to_arguments(replace(model, gpt_model=True))
    head_settings: dict[str, Any] = {}
    other_mechanisms = {}
    for name, value in model.kha.to_dict().items():
        is_from_other_package = name in mechanism_types() and provider_of(name)
        if is_from_other_package:
            other_mechanisms[name] = value
        elif name not in _UNSUPPORTED_HEADS:
            head_settings[f"kha_{name}"] = value
    if other_mechanisms:
        head_settings["kha_others"] = other_mechanisms
    arguments.pop("moe_router_load_balancing_type", None)  # only for training
    settings = {}
    for field in MODEL_FIELDS.values():
        if field.attribute and field.argument in arguments:
            settings[field.attribute] = arguments[field.argument]
    for name in _SAME_NAME:
        if name in arguments:
            settings[name] = arguments[name]
    settings["share_embeddings_and_output_weights"] = model.tied_embeddings
    return settings | head_settings


def _check_supported(config: KHAModelConfig, model: ModelConfig) -> None:
    if model.scaling is not None:
        name = "rope_parameters"
    elif model.kha.attention is not None:
        name = "kha_attention"
    elif model.multi_latent_attention:
        name = "kv_lora_rank"
    else:
        return
    raise CheckpointError(
        f"{name}={getattr(config, name)!r} is not supported in Megatron-Bridge, only MHA, "
        "MQA and GQA with unscaled RoPE. Please use `kha-megatron convert` instead."
    )


def read_heads(provider: Any) -> HeadsConfig:
    """Collect the ``kha_*`` fields of a provider."""
    entries = dict(vars(provider))
    other_mechanisms = entries.get("kha_others") or {}
    for name, settings in other_mechanisms.items():
        entries[f"kha_{name}"] = settings
    return HeadsConfig.from_entries_or_empty(entries)


def hybrid_pattern(provider: Any) -> str:
    """Return the ``hybrid_layer_pattern`` for the layers of a ``GPTModelProvider``."""
    moe_layers = []
    for layer in range(provider.num_layers):
        has_experts = bool(provider.num_moe_experts)
        is_moe = has_experts and is_moe_layer(provider.moe_layer_freq, layer)
        moe_layers.append(int(is_moe))
    pattern = LayerPattern(
        moe=tuple(moe_layers),
        stages=(provider.num_layers,),
        latent=provider.multi_latent_attention,
        predictions=provider.mtp_num_layers or 0,
    )
    return str(pattern)


def provider_to_hf_config(provider: Any) -> KHAModelConfig:
    """Convert a provider to a Hugging Face config."""
    supported_values = {
        "softmax_scale": (None,),
        "position_embedding_type": ("rope",),
        "mtp_num_layers": (None, 0),
    }
    for name, supported in supported_values.items():
        value = getattr(provider, name)
        if value not in supported:
            raise CheckpointError(f"{name}={value!r} is not supported for kha models.")
    heads = read_heads(provider)
    model = model_from_checkpoint(_megatron_arguments(provider), heads, provider.vocab_size)
    return to_hf_config(model, "kha")


def compare_fields(provider: Any, config: KHAModelConfig) -> list[str]:
    """Return a human-readable list of fields whose values differ."""
    # convert the provider to a Hugging Face config and back, so that both have the same fields
    provider_fields = to_provider_fields(provider_to_hf_config(provider))
    config_fields = to_provider_fields(config)
    names = provider_fields.keys() | config_fields.keys()
    differences = []
    for name in sorted(names - _TRAINING_FIELDS):
        provider_value = provider_fields.get(name)
        config_value = config_fields.get(name)
        if provider_value != config_value:
            differences.append(f"{name} is {provider_value!r} and {config_value!r}")
    return differences


def _megatron_arguments(provider: Any) -> dict[str, Any]:
    """Translate provider fields to the names of Megatron's command-line arguments."""
    arguments = {field.name: getattr(provider, field.name) for field in fields(provider)}
    default_head_dim = provider.hidden_size // provider.num_attention_heads
    return arguments | {
        "swiglu": provider.gated_linear_unit and provider.activation_func is silu,
        "num_experts": provider.num_moe_experts,
        "group_query_attention": provider.num_query_groups is not None,
        "kv_channels": provider.kv_channels or default_head_dim,
        "untie_embeddings_and_output_weights": not provider.share_embeddings_and_output_weights,
        "max_position_embeddings": provider.seq_length,
        "rotary_seq_len_interpolation_factor": provider.seq_len_interpolation_factor,
        "use_rope_scaling": getattr(provider, "rope_scaling", False),
    }
