"""Mixture-of-experts fields of Hugging Face configurations, each way; see ``hf_configs``."""

from typing import Any

from transformers import PreTrainedConfig

from kha_megatron.conversion.architecture import Architecture, Experts
from kha_megatron.errors import CheckpointError

KHA = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "mlp_layer_types",
    "shared_expert_intermediate_size",
    "shared_expert_gate",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
)
QWEN3 = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
    "norm_topk_prob",
)
DEEPSEEK = (
    "n_routed_experts",
    "num_local_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "scoring_func",
    "topk_method",
)


def write_none(model: Architecture) -> dict[str, Any]:
    """Of an architecture without experts."""
    if model.experts is not None:
        raise CheckpointError(
            "mixture-of-experts layers cannot be expressed by a dense architecture: choose "
            "another --architecture"
        )
    return {}


def read_kha(config: PreTrainedConfig) -> Experts | None:
    """Of ``kha``, whose fields are Megatron's."""
    sparse = tuple(kind == "sparse" for kind in config.mlp_layer_types)
    if not any(sparse):
        return None
    return Experts(
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        sparse=sparse,
        score=config.scoring_func,
        normalised=config.norm_topk_prob,
        scaling=float(config.routed_scaling_factor),
        bias=config.scoring_func == "sigmoid",
        shared_size=config.shared_expert_intermediate_size,
        shared_gate=config.shared_expert_gate,
        groups=config.n_group,
        groups_per_token=config.topk_group if config.n_group > 1 else 1,
    )


def write_kha(model: Architecture) -> dict[str, Any]:
    """Of ``kha``."""
    experts = model.experts
    if experts is None:
        return {}
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.size,
        "mlp_layer_types": ["sparse" if sparse else "dense" for sparse in experts.sparse],
        "shared_expert_intermediate_size": experts.shared_size,
        "shared_expert_gate": experts.shared_gate,
        "scoring_func": experts.score,
        "norm_topk_prob": experts.normalised,
        "routed_scaling_factor": experts.scaling,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
    }


def read_qwen3(config: PreTrainedConfig) -> Experts | None:
    """Of ``qwen3_moe``: softmax, no shared expert, any layer dense."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    count = config.num_experts
    sparse = tuple(
        i not in dense and count > 0 and (i + 1) % step == 0
        for i in range(config.num_hidden_layers)
    )
    if not any(sparse):
        return None
    return Experts(
        count=count,
        per_token=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        sparse=sparse,
        normalised=config.norm_topk_prob,
    )


def write_qwen3(model: Architecture) -> dict[str, Any]:
    """Of ``qwen3_moe``."""
    experts = model.experts
    if experts is None:
        raise _refused("qwen3_moe", "a dense model")
    for wrong, what in (
        (experts.score != "softmax", f"{experts.score} scores of the router"),
        (experts.scaling != 1.0, f"moe_router_topk_scaling_factor={experts.scaling}"),
        (experts.shared_size > 0, "a shared expert"),
        (experts.groups > 1, f"experts chosen from {experts.groups} groups"),
    ):
        if wrong:
            raise _refused("qwen3_moe", what)
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(experts.sparse) if not sparse],
        "norm_topk_prob": experts.normalised,
    }


def read_deepseek(config: PreTrainedConfig) -> Experts | None:
    """Of ``deepseek_v3`` and ``glm4_moe``: sigmoid with a correction bias, dense layers first."""
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
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    if dense >= layers:
        return None
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
    return Experts(
        count=config.n_routed_experts,
        per_token=per_token,
        size=config.moe_intermediate_size,
        sparse=tuple(layer >= dense for layer in range(layers)),
        score="sigmoid",
        normalised=config.norm_topk_prob,
        scaling=float(config.routed_scaling_factor),
        bias=True,
        shared_size=config.moe_intermediate_size * (config.n_shared_experts or 0),
        groups=groups,
        groups_per_token=config.topk_group if groups > 1 else 1,
    )


def write_deepseek(model: Architecture) -> dict[str, Any]:
    """Of ``deepseek_v3`` and ``glm4_moe``."""
    experts = model.experts
    if experts is None:
        return {"first_k_dense_replace": model.layers}
    dense = experts.sparse.index(True)
    for wrong, what in (
        (experts.score != "sigmoid", f"{experts.score} scores of the router"),
        (not all(experts.sparse[dense:]), "a dense layer behind one with experts"),
        (experts.shared_gate, "a gate of the shared expert"),
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
            raise _refused("an architecture with sigmoid routing (glm4_moe, deepseek_v3)", what)
    return {
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared_size // experts.size,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.size,
        "first_k_dense_replace": dense,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "norm_topk_prob": experts.normalised,
        "routed_scaling_factor": experts.scaling,
    }


def _refused(architecture: str, what: str) -> CheckpointError:
    return CheckpointError(f"{architecture} cannot express {what}: choose another --architecture")
