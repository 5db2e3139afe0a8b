"""Convert between Megatron's training arguments and :class:`Architecture`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.conversion.architecture import LATENT, ROWS, STYLE, Architecture
from kha_megatron.errors import CheckpointError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.pattern import LayerPattern
from kha_megatron.model.rope import Llama3Scaling, RopeScaling, Yarn

SUPPORTED_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "position_embedding_type": ("rope", "yarn"),
    "yarn_correction_range_round_to_int": (True, None),
    "add_bias_linear": (False,),
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
"""Allow-list for other arguments that would change the model's outputs."""

_HYBRID = "hybrid_layer_pattern"

_READ = (
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
"""Fields we can simply copy in both directions."""
_WRITTEN = (
    "num_layers",
    "mtp_num_layers",
    "num_query_groups",
    "group_query_attention",
    "kv_channels",
    "vocab_size",
    "padded_vocab_size",
    "multi_latent_attention",
    "attention_output_gate",
    "layernorm_zero_centered_gamma",
)
"""Fields we can copy when writing, but not when reading."""
_EXPERTS = (
    "num_experts",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)
_GROUPS = ("moe_router_num_groups", "moe_router_group_topk")


def from_arguments(
    args: Mapping[str, Any], kha: HeadsConfig, padded_vocab_size: int
) -> Architecture:
    """Parse the arguments stored in a checkpoint.

    Note: ``vocab_size`` still includes padding here.
    """
    for name, allowed in SUPPORTED_ARGUMENTS.items():
        if args.get(name) not in allowed:
            raise _unsupported(name, args.get(name), f"expected {allowed[0]!r}")
    try:
        return _architecture(args, kha, padded_vocab_size)
    except KeyError as error:
        raise CheckpointError(
            f"Argument {error.args[0]} is missing in the checkpoint. Was it saved by another "
            "version of Megatron?"
        ) from error


def _unsupported(name: str, value: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint was trained with {name}={value!r}, which is not supported: {why}."
    )


def _copy(args: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: ROWS[name].convert(args[ROWS[name].argument]) for name in names}


def _architecture(args: Mapping[str, Any], kha: HeadsConfig, rows: int) -> Architecture:
    pattern, text = None, args.get(_HYBRID)
    if text is not None:
        pattern = LayerPattern.parse(text) if isinstance(text, str) else None
        if pattern is None:
            raise _unsupported(_HYBRID, text, "expected attention alternating with - or E")
        if args.get("use_rope_scaling") and not _of_our_entry_point(args):
            raise _unsupported("use_rope_scaling", True, "stock hybrid models ignore it")
    latent = bool(args.get("multi_latent_attention"))
    given = _copy(args, (*_READ, *(LATENT if latent else ())))
    if latent and given["q_lora_rank"] is None and given["qk_layernorm"]:
        # Megatron would then normalize the input of q_proj
        raise _unsupported("q_lora_rank", None, "qk_layernorm requires compressed queries")
    heads = given["num_attention_heads"]
    layers = len(pattern.moe) if pattern else args["num_layers"]
    predictions = (pattern.predictions if pattern else args.get("mtp_num_layers")) or None
    groups = args["num_query_groups"] if args["group_query_attention"] and not latent else heads
    if args["num_experts"]:
        given |= _experts(args, layers, pattern.moe if pattern else ())
    return Architecture(
        **STYLE,
        **given,
        vocab_size=rows,
        padded_vocab_size=rows,
        num_layers=layers,
        mtp_num_layers=predictions and (1 if args.get("mtp_use_repeated_layer") else predictions),
        num_query_groups=groups,
        group_query_attention=groups != heads,
        kv_channels=given["v_head_dim"] if latent else args["kv_channels"],
        rotary_base=float(args["rotary_base"]),
        scaling=_latent_yarn(args) if latent else _scaling(args),
        multi_latent_attention=latent,
        layernorm_zero_centered_gamma=bool(args.get("layernorm_zero_centered_gamma")),
        gpt_model=pattern is None,
        kha=kha,
    )


def _experts(args: Mapping[str, Any], layers: int, sparse: Sequence[int]) -> dict[str, Any]:
    """Read the MoE arguments. For hybrid models, ``sparse`` overrides ``moe_layer_freq``."""
    score, balance = args["moe_router_score_function"], args["moe_router_load_balancing_type"]
    if score not in ("softmax", "sigmoid"):
        raise _unsupported("moe_router_score_function", score, "expected softmax or sigmoid")
    if balance in ("sinkhorn", "quantile_balancing"):
        raise _unsupported("moe_router_load_balancing_type", balance, "it affects expert selection")
    frequency = args["moe_layer_freq"]
    if isinstance(frequency, int):
        frequency = [layer % frequency == 0 for layer in range(layers)]
    factor, groups = args["moe_router_topk_scaling_factor"], args.get("moe_router_num_groups") or 1
    # Sigmoid scores are only normalized for top-k > 1. Softmax comes after top-k (so weights sum
    # to 1), unless moe_router_pre_softmax is set.
    sigmoid = score == "sigmoid"
    normalizes_topk = args["moe_router_topk"] > 1 if sigmoid else not args["moe_router_pre_softmax"]
    return _copy(args, _EXPERTS) | {
        "moe_ffn_hidden_size": args["moe_ffn_hidden_size"] or args["ffn_hidden_size"],
        "moe_shared_expert_intermediate_size": args["moe_shared_expert_intermediate_size"] or None,
        "moe_layer_freq": tuple(map(int, sparse or frequency)),
        "normalizes_topk": normalizes_topk,
        "moe_router_dtype": args.get("moe_router_dtype"),
        "moe_router_topk_scaling_factor": None if factor == 1.0 else factor,
        **({name: args.get(name) for name in _GROUPS} if groups > 1 else {}),
    }


STOCK_SCALING = Llama3Scaling(factor=8.0)
"""Megatron's own scripts always use this scaling and ignore ``--rope-scaling-factor``."""
_STOCK_SPEC = "kha_megatron.training.stock"
"""Used with Megatron's own training script, patched to accept ``--kha-*`` flags."""


def rope_scaling_factor(args: Mapping[str, Any]) -> float:
    """Return the RoPE scaling factor that was really used in training.

    Only our own entry point respects ``--rope-scaling-factor``. We can tell from the ``kha_*``
    arguments whether it was used. Converted checkpoints do not have a ``spec`` and always store the
    right factor.
    """
    return float(args["rope_scaling_factor"] if _of_our_entry_point(args) else STOCK_SCALING.factor)


def _of_our_entry_point(args: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was converted or trained with our entry point."""
    return "spec" not in args or (
        "kha_query" in args and (args["spec"] or [None])[0] != _STOCK_SPEC
    )


def _scaling(args: Mapping[str, Any]) -> Llama3Scaling | Yarn | None:
    if args["position_embedding_type"] == "yarn":
        if args["rotary_percent"] != 1.0:  # ignored by Megatron
            raise _unsupported("rotary_percent", args["rotary_percent"], "YaRN requires 1.0")
        yarn = Yarn(**_given(args, Yarn))
        return yarn if yarn.factor != 1.0 else None
    return _llama3(args) if args.get("use_rope_scaling") else None


def _given(args: Mapping[str, Any], kind: type[RopeScaling]) -> dict[str, Any]:
    """Return the fields of ``kind`` whose arguments are set."""
    found = {ours: args.get(name) for ours, name in kind.arguments.items()}
    return {ours: value for ours, value in found.items() if value is not None}


def _llama3(args: Mapping[str, Any]) -> Llama3Scaling:
    asked, factor = float(args["rope_scaling_factor"]), rope_scaling_factor(args)
    if asked != factor:
        announce(
            f"Using a RoPE scaling factor of {factor:g}, because Megatron's own scripts ignore "
            f"--rope-scaling-factor {asked:g}. If your script uses this argument, please set "
            f"rope_parameters.factor to {asked:g} in the exported config.json.",
            once=("rope_scaling_factor", asked),
        )
    return Llama3Scaling(**_given(args, Llama3Scaling) | {"factor": factor})


def _latent_yarn(args: Mapping[str, Any]) -> Yarn | None:
    factor, plain = float(args["rotary_scaling_factor"]), args.get("rope_type") == "rope"
    if plain and args["rotary_percent"] != 1.0:
        raise _unsupported("rotary_percent", args["rotary_percent"], "rope_type=rope requires 1.0")
    if plain and factor > 1.0 and args["mscale_all_dim"]:  # would change the softmax scale
        raise _unsupported("mscale_all_dim", args["mscale_all_dim"], "rope_type=rope requires 0.0")
    if plain or factor == 1.0:
        return None
    given = {name: value for name, value in args.items() if not name.startswith("yarn_")}
    return Yarn(**_given(given, Yarn))


def to_arguments(model: Architecture) -> dict[str, Any]:
    """Build the arguments that Megatron would store in a checkpoint of this model.

    The result is parsed again to catch settings that Megatron cannot represent.
    """
    names = (*STYLE, *_READ, *_WRITTEN, *(LATENT if model.multi_latent_attention else ()))
    scaling, base = model.scaling, model.rotary_base
    args: dict[str, Any] = {ROWS[name].argument: getattr(model, name) for name in names}
    args |= {
        "seq_length": model.max_position_embeddings,
        "norm_epsilon": model.layernorm_epsilon,
        "add_position_embedding": False,
        "use_rotary_position_embeddings": False,
        "rotary_base": int(base) if base == int(base) else base,
        "rotary_interleaved": False,
        "use_rope_scaling": isinstance(scaling, Llama3Scaling),
        **(_expert_arguments(model) if model.num_experts else {"num_experts": None}),
    }
    if not model.gpt_model:
        pattern = str(model.layer_pattern([model.num_layers]))
        args |= {_HYBRID: pattern, "num_layers": 2 * model.num_layers, "moe_layer_freq": 1}
    if isinstance(scaling, Yarn) and not model.multi_latent_attention:
        # Megatron accepts add_position_embedding=False only for rope
        args |= {"position_embedding_type": "yarn", "add_position_embedding": True}
    if scaling is not None:
        given = {ours: getattr(scaling, ours) for ours in scaling.arguments}
        args |= {  # stock scripts do not have all of these arguments, so leave out the defaults
            scaling.arguments[ours]: value
            for ours, value in given.items()
            if value != getattr(type(scaling), ours, None)
        }
    if model.multi_latent_attention:
        args["rope_type"] = "rope" if scaling is None else scaling.rope_type
        args.setdefault("rotary_scaling_factor", 1.0)
    back = from_arguments(args, model.kha, model.padded_vocab_size)
    for name, (ours, theirs) in model.differences(back).items():
        raise CheckpointError(
            f"Megatron does not support {name}={ours!r} and would use {theirs!r} for this model."
        )
    own = model.kha.without_output_gate() if model.attention_output_gate else model.kha
    if own.mechanisms or own.attention is not None:
        args |= model.kha.to_entries(multi_latent=model.multi_latent_attention)
    return args


def _expert_arguments(model: Architecture) -> dict[str, Any]:
    softmax = model.moe_router_score_function == "softmax"
    names = (*_EXPERTS, *_GROUPS, "moe_ffn_hidden_size", "moe_router_topk_scaling_factor")
    return {name: getattr(model, name) for name in names} | {
        "moe_layer_freq": 1 if model.is_uniform else list(model.moe_layer_freq),
        "moe_router_pre_softmax": softmax and not model.normalizes_topk,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": model.moe_router_dtype,
    }


_NOT_FROM_CHECKPOINT = (
    "vocab_size",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "qk_layernorm",
    "attention_output_gate",
    "use_rope_scaling",
    *Llama3Scaling.arguments.values(),
    "multi_latent_attention",
    *LATENT,
    "rope_type",
    *Yarn.arguments.values(),
    "moe_router_dtype",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_shared_expert_gate",
    "bf16",
    "fp16",
)
"""``--use-checkpoint-args`` does not restore these, so we need to pass them explicitly."""


def command_line(args: Mapping[str, Any], checkpoint: str) -> list[str]:
    """Build the command line for training from a converted checkpoint.

    We do not pass ``--load`` here. Otherwise, a restarted job would load the converted checkpoint
    again and overwrite its own progress.
    """
    words = ["--pretrained-checkpoint", checkpoint, "--use-checkpoint-args"]
    if not args.get(_HYBRID):
        words.append("--gpt-model")
    names: tuple[str, ...] = _NOT_FROM_CHECKPOINT
    if args.get("kha_attention") == "gta":  # checked by our entry point before loading
        names += ("position_embedding_type", "rotary_percent")
    for name in names:
        flag = ROWS[name].flag if name in ROWS else f"--{name.replace('_', '-')}"
        value = args.get(name)
        if value is not None and value is not False:
            words += [flag] if value is True else [flag, str(value)]
    return words
