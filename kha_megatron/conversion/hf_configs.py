"""The ``config.json`` of Hugging Face architectures as ours: one small table for each.

``config.json`` is read as data. Only transformers' own configuration classes, and ours, fill in
what it leaves out; nothing that a folder brings along is imported. A field that we do not know is
refused, unless it is off. The way back goes by the same tables, and says why where there is none.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import transformers
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from kha_megatron.config import KHAConfig
from kha_megatron.conversion import hf_experts, hf_gates
from kha_megatron.conversion.architecture import (
    HF_KEYS,
    LATENT,
    ROWS,
    STYLE,
    Architecture,
    Llama3Scaling,
    Yarn,
)
from kha_megatron.conversion.dialects import Dialect
from kha_megatron.conversion.hf_experts import ExpertFields
from kha_megatron.conversion.hf_gates import OutputGate
from kha_megatron.errors import CheckpointError, KHAError, in_one_line
from kha_megatron.hf import KHAModelConfig


class Family(NamedTuple):
    """How one architecture of transformers says what an :class:`Architecture` says."""

    config: type[PreTrainedConfig]
    causal_lm: str | None
    """Name of its class with an output layer; None where transformers has none."""
    fields: tuple[str, ...]
    """Fields of the architecture that it leaves open."""
    always: Mapping[str, Any] = {}
    """Fields of the architecture that it settles."""
    only: Mapping[str, Any] = {}
    """Configuration fields of which Megatron has one value."""
    experts: ExpertFields | None = None
    latent: tuple[bool, ...] = (False,)
    """Whether its attention has a latent, or may have one."""
    partial_rope: bool = False
    """Whether it can rotate a part of a head only."""
    gate: OutputGate = OutputGate()
    """Of what attention gives."""
    dialect: Dialect = Dialect()
    """How its files hold the tensors."""
    aliases: Mapping[str, str] = {}
    """Names of its own in ``config.json``, and what the other architectures call them."""
    rest: Callable[[Architecture], dict[str, Any]] = lambda model: {}
    """Further configuration fields of a model."""
    rope: Callable[[dict[str, Any], Architecture], dict[str, Any]] = lambda rope, model: rope
    """``rope_parameters`` in its own form."""


_COMMON = (
    "vocab_size",
    "hidden_size",
    "ffn_hidden_size",
    "num_layers",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "layernorm_epsilon",
    "init_method_std",
    "attention_dropout",
)
_MAY_BE_NOTHING = ("layernorm_epsilon", "init_method_std", "attention_dropout")
_OPEN = ("qk_layernorm", "add_qkv_bias")
_QWEN3 = {"qk_layernorm": True, "add_qkv_bias": False}
_LLAMA = {"qk_layernorm": False, "add_qkv_bias": False}
_TIED = "tie_word_embeddings"
_WITH_OUTPUT_BIAS = {"attention_bias": False}  # there, it is one of o_proj as well
_NO_MTP = {"num_nextn_predict_layers": 0}


def _of_newer_transformers(name: str) -> type[PreTrainedConfig]:
    """A configuration class that the oldest transformers that we support lacks; then, none."""
    return getattr(transformers, name, PreTrainedConfig)


_EVERY: dict[str, Family] = {
    "kha": Family(
        KHAModelConfig,
        "KHAForCausalLM",
        _COMMON + _OPEN,
        experts=hf_experts.KHA,
        latent=(False, True),
        partial_rope=True,
    ),
    "qwen3": Family(Qwen3Config, "Qwen3ForCausalLM", _COMMON, _QWEN3, _WITH_OUTPUT_BIAS),
    "qwen3_moe": Family(
        Qwen3MoeConfig,
        "Qwen3MoeForCausalLM",
        _COMMON,
        _QWEN3,
        _WITH_OUTPUT_BIAS,
        hf_experts.QWEN3,
    ),
    "glm4_moe": Family(
        Glm4MoeConfig,
        "Glm4MoeForCausalLM",
        _COMMON + _OPEN,
        only=_NO_MTP,
        experts=hf_experts.DEEPSEEK,
        partial_rope=True,
    ),
    "deepseek_v3": Family(
        DeepseekV3Config,
        "DeepseekV3ForCausalLM",
        _COMMON,
        _QWEN3,  # with the norms of the compressed states
        # the norms of the compressed states have this epsilon whatever the configuration says
        _WITH_OUTPUT_BIAS | _NO_MTP | {"rope_interleave": True, "rms_norm_eps": 1e-6},
        hf_experts.DEEPSEEK,
        latent=(True,),
    ),
    "llama": Family(
        LlamaConfig, "LlamaForCausalLM", _COMMON, _LLAMA, _WITH_OUTPUT_BIAS | {"mlp_bias": False}
    ),
    "mistral": Family(
        MistralConfig,
        "MistralForCausalLM",
        _COMMON,
        _LLAMA,
        rest=lambda model: {"sliding_window": None},
    ),
    "qwen3_next": Family(
        Qwen3NextConfig,
        "Qwen3NextForCausalLM",
        _COMMON,
        _QWEN3,
        _WITH_OUTPUT_BIAS,
        hf_experts.QWEN3_NEXT,
        partial_rope=True,
        gate=OutputGate(always=hf_gates.ELEMENT),
        dialect=hf_gates.QWEN3_NEXT,
        rest=hf_gates.all_attend,
    ),
    "qwen3_5_text": Family(
        _of_newer_transformers("Qwen3_5TextConfig"),
        "Qwen3_5ForCausalLM",
        _COMMON,
        _QWEN3,
        _WITH_OUTPUT_BIAS,
        partial_rope=True,
        gate=OutputGate(always=hf_gates.ELEMENT),
        dialect=hf_gates.QWEN3_NEXT,
        rest=hf_gates.all_attend,
        rope=hf_gates.with_sections,
    ),
    "qwen3_5_moe_text": Family(
        _of_newer_transformers("Qwen3_5MoeTextConfig"),
        "Qwen3_5MoeForCausalLM",
        tuple(name for name in _COMMON if name != "ffn_hidden_size"),
        _QWEN3,
        _WITH_OUTPUT_BIAS,
        hf_experts.QWEN3_5,
        partial_rope=True,
        gate=OutputGate(always=hf_gates.ELEMENT),
        dialect=hf_gates.QWEN3_NEXT,
        rest=hf_gates.all_attend,
        rope=hf_gates.with_sections,
    ),
    "lfm3": Family(
        _of_newer_transformers("Lfm3Config"),
        "Lfm3ForCausalLM",
        _COMMON,
        _QWEN3,
        _WITH_OUTPUT_BIAS | {"use_sandwich_norm": False},
        gate=OutputGate({"use_attention_gate": hf_gates.HEAD}),
        dialect=hf_gates.LFM3,
        aliases={"norm_eps": "rms_norm_eps"},
        rest=hf_gates.of_lfm3,
        rope=hf_gates.by_kind,
    ),
}
FAMILIES = {name: f for name, f in _EVERY.items() if f.config is not PreTrainedConfig}
"""By ``model_type``, those that the installed transformers has."""

PUBLISHED = Family(
    hf_gates.PublishedConfig,
    None,
    (*_COMMON, "qk_layernorm"),
    {"add_qkv_bias": False},
    _WITH_OUTPUT_BIAS | {"qkv_bias": False},
    gate=hf_gates.PUBLISHED,
    dialect=Dialect(gate_beside="group"),
)
"""The layout of published gated models, which call themselves ``qwen3``; it is only read."""

_AT_LEAST_ONE = {HF_KEYS[name] for name in _COMMON if name not in _MAY_BE_NOTHING}
_MOST = {"num_hidden_layers": 10**4, "num_experts": 10**5, "n_routed_experts": 10**5}
"""Lists of so many are made before tensors are looked at."""
_SURPRISES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What code raises that meets values of kinds that no one expects there."""

