"""Convert between Hugging Face configs (``config.json``) and :class:`Architecture`.

If a field is missing, we use the default of the config class. See :mod:`.hf_fields` for fields that
we don't know.
"""

import dataclasses
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import (
    HF_KEYS,
    LATENT,
    ROWS,
    STYLE,
    Architecture,
    Llama3Scaling,
    Yarn,
)
from kha_megatron.conversion.hf_families import FAMILIES, PUBLISHED, Family
from kha_megatron.conversion.hf_fields import (
    COMMON,
    check_fields,
    field_names,
    known_fields,
    unsupported,
)
from kha_megatron.errors import CheckpointError, KHAError, in_one_line
from kha_megatron.hf import KHAModelConfig, read_kha
from kha_megatron.model.fields import MAX_EXPERTS, MAX_LAYERS

_MAX = {
    "num_hidden_layers": MAX_LAYERS,
    "num_nextn_predict_layers": MAX_LAYERS,
    "num_experts": MAX_EXPERTS,
    "n_routed_experts": MAX_EXPERTS,
}
"""Sanity limits for fields that set the length of a list."""


def family_of(raw: Mapping[str, Any]) -> Family:
    """Look up the family for ``model_type``."""
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"Unsupported model_type {name!r} in config.json. Supported architectures: "
            f"{', '.join(FAMILIES)}."
        )
    is_published = name == "qwen3" and raw.keys() & PUBLISHED.switches.keys()
    return PUBLISHED if is_published else FAMILIES[name]


def from_hf_config(raw: Mapping[str, Any]) -> Architecture:
    """Parse the content of a ``config.json``."""
    family = family_of(raw)
    # check sizes first, transformers allocates lists of these lengths
    experts = family.experts.keys.values() if family.experts else ()
    for name in {*(HF_KEYS[field] for field in field_names(family)), *experts, *_MAX}:
        value, most = raw.get(name), _MAX.get(name, 2**31 - 1)
        least = int(name in {HF_KEYS[field] for field in COMMON[:8]})
        if type(value) is int and not least <= value <= most:
            raise CheckpointError(
                f"Invalid config.json: {name}={value} must be between {least} and {most}."
            )
    try:
        known = known_fields(family) - {"auto_map", "model_type"}
        # transformers modifies its arguments, so pass a copy
        config = family.config(**{n: deepcopy(value) for n, value in raw.items() if n in known})
        check_fields(family, raw, config)
        return _to_architecture(family, config)
    except KHAError:
        raise
    except Exception as error:  # bad types can raise almost anything
        raise CheckpointError(
            f"config.json is not a valid {family.config.__name__} ({type(error).__name__}: "
            f"{in_one_line(error)})."
        ) from error


def _to_architecture(family: Family, config: PreTrainedConfig) -> Architecture:
    latent = family.latent is not False and config.kv_lora_rank is not None
    names = [name for name in field_names(family) if latent or name not in LATENT]
    fields: dict[str, Any] = {n: getattr(config, HF_KEYS[n], None) for n in names}
    if latent:
        if (groups := config.num_key_value_heads) != config.num_attention_heads:
            raise unsupported("num_key_value_heads", groups, "MLA has no grouped key/value heads")
        rotary = config.qk_rope_head_dim
        if config.head_dim != rotary:
            raise unsupported("head_dim", config.head_dim, f"expected qk_rope_head_dim={rotary}")
        fields |= {"multi_latent_attention": True, "kv_channels": fields["v_head_dim"]}
    if fields["kv_channels"] is None:
        fields["kv_channels"] = config.hidden_size // config.num_attention_heads
    fields |= family.experts.from_config(config) if family.experts else {}
    for name in (name for name in fields if name in HF_KEYS and ROWS[name].kind is int):
        optional = fields[name] is None and name not in COMMON
        if type(fields[name]) is not int and not optional:
            raise unsupported(HF_KEYS[name], fields[name], "expected an integer")
    fields["attention_dropout"] = float(fields["attention_dropout"] or 0.0)
    fields["layernorm_epsilon"] = float(fields["layernorm_epsilon"])
    heads, groups = fields["num_attention_heads"], fields["num_query_groups"]
    if heads % groups:
        why = f"num_attention_heads ({heads}) must be divisible by it"
        raise unsupported("num_key_value_heads", groups, why)
    chosen = (gate for name, gate in family.switches.items() if getattr(config, name))
    gate = family.gate or next(chosen, None)
    kha = (
        read_kha(config)
        if isinstance(config, KHAModelConfig)
        else KHAConfig(other_mechanisms=(gate,) if gate else ())
    )
    return Architecture(
        **STYLE,
        **fields,
        **family.always,
        **_read_rope(family, config, latent),
        group_query_attention=heads != groups,
        padded_vocab_size=config.vocab_size,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        kha=kha,
    )


