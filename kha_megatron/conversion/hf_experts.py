"""Mixture-of-experts fields of Hugging Face configurations, each way.

What has no way is said here and refused by ``hf_configs``.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from kha_megatron.conversion.architecture import HF_KEYS, Architecture

_OFF = {
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_shared_expert_intermediate_size": 0,
}
"""What configurations say where a field is None."""


class ExpertFields(NamedTuple):
    """How one architecture of transformers says what an :class:`Architecture` says of experts."""

    fields: tuple[str, ...]
    """Those of :class:`Architecture` that have a configuration field of their own."""
    read: Callable[[PreTrainedConfig], dict[str, Any]]
    """The other fields; ``moe_layer_freq`` is among them."""
    write: Callable[[Architecture], dict[str, Any]]
    """The other configuration fields."""
    known: tuple[str, ...]
    """The other configuration fields that ``config.json`` may have."""
    number: str = "num_experts"
    """Configuration field of the number of experts."""
    normalised: str | None = "norm_topk_prob"
    """Configuration field of ``normalised``; None where ``only`` settles it."""
    only: Mapping[str, Any] = {}
    """Fields of :class:`Architecture` of which there is one value."""
    implied: Mapping[str, Any] = {}
    """Configuration fields that may be there, with the one value that they may have."""
    dense: Callable[[Architecture], dict[str, Any]] | None = None
    """The configuration fields of a model without experts."""
    unreadable: Callable[[PreTrainedConfig], Iterator[tuple[str, Any, str]]] = lambda _: iter(())
    """Configuration fields with a value that Megatron cannot compute: name, value and why."""
    unwritable: Callable[[Architecture], Iterator[str]] = lambda _: iter(())
    """What ``only`` does not say of a model with experts that the architecture cannot compute."""

    @property
    def keys(self) -> dict[str, str]:
        """Configuration field of each of ``fields``."""
        own = {"num_experts": self.number}
        own |= {"normalised": self.normalised} if self.normalised else {}
        return own | {name: HF_KEYS[name] for name in self.fields}

    def of(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Fields of :class:`Architecture` from a configuration; none if no layer has experts."""
        rest = self.read(config)
        if not any(rest["moe_layer_freq"]):
            return {}
        given = {ours: getattr(config, theirs) for ours, theirs in self.keys.items()}
        given |= self.only
        given = {k: None if k in _OFF and v == _OFF[k] else v for k, v in given.items()} | rest
        if factor := given["moe_router_topk_scaling_factor"]:
            given["moe_router_topk_scaling_factor"] = float(factor)
        if not given["moe_router_num_groups"]:
            given["moe_router_group_topk"] = None
        return given

    def beyond(self, model: Architecture) -> Iterator[str]:
        """What of a model its architecture cannot compute."""
        if not model.num_experts:
            if self.dense is None:
                yield "a dense model"
            return
        for name, value in self.only.items():
            if (found := getattr(model, name)) != value:
                yield f"{name}={found!r}, only {value!r}"
        yield from self.unwritable(model)

    def to(self, model: Architecture) -> dict[str, Any]:
        """The configuration fields of a model, of which nothing is ``beyond`` the architecture."""
        if not model.num_experts:
            return self.dense(model) if self.dense else {}
        values = {ours: getattr(model, ours) for ours in self.keys}
        given = {self.keys[k]: _OFF.get(k) if v is None else v for k, v in values.items()}
        return given | self.write(model)


_COMMON = ("moe_router_topk", "moe_ffn_hidden_size")
_SCALED = ("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk")


def _read_kha(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "moe_layer_freq": tuple(int(kind == "sparse") for kind in config.mlp_layer_types),
        "moe_router_enable_expert_bias": config.scoring_func == "sigmoid",
    }


def _write_kha(model: Architecture) -> dict[str, Any]:
    return {"mlp_layer_types": ["sparse" if sparse else "dense" for sparse in model.moe_layer_freq]}


def _read_qwen3(config: PreTrainedConfig) -> dict[str, Any]:
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    layers = range(config.num_hidden_layers)
    sparse = (config.num_experts > 0 and i not in dense and (i + 1) % step == 0 for i in layers)
    return {"moe_layer_freq": tuple(map(int, sparse))}


def _write_qwen3(model: Architecture) -> dict[str, Any]:
    dense = [i for i, sparse in enumerate(model.moe_layer_freq) if not sparse]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _read_all_sparse(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "moe_layer_freq": (1,) * config.num_hidden_layers,
        # of no layer, but Megatron wants one; its own default follows from the hidden size
        "ffn_hidden_size": config.moe_intermediate_size,
    }