_ALIASES = {"num_mtp_layers": "num_nextn_predict_layers"}
_ROPE = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}
_HARMLESS = {
    *PreTrainedConfig().to_dict(),
    "torch_dtype",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "pretraining_tp",
    "attn_implementation",
    "_attn_implementation_autoset",
    "is_llama_config",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
    "kha_init",
    "kha_init_seed",
    # these have an effect together only, and are looked at below
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "hidden_act",
}
"""Fields that change no logit."""


def from_hf_config(raw: Mapping[str, Any]) -> Architecture:
    """The architecture of a Hugging Face model.

    Args:
        raw: its ``config.json``.

    Raises:
        CheckpointError: an unknown ``model_type``, or a field with a value that Megatron cannot
            express; it is named.
    """
    family = family_of(raw)
    _check_sizes(family, raw)
    try:
        return _described(family, raw)
    except KHAError:
        raise
    except _SURPRISES as error:
        raise CheckpointError(
            f"config.json describes no model that can be built ({type(error).__name__}: "
            f"{in_one_line(error)}): compare it with another of {raw['model_type']}"
        ) from error


def _check_sizes(family: Family, raw: Mapping[str, Any]) -> None:
    """Refuse sizes that are none before anybody makes a list of so many layers."""
    for name, value in raw.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise unsupported(name, value, "only a finite number")
    experts = family.experts.keys.values() if family.experts else ()
    for name in {*(HF_KEYS[field] for field in (*family.fields, *LATENT)), *experts, *_MOST}:
        value, least = raw.get(name), int(name in _AT_LEAST_ONE)
        most = _MOST.get(name, 2**31 - 1)
        if type(value) is int and not least <= value <= most:
            raise CheckpointError(
                f"config.json has {name}={value}: it must lie between {least} and {most}"
            )


