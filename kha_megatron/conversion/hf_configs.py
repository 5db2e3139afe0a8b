"""Convert between Hugging Face configs (``config.json``) and :class:`ModelConfig`.

If a field is missing, we use the default of the config class. See :mod:`.hf_fields` for fields that
we do not know.
"""

import dataclasses
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from kha_megatron.conversion.hf_families import FAMILIES, PUBLISHED_GATED_ATTENTION, Family
from kha_megatron.conversion.hf_fields import (
    COMMON,
    SIZES,
    check_fields,
    field_names,
    known_fields,
    unsupported,
)
from kha_megatron.errors import CheckpointError, KHAError, in_one_line
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import KHAModelConfig, read_kha
from kha_megatron.model.config import HF_KEYS, LATENT, MODEL_FIELDS, STYLE, ModelConfig
from kha_megatron.model.fields import MAX_EXPERTS, MAX_LAYERS
from kha_megatron.model.rope import Llama3Scaling, Yarn

_MAX_LENGTHS = {
    "num_hidden_layers": MAX_LAYERS,
    "num_nextn_predict_layers": MAX_LAYERS,
    "num_experts": MAX_EXPERTS,
    "n_routed_experts": MAX_EXPERTS,
}
"""Sanity limits for fields that set the length of a list."""
_MAX_INTEGER = 2**31 - 1
"""Sanity limit for all other integers."""


def family_of(raw: Mapping[str, Any]) -> Family:
    """Look up the family for ``model_type``.

    The published gated-attention models have the ``model_type`` of Qwen3, but additional fields.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"Unsupported model_type {model_type!r} in config.json. Supported architectures: "
            f"{', '.join(FAMILIES)}."
        )
    if model_type == "qwen3" and raw.keys() & PUBLISHED_GATED_ATTENTION.gate_switches.keys():
        return PUBLISHED_GATED_ATTENTION
    return FAMILIES[model_type]


def from_hf_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse the content of a ``config.json``."""
    family = family_of(raw)
    _check_sizes(family, raw)  # first, because transformers allocates lists of these lengths
    try:
        known = known_fields(family) - {"auto_map", "model_type"}
        arguments = {}
        for name, value in raw.items():
            if name in known:
                arguments[name] = deepcopy(value)  # transformers modifies its arguments
        config = family.config_class(**arguments)
        check_fields(family, raw, config)
        model = _to_model_config(family, config)
    except KHAError:
        raise
    except Exception as error:  # bad types can raise almost anything
        raise CheckpointError(
            f"config.json is not a valid {family.config_class.__name__} ({type(error).__name__}: "
            f"{in_one_line(error)})."
        ) from error
    if model.kha.own_projections and model.add_qkv_bias:
        raise CheckpointError(f"The projections of {model.kha} do not support attention_bias=True.")
    return model


