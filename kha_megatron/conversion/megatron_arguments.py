"""Megatron's saved arguments as an architecture, and back to arguments and command line."""

from collections.abc import Iterable, Mapping
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import (
    LATENT,
    ROWS,
    STYLE,
    Architecture,
    Llama3Scaling,
    Yarn,
)
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import Gate

REPRESENTED: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "position_embedding_type": ("rope",),
    "add_bias_linear": (False,),
    "layernorm_zero_centered_gamma": (False, None),
    "qk_l2_norm": (False, None),
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

_HYBRID = {"-": 0, "E": 1}
"""Symbols of an MLP in ``--hybrid-layer-pattern``, and whether it has experts."""

_AS_THEY_ARE = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "layernorm_epsilon",
    "rotary_percent",
    "qk_layernorm",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "init_method_std",
    "attention_dropout",
)
"""Fields that are read and written without a thought."""

_OF_EXPERTS = (
    "num_experts",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)
_OF_GROUPS = ("moe_router_num_groups", "moe_router_group_topk")
_SIZES = (
    "num_layers",
    "num_query_groups",
    "group_query_attention",
    "kv_channels",
    "vocab_size",
    "padded_vocab_size",
    "multi_latent_attention",
    "attention_output_gate",
)
"""Fields that are written as they are."""

_OUTPUT_GATE = KHAConfig(gate=Gate(output="element"))
"""What ``attention_output_gate`` means, without anything beside it."""


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


def hybrid_layers(args: Mapping[str, Any]) -> tuple[int, ...] | None:
    """For a HybridModel that is a GPT model cut in two, which of its MLPs have experts.

    Returns:
        1 for those, 0 for the others; None for a GPTModel.

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


def _read(args: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: ROWS[name].typed(args[ROWS[name].argument]) for name in names}


def _architecture(args: Mapping[str, Any], kha: KHAConfig, rows: int) -> Architecture:
    hybrid = hybrid_layers(args)
    for name in ("multi_latent_attention", "use_rope_scaling", "kha_attention"):
        if hybrid and args.get(name):
            raise _refused(name, args[name], "not with hybrid_layer_pattern")
    latent = bool(args.get("multi_latent_attention"))
    given: dict[str, Any] = _read(args, _AS_THEY_ARE) | (_latent(args) if latent else {})
    if kha.attention == "gta" and not latent and given["rotary_percent"] != 0.5:
        raise _refused("rotary_percent", given["rotary_percent"], "only 0.5 with kha_attention=gta")
    heads, layers = given["num_attention_heads"], len(hybrid or ()) or args["num_layers"]
    grouped = args["group_query_attention"] and not latent
    groups = args["num_query_groups"] if grouped else heads
    return Architecture(
        **STYLE,
        **given | (_experts(args, layers, hybrid) if args["num_experts"] else {}),
        vocab_size=rows,
        padded_vocab_size=rows,
        num_layers=layers,
        num_query_groups=groups,
        group_query_attention=groups != heads,
        kv_channels=given["v_head_dim"] if latent else args["kv_channels"],
        rotary_base=float(args["rotary_base"]),
        scaling=_latent_scaling(args) if latent else _scaling(args),
        multi_latent_attention=latent,
        kha=kha,
    )


def _latent(args: Mapping[str, Any]) -> dict[str, Any]:
    if args["q_lora_rank"] is None and args["qk_layernorm"]:
        # then Megatron normalises what queries are projected from
        raise _refused("q_lora_rank", None, "queries must be compressed with qk_layernorm")
    if args.get("rope_type") == "rope" and args["rotary_percent"] != 1.0:
        raise _refused("rotary_percent", args["rotary_percent"], "only 1.0 with rope_type=rope")
    if args["add_qkv_bias"]:
        raise _refused("add_qkv_bias", True, "not with multi_latent_attention")
    return _read(args, LATENT)


def _scaling(args: Mapping[str, Any]) -> Llama3Scaling | None:
    if not args.get("use_rope_scaling"):
        return None
    asked, factor = float(args["rope_scaling_factor"]), rope_scaling_factor(args)
    if asked != factor:
        announce(
            f"--rope-scaling-factor {asked:g} was recorded by a script of Megatron's, which drops "
            f"it and computes with {factor:g}: read as {factor:g}. Where yours heeds it, set "
            f"rope_parameters.factor to {asked:g} in the exported config.json",
            once=("rope_scaling_factor", asked),
        )
    return Llama3Scaling(factor=factor)


STOCK_FACTOR = 8.0
"""By which Megatron's own scripts stretch RoPE, whatever ``--rope-scaling-factor`` says."""
_STOCK_SPEC = "kha_megatron.training.stock"
"""The module that a patched Megatron names as its spec where ``--kha-*`` choose the heads."""


