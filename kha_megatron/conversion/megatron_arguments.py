"""Megatron's saved arguments as an architecture, and back to arguments and command line."""

from collections.abc import Mapping
from typing import Any

from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import (
    Architecture,
    Experts,
    Latent,
    Llama3Scaling,
    Rope,
    Yarn,
)
from kha_megatron.errors import CheckpointError

REPRESENTED: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "position_embedding_type": ("rope",),
    "add_bias_linear": (False,),
    "layernorm_zero_centered_gamma": (False, None),
    "qk_l2_norm": (False, None),
    "attention_output_gate": (False, None),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "softmax_type": ("vanilla", None),
    "window_size": (None,),
    "no_rope_freq": (None,),
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None,),
    "apply_residual_connection_post_layernorm": (False, None),
    "use_mup": (False, None),
    "mtp_num_layers": (None, 0),
    "moe_apply_probs_on_input": (False, None),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "moe_expert_capacity_factor": (None,),
    "moe_router_force_load_balancing": (False, None),
    "moe_router_force_biased": (None,),
    "glu_linear_offset": (0.0, None),
    "activation_func_clamp_value": (None,),
    "heterogeneous_layers_config_path": (None,),
}
"""Arguments that change what a model computes, with the values that we can express."""

_ROUTING_BY_BALANCE = ("sinkhorn", "quantile_balancing")
"""Load balancing that is a routing rule of its own, not a loss."""

_HYBRID = {"-": False, "E": True}
"""Symbols of an MLP in ``--hybrid-layer-pattern``, and whether it has experts."""


def from_arguments(args: Mapping[str, Any], kha: KHAConfig, padded_vocab_size: int) -> Architecture:
    """The architecture of a Megatron model; ``vocab_size`` is still the padded one.

    Args:
        args: Megatron's saved arguments (``MegatronCheckpoint.args``).
        kha: what is knocked.
        padded_vocab_size: rows of the embedding.

    Raises:
        CheckpointError: an argument changes the model in a way that we cannot express.
        ConfigError: a kind of attention that the other arguments contradict.
    """
    for name, allowed in REPRESENTED.items():
        if args.get(name) not in allowed:
            raise _refused(name, args.get(name), f"only {allowed[0]!r}")
    try:
        return _architecture(args, kha, padded_vocab_size)
    except KeyError as error:
        raise CheckpointError(
            f"the checkpoint's training arguments lack {error.args[0]}: it was not saved by a "
            "supported version of Megatron's training loop"
        ) from error