def _read_rope(family: Family, config: PreTrainedConfig, latent: bool) -> dict[str, Any]:
    given = dict(config.rope_parameters)
    kind, share = given.get("rope_type", "default"), given.get("partial_rotary_factor")
    fraction = 1.0 if share is None else float(share)
    if not 0.0 < fraction <= 1.0 or (fraction != 1.0 and not family.partial_rope):
        allowed = "a value in (0.0, 1.0]" if family.partial_rope else "1.0"
        raise unsupported("partial_rotary_factor", fraction, f"expected {allowed}")
    rope = {"rotary_base": float(given["rope_theta"]), "rotary_percent": fraction}
    if kind == "default":
        return rope
    if kind == "llama3" and not latent:
        names = [field.name for field in dataclasses.fields(Llama3Scaling)]
        return rope | {"scaling": Llama3Scaling(**{name: given[name] for name in names})}
    if kind == "yarn":
        return rope | {"scaling": _read_yarn(given)}
    why = f"Megatron does not implement rope_type {kind!r} for this attention"
    raise unsupported("rope_parameters", given, why)


def _read_yarn(given: Mapping[str, Any]) -> Yarn:
    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if given.get("attention_factor") is not None or not given.get("truncate", True):
        why = "Megatron does not support attention_factor or truncate=False"
        raise unsupported("rope_parameters", dict(given), why)
    if bool(mscale) != bool(all_dim) and (mscale, all_dim) not in ((1, 0), (1, None)):
        why = "mscale and mscale_all_dim must be set together"
        raise unsupported("rope_parameters", dict(given), why)
    return Yarn(
        factor=float(given["factor"]),
        mscale=float(mscale or 1.0),
        mscale_all_dim=float(all_dim or 0.0),
        original_max_position_embeddings=given["original_max_position_embeddings"],
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
    )


def has_stock_heads(model: Architecture) -> bool:
    """Whether the attention has no head mechanisms, except for an output gate."""
    kha = model.kha
    gate_fits = not (kha.has_output_gate and model.multi_latent_attention)
    return kha.attention is None and gate_fits and not kha.without_output_gate().mechanisms


def stock_type(model: Architecture) -> str:
    """Pick a stock ``model_type`` that represents the model exactly.

    Raises:
        CheckpointError: If there is none.
    """
    if not has_stock_heads(model):
        raise CheckpointError(
            f"No stock architecture supports {model.kha}. Please use --architecture kha."
        )
    closest = _closest_stock_type(model)
    refusals = []
    for model_type in (closest, *(name for name in FAMILIES if name not in ("kha", closest))):
        exported = model
        if FAMILIES[model_type].always.get("layernorm_zero_centered_gamma"):
            exported = replace(model, layernorm_zero_centered_gamma=True)  # see center_norms
        try:
            to_hf_config(exported, model_type)
        except CheckpointError as error:
            refusals.append(str(error))
        else:
            return model_type
    raise CheckpointError(f"No stock architecture supports this model. {refusals[0]}")


def _closest_stock_type(model: Architecture) -> str:
    if model.kha.has_output_gate:
        return "qwen3_next"
    if model.multi_latent_attention:
        return "deepseek_v3"
    if model.num_experts:
        return "glm4_moe" if model.moe_router_score_function == "sigmoid" else "qwen3_moe"
    if model.rotary_percent != 1.0 or (model.qk_layernorm and model.add_qkv_bias):
        return "glm4_moe"  # without experts
    if model.qk_layernorm:
        return "qwen3"
    return "qwen2" if model.add_qkv_bias else "llama"


