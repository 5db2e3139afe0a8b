"""A ``kha`` configuration of Hugging Face as the fields of a Bridge provider, and back.

Needs no Megatron-Bridge: a provider is any dataclass with Megatron's ``TransformerConfig`` fields
and those that ``GPTModelProvider`` adds.
"""

from dataclasses import fields
from typing import Any

from torch.nn.functional import silu

from kha_megatron.config import KHAConfig
from kha_megatron.conversion.hf_configs import to_hf_config
from kha_megatron.conversion.megatron_arguments import from_arguments
from kha_megatron.errors import CheckpointError
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.hf import KHAModelConfig

_TRAINING = {"seq_length", "init_method_std", "attention_dropout", "kha_init"}
"""Fields that do not change what a trained model computes."""


def kha_of(config: Any) -> KHAConfig:
    """What a provider or a ``kha`` configuration of Hugging Face knocks.

    Raises:
        ConfigError: a ``kha_*`` field holds an unknown word.
    """
    return KHAConfig.recorded(vars(config)) or KHAConfig()


def provider_fields(config: KHAModelConfig) -> dict[str, Any]:
    """The provider fields that say what ``config`` says.

    Raises:
        CheckpointError: Megatron cannot compute what a field of ``config`` asks for.
    """
    _refuse(config)
    kha = kha_of(config)
    rope = config.rope_parameters
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "vocab_size": config.vocab_size,
        "seq_length": config.max_position_embeddings,
        "layernorm_epsilon": config.rms_norm_eps,
        "init_method_std": config.initializer_range,
        "qk_layernorm": config.use_qk_norm,
        "add_qkv_bias": config.attention_bias,
        "attention_dropout": config.attention_dropout,
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        **{f"kha_{projection}": getattr(kha, projection) for projection in PROJECTIONS},
        "kha_init": kha.init,
        **_expert_fields(config),
    }


def hf_config_of(provider: Any) -> KHAModelConfig:
    """The Hugging Face configuration of the models that ``provider`` builds.

    Raises:
        CheckpointError: a field changes the model in a way that the architecture cannot express,
            or ``provider`` is no provider.
    """
    try:
        arguments = _arguments(provider)
        rows = provider.vocab_size
    except AttributeError as error:
        raise CheckpointError(
            f"{type(provider).__name__} has no {error.name}: the model was not built by a "
            "KHAModelProvider (kha_megatron.bridge.provider)"
        ) from error
    return to_hf_config(from_arguments(arguments, kha_of(provider), rows), "kha")


def check_agreement(provider: Any, config: KHAModelConfig) -> None:
    """Refuse a Megatron model and a Hugging Face folder that describe different models.

    Tensors of equal shapes would load, and compute something else.

    Raises:
        CheckpointError: with the fields that differ.
    """
    ours, theirs = provider_fields(hf_config_of(provider)), provider_fields(config)
    differing = [
        f"{name} {ours.get(name)!r} against {theirs.get(name)!r}"
        for name in sorted((ours.keys() | theirs.keys()) - _TRAINING)
        if ours.get(name) != theirs.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"the Megatron model and the Hugging Face configuration differ: {', '.join(differing)}"
        )


def _refuse(config: KHAModelConfig) -> None:
    normalised = config.norm_topk_prob
    only: dict[str, tuple[Any, Any]] = {
        "hidden_act": (config.hidden_act, "silu"),
        "rope_parameters.rope_type": (config.rope_parameters.get("rope_type"), "default"),
        "kha_attention": (config.kha_attention, None),
        "kv_lora_rank": (config.kv_lora_rank, None),
    }
    if "sparse" in config.mlp_layer_types:
        several = config.num_experts_per_tok > 1
        if config.scoring_func == "sigmoid" or not several:
            # Megatron divides by the sum where there is something to divide
            only["norm_topk_prob"] = (normalised, several)
    for name, (value, limit) in only.items():
        if value != limit:
            raise CheckpointError(
                f"{name}={value!r} of the kha configuration cannot be computed by Megatron's "
                f"layers here (only {limit!r})"
            )


def _expert_fields(config: KHAModelConfig) -> dict[str, Any]:
    if "sparse" not in config.mlp_layer_types:
        return {"num_moe_experts": None}
    sigmoid = config.scoring_func == "sigmoid"
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size or None,
        "moe_shared_expert_gate": config.shared_expert_gate,
        "moe_router_score_function": config.scoring_func,
        "moe_router_pre_softmax": not sigmoid and not config.norm_topk_prob,
        "moe_router_topk_scaling_factor": _factor(config),
        "moe_router_num_groups": config.n_group if config.n_group > 1 else None,
        "moe_router_group_topk": config.topk_group if config.n_group > 1 else None,
    }


def _factor(config: KHAModelConfig) -> float | None:
    # Megatron multiplies only when there is a factor
    return None if config.routed_scaling_factor == 1.0 else float(config.routed_scaling_factor)


def _arguments(provider: Any) -> dict[str, Any]:
    """A provider's fields under the names of Megatron's command line, as checkpoints record them.

    Raises:
        AttributeError: it lacks a field that ``GPTModelProvider`` has.
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