def _check_sizes(family: Family, raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError if an integer is negative or unreasonably large."""
    keys = {HF_KEYS[name] for name in field_names(family)}
    keys |= _MAX_LENGTHS.keys()
    if family.experts:
        keys.update(family.experts.keys.values())
    positive_keys = {HF_KEYS[name] for name in SIZES}
    for key in keys:
        value = raw.get(key)
        if type(value) is not int:
            continue
        minimum = 1 if key in positive_keys else 0
        maximum = _MAX_LENGTHS.get(key, _MAX_INTEGER)
        if not minimum <= value <= maximum:
            raise CheckpointError(
                f"Invalid config.json: {key}={value} must be between {minimum} and {maximum}."
            )


def _to_model_config(family: Family, config: PreTrainedConfig) -> ModelConfig:
    is_latent = family.has_latent_fields and config.kv_lora_rank is not None
    fields: dict[str, Any] = {}
    for name in field_names(family):
        if is_latent or name not in LATENT:
            fields[name] = getattr(config, HF_KEYS[name], None)
    if is_latent:
        _check_latent_heads(config)
        fields["multi_latent_attention"] = True
        fields["kv_channels"] = fields["v_head_dim"]  # head_dim is the rotary dim
    if isinstance(config, KHAModelConfig):
        fields["kha_folded"] = tuple(config.kha_folded or ())
    if fields["kv_channels"] is None:
        fields["kv_channels"] = config.hidden_size // config.num_attention_heads
    if family.experts:
        fields |= family.experts.from_config(config)
    _check_integers(fields)
    _check_query_groups(fields)
    fields["attention_dropout"] = float(fields["attention_dropout"] or 0.0)
    fields["layernorm_epsilon"] = float(fields["layernorm_epsilon"])
    has_query_groups = fields["num_query_groups"] != fields["num_attention_heads"]
    return ModelConfig(
        **STYLE,
        **fields,
        **family.fixed_model_fields,
        **_read_rope_fields(family, config, is_latent),
        group_query_attention=has_query_groups,
        padded_vocab_size=config.vocab_size,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        kha=_read_heads(family, config),
    )


def _check_latent_heads(config: PreTrainedConfig) -> None:
    groups = config.num_key_value_heads
    if groups != config.num_attention_heads:
        raise unsupported("num_key_value_heads", groups, "MLA has no grouped key/value heads")
    rotary_dim = config.qk_rope_head_dim
    if config.head_dim != rotary_dim:
        why = f"expected qk_rope_head_dim={rotary_dim}"
        raise unsupported("head_dim", config.head_dim, why)


def _check_integers(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name not in HF_KEYS or MODEL_FIELDS[name].value_type is not int:
            continue
        is_missing = value is None and name not in COMMON
        if type(value) is not int and not is_missing:
            raise unsupported(HF_KEYS[name], value, "expected an integer")


def _check_query_groups(fields: Mapping[str, Any]) -> None:
    heads = fields["num_attention_heads"]
    groups = fields["num_query_groups"]
    if heads % groups:
        why = f"num_attention_heads ({heads}) must be divisible by it"
        raise unsupported("num_key_value_heads", groups, why)


def _read_heads(family: Family, config: PreTrainedConfig) -> HeadsConfig:
    if isinstance(config, KHAModelConfig):
        return read_kha(config)
    if family.output_gate is not None:
        return HeadsConfig(family.output_gate)
    for name, gate in family.gate_switches.items():
        if getattr(config, name):
            return HeadsConfig(gate)
    return HeadsConfig()


def _read_rope_fields(
    family: Family,
    config: PreTrainedConfig,
    is_latent: bool,
) -> dict[str, Any]:
    """Return the ``ModelConfig`` fields for RoPE."""
    parameters = dict(config.rope_parameters)
    rope_type = parameters.get("rope_type", "default")
    fields: dict[str, Any] = {
        "rotary_base": float(parameters["rope_theta"]),
        "rotary_percent": _read_rotary_fraction(family, parameters),
    }
    if rope_type == "llama3" and not is_latent:
        scaling_fields = {}
        for field in dataclasses.fields(Llama3Scaling):
            scaling_fields[field.name] = parameters[field.name]
        fields["scaling"] = Llama3Scaling(**scaling_fields)
    elif rope_type == "yarn":
        fields["scaling"] = _read_yarn(parameters)
    elif rope_type != "default":
        why = f"Megatron does not implement rope_type {rope_type!r} for this attention"
        raise unsupported("rope_parameters", parameters, why)
    return fields


def _read_rotary_fraction(family: Family, parameters: Mapping[str, Any]) -> float:
    value = parameters.get("partial_rotary_factor")
    fraction = 1.0 if value is None else float(value)
    if family.supports_partial_rope:
        is_supported = 0.0 < fraction <= 1.0
        expected = "a value in (0.0, 1.0]"
    else:
        is_supported = fraction == 1.0
        expected = "1.0"
    if not is_supported:
        raise unsupported("partial_rotary_factor", fraction, f"expected {expected}")
    return fraction


def _read_yarn(parameters: Mapping[str, Any]) -> Yarn:
    if parameters.get("attention_factor") is not None or not parameters.get("truncate", True):
        why = "Megatron does not support attention_factor or truncate=False"
        raise unsupported("rope_parameters", dict(parameters), why)
    mscale = parameters.get("mscale")
    mscale_all_dim = parameters.get("mscale_all_dim")
    is_only_one_set = bool(mscale) != bool(mscale_all_dim)
    # transformers ignores one without the other, i.e. uses the defaults 1 and 0
    are_defaults = mscale == 1 and mscale_all_dim in (0, None)
    if is_only_one_set and not are_defaults:
        why = "mscale and mscale_all_dim must be set together"
        raise unsupported("rope_parameters", dict(parameters), why)
    return Yarn(
        factor=float(parameters["factor"]),
        mscale=float(mscale or 1.0),
        mscale_all_dim=float(mscale_all_dim or 0.0),
        original_max_position_embeddings=parameters["original_max_position_embeddings"],
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
    )


def has_stock_heads(model: ModelConfig) -> bool:
    """Whether the attention has no head mechanisms, except for an output gate."""
    kha = model.kha
    if kha.attention is not None:
        return False  # GTA or GLA
    if kha.has_output_gate and model.multi_latent_attention:
        return False
    return not kha.without_output_gate().mechanisms


def stock_type(model: ModelConfig) -> str:
    """Pick a stock ``model_type`` that represents the model exactly.

    Raises:
        CheckpointError: If there is none.
    """
    if not has_stock_heads(model):
        raise CheckpointError(
            f"No stock architecture supports {model.kha}. Please use --architecture kha."
        )
    closest = _closest_stock_type(model)
    others = [name for name in FAMILIES if name not in ("kha", closest)]
    refusals = []
    for model_type in (closest, *others):
        exported = model
        if FAMILIES[model_type].has_zero_centered_norms:
            exported = replace(model, layernorm_zero_centered_gamma=True)  # see center_norms
        try:
            to_hf_config(exported, model_type)
        except CheckpointError as error:
            refusals.append(str(error))
        else:
            return model_type
    closest_refusal = refusals[0]
    raise CheckpointError(f"No stock architecture supports this model. {closest_refusal}")


def _closest_stock_type(model: ModelConfig) -> str:
    if model.kha.has_output_gate:
        return "qwen3_next"
    if model.multi_latent_attention:
        return "deepseek_v3"
    if model.experts:
        has_sigmoid_router = model.moe_router_score_function == "sigmoid"
        return "glm4_moe" if has_sigmoid_router else "qwen3_moe"
    has_partial_rope = model.rotary_percent != 1.0
    has_norm_and_bias = model.qk_layernorm and model.add_qkv_bias
    if has_partial_rope or has_norm_and_bias:
        return "glm4_moe"  # without experts
    if model.qk_layernorm:
        return "qwen3"
    if model.add_qkv_bias:
        return "qwen2"
    return "llama"


def fill_missing_tensors(model: ModelConfig, model_type: str) -> ModelConfig:
    """Enable MoE tensors that are mandatory in the target architecture.

    They are initialized to zero, so the outputs do not change:

    - Sigmoid routers have a correction bias.
    - ``glm4_moe`` and ``deepseek_v3`` also have a shared expert.
    - ``qwen3_next`` has a shared expert with a gate.
    """
    if not model.experts:
        return model
    if model_type == "qwen3_next":
        return with_zero_tensors(
            model,
            router_bias=False,
            shared_width=model.expert_width,
            shared_gate=True,
        )
    if model.moe_router_score_function != "sigmoid":
        return model
    shared_width = 0 if model_type == "kha" else model.expert_width
    return with_zero_tensors(
        model,
        router_bias=True,
        shared_width=shared_width,
        shared_gate=False,
    )


def can_predict(model: ModelConfig, model_type: str) -> bool:
    """Whether an architecture supports the model's multi-token prediction (MTP) layers.

    ``glm4_moe`` and ``deepseek_v3`` always have experts in these layers. In ``qwen3_next``, vLLM
    builds them like the first layer, while Megatron builds them like the last one.
    """
    file_format = FAMILIES[model_type].file_format
    if not file_format.supports_predictions(model.predictions):
        return False
    first_prediction = model.layers  # MTP layers are counted after the others
    requires_experts = file_format.copies_embeddings or model.is_moe(0)
    return model.is_moe(first_prediction) == requires_experts


def with_zero_tensors(
    model: ModelConfig,
    *,
    router_bias: bool,
    shared_width: int,
    shared_gate: bool,
) -> ModelConfig:
    """Enable MoE tensors, which are then initialized to zero.

    If the model already has a shared expert, we keep it as is.

    Args:
        model: The model without these tensors.
        router_bias: Whether routers have a correction bias.
        shared_width: FFN size of the shared expert (0 for no shared expert).
        shared_gate: Whether the shared expert has a gate.
    """
    model = replace(model, moe_router_enable_expert_bias=router_bias)
    if model.shared_width:
        return model
    return replace(
        model,
        moe_shared_expert_intermediate_size=shared_width or None,
        moe_shared_expert_gate=shared_gate,
    )


def to_hf_config(model: ModelConfig, model_type: str) -> PreTrainedConfig:
    """Build the HF config for a given ``model_type``.

    We parse the result again and compare it to ``model``, to make sure that nothing got lost.
    """
    model = fill_missing_tensors(model, model_type)
    try:
        config = _build_config(model, model_type)
        raw = json.loads(config.to_json_string())
        reparsed = from_hf_config(raw | names_in_transformers_4(raw))
    except (
        CheckpointError,
        ArithmeticError,
        TypeError,
        ValueError,
        StrictDataclassError,  # raised by configs of transformers
    ) as error:
        raise CheckpointError(
            f"The model cannot be exported as {model_type}: {in_one_line(error)}"
        ) from error
    differences = model.differences(reparsed, ("mtp_num_layers",))
    for name, (value, supported_value) in differences.items():
        remedy = "--architecture kha"
        if name.startswith("kha") and model.kha.mechanisms and model.kha.is_foldable:
            remedy += " or `kha-megatron convert fold`"
        raise CheckpointError(
            f"The model cannot be exported as {model_type}: it has {name}={value!r}, but "
            f"{model_type} supports only {supported_value!r}. Please use {remedy}."
        )
    return config


def names_in_transformers_4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that transformers 4 reads in place of renamed ones.

    Without them, it silently uses its defaults, e.g. a RoPE base of 10000. The ``kha`` architecture
    does not need these keys, because its code requires transformers 5.
    """
    if raw["model_type"] == KHAModelConfig.model_type:
        return {}
    scaling = dict(raw["rope_parameters"])
    rope_theta = scaling.pop("rope_theta")
    partial_rotary_factor = scaling.pop("partial_rotary_factor")
    is_scaled = scaling["rope_type"] != "default"
    names = {
        "rope_theta": rope_theta,
        "partial_rotary_factor": partial_rotary_factor,
        "torch_dtype": raw.get("dtype"),
        "rope_scaling": scaling if is_scaled else None,
    }
    if "num_local_experts" in raw:
        names["num_experts"] = raw["num_local_experts"]
    return names


def _build_config(model: ModelConfig, model_type: str) -> PreTrainedConfig:
    family = FAMILIES[model_type]
    names = [name for name in field_names(family) if name not in LATENT]
    if model.multi_latent_attention:
        names.remove("kv_channels")  # for MLA, head_dim in config.json is the rotary dim
        names += LATENT
    fields = {HF_KEYS[name]: getattr(model, name) for name in names}
    fields |= family.required_config_values
    fields["tie_word_embeddings"] = model.tied_embeddings
    if model_type == "kha":
        fields |= _kha_fields(model)
    fields |= family.extra_fields(model)
    if family.experts:
        fields |= family.experts.to_config(model)
    fields["rope_parameters"] = _rope_parameters(model, family)
    config = family.config_class(**fields)
    config.architectures = [family.causal_lm or ""]
    return config


def _kha_fields(model: ModelConfig) -> dict[str, Any]:
    settings = model.kha.to_dict(start=False)
    fields = {f"kha_{name}": value for name, value in settings.items()}
    fields |= model.kha.providers_entry
    if model.kha_folded:
        fields["kha_folded"] = list(model.kha_folded)
    return fields


def _rope_parameters(model: ModelConfig, family: Family) -> dict[str, Any]:
    parameters = {
        "rope_type": "default",
        "rope_theta": model.rotary_base,
        # be explicit, libraries disagree on the default
        "partial_rotary_factor": model.rotary_percent,
    }
    if model.scaling is not None:
        parameters |= dataclasses.asdict(model.scaling)
        parameters["rope_type"] = model.scaling.rope_type
    parameters |= family.extra_rope_parameters(model)
    return parameters