def _described(family: Family, raw: Mapping[str, Any]) -> Architecture:
    # a copy, because transformers writes into what it is given
    aliases = {**_ALIASES, **family.aliases}
    values = {aliases.get(name, name): deepcopy(value) for name, value in raw.items()}
    config = _filled_in(family, values)
    _check_fields(family, values, config)
    keys = {name: HF_KEYS[name] for name in family.fields if hasattr(config, HF_KEYS[name])}
    fields: dict[str, Any] = {name: getattr(config, key) for name, key in keys.items()}
    fields |= _read_latent(family, config)
    if fields.get("kv_channels") is None:
        fields["kv_channels"] = config.hidden_size // config.num_attention_heads
    if family.experts:
        if problem := next(family.experts.unreadable(config), None):
            raise unsupported(*problem)
        fields |= family.experts.of(config)
    for name, value in fields.items():
        is_none = isinstance(value, bool | float | str) or (value is None and name in family.fields)
        if name in HF_KEYS and ROWS[name].kind is int and is_none:
            raise unsupported(HF_KEYS[name], value, "only a whole number")
    fields["attention_dropout"] = float(fields["attention_dropout"] or 0.0)
    epsilon = fields["layernorm_epsilon"]  # by an alias, transformers does not look at its kind
    if type(epsilon) not in (int, float):
        raise unsupported(HF_KEYS["layernorm_epsilon"], epsilon, "only a number")
    fields["layernorm_epsilon"] = float(epsilon)
    heads, groups = fields["num_attention_heads"], fields["num_query_groups"]
    kha = KHAConfig.recorded(raw) or KHAConfig()
    if gate := family.gate.of(config):
        kha = replace(kha, gate=gate)
    if heads % groups:
        raise unsupported("num_key_value_heads", groups, f"no divisor of {heads} heads")
    return Architecture(
        **STYLE,
        **fields,
        **family.always,
        **_read_rope(family, config),
        group_query_attention=heads != groups,
        padded_vocab_size=config.vocab_size,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        kha=kha,
    )


def unsupported(name: str, value: Any, why: str) -> CheckpointError:
    """The error of a field of ``config.json`` that Megatron cannot compute."""
    said = repr(value)
    said = said if len(said) < 300 else f"{said[:300]}..."
    return CheckpointError(f"config.json has {name}={said}, which cannot be expressed ({why})")


def family_of(raw: Mapping[str, Any]) -> Family:
    """The architecture that ``config.json`` names.

    Raises:
        CheckpointError: we do not know it.
    """
    name = raw.get("model_type")
    _check_installed(name)
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"config.json has model_type={name!r}: known are {', '.join(FAMILIES)}"
        )
    if name == "qwen3" and raw.keys() & PUBLISHED.gate.fields:
        return PUBLISHED
    return FAMILIES[name]


def _check_installed(name: Any) -> None:
    if isinstance(name, str) and name in _EVERY.keys() - FAMILIES.keys():
        raise CheckpointError(
            f"the installed transformers has no {name}: install a newer one, or choose kha"
        )


def _filled_in(family: Family, values: Mapping[str, Any]) -> PreTrainedConfig:
    kept = {name: value for name, value in values.items() if name not in ("auto_map", "model_type")}
    try:
        return family.config(**kept)
    except Exception as error:  # transformers' own checks raise many kinds
        raise CheckpointError(
            f"config.json is no {family.config.__name__}: {in_one_line(error)}"
        ) from error


