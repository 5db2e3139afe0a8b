"""Mixture-of-experts fields of Hugging Face configurations, each way; see ``hf_configs``."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from kha_megatron.conversion.architecture import Architecture, Experts
from kha_megatron.errors import CheckpointError


class ExpertFields(NamedTuple):
    """How one architecture of transformers says what an :class:`Experts` says."""

    fields: Mapping[str, str]
    """Configuration field of each field of :class:`Experts` that has one of its own."""
    read: Callable[[PreTrainedConfig], dict[str, Any]]
    """The other fields; ``sparse`` is among them."""
    write: Callable[[Experts], dict[str, Any]]
    """The other configuration fields."""
    known: tuple[str, ...]
    """The other configuration fields that ``config.json`` may have."""
    only: Mapping[str, Any] = {}
    """Fields of :class:`Experts` of which the architecture has one value."""
    dense: Mapping[str, str] | None = None
    """Configuration fields of a model without experts, each a field of :class:`Architecture`."""

    def of(self, config: PreTrainedConfig) -> Experts | None:
        """The experts of a configuration; None if no layer has any.

        Raises:
            CheckpointError: Megatron cannot express them; the message names the field.
        """
        rest = self.read(config)
        if not any(rest["sparse"]):
            return None
        given = {ours: getattr(config, theirs) for ours, theirs in self.fields.items()}
        return Experts(**given | self.only | rest)

    def to(self, model: Architecture, model_type: str) -> dict[str, Any]:
        """The configuration fields of a model.

        Raises:
            CheckpointError: the architecture cannot compute what the model does.
        """
        experts = model.experts
        if experts is None:
            if self.dense is None:
                raise refused(model_type, "a dense model")
            return {theirs: getattr(model, ours) for theirs, ours in self.dense.items()}
        for name, value in self.only.items():
            if (found := getattr(experts, name)) != value:
                raise refused(model_type, f"experts with {name}={found!r}, only {value!r}")
        given = {theirs: getattr(experts, ours) for ours, theirs in self.fields.items()}
        return given | self.write(experts)


def refused(model_type: str, what: str, remedy: str = "choose another --architecture") -> Exception:
    """The error of an architecture of transformers that cannot compute what a model does."""
    return CheckpointError(f"{model_type} cannot express {what}: {remedy}")


_COMMON = {
    "per_token": "num_experts_per_tok",
    "size": "moe_intermediate_size",
    "normalised": "norm_topk_prob",
}
_GROUPS = {"groups": "n_group", "groups_per_token": "topk_group"}


def _read_kha(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "sparse": tuple(kind == "sparse" for kind in config.mlp_layer_types),
        "scaling": float(config.routed_scaling_factor),
        "bias": config.scoring_func == "sigmoid",
        "groups_per_token": config.topk_group if config.n_group > 1 else 1,
    }


def _write_kha(experts: Experts) -> dict[str, Any]:
    return {"mlp_layer_types": ["sparse" if sparse else "dense" for sparse in experts.sparse]}


def _read_qwen3(config: PreTrainedConfig) -> dict[str, Any]:
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    layers = range(config.num_hidden_layers)
    has = config.num_experts > 0
    return {"sparse": tuple(has and i not in dense and (i + 1) % step == 0 for i in layers)}


def _write_qwen3(experts: Experts) -> dict[str, Any]:
    dense = [i for i, sparse in enumerate(experts.sparse) if not sparse]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _read_deepseek(config: PreTrainedConfig) -> dict[str, Any]:
    for name, only in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        found = getattr(config, name, only)
        if found != only:
            raise CheckpointError(
                f"config.json has {name}={found!r}, which cannot be expressed (only {only!r})"
            )
    dense = config.first_k_dense_replace
    sparse = tuple(layer >= dense for layer in range(config.num_hidden_layers))
    if not any(sparse):
        return {"sparse": sparse}
    groups, per_token = config.n_group or 1, config.num_experts_per_tok
    size, rest = divmod(config.n_routed_experts, groups)
    if size < 2 or rest:
        raise CheckpointError(
            f"config.json has n_group={groups} with n_routed_experts={config.n_routed_experts}, "
            "which cannot be expressed (every group needs as many experts, and two of them)"
        )
    if groups > 1 and per_token != 2 * config.topk_group:
        raise CheckpointError(
            f"config.json has n_group={groups} with topk_group={config.topk_group} and "
            f"num_experts_per_tok={per_token}, which cannot be expressed (Megatron ranks a group "
            "by its best num_experts_per_tok / topk_group experts, transformers by two)"
        )
    return {
        "sparse": sparse,
        "scaling": float(config.routed_scaling_factor),
        "shared_size": config.moe_intermediate_size * (config.n_shared_experts or 0),
        "groups": groups,
        "groups_per_token": config.topk_group if groups > 1 else 1,
    }


def _write_deepseek(experts: Experts) -> dict[str, Any]:
    dense = experts.sparse.index(True)
    for wrong, what in (
        (not all(experts.sparse[dense:]), "a dense layer behind one with experts"),
        (
            experts.shared_size % experts.size != 0,
            f"a shared expert of {experts.shared_size} features, no multiple of {experts.size}",
        ),
        (experts.count < 2, "a single expert"),
        (
            experts.groups > 1 and experts.per_token != 2 * experts.groups_per_token,
            f"moe_router_group_topk={experts.groups_per_token} of {experts.per_token} experts",
        ),
    ):
        if wrong:
            raise refused("sigmoid routing of transformers (glm4_moe, deepseek_v3)", what)
    return {
        "n_shared_experts": experts.shared_size // experts.size,
        "first_k_dense_replace": dense,
    }


KHA = ExpertFields(
    _COMMON
    | _GROUPS
    | {
        "count": "num_experts",
        "shared_size": "shared_expert_intermediate_size",
        "shared_gate": "shared_expert_gate",
        "score": "scoring_func",
        "scaling": "routed_scaling_factor",
    },
    _read_kha,
    _write_kha,
    ("num_local_experts", "mlp_layer_types"),
    dense={},
)
"""Of ``kha``, whose fields are Megatron's."""

QWEN3 = ExpertFields(
    _COMMON | {"count": "num_experts"},
    _read_qwen3,
    _write_qwen3,
    ("num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
    only={"score": "softmax", "scaling": 1.0, "shared_size": 0, "groups": 1},
)
"""Of ``qwen3_moe``: softmax, no shared expert, any layer dense."""

DEEPSEEK = ExpertFields(
    _COMMON | _GROUPS | {"count": "n_routed_experts", "scaling": "routed_scaling_factor"},
    _read_deepseek,
    _write_deepseek,
    (
        "num_local_experts",
        "n_shared_experts",
        "first_k_dense_replace",
        "moe_layer_freq",
        "scoring_func",
        "topk_method",
    ),
    only={"score": "sigmoid", "bias": True, "shared_gate": False},
    dense={"first_k_dense_replace": "layers"},
)
"""Of ``deepseek_v3`` and ``glm4_moe``: sigmoid with a correction bias, dense layers first."""