def fill_missing_tensors(model: Architecture, model_type: str) -> Architecture:
    """Enable MoE tensors that are mandatory in the target architecture.

    They are initialized to zero, so the outputs don't change:

    - Sigmoid routers have a correction bias.
    - ``glm4_moe`` and ``deepseek_v3`` also have a shared expert.
    - ``qwen3_next`` has a shared expert with a gate.
    """
    if not model.num_experts:
        return model
    size = model.moe_ffn_hidden_size
    if model_type == "qwen3_next":
        return with_zero_tensors(model, shared=size, bias=False, gate=True)
    if model.moe_router_score_function != "sigmoid":
        return model
    return with_zero_tensors(model, shared=0 if model_type == "kha" else size)


def can_predict(model: Architecture, model_type: str) -> bool:
    """Whether an architecture supports the model's multi-token prediction (MTP) layers.

    ``glm4_moe`` and ``deepseek_v3`` always have experts in these layers. In ``qwen3_next``, vLLM
    builds them like the first layer, while Megatron builds them like the last one.
    """
    files = FAMILIES[model_type].files
    kind = files.shared or model.is_moe(0)
    return model.is_moe(model.num_layers) == kind and model.predictions <= files.predictions


def with_zero_tensors(
    model: Architecture, *, shared: int, bias: bool = True, gate: bool = False
) -> Architecture:
    """Add a zero-initialized router bias and a shared expert with FFN size ``shared``.

    If the model already has a shared expert, we keep it as is.
    """
    width: Any = model.shared_width or shared or None
    return replace(
        model,
        moe_router_enable_expert_bias=bias,
        moe_shared_expert_intermediate_size=width,
        moe_shared_expert_gate=model.moe_shared_expert_gate if model.shared_width else gate,
    )


def to_hf_config(model: Architecture, model_type: str) -> PreTrainedConfig:
    """Build the HF config for a given ``model_type``.

    We parse the result again and compare it to ``model``, to make sure that nothing got lost.
    """
    model = fill_missing_tensors(model, model_type)
    try:
        config = _build_config(model, FAMILIES[model_type], model_type)
        raw = json.loads(config.to_json_string())
        back = from_hf_config(raw | names_in_transformers_4(raw))
    except (CheckpointError, ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The model cannot be exported as {model_type}: {in_one_line(error)}"
        ) from error
    for name, (ours, theirs) in model.differences(back, ("mtp_num_layers",)).items():
        remedy = "--architecture kha"
        if name.startswith("kha") and model.kha.mechanisms and model.kha.is_foldable:
            remedy += " or `kha-megatron convert fold`"
        raise CheckpointError(
            f"The model cannot be exported as {model_type}: it has {name}={ours!r}, but "
            f"{model_type} supports only {theirs!r}. Please use {remedy}."
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
    names = {
        "rope_theta": scaling.pop("rope_theta"),
        "partial_rotary_factor": scaling.pop("partial_rotary_factor"),
        "torch_dtype": raw.get("dtype"),
    }
    names["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    if "num_local_experts" in raw:
        names["num_experts"] = raw["num_local_experts"]
    return names


def _build_config(model: Architecture, family: Family, model_type: str) -> PreTrainedConfig:
    names = [name for name in field_names(family) if name not in LATENT]
    if model.multi_latent_attention:
        names.remove("kv_channels")  # for MLA, head_dim in config.json is the rotary dim
        names += LATENT
    fields = {HF_KEYS[name]: getattr(model, name) for name in names} | dict(family.only)
    fields["tie_word_embeddings"] = model.tied_embeddings
    if model_type == "kha":
        fields |= {f"kha_{name}": v for name, v in model.kha.to_dict(start=False).items()}
        fields |= model.kha.providers_entry
    fields |= family.extra(model)
    fields |= family.experts.to_config(model) if family.experts else {}
    # be explicit about partial_rotary_factor, libraries disagree on the default
    rope = {
        "rope_type": "default",
        "rope_theta": model.rotary_base,
        "partial_rotary_factor": model.rotary_percent,
    }
    if (scaling := model.scaling) is not None:
        rope |= {"rope_type": scaling.rope_type, **dataclasses.asdict(scaling)}
    config = family.config(**fields, rope_parameters=rope | family.rope(model))
    config.architectures = [family.causal_lm or ""]
    return config
