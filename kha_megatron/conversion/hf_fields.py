"""Check the fields of a ``config.json`` that we cannot convert or do not know.

transformers ignores fields that an architecture does not have, e.g. the notes of fine-tuning tools.
We ignore them as well and list them in a warning. A field is refused, however, if

- any causal language model in transformers has a field of this name, e.g. ``logits_scaling``, or
- transformers reads it for all architectures, or programs other than transformers are known to use
  it in the computation, see :func:`may_change_outputs`.

Fields that are False or None are accepted.
"""

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import PreTrainedConfig

from kha_megatron.announcements import announce
from kha_megatron.conversion.hf_families import FAMILIES, PUBLISHED_GATED_ATTENTION, Family
from kha_megatron.errors import CheckpointError
from kha_megatron.heads.config import setting_names
from kha_megatron.hf import KHAModelConfig
from kha_megatron.model.config import HF_KEYS, LATENT

SIZES = (
    "vocab_size",
    "hidden_size",
    "ffn_hidden_size",
    "num_layers",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
)
"""``ModelConfig`` fields that every family has in its config, and that must be positive."""
COMMON = (
    *SIZES,
    "layernorm_epsilon",
    "init_method_std",
    "attention_dropout",
)
"""``ModelConfig`` fields that every family has in its config."""
_SOMETIMES_FIXED = ("qk_layernorm", "add_qkv_bias", "layernorm_zero_centered_gamma")
"""``ModelConfig`` fields that some families have in their config, and others fix.

See ``Family.fixed_model_fields``.
"""
_HARMLESS = {
    *PreTrainedConfig().to_dict(),
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "tie_word_embeddings",
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
    "kha_init",
    "kha_init_seed",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "hidden_act",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "num_labels",
    "name_or_path",
    "keys_to_ignore_at_inference",
}
"""Fields that do not affect the logits, or that we check separately."""
_READ_FOR_ALL_MODELS = {
    "is_causal",
    "per_layer_config",
    "quantization_config",
    "fusion_config",
    "transformers_weights",
}
"""Fields that transformers reads for all architectures, although no config class declares them."""
_COMPUTATION_PATTERNS = (
    r"quantiz",
    r"compression_config",
    r"soft_?cap",  # Gemma 2
    r"multiplier",  # Granite
    r"(^|_)mup(_|$)",
    r"^scale_(emb|depth)$",  # MiniCPM
    r"^dim_model_base$",
    r"alibi",
    r"logn",  # Qwen 1
    r"ntk",
    r"rope_ratio",  # ChatGLM
    r"sink",  # gpt-oss
    r"^kha_",
)
_COMPUTATION_FIELD = re.compile("|".join(_COMPUTATION_PATTERNS))
"""Names of fields that custom modeling code uses in the computation."""
_HARMLESS_PATTERNS = (
    r"_token_id$",
    r"dropout",
    r"^init",
    r"^summary_",
    r"suppress_tokens$",
    r"^encoder_no_repeat",
    r"^seed$",
    r"^(max_seq_len|model_max_length|n_ctx|context_length)$",
)
_HARMLESS_FIELD = re.compile("|".join(_HARMLESS_PATTERNS))
"""Names of fields for special tokens, initialization, training and generation."""


def field_names(family: Family) -> tuple[str, ...]:
    """Return the names of all ``ModelConfig`` fields that this family has in its config."""
    names = [*COMMON]
    for name in _SOMETIMES_FIXED:
        if name not in family.fixed_model_fields:
            names.append(name)
    if family.has_latent_fields:
        names += LATENT
    return tuple(names)


def unsupported(name: str, value: Any, why: str) -> CheckpointError:
    return CheckpointError(f"{name}={value!r:.300} in config.json is not supported: {why}.")


def check_fields(family: Family, raw: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Reject all settings that Megatron cannot represent, and warn about ignored fields.

    Args:
        family: Family of the model.
        raw: Content of the ``config.json``.
        config: Config of transformers, built from those fields that we know.
    """
    for name, expected in _required_values(family).items():
        # missing fields have the default value of `config`
        _check_value(name, getattr(config, name), expected)
    for name, expected in _required_values_if_present(family).items():
        if name in raw:
            _check_value(name, raw[name], expected)
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise unsupported("sliding_window", window, "only full attention can be converted")
    layer_types = getattr(config, "layer_types", None) or ()
    if not set(layer_types) <= {"full_attention"}:
        raise unsupported("layer_types", layer_types, "only full attention can be converted")
    _check_unknown_fields(family, raw, config)


def _check_value(name: str, value: Any, expected: Any) -> None:
    if value != expected:
        raise unsupported(name, value, f"expected {expected!r}")


def _required_values(family: Family) -> dict[str, Any]:
    """Return the fields where Megatron supports only one value."""
    return {"hidden_act": "silu", **family.required_config_values}


def _required_values_if_present(family: Family) -> dict[str, Any]:
    """Return the optional fields where Megatron supports only one value."""
    required_values: dict[str, Any] = {"is_causal": True}
    if family.experts:
        required_values.update(family.experts.required_config_values)
    return required_values


def may_change_outputs(name: str) -> bool:
    """Whether any program is known to read a field of this name in a model's computation."""
    if name in _READ_FOR_ALL_MODELS or _COMPUTATION_FIELD.search(name):
        return True
    if hasattr(PreTrainedConfig, name) and not name.startswith("_"):
        return True  # replaces a method or an attribute of the class
    return name in _fields_of_all_models() and not _HARMLESS_FIELD.search(name)


def known_fields(family: Family) -> set[str]:
    """Return the fields that we convert, check, or know to be harmless."""
    known = {HF_KEYS[name] for name in field_names(family)}
    known |= _HARMLESS
    known |= _required_values(family).keys()
    known |= _required_values_if_present(family).keys()
    known |= family.gate_switches.keys()
    if family.experts:
        known |= family.experts.all_keys
    if family.config_class is KHAModelConfig:
        known |= {f"kha_{name}" for name in (*setting_names(), "folded", "providers")}
    return known


def _check_unknown_fields(family: Family, raw: Mapping[str, Any], config: PreTrainedConfig) -> None:
    known = known_fields(family)
    ignored = []
    for name, value in raw.items():
        if name in known or value in (None, False):
            continue
        if value == getattr(config, name, None):
            continue  # transformers derives the same value from the other fields
        if "quantiz" in name:
            raise unsupported(name, value, "please save the model in bfloat16 or float32 first")
        if may_change_outputs(name):
            why = (
                f"{config.model_type} models in transformers do not use this field, but others do. "
                "Delete it from config.json if the model was trained without it"
            )
            raise unsupported(name, value, why)
        ignored.append(name)
    if ignored:
        warning = (
            f"Ignoring {', '.join(sorted(ignored))} in config.json, because {config.model_type} "
            "models in transformers do not use these fields."
        )
        announce(warning, once=warning)


@cache
def _fields_of_all_models() -> frozenset[str]:
    """Return the fields of all causal language models in transformers (takes a second)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_classes = [CONFIG_MAPPING[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    for family in (*FAMILIES.values(), PUBLISHED_GATED_ATTENTION):
        config_classes.append(family.config_class)
    names: set[str] = set()
    for config_class in config_classes:
        names.update(field.name for field in dataclasses.fields(config_class))
        names.update(config_class.attribute_map)
    return frozenset(names)