def _check_fields(family: Family, raw: Mapping[str, Any], config: PreTrainedConfig) -> None:
    names = (*family.fields, *(LATENT if True in family.latent else ()))
    known = {*(HF_KEYS[name] for name in names), _TIED, *family.only, *_ROPE, *_HARMLESS}
    known |= family.gate.fields.keys()
    if family.experts is not None:
        known |= {*family.experts.keys.values(), *family.experts.known, *family.experts.implied}
    if family.config is KHAModelConfig:
        known |= {f"kha_{field.name}" for field in dataclasses.fields(KHAConfig)}
    given = {n: deepcopy(v) for n, v in raw.items() if n in known and n != "model_type"}
    usual = family.config(**given)
    for name, value in raw.items():
        # what follows from the other fields, or is off, says nothing new
        if name not in known and value not in (None, False, getattr(usual, name, None)):
            quantised = "a quantised model: save it in bfloat16 or float32"
            unknown = "not known to leave the computation alone: remove it if it does"
            raise unsupported(name, value, quantised if "quantiz" in name else unknown)
    implied = family.experts.implied if family.experts else {}
    for name, value in {**family.only, **implied}.items():
        found = raw.get(name, value) if name in {*_NO_MTP, *implied} else getattr(config, name)
        if found != value:
            raise unsupported(name, found, f"only {value!r}")
    if getattr(config, "hidden_act", "silu") != "silu":  # of lfm3 it is always
        raise unsupported("hidden_act", config.hidden_act, "only 'silu'")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise unsupported("sliding_window", window, "every layer must attend to the whole sequence")
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "full_attention":
            raise unsupported("layer_types", kind, "every layer must attend to the whole sequence")


def _read_rope(family: Family, config: PreTrainedConfig) -> dict[str, Any]:
    given = dict(config.rope_parameters)
    given = given.get("full_attention", given)  # where kinds of layers have their own
    kind = given.get("rope_type", "default")
    share = given.get("partial_rotary_factor")
    fraction = 1.0 if share is None else float(share)
    if fraction != 1.0 and not family.partial_rope:
        raise unsupported("partial_rotary_factor", fraction, "only 1.0 in this architecture")
    if not 0.0 < fraction <= 1.0:
        raise unsupported("partial_rotary_factor", fraction, "only above 0.0 and up to 1.0")
    rope = {"rotary_base": float(given["rope_theta"]), "rotary_percent": fraction}
    if kind == "default":
        return rope
    latent = _has_latent(family, config)
    if kind == "llama3" and not latent:
        names = [field.name for field in dataclasses.fields(Llama3Scaling)]
        return rope | {"scaling": Llama3Scaling(**{name: given[name] for name in names})}
    if kind == "yarn" and latent:
        return rope | {"scaling": _read_yarn(given)}
    raise unsupported("rope_parameters", given, f"rope_type {kind!r} is not Megatron's")


def _read_yarn(given: Mapping[str, Any]) -> Yarn:
    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if given.get("attention_factor") is not None or not given.get("truncate", True):
        raise unsupported("rope_parameters", dict(given), "attention_factor and truncate are fixed")
    if bool(mscale) != bool(all_dim) and (mscale, all_dim) not in ((1, 0), (1, None)):
        raise unsupported("rope_parameters", dict(given), "mscale goes with mscale_all_dim")
    return Yarn(
        factor=float(given["factor"]),
        mscale=float(mscale or 1.0),
        mscale_all_dim=float(all_dim or 0.0),
        original_max_position_embeddings=given["original_max_position_embeddings"],
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
    )


def _has_latent(family: Family, config: PreTrainedConfig) -> bool:
    return True in family.latent and config.kv_lora_rank is not None


def _read_latent(family: Family, config: PreTrainedConfig) -> dict[str, Any]:
    if not _has_latent(family, config):
        return {}
    if config.num_key_value_heads != config.num_attention_heads:
        raise unsupported("num_key_value_heads", config.num_key_value_heads, "one a query head")
    sizes = {name: getattr(config, HF_KEYS[name]) for name in LATENT}
    return sizes | {"multi_latent_attention": True, "kv_channels": sizes["v_head_dim"]}


_STOCK_GATES = {hf_gates.ELEMENT: "qwen3_next", hf_gates.HEAD: "lfm3"}


def has_stock_heads(model: Architecture) -> bool:
    """Whether all that its heads have is a gate which some stock architecture has too."""
    kha = model.kha
    return not (replace(kha, gate=None) if kha.gate in _STOCK_GATES else kha).mechanisms


def stock_type(model: Architecture) -> str:
    """The ``model_type`` that transformers and servers have for a model without KHA.

    Raises:
        CheckpointError: they have none for GTA and GLA, and for mechanisms of the heads but a gate
            on what grouped-query attention gives.
    """
    if model.kha.attention is not None:
        raise CheckpointError(
            f"kha_attention={model.kha.attention!r} has no stock architecture: export it as kha"
        )
    gate = model.kha.gate
    if not has_stock_heads(model) or (gate and model.multi_latent_attention):
        raise CheckpointError(f"{model.kha} has no stock architecture: export it as kha")
    if gate:
        return _STOCK_GATES[gate]
    if model.multi_latent_attention:
        return "deepseek_v3"
    if model.num_experts:
        return "glm4_moe" if model.moe_router_score_function == "sigmoid" else "qwen3_moe"
    return "qwen3" if model.qk_layernorm else "llama"


