"""MoE settings in Hugging Face configs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from kha_megatron.errors import CheckpointError
from kha_megatron.model.config import HF_KEYS, ModelConfig

_OFF = {
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_shared_expert_intermediate_size": 0,
}
"""How ``config.json`` spells "not used" (None in :class:`ModelConfig`)."""


class ExpertFields(NamedTuple):
    """Describes how an architecture stores its MoE settings in ``config.json``."""

    fields: tuple[str, ...]
    """``ModelConfig`` fields that have a direct counterpart in the config."""
    read: Callable[[PreTrainedConfig], dict[str, Any]]
    """Reads the remaining ``ModelConfig`` fields, e.g. ``moe_layer_freq``."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Inverse of ``read``. These keys need to be in ``known``, too."""
    known: tuple[str, ...]
    number: str = "num_experts"
    """Config key for the number of experts."""
    always: Mapping[str, Any] = {}
    """``ModelConfig`` fields with a fixed value."""
    implied: Mapping[str, Any] = {}
    """Optional config keys that must have this value if they are present."""
    dense: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    """Config fields for models without any experts."""

    @property
    def keys(self) -> dict[str, str]:
        """Maps ``ModelConfig`` fields to config keys."""
        keys = {"num_experts": self.number, "normalizes_topk": "norm_topk_prob"}
        for name in self.fields:
            keys[name] = HF_KEYS[name]
        return keys

    def from_config(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Read the MoE fields of a config (nothing if all layers are dense)."""
        special = self.read(config)
        if not any(special["moe_layer_freq"]):
            return {}
        fields: dict[str, Any] = {}
        for name, key in self.keys.items():
            value = getattr(config, key)
            is_off = name in _OFF and value == _OFF[name]
            fields[name] = None if is_off else value
        fields |= self.always
        fields |= special
        if factor := fields.get("moe_router_topk_scaling_factor"):
            fields["moe_router_topk_scaling_factor"] = float(factor)
        if fields.get("moe_router_num_groups"):
            fields["moe_router_group_topk"] = getattr(config, self.keys["moe_router_group_topk"])
        else:
            fields["moe_router_group_topk"] = None
        return fields

    def to_config(self, model: ModelConfig) -> dict[str, Any]:
        if not model.experts:
            return self.dense(model)
        values = {}
        for name, key in self.keys.items():
            value = getattr(model, name)
            values[key] = _OFF.get(name) if value is None else value
        return values | self.write(model)


_COMMON = ("moe_router_topk", "moe_ffn_hidden_size")
_SCALED = ("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk")


def _read_kha(config: PreTrainedConfig) -> dict[str, Any]:
    layers = [int(mlp == "sparse") for mlp in config.mlp_layer_types]
    return {
        "moe_layer_freq": tuple(layers),
        "moe_router_enable_expert_bias": config.scoring_func == "sigmoid",
        "moe_router_dtype": "fp32" if config.router_dtype == "float32" else None,
    }


def _write_kha(model: ModelConfig) -> dict[str, Any]:
    return {
        "mlp_layer_types": ["sparse" if sparse else "dense" for sparse in model.moe_layers],
        "router_dtype": "float32" if model.moe_router_dtype else "auto",
    }


def _read_qwen3(config: PreTrainedConfig) -> dict[str, Any]:
    layers = []
    for layer in range(config.num_hidden_layers):
        can_be_sparse = config.num_experts > 0 and layer not in config.mlp_only_layers
        is_sparse = can_be_sparse and (layer + 1) % config.decoder_sparse_step == 0
        layers.append(int(is_sparse))
    return {"moe_layer_freq": tuple(layers)}


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    dense_layers = []
    for layer, is_sparse in enumerate(model.moe_layers):
        if not is_sparse:
            dense_layers.append(layer)
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense_layers}


def _write_dense_qwen3_next(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": 0,
        "mlp_only_layers": list(range(model.layers)),
    }


def _read_deepseek(config: PreTrainedConfig) -> dict[str, Any]:
    first_sparse = config.first_k_dense_replace
    freq = [int(layer >= first_sparse) for layer in range(config.num_hidden_layers)]
    groups = config.n_group or 1
    per_token = config.num_experts_per_tok
    if any(freq) and groups > 1 and per_token != 2 * config.topk_group:
        raise CheckpointError(
            f"n_group={groups} with topk_group={config.topk_group} and num_experts_per_tok="
            f"{per_token} in config.json is not supported: Megatron ranks a group by its top "
            "num_experts_per_tok / topk_group experts, but transformers always uses the top two."
        )
    shared = config.moe_intermediate_size * (config.n_shared_experts or 0)
    return {
        "moe_layer_freq": tuple(freq),
        "moe_shared_expert_intermediate_size": shared or None,
    }


def _write_deepseek(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_shared_experts": model.shared_width // model.expert_width,
        "first_k_dense_replace": model.moe_layers.index(1),
    }


KHA = ExpertFields(
    (
        *_COMMON,
        *_SCALED,
        "moe_router_score_function",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
    ),
    _read_kha,
    _write_kha,
    ("num_local_experts", "mlp_layer_types", "router_dtype"),
)

_SOFTMAX = {
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
}
QWEN3 = ExpertFields(
    _COMMON,
    _read_qwen3,
    _write_qwen3,
    ("num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
    always=_SOFTMAX,
)
"""``qwen3_moe``: softmax router, no shared experts."""

QWEN3_NEXT = QWEN3._replace(
    fields=(*_COMMON, "moe_shared_expert_intermediate_size"),
    always=_SOFTMAX | {"moe_shared_expert_gate": True},
    dense=_write_dense_qwen3_next,
)
"""``qwen3_next``: like ``qwen3_moe`` with an additional, gated shared expert."""

DEEPSEEK = ExpertFields(
    (*_COMMON, *_SCALED),
    _read_deepseek,
    _write_deepseek,
    ("num_local_experts", "n_shared_experts", "first_k_dense_replace"),
    number="n_routed_experts",
    always={
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    },
    implied={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    dense=lambda model: {"first_k_dense_replace": model.layers},
)
"""``deepseek_v3``, ``glm4_moe``: sigmoid router with correction bias, first layers can be dense."""
