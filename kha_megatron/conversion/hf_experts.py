"""MoE settings in Hugging Face configs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedConfig

from kha_megatron.errors import CheckpointError
from kha_megatron.model.config import HF_KEYS, ModelConfig

_DISABLED_VALUES = {
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_shared_expert_intermediate_size": 0,
}
"""How ``config.json`` spells "not used" (None in :class:`ModelConfig`)."""


def no_fields(model: ModelConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """Describes how an architecture stores its MoE settings in ``config.json``."""

    direct_fields: tuple[str, ...]
    """``ModelConfig`` fields that have a direct counterpart in the config."""
    expert_count_key: str = "num_experts"
    """Config key for the number of experts."""
    read_special_fields: Callable[[PreTrainedConfig], dict[str, Any]]
    """Reads the ``ModelConfig`` fields without a direct counterpart, e.g. ``moe_layer_freq``."""
    write_special_keys: Callable[[ModelConfig], dict[str, Any]]
    """Inverse of ``read_special_fields``. Returns some of the ``special_keys``."""
    special_keys: tuple[str, ...]
    """Config keys that ``read_special_fields`` needs."""
    fixed_model_fields: Mapping[str, Any] = field(default_factory=dict)
    """``ModelConfig`` fields that are the same in all models of this architecture."""
    required_config_values: Mapping[str, Any] = field(default_factory=dict)
    """Optional config keys that must have this value if they are present."""
    write_dense_keys: Callable[[ModelConfig], dict[str, Any]] = no_fields
    """Returns the config keys of models without any experts."""

    @property
    def keys(self) -> dict[str, str]:
        """Maps ``ModelConfig`` fields to config keys."""
        keys = {
            "num_experts": self.expert_count_key,
            "normalizes_topk": "norm_topk_prob",
        }
        for name in self.direct_fields:
            keys[name] = HF_KEYS[name]
        return keys

    @property
    def all_keys(self) -> set[str]:
        """All config keys with MoE settings that we convert."""
        # the last one is another name of `expert_count_key`, which some configs are saved with
        return {*self.keys.values(), *self.special_keys, "num_local_experts"}

    def from_config(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Read the MoE fields of a config (nothing if all layers are dense)."""
        special_fields = self.read_special_fields(config)
        if not any(special_fields["moe_layer_freq"]):
            return {}
        fields: dict[str, Any] = {}
        for name, key in self.keys.items():
            value = getattr(config, key)
            is_disabled = name in _DISABLED_VALUES and value == _DISABLED_VALUES[name]
            fields[name] = None if is_disabled else value
        fields |= self.fixed_model_fields
        fields |= special_fields
        scaling_factor = fields.get("moe_router_topk_scaling_factor")
        if scaling_factor:
            fields["moe_router_topk_scaling_factor"] = float(scaling_factor)
        if fields.get("moe_router_num_groups"):
            # with groups, 1 means one group per token
            fields["moe_router_group_topk"] = getattr(config, self.keys["moe_router_group_topk"])
        else:
            fields["moe_router_group_topk"] = None
        return fields

    def to_config(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config keys for the MoE settings of a model."""
        if not model.experts:
            return self.write_dense_keys(model)
        values = {}
        for name, key in self.keys.items():
            value = getattr(model, name)
            values[key] = _DISABLED_VALUES.get(name) if value is None else value
        return values | self.write_special_keys(model)


_COMMON_FIELDS = ("moe_router_topk", "moe_ffn_hidden_size")
_GROUPED_ROUTER_FIELDS = (
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
)


def _read_kha(config: PreTrainedConfig) -> dict[str, Any]:
    moe_layers = [int(mlp_type == "sparse") for mlp_type in config.mlp_layer_types]
    return {
        "moe_layer_freq": tuple(moe_layers),
        "moe_router_enable_expert_bias": config.scoring_func == "sigmoid",
        "moe_router_dtype": "fp32" if config.router_dtype == "float32" else None,
    }


def _write_kha(model: ModelConfig) -> dict[str, Any]:
    return {
        "mlp_layer_types": ["sparse" if is_moe else "dense" for is_moe in model.moe_layers],
        "router_dtype": "float32" if model.moe_router_dtype else "auto",
    }


def _read_qwen3(config: PreTrainedConfig) -> dict[str, Any]:
    moe_layers = []
    for layer in range(config.num_hidden_layers):
        can_be_moe = config.num_experts > 0 and layer not in config.mlp_only_layers
        is_moe = can_be_moe and (layer + 1) % config.decoder_sparse_step == 0
        moe_layers.append(int(is_moe))
    return {"moe_layer_freq": tuple(moe_layers)}


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    dense_layers = []
    for layer, is_moe in enumerate(model.moe_layers):
        if not is_moe:
            dense_layers.append(layer)
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense_layers}


def _write_dense_qwen3_next(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": 0,
        "mlp_only_layers": list(range(model.layers)),
    }


def _read_deepseek(config: PreTrainedConfig) -> dict[str, Any]:
    first_moe_layer = config.first_k_dense_replace
    moe_layers = [int(layer >= first_moe_layer) for layer in range(config.num_hidden_layers)]
    if any(moe_layers):
        _check_deepseek_groups(config)
    # this config stores the number of shared experts, Megatron fuses them into one
    shared_width = config.moe_intermediate_size * (config.n_shared_experts or 0)
    return {
        "moe_layer_freq": tuple(moe_layers),
        "moe_shared_expert_intermediate_size": shared_width or None,
    }


def _check_deepseek_groups(config: PreTrainedConfig) -> None:
    groups = config.n_group or 1
    experts_per_token = config.num_experts_per_tok
    if groups > 1 and experts_per_token != 2 * config.topk_group:
        raise CheckpointError(
            f"n_group={groups} with topk_group={config.topk_group} and num_experts_per_tok="
            f"{experts_per_token} in config.json is not supported: Megatron ranks a group by its "
            "top num_experts_per_tok / topk_group experts, but transformers always uses the top "
            "two."
        )


def _write_deepseek(model: ModelConfig) -> dict[str, Any]:
    first_moe_layer = model.moe_layers.index(1)
    return {
        "n_shared_experts": model.shared_width // model.expert_width,
        "first_k_dense_replace": first_moe_layer,
    }


def _write_dense_deepseek(model: ModelConfig) -> dict[str, Any]:
    return {"first_k_dense_replace": model.layers}


KHA_EXPERTS = ExpertFields(
    direct_fields=(
        *_COMMON_FIELDS,
        *_GROUPED_ROUTER_FIELDS,
        "moe_router_score_function",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
    ),
    read_special_fields=_read_kha,
    write_special_keys=_write_kha,
    special_keys=("mlp_layer_types", "router_dtype"),
)

_SOFTMAX_ROUTER = {
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
}
QWEN3_EXPERTS = ExpertFields(
    direct_fields=_COMMON_FIELDS,
    read_special_fields=_read_qwen3,
    write_special_keys=_write_qwen3,
    special_keys=("decoder_sparse_step", "mlp_only_layers"),
    fixed_model_fields=_SOFTMAX_ROUTER,
)
"""``qwen3_moe``: softmax router, no shared experts."""

QWEN3_NEXT_EXPERTS = replace(
    QWEN3_EXPERTS,
    direct_fields=(*_COMMON_FIELDS, "moe_shared_expert_intermediate_size"),
    fixed_model_fields={**_SOFTMAX_ROUTER, "moe_shared_expert_gate": True},
    write_dense_keys=_write_dense_qwen3_next,
)
"""``qwen3_next``: like ``qwen3_moe`` with an additional, gated shared expert."""

DEEPSEEK_EXPERTS = ExpertFields(
    direct_fields=(*_COMMON_FIELDS, *_GROUPED_ROUTER_FIELDS),
    expert_count_key="n_routed_experts",
    read_special_fields=_read_deepseek,
    write_special_keys=_write_deepseek,
    special_keys=("n_shared_experts", "first_k_dense_replace"),
    fixed_model_fields={
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    },
    required_config_values={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    write_dense_keys=_write_dense_deepseek,
)
"""``deepseek_v3``, ``glm4_moe``: sigmoid router with correction bias, first layers can be dense."""