def expressed(model: Architecture, model_type: str) -> Architecture:
    """The model as an architecture of transformers has it: with what it cannot leave out.

    A router with sigmoid scores has a correction bias there, ``glm4_moe`` and ``deepseek_v3`` have
    a shared expert, and others one that always has a gate of its own (``ExpertFields.only``).
    """
    if not model.num_experts:
        return model
    size = model.moe_ffn_hidden_size
    family = FAMILIES.get(model_type)  # what is unknown, to_hf_config refuses
    if family and family.experts and family.experts.only.get("moe_shared_expert_gate"):
        return with_zeros(model, shared=size, bias=False, gate=True)
    if model.moe_router_score_function != "sigmoid":
        return model
    return with_zeros(model, shared=0 if model_type == "kha" else size)


def with_zeros(
    model: Architecture, *, shared: int, bias: bool = True, gate: bool = False
) -> Architecture:
    """The model with a correction bias, and a shared expert of ``shared`` features where it has
    none, with a ``gate`` or without: all are zeros, which change no bit of its output."""
    width: Any = model.shared_width or shared or None
    return replace(
        model,
        moe_router_enable_expert_bias=bias,
        moe_shared_expert_intermediate_size=width,
        moe_shared_expert_gate=model.moe_shared_expert_gate if model.shared_width else gate,
    )


def to_hf_config(model: Architecture, model_type: str) -> PreTrainedConfig:
    """The configuration of a model in one of transformers' architectures.

    Raises:
        CheckpointError: the architecture cannot compute what the model does; it says which part.
    """
    _check_installed(model_type)
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"unknown architecture {model_type!r}: choose one of {', '.join(FAMILIES)}"
        )
    family, model = FAMILIES[model_type], expressed(model, model_type)
    _check_expressible(model, model_type, family)
    names = [*family.fields, *(LATENT if model.multi_latent_attention else ())]
    if model.multi_latent_attention:
        names.remove("kv_channels")  # there it is of the rotary part, and follows
    fields = {HF_KEYS[name]: getattr(model, name) for name in names} | dict(family.only)
    fields[_TIED] = model.tied_embeddings
    if model_type == "kha":
        recorded = model.kha.to_dict(start=False)
        fields |= {f"kha_{name}": value for name, value in recorded.items()}
    fields |= family.gate.to(model.kha.gate) | family.rest(model)
    fields |= family.experts.to(model) if family.experts else {}
    rope = family.rope(_write_rope(model), model)
    config = family.config(**fields, rope_parameters=rope)
    config.architectures = [family.causal_lm or ""]
    return config


def _check_expressible(model: Architecture, model_type: str, family: Family) -> None:
    def refuse(what: str, remedy: str = "choose another --architecture") -> None:
        raise CheckpointError(f"{model_type} cannot express {what}: {remedy}")

    own = replace(model.kha, gate=None) if model.kha.gate in family.gate.known else model.kha
    if model_type != "kha":
        if own.variants:
            refuse(f"knocking heads ({own})", "fold linear ones away, or choose kha")
        if own.mechanisms:
            refuse(str(own), "choose kha")
        if model.kha.gate not in family.gate.known:
            refuse("attention without a gate on its output")
        if (kind := model.kha.attention) is not None:
            refuse(f"kha_attention={kind!r}", "no stock architecture can: choose kha")
    if model.num_experts and family.experts is None:
        refuse("mixture-of-experts layers")
    for what in family.experts.beyond(model) if family.experts else ():
        refuse(what)
    if model.multi_latent_attention not in family.latent:
        refuse(
            "multi-latent attention" if model.multi_latent_attention else "grouped-query attention"
        )
    for name, value in family.always.items():
        if getattr(model, name) != value:
            refuse(f"{name}={getattr(model, name)}")
    for name, value in family.only.items():
        ours = next((field for field in family.fields if HF_KEYS[field] == name), None)
        if ours and getattr(model, ours) != value:
            refuse(f"{name}={getattr(model, ours)}", f"it has only {value}; choose another")
    if model.rotary_percent != 1.0 and not family.partial_rope:
        refuse(f"partial RoPE ({model.rotary_percent})")


def _write_rope(model: Architecture) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
    # said by all: what is left out is 1 to some readers of a configuration, and 1/2 to others
    values["partial_rotary_factor"] = model.rotary_percent
    if (scaling := model.scaling) is not None:
        values |= {"rope_type": scaling.rope_type, **dataclasses.asdict(scaling)}
    return values