def hybrid_layers(args: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """For a HybridModel that is a GPT model cut in two, which of its MLPs have experts.

    Returns:
        None for a GPTModel.

    Raises:
        CheckpointError: its layers are no alternation of attention and MLPs.
    """
    pattern = args.get("hybrid_layer_pattern")
    if pattern is None:
        return None
    symbols = pattern.replace("|", "") if isinstance(pattern, str) else ""
    mlps = symbols[1::2]
    if not mlps or set(symbols[::2]) != {"*"} or len(symbols) % 2 or not set(mlps) <= set(_HYBRID):
        raise _refused(
            "hybrid_layer_pattern", pattern, "only attention * and an MLP, - or E, by turns"
        )
    return tuple(_HYBRID[symbol] for symbol in mlps)


def _refused(name: str, value: Any, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint was trained with {name}={value!r}, which cannot be expressed ({remedy})"
    )


def _architecture(args: Mapping[str, Any], kha: KHAConfig, rows: int) -> Architecture:
    heads = args["num_attention_heads"]
    latent = _latent(args) if args.get("multi_latent_attention") else None
    hybrid = hybrid_layers(args)
    layers = args["num_layers"] if hybrid is None else len(hybrid)
    grouped = args["group_query_attention"] and latent is None
    for name in ("multi_latent_attention", "use_rope_scaling", "kha_attention"):
        if hybrid and args.get(name):
            raise _refused(name, args[name], "not with hybrid_layer_pattern")
    if kha.attention == "gta" and latent is None and args["rotary_percent"] != 0.5:
        raise _refused("rotary_percent", args["rotary_percent"], "only 0.5 with kha_attention=gta")
    if latent and args["add_qkv_bias"]:
        raise _refused("add_qkv_bias", True, "not with multi_latent_attention")
    return Architecture(
        vocab_size=rows,
        padded_vocab_size=rows,
        hidden_size=args["hidden_size"],
        ffn_size=args["ffn_hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=args["num_query_groups"] if grouped else heads,
        head_dim=args["kv_channels"] if latent is None else latent.rotary_dim,
        max_positions=args["max_position_embeddings"],
        norm_eps=args["layernorm_epsilon"],
        rope=Rope(
            base=float(args["rotary_base"]),
            fraction=float(args["rotary_percent"]),
            scaling=_latent_scaling(args) if latent else _scaling(args),
        ),
        tied=not args["untie_embeddings_and_output_weights"],
        qk_norm=bool(args["qk_layernorm"]),
        qkv_bias=bool(args["add_qkv_bias"]),
        init_std=args["init_method_std"],
        attention_dropout=args["attention_dropout"],
        experts=_experts(args, layers, hybrid),
        latent=latent,
        kha=kha,
    )


def _latent(args: Mapping[str, Any]) -> Latent:
    if args["q_lora_rank"] is None and args["qk_layernorm"]:
        # then Megatron normalises what queries are projected from
        raise _refused("q_lora_rank", None, "queries must be compressed with qk_layernorm")
    if args.get("rope_type") == "rope" and args["rotary_percent"] != 1.0:
        raise _refused("rotary_percent", args["rotary_percent"], "only 1.0 with rope_type=rope")
    return Latent(
        query_rank=args["q_lora_rank"],
        kv_rank=args["kv_lora_rank"],
        plain_dim=args["qk_head_dim"],
        rotary_dim=args["qk_pos_emb_head_dim"],
        value_dim=args["v_head_dim"],
    )


def _scaling(args: Mapping[str, Any]) -> Llama3Scaling | None:
    if not args.get("use_rope_scaling"):
        return None
    return Llama3Scaling(factor=float(args["rope_scaling_factor"]))


def _latent_scaling(args: Mapping[str, Any]) -> Yarn | None:
    """Megatron's latent attention has YaRN unless told otherwise; a factor of 1 is plain RoPE."""
    factor = float(args["rotary_scaling_factor"])
    plain = args.get("rope_type") == "rope"
    if plain and factor > 1.0 and args["mscale_all_dim"]:  # which Megatron's softmax heeds alone
        raise _refused("mscale_all_dim", args["mscale_all_dim"], "only 0.0 with rope_type=rope")
    if plain or factor == 1.0:
        return None
    return Yarn(factor=factor, mscale=args["mscale"], mscale_all_dim=args["mscale_all_dim"])


def _experts(
    args: Mapping[str, Any], layers: int, hybrid: tuple[bool, ...] | None
) -> Experts | None:
    if not args["num_experts"]:
        return None
    sigmoid = args["moe_router_score_function"] == "sigmoid"
    if not sigmoid and args["moe_router_score_function"] != "softmax":
        raise _refused(
            "moe_router_score_function",
            args["moe_router_score_function"],
            "only softmax and sigmoid",
        )
    if args["moe_router_enable_expert_bias"] and not sigmoid:
        raise CheckpointError(
            "moe_router_enable_expert_bias with softmax scores cannot be expressed: only sigmoid"
        )
    if args["moe_router_load_balancing_type"] in _ROUTING_BY_BALANCE:
        raise _refused(
            "moe_router_load_balancing_type",
            args["moe_router_load_balancing_type"],
            "it chooses experts by itself; only balancing by losses or expert biases",
        )
    frequency = args["moe_layer_freq"]
    if isinstance(frequency, int):
        frequency = [layer % frequency == 0 for layer in range(layers)]
    top_k = args["moe_router_topk"]
    return Experts(
        count=args["num_experts"],
        per_token=top_k,
        size=args["moe_ffn_hidden_size"] or args["ffn_hidden_size"],
        sparse=hybrid or tuple(map(bool, frequency)),
        score="sigmoid" if sigmoid else "softmax",
        # Megatron divides sigmoid scores by their sum only when there is more than one, and takes
        # the softmax over the chosen logits unless told to take it before
        normalised=top_k > 1 if sigmoid else not args["moe_router_pre_softmax"],
        scaling=args["moe_router_topk_scaling_factor"] or 1.0,
        bias=bool(args["moe_router_enable_expert_bias"]),
        shared_size=args["moe_shared_expert_intermediate_size"] or 0,
        shared_gate=bool(args["moe_shared_expert_gate"]),
        groups=args.get("moe_router_num_groups") or 1,
        groups_per_token=args.get("moe_router_group_topk") or 1,
    )


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
    if not kha.mechanisms and kha.attention is None:
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
