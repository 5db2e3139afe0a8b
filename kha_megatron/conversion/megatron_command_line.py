"""From an architecture to Megatron's arguments; ``megatron_arguments`` is the way back."""

from collections.abc import Mapping
from typing import Any

from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import (
    Architecture,
    Experts,
    Llama3Scaling,
    Yarn,
)
from kha_megatron.errors import CheckpointError


def to_arguments(model: Architecture) -> dict[str, Any]:
    """What Megatron would have saved for a model: its model arguments, by their names.

    Raises:
        CheckpointError: Megatron cannot compute what the model does.
    """
    return (
        {
            "num_layers": model.layers,
            "hidden_size": model.hidden_size,
            "ffn_hidden_size": model.ffn_size,
            "num_attention_heads": model.heads,
            "group_query_attention": model.kv_heads != model.heads,
            "num_query_groups": model.kv_heads,
            "kv_channels": model.head_dim if model.latent is None else model.latent.value_dim,
            "max_position_embeddings": model.max_positions,
            "seq_length": model.max_positions,
            "normalization": "RMSNorm",
            "layernorm_epsilon": model.norm_eps,
            "norm_epsilon": model.norm_eps,
            "swiglu": True,
            "add_bias_linear": False,
            "add_qkv_bias": model.qkv_bias,
            "qk_layernorm": model.qk_norm,
            "untie_embeddings_and_output_weights": not model.tied,
            "init_method_std": model.init_std,
            "attention_dropout": model.attention_dropout,
            "hidden_dropout": 0.0,
            "multi_latent_attention": model.latent is not None,
            "padded_vocab_size": model.padded_vocab_size,
            "vocab_size": model.vocab_size,
        }
        | _rope_arguments(model)
        | (_latent_arguments(model) if model.latent else {})
        | (_expert_arguments(model.experts) if model.experts else {"num_experts": None})
        | _kha_arguments(model.kha)
    )


def _rope_arguments(model: Architecture) -> dict[str, Any]:
    rope, scaling = model.rope, model.rope.scaling
    base = int(rope.base) if rope.base == int(rope.base) else rope.base
    args = {
        "position_embedding_type": "rope",
        "add_position_embedding": False,
        "use_rotary_position_embeddings": False,
        "rotary_base": base,
        "rotary_percent": rope.fraction,
        "rotary_interleaved": False,
        "use_rope_scaling": isinstance(scaling, Llama3Scaling),
    }
    if isinstance(scaling, Llama3Scaling):
        if scaling != Llama3Scaling(factor=scaling.factor):
            raise CheckpointError(
                f"rope_parameters with {scaling}: Megatron has Llama 3's constants only, "
                f"{Llama3Scaling(factor=scaling.factor)}"
            )
        args["rope_scaling_factor"] = scaling.factor
    if model.latent and scaling is None:
        args |= {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if isinstance(scaling, Yarn):
        fixed = Yarn(
            factor=scaling.factor, mscale=scaling.mscale, mscale_all_dim=scaling.mscale_all_dim
        )
        if scaling != fixed:
            raise CheckpointError(
                f"rope_parameters with {scaling}: Megatron takes DeepSeek's constants from no "
                f"argument, only {fixed}"
            )
        args |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling.factor,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    return args


def _latent_arguments(model: Architecture) -> dict[str, Any]:
    latent = model.latent
    if latent.query_rank is None and model.qk_norm:
        raise CheckpointError(
            "q_lora_rank=None with a norm of the latent: Megatron would normalise what queries are "
            "projected from as well: compress queries, or do without the norm"
        )
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
    }


def _expert_arguments(experts: Experts) -> dict[str, Any]:
    sigmoid = experts.score == "sigmoid"
    if sigmoid and experts.normalised != (experts.per_token > 1):
        raise CheckpointError(
            f"norm_topk_prob={experts.normalised} with sigmoid scores and "
            f"num_experts_per_tok={experts.per_token}: Megatron divides by the sum when there is "
            "more than one expert, and only then"
        )
    if not sigmoid and experts.normalised and experts.per_token == 1:
        raise CheckpointError(
            "norm_topk_prob=True with softmax scores and num_experts_per_tok=1 gives every token "
            "the weight 1, which Megatron refuses to train"
        )
    grouped = experts.groups > 1
    return {
        "num_experts": experts.count,
        "moe_layer_freq": 1 if all(experts.sparse) else [int(sparse) for sparse in experts.sparse],
        "moe_ffn_hidden_size": experts.size,
        "moe_router_topk": experts.per_token,
        "moe_router_score_function": experts.score,
        "moe_router_pre_softmax": not sigmoid and not experts.normalised,
        "moe_router_topk_scaling_factor": None if experts.scaling == 1.0 else experts.scaling,
        "moe_router_enable_expert_bias": experts.bias,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": experts.groups if grouped else None,
        "moe_router_group_topk": experts.groups_per_token if grouped else None,
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_grouped_gemm": False,
    }


def _kha_arguments(kha: KHAConfig) -> dict[str, Any]:
    if not kha.variants and kha.attention is None:
        return {}
    return {f"kha_{name}": value for name, value in kha.to_dict().items()}


_FLAGS = {
    "layernorm_epsilon": "--norm-epsilon",
    "qk_layernorm": "--qk-layernorm",
    "use_rope_scaling": "--use-rope-scaling",
    "rope_scaling_factor": "--rope-scaling-factor",
    "multi_latent_attention": "--multi-latent-attention",
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_head_dim": "--qk-head-dim",
    "qk_pos_emb_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
    "rope_type": "--rope-type",
    "rotary_scaling_factor": "--rotary-scaling-factor",
    "mscale": "--mscale",
    "mscale_all_dim": "--mscale-all-dim",
    "moe_router_dtype": "--moe-router-dtype",
    "moe_router_num_groups": "--moe-router-num-groups",
    "moe_router_group_topk": "--moe-router-group-topk",
    "moe_shared_expert_gate": "--moe-shared-expert-gate",
    "bf16": "--bf16",
    "fp16": "--fp16",
}
"""Arguments of the model that Megatron's ``--use-checkpoint-args`` leaves as they are."""

_TIED_FLAGS = {
    "position_embedding_type": "--position-embedding-type",
    "rotary_percent": "--rotary-percent",
}
"""Of GTA also these, which our entry point looks at before Megatron reads the checkpoint's."""


def command_line(args: Mapping[str, Any], folder: str) -> list[str]:
    """What a training needs on its command line to go on from a converted checkpoint.

    Args:
        args: from :func:`to_arguments`.
        folder: the checkpoint.
    """
    words = ["--load", folder, "--use-checkpoint-args"]
    tied = args.get("kha_attention") == "gta"
    for name, flag in (_FLAGS | (_TIED_FLAGS if tied else {})).items():
        value = args.get(name)
        if value is not None and value is not False:
            words += [flag] if value is True else [flag, str(value)]
    return words
