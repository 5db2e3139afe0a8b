"""A model as the configuration of one of transformers' architectures, or why it has none there."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from kha_megatron.conversion.architecture import Architecture, Llama3Scaling, Rope, Yarn
from kha_megatron.conversion.hf_configs import FAMILIES, KHA_FIELDS, LATENT, Family
from kha_megatron.errors import CheckpointError


def stock_type(model: Architecture) -> str:
    """The ``model_type`` that transformers and servers have for a model without KHA.

    Raises:
        CheckpointError: they have none for GTA and GLA.
    """
    if model.kha.attention is not None:
        raise CheckpointError(
            f"kha_attention={model.kha.attention!r} has no stock architecture: export it as kha"
        )
    if model.latent is not None:
        return "deepseek_v3"
    if model.experts is not None:
        return "glm4_moe" if model.experts.score == "sigmoid" else "qwen3_moe"
    return "qwen3" if model.qk_norm else "llama"


def expressed(model: Architecture, model_type: str) -> Architecture:
    """The model as an architecture of transformers has it: with what it cannot leave out.

    A router with sigmoid scores has a correction bias there, and ``glm4_moe`` and ``deepseek_v3``
    have a shared expert: both are zeros for a model without, which change no bit of its output.
    """
    experts = model.experts
    if experts is None or experts.score != "sigmoid":
        return model
    experts = replace(experts, bias=True)
    if model_type != "kha" and not experts.shared_size:
        experts = replace(experts, shared_size=experts.size)
    return replace(model, experts=experts)


def to_hf_config(model: Architecture, model_type: str) -> PreTrainedConfig:
    """The configuration of a model in one of transformers' architectures.

    Raises:
        CheckpointError: the architecture cannot compute what the model does; it says which part.
    """
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"unknown architecture {model_type!r}: choose one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    _check_expressible(model, model_type, family)
    fields = {theirs: getattr(model, ours) for ours, theirs in family.fields.items()}
    fields |= family.only
    if model.latent is not None:
        fields |= {theirs: getattr(model.latent, ours) for ours, theirs in LATENT.items()}
    if model_type == "kha":
        fields |= {f"kha_{name}": getattr(model.kha, name) for name in KHA_FIELDS}
    if model_type == "mistral":
        fields["sliding_window"] = None
    config = family.config(
        **fields,
        **family.write_experts(expressed(model, model_type)),
        rope_parameters=_write_rope(model.rope, family),
    )
    config.architectures = [family.causal_lm]
    return config


def _check_expressible(model: Architecture, model_type: str, family: Family) -> None:
    def refuse(what: str, remedy: str = "choose another --architecture") -> None:
        raise CheckpointError(f"{model_type} cannot express {what}: {remedy}")

    if model_type != "kha" and model.kha.variants:
        kinds = ", ".join(f"{p}={v}" for p, v in model.kha.variants.items())
        refuse(f"knocking heads ({kinds})", "fold linear ones away, or choose kha")
    if model_type != "kha" and model.kha.attention is not None:
        refuse(f"kha_attention={model.kha.attention!r}", "no stock architecture can: choose kha")
    if (model.latent is not None) not in family.latent:
        refuse("multi-latent attention" if model.latent else "grouped-query attention")
    for name, value in family.always.items():
        if getattr(model, name) != value:
            refuse(f"{name}={getattr(model, name)}")
    for name, value in family.only.items():
        ours = next((o for o, theirs in family.fields.items() if theirs == name), None)
        if ours and getattr(model, ours) != value:
            refuse(f"{name}={getattr(model, ours)}", f"it has only {value}; choose another")
    if model.rope.fraction != 1.0 and not family.partial_rope:
        refuse(f"partial RoPE ({model.rope.fraction})")


def _write_rope(rope: Rope, family: Family) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.base}
    if family.partial_rope:
        values["partial_rotary_factor"] = rope.fraction
    scaling = rope.scaling
    if isinstance(scaling, Llama3Scaling):
        values |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    elif isinstance(scaling, Yarn):
        values |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
            "original_max_position_embeddings": scaling.original_max_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
    return values