def rope_scaling_factor(args: Mapping[str, Any]) -> float:
    """What a training with ``--use-rope-scaling`` has computed with.

    Megatron's own scripts are told by ``spec``, which every training records, beside no ``kha_*``
    of our entry point; that one heeds the argument. A converted checkpoint has no ``spec``.
    """
    of_our_entry_point = "kha_query" in args and (args.get("spec") or [None])[0] != _STOCK_SPEC
    if "spec" in args and not of_our_entry_point:
        return STOCK_FACTOR
    return float(args["rope_scaling_factor"])


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
    args: Mapping[str, Any], layers: int, hybrid: tuple[int, ...] | None
) -> dict[str, Any]:
    score = args["moe_router_score_function"]
    if score not in ("softmax", "sigmoid"):
        raise _refused("moe_router_score_function", score, "only softmax and sigmoid")
    if args["moe_router_enable_expert_bias"] and score != "sigmoid":
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
    factor, groups = args["moe_router_topk_scaling_factor"], args.get("moe_router_num_groups") or 1
    return _read(args, _OF_EXPERTS) | {
        "moe_ffn_hidden_size": args["moe_ffn_hidden_size"] or args["ffn_hidden_size"],
        "moe_shared_expert_intermediate_size": args["moe_shared_expert_intermediate_size"] or None,
        "moe_layer_freq": hybrid or tuple(map(int, frequency)),
        # Megatron divides sigmoid scores by their sum only when there is more than one, and takes
        # the softmax over the chosen logits unless told to take it before
        "normalised": args["moe_router_topk"] > 1
        if score == "sigmoid"
        else not args["moe_router_pre_softmax"],
        "moe_router_topk_scaling_factor": None if factor == 1.0 else factor,
        **({name: args.get(name) for name in _OF_GROUPS} if groups > 1 else {}),
    }


def to_arguments(model: Architecture) -> dict[str, Any]:
    """What Megatron would have saved for a model: its model arguments, by their names.

    Raises:
        CheckpointError: Megatron cannot compute what the model does.
    """
    names = (*STYLE, *_AS_THEY_ARE, *_SIZES, *(LATENT if model.multi_latent_attention else ()))
    args = {ROWS[name].argument: getattr(model, name) for name in names}
    args |= {
        "seq_length": model.max_position_embeddings,
        "norm_epsilon": model.layernorm_epsilon,
        **_rope_arguments(model),
        **(_expert_arguments(model) if model.num_experts else {"num_experts": None}),
    }
    if model.multi_latent_attention and model.q_lora_rank is None and model.qk_layernorm:
        raise CheckpointError(
            "q_lora_rank=None with a norm of the latent: Megatron would normalise what queries are "
            "projected from as well: compress queries, or do without the norm"
        )
    said = model.attention_output_gate and model.kha == _OUTPUT_GATE
    if (model.kha.mechanisms or model.kha.attention is not None) and not said:
        args |= model.kha.recording(multi_latent=model.multi_latent_attention)
    return args


def _rope_arguments(model: Architecture) -> dict[str, Any]:
    scaling, base = model.scaling, model.rotary_base
    args: dict[str, Any] = {
        "add_position_embedding": False,
        "use_rotary_position_embeddings": False,
        "rotary_base": int(base) if base == int(base) else base,
        "rotary_interleaved": False,
        "use_rope_scaling": isinstance(scaling, Llama3Scaling),
    }
    if scaling is not None:
        named = {ours: getattr(scaling, ours) for ours in scaling.arguments}
        if scaling != (all_of_them := type(scaling)(**named)):
            raise CheckpointError(
                f"rope_parameters with {scaling}: Megatron has no argument for the other "
                f"constants, only {all_of_them}"
            )
        args |= {scaling.arguments[ours]: value for ours, value in named.items()}
    if model.multi_latent_attention:
        args["rope_type"] = "rope" if scaling is None else scaling.rope_type
        args.setdefault("rotary_scaling_factor", 1.0)
    return args


def _expert_arguments(model: Architecture) -> dict[str, Any]:
    sigmoid, top_k = model.moe_router_score_function == "sigmoid", model.moe_router_topk
    if sigmoid and model.normalised != (top_k > 1):
        raise CheckpointError(
            f"norm_topk_prob={model.normalised} with sigmoid scores and "
            f"num_experts_per_tok={top_k}: Megatron divides by the sum when there is more than one "
            "expert, and only then"
        )
    if not sigmoid and model.normalised and top_k == 1:
        raise CheckpointError(
            "norm_topk_prob=True with softmax scores and num_experts_per_tok=1 gives every token "
            "the weight 1, which Megatron refuses to train"
        )
    names = (*_OF_EXPERTS, *_OF_GROUPS, "moe_ffn_hidden_size", "moe_router_topk_scaling_factor")
    return {name: getattr(model, name) for name in names} | {
        "moe_layer_freq": 1 if model.is_uniform else list(model.moe_layer_freq),
        "moe_router_pre_softmax": not sigmoid and not model.normalised,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }


_UNHEEDED = (
    "layernorm_epsilon",
    "qk_layernorm",
    "attention_output_gate",
    "use_rope_scaling",
    "rope_scaling_factor",
    "multi_latent_attention",
    *LATENT,
    "rope_type",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
    "moe_router_dtype",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_shared_expert_gate",
    "bf16",
    "fp16",
)
"""Arguments of the model that Megatron's ``--use-checkpoint-args`` leaves as they are."""

_UNHEEDED_OF_GTA = ("position_embedding_type", "rotary_percent")
"""Of GTA also these, which our entry point looks at before Megatron reads the checkpoint's."""


def command_line(args: Mapping[str, Any], folder: str) -> list[str]:
    """What a new run needs on its command line to begin with a converted checkpoint.

    Not ``--load``: started again, the run would begin anew, and overwrite what it has saved.

    Args:
        args: from :func:`to_arguments`.
        folder: the checkpoint.
    """
    words = ["--pretrained-checkpoint", folder, "--use-checkpoint-args"]
    tied = args.get("kha_attention") == "gta"
    for name in (*_UNHEEDED, *(_UNHEEDED_OF_GTA if tied else ())):
        flag = ROWS[name].flag if name in ROWS else f"--{name.replace('_', '-')}"
        value = args.get(name)
        if value is not None and value is not False:
            words += [flag] if value is True else [flag, str(value)]
    return words