def _without_experts(config: PreTrainedConfig) -> Iterator[tuple[str, Any, str]]:
    if not config.num_experts:
        yield "num_experts", config.num_experts, "every layer has experts"


def _dense_layers(model: Architecture) -> Iterator[str]:
    if not all(model.moe_layer_freq):
        yield "dense layers among those with experts"


def _read_deepseek(config: PreTrainedConfig) -> dict[str, Any]:
    dense = config.first_k_dense_replace
    freq = tuple(int(layer >= dense) for layer in range(config.num_hidden_layers))
    if not any(freq):
        return {"moe_layer_freq": freq}
    shared = config.moe_intermediate_size * (config.n_shared_experts or 0)
    return {"moe_layer_freq": freq, "moe_shared_expert_intermediate_size": shared or None}


def _unreadable_deepseek(config: PreTrainedConfig) -> Iterator[tuple[str, Any, str]]:
    if config.first_k_dense_replace >= config.num_hidden_layers:
        return
    groups, per_token = config.n_group or 1, config.num_experts_per_tok
    size, rest = divmod(config.n_routed_experts, groups)
    if size < 2 or rest:
        yield (
            f"n_group={groups} with n_routed_experts",
            config.n_routed_experts,
            "every group needs as many experts, and two of them",
        )
    if groups > 1 and per_token != 2 * config.topk_group:
        yield (
            f"n_group={groups} with topk_group={config.topk_group} and num_experts_per_tok",
            per_token,
            "Megatron ranks a group by its best num_experts_per_tok / topk_group experts, "
            "transformers by two",
        )


def _write_deepseek(model: Architecture) -> dict[str, Any]:
    shared = model.moe_shared_expert_intermediate_size or 0
    return {
        "n_shared_experts": shared // model.moe_ffn_hidden_size,
        "first_k_dense_replace": model.moe_layer_freq.index(1),
    }


def _unwritable_deepseek(model: Architecture) -> Iterator[str]:
    freq, size = model.moe_layer_freq, model.moe_ffn_hidden_size
    shared, groups = model.moe_shared_expert_intermediate_size or 0, model.moe_router_group_topk
    if not all(freq[freq.index(1) :]):
        yield "a dense layer behind one with experts"
    if shared % size:
        yield f"a shared expert of {shared} features, no multiple of {size}"
    if model.num_experts < 2:
        yield "a single expert"
    if groups is not None and model.moe_router_topk != 2 * groups:
        yield f"moe_router_group_topk={groups} of {model.moe_router_topk} experts"


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
    ("num_local_experts", "mlp_layer_types"),
    dense=lambda model: {},
)
"""Of ``kha``, whose fields are Megatron's."""

QWEN3 = ExpertFields(
    _COMMON,
    _read_qwen3,
    _write_qwen3,
    ("num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
    only={
        "moe_router_score_function": "softmax",
        "moe_router_topk_scaling_factor": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_router_num_groups": None,
    },
)
"""Of ``qwen3_moe``: softmax, no shared expert, any layer dense."""

QWEN3_NEXT = ExpertFields(
    (*_COMMON, "moe_shared_expert_intermediate_size"),
    _read_qwen3,
    _write_qwen3,
    QWEN3.known,
    only={
        "moe_router_score_function": "softmax",
        "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None,
        "moe_shared_expert_gate": True,
    },
    dense=lambda model: {"num_experts": 0, "mlp_only_layers": list(range(model.num_layers))},
)
"""Of ``qwen3_next``: as ``qwen3_moe``, and always a shared expert with a gate of its own."""

QWEN3_5 = ExpertFields(
    QWEN3_NEXT.fields,
    _read_all_sparse,
    lambda model: {},
    ("num_local_experts",),
    normalised=None,
    only={**QWEN3_NEXT.only, "normalised": True},
    unreadable=_without_experts,
    unwritable=_dense_layers,
)
"""Of ``qwen3_5_moe_text``: as ``qwen3_next``, in every layer, and the weights of a token's experts
always sum to one."""

DEEPSEEK = ExpertFields(
    (*_COMMON, *_SCALED),
    _read_deepseek,
    _write_deepseek,
    (
        "num_local_experts",
        "n_shared_experts",
        "first_k_dense_replace",
    ),
    number="n_routed_experts",
    only={
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_gate": False,
    },
    implied={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    dense=lambda model: {"first_k_dense_replace": model.num_layers},
    unreadable=_unreadable_deepseek,
    unwritable=_unwritable_deepseek,
)
"""Of ``deepseek_v3`` and ``glm4_moe``: sigmoid with a correction bias, dense layers first."""
