"""Convert Megatron's arguments and ``TransformerConfig`` to :class:`ModelConfig`, and back."""

from collections.abc import Iterable, Mapping
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.errors import CheckpointError, show_value
from kha_megatron.heads.config import LATENT_HEADS, HeadsConfig
from kha_megatron.model.config import LATENT, MODEL_FIELDS, STYLE, ModelConfig, flag_of
from kha_megatron.model.fields import read_arguments, read_attributes
from kha_megatron.model.pattern import PATTERN_ARGUMENT, LayerPattern
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

_COPIED_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "group_query_attention",
    "kv_channels",
    "vocab_size",
    "padded_vocab_size",
    "max_position_embeddings",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "rotary_percent",
    "qk_layernorm",
    "add_qkv_bias",
    "attention_output_gate",
    "untie_embeddings_and_output_weights",
    "init_method_std",
    "attention_dropout",
    "multi_latent_attention",
    "mtp_num_layers",
)
"""Fields that a checkpoint records as they are."""
_OPTIONAL_FIELDS = (
    "vocab_size",
    "padded_vocab_size",
    "layernorm_zero_centered_gamma",
    "attention_output_gate",
    "multi_latent_attention",
    "mtp_num_layers",
)
"""Those that not every checkpoint has."""
_EXPERT_FIELDS = (
    "num_experts",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)
"""Fields that checkpoints of models with experts record in addition."""
_EXPERT_GROUP_FIELDS = ("moe_router_num_groups", "moe_router_group_topk")


def model_from_arguments(
    arguments: Mapping[str, Any],
    kha: HeadsConfig | None = None,
) -> ModelConfig | None:
    """Describe the model of a command line. Returns None if model sizes are missing.

    In hybrid models, ``num_layers`` is the number of pairs of attention and MLP. It is None if the
    layer pattern has other layers, and so are ``ffn_hidden_size`` and ``mtp_num_layers``.
    """
    settings = read_arguments(ModelConfig, arguments)
    heads = settings["num_attention_heads"]
    hidden = settings["hidden_size"]
    is_hybrid = bool(settings[PATTERN_ARGUMENT])
    has_layers = settings["num_layers"] or is_hybrid
    if not (heads and hidden and has_layers):
        return None
    if not arguments.get("group_query_attention"):
        settings["num_query_groups"] = heads
    elif settings["num_query_groups"] is None:
        settings["num_query_groups"] = 1  # Megatron's default
    if not settings["kv_channels"]:
        settings["kv_channels"] = max(1, hidden // heads)
    if not settings["ffn_hidden_size"]:
        settings["ffn_hidden_size"] = _default_ffn_size(hidden, swiglu=settings["swiglu"])
    if arguments.get("device") == "cpu" and "transformer_impl" not in arguments:
        settings["transformer_impl"] = "local"  # Transformer Engine requires a GPU
    settings["num_experts"] = settings["num_experts"] or None
    settings["moe_ffn_hidden_size"] = settings["moe_ffn_hidden_size"] or settings["ffn_hidden_size"]
    if is_hybrid:
        pattern = LayerPattern.parse(settings[PATTERN_ARGUMENT])
        settings |= _UNKNOWN_LAYERS if pattern is None else _settings_of_pattern(pattern)
    if kha is None:
        kha = HeadsConfig(
            attention=arguments.get("kha_attention"),
            latent_heads=arguments.get("kha_latent_heads", LATENT_HEADS),
        )
    return ModelConfig(**settings, kha=kha)


def _default_ffn_size(hidden: int, *, swiglu: bool) -> int:
    """Return Megatron's default, see ``validate_args``.

    SwiGLU has three matrices instead of two, so two thirds of the usual size have as many weights.
    Megatron rounds this down to a multiple of 64.
    """
    if not swiglu:
        return 4 * hidden
    multiple = 64
    return int(hidden * 8 / 3 / multiple) * multiple


_UNKNOWN_LAYERS: dict[str, Any] = {
    "num_layers": None,
    "ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "mtp_num_layers": None,
}
"""Settings of hybrid models with other layers than pairs of attention and MLP."""


def _settings_of_pattern(pattern: LayerPattern) -> dict[str, Any]:
    return {
        "num_layers": len(pattern.moe),
        "moe_layer_freq": pattern.moe,
        "mtp_num_layers": pattern.predictions or None,
        "multi_latent_attention": pattern.latent,
    }


def model_from_config(
    config: Any,
    kha: HeadsConfig | None = None,
) -> ModelConfig:
    """Describe the model of a ``TransformerConfig``, which has no vocab size.

    ``num_layers`` is None for hybrid models and custom pipeline layouts. For hybrid models,
    ``ffn_hidden_size`` and ``mtp_num_layers`` are None as well.
    """
    settings = read_attributes(ModelConfig, config)
    settings["gpt_model"] = not config.is_hybrid_model
    if kha is not None:
        settings["kha"] = kha
    if config.is_hybrid_model:
        settings |= {
            "num_layers": None,
            "ffn_hidden_size": None,
            "mtp_num_layers": None,
        }
    if config.pipeline_model_parallel_layout is not None:
        settings["num_layers"] = None
    return ModelConfig(**settings)


def model_from_checkpoint(
    args: Mapping[str, Any],
    kha: HeadsConfig,
    padded_vocab_size: int,
) -> ModelConfig:
    """Describe a trained model by the arguments in its checkpoint.

    Only settings that affect the outputs are read, all others have their defaults. ``vocab_size``
    still includes padding here.

    Raises:
        CheckpointError: If the model cannot be converted, or an argument is missing.
    """
    for name, allowed in SUPPORTED_ARGUMENTS.items():
        if args.get(name) not in allowed:
            raise _unsupported(name, args.get(name), f"expected {allowed[0]!r}")
    try:
        return _build_trained_model(args, kha, padded_vocab_size)
    except KeyError as error:
        raise CheckpointError(
            f"Argument {error.args[0]} is missing in the checkpoint. Was it saved by another "
            "version of Megatron?"
        ) from error


def _build_trained_model(
    args: Mapping[str, Any],
    kha: HeadsConfig,
    padded_vocab_size: int,
) -> ModelConfig:
    """Same as :func:`model_from_checkpoint`, but raises KeyError if an argument is missing."""
    _check_pattern(args)
    is_latent = bool(args.get("multi_latent_attention"))
    copied_fields = [*_COPIED_FIELDS]
    if is_latent:
        copied_fields += LATENT
    if args["num_experts"]:
        copied_fields += _EXPERT_FIELDS
        _check_router(args)
    _check_recorded(args, copied_fields)
    if is_latent:
        _check_latent_query_norm(args)
    parsed = model_from_arguments(args, kha)
    if parsed is None:
        raise _unsupported(
            "num_layers",
            args["num_layers"],
            "expected at least one layer",
        )
    settings = STYLE | {name: getattr(parsed, name) for name in copied_fields}
    settings |= {
        "vocab_size": padded_vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "rotary_base": float(args["rotary_base"]),
        "scaling": _read_mla_scaling(args) if is_latent else _read_scaling(args),
        "gpt_model": args.get(PATTERN_ARGUMENT) is None,
        "kha": kha,
    }
    if is_latent:
        settings["num_query_groups"] = parsed.num_attention_heads
        settings["kv_channels"] = parsed.v_head_dim
    is_mha = settings["num_query_groups"] == parsed.num_attention_heads
    settings["group_query_attention"] = not is_mha
    if parsed.mtp_num_layers and args.get("mtp_use_repeated_layer"):
        settings["mtp_num_layers"] = 1  # all predictions use the same weights
    if parsed.num_experts:
        settings |= _router_settings(args, parsed)
    return ModelConfig(**settings)


def _unsupported(name: str, value: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint was trained with {name}={show_value(value)}, which is not supported: "
        f"{why}."
    )


def _check_pattern(args: Mapping[str, Any]) -> None:
    pattern = args.get(PATTERN_ARGUMENT)
    if pattern is None:
        return
    if not isinstance(pattern, str) or LayerPattern.parse(pattern) is None:
        raise _unsupported(
            PATTERN_ARGUMENT,
            pattern,
            "expected attention alternating with - or E",
        )
    if args.get("use_rope_scaling") and not _is_from_our_entry_point(args):
        raise _unsupported(
            "use_rope_scaling",
            True,
            "stock hybrid models ignore it",
        )


def _check_recorded(args: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Raise KeyError if the argument of a field is missing, unless it is optional."""
    for name in fields:
        argument = MODEL_FIELDS[name].argument
        if argument not in args and name not in _OPTIONAL_FIELDS:
            raise KeyError(argument)


def _check_latent_query_norm(args: Mapping[str, Any]) -> None:
    if args["q_lora_rank"] is None and args["qk_layernorm"]:
        # Megatron would then normalize the input of q_proj
        raise _unsupported(
            "q_lora_rank",
            None,
            "qk_layernorm requires compressed queries",
        )


def _check_router(args: Mapping[str, Any]) -> None:
    score = args["moe_router_score_function"]
    balancing = args["moe_router_load_balancing_type"]
    if score not in ("softmax", "sigmoid"):
        raise _unsupported(
            "moe_router_score_function",
            score,
            "expected softmax or sigmoid",
        )
    if balancing in ("sinkhorn", "quantile_balancing"):
        raise _unsupported(
            "moe_router_load_balancing_type",
            balancing,
            "it affects expert selection",
        )


def _router_settings(
    args: Mapping[str, Any],
    model: ModelConfig,
) -> dict[str, Any]:
    """Return the settings of experts that depend on several arguments."""
    # Sigmoid scores are only normalized for top-k > 1. Softmax comes after top-k (so weights sum
    # to 1), unless moe_router_pre_softmax is set.
    if model.moe_router_score_function == "sigmoid":
        normalizes_topk = model.moe_router_topk > 1
    else:
        normalizes_topk = not args["moe_router_pre_softmax"]
    topk_factor = args["moe_router_topk_scaling_factor"]
    settings = {
        "moe_ffn_hidden_size": model.expert_width,
        "moe_shared_expert_intermediate_size": model.shared_width or None,
        "moe_layer_freq": model.moe_layers,
        "normalizes_topk": normalizes_topk,
        "moe_router_dtype": args.get("moe_router_dtype"),
        "moe_router_topk_scaling_factor": None if topk_factor == 1.0 else topk_factor,
    }
    expert_groups = args.get("moe_router_num_groups") or 1
    if expert_groups > 1:
        settings |= {name: args.get(name) for name in _EXPERT_GROUP_FIELDS}
    return settings


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
    if _is_from_our_entry_point(args):
        return float(args["rope_scaling_factor"])
    return STOCK_SCALING.factor


def _is_from_our_entry_point(args: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was converted or trained with our entry point."""
    is_converted = "spec" not in args
    if is_converted:
        return True
    if "kha_query" not in args:
        return False
    spec = args["spec"]  # module and name, or None
    return not spec or spec[0] != _STOCK_SPEC


def _read_scaling(args: Mapping[str, Any]) -> Llama3Scaling | Yarn | None:
    """Read the RoPE scaling of models without multi-latent attention."""
    if args["position_embedding_type"] == "yarn":
        if args["rotary_percent"] != 1.0:  # ignored by Megatron
            raise _unsupported(
                "rotary_percent",
                args["rotary_percent"],
                "YaRN requires 1.0",
            )
        yarn = Yarn(**_scaling_fields(args, Yarn))
        return yarn if yarn.factor != 1.0 else None
    if args.get("use_rope_scaling"):
        return _read_llama3_scaling(args)
    return None


def _scaling_fields(
    args: Mapping[str, Any],
    scaling_type: type[RopeScaling],
) -> dict[str, Any]:
    """Return the fields of ``scaling_type`` whose arguments are set."""
    settings = {}
    for field, argument in scaling_type.arguments.items():
        if args.get(argument) is not None:
            settings[field] = args[argument]
    return settings


def _read_llama3_scaling(args: Mapping[str, Any]) -> Llama3Scaling:
    recorded_factor = float(args["rope_scaling_factor"])
    factor = rope_scaling_factor(args)
    if recorded_factor != factor:
        announce(
            f"Using a RoPE scaling factor of {factor:g}, because Megatron's own scripts ignore "
            f"--rope-scaling-factor {recorded_factor:g}. If your script uses this argument, please "
            f"set rope_parameters.factor to {recorded_factor:g} in the exported config.json.",
            once=("rope_scaling_factor", recorded_factor),
        )
    fields = _scaling_fields(args, Llama3Scaling)
    fields["factor"] = factor
    return Llama3Scaling(**fields)


def _read_mla_scaling(args: Mapping[str, Any]) -> Yarn | None:
    """Read the RoPE scaling of models with multi-latent attention."""
    factor = float(args["rotary_scaling_factor"])
    if args.get("rope_type") == "rope":
        rotary_percent = args["rotary_percent"]
        if rotary_percent != 1.0:
            raise _unsupported(
                "rotary_percent",
                rotary_percent,
                "rope_type=rope requires 1.0",
            )
        if factor > 1.0 and args["mscale_all_dim"]:  # would change the softmax scale
            raise _unsupported(
                "mscale_all_dim",
                args["mscale_all_dim"],
                "rope_type=rope requires 0.0",
            )
        return None
    if factor == 1.0:
        return None
    # Megatron ignores the yarn_* arguments for MLA
    mla_args = {name: value for name, value in args.items() if not name.startswith("yarn_")}
    return Yarn(**_scaling_fields(mla_args, Yarn))


def to_arguments(model: ModelConfig) -> dict[str, Any]:
    """Build the arguments that Megatron would store in a checkpoint of this model.

    The result is parsed again to catch settings that Megatron cannot represent.

    Raises:
        CheckpointError: If KHA is folded into the projections.
    """
    if model.kha_folded:
        raise CheckpointError(
            f"KHA ({model.kha}) is folded into the projections of this model, so that its matrices "
            "cannot be recovered for training. Convert the unfolded model instead, i.e. the one "
            "that was passed to `kha-megatron convert fold`."
        )
    assert model.padded_vocab_size is not None
    is_latent = model.multi_latent_attention
    names = [*STYLE, *_COPIED_FIELDS]
    if is_latent:
        names += LATENT
    args: dict[str, Any] = {MODEL_FIELDS[name].argument: getattr(model, name) for name in names}
    rotary_base = model.rotary_base
    has_integer_base = rotary_base == int(rotary_base)
    args |= {
        "seq_length": model.max_position_embeddings,
        "norm_epsilon": model.layernorm_epsilon,
        "add_position_embedding": False,
        "use_rotary_position_embeddings": False,
        "rotary_base": int(rotary_base) if has_integer_base else rotary_base,
        "rotary_interleaved": False,
        "num_experts": None,
    }
    if model.num_experts:
        args |= _expert_arguments(model)
    if not model.gpt_model:
        args |= {
            PATTERN_ARGUMENT: str(model.layer_pattern([model.layers])),
            "num_layers": 2 * model.layers,
            "moe_layer_freq": 1,
        }
    args |= _scaling_arguments(model)
    parsed = model_from_checkpoint(args, model.kha, model.padded_vocab_size)
    for name, (wanted, result) in model.differences(parsed).items():
        raise CheckpointError(
            f"Megatron does not support {name}={wanted!r} and would use {result!r} for this model."
        )
    added_kha = model.kha
    if model.attention_output_gate:
        added_kha = added_kha.without_output_gate()  # it is one of Megatron's own arguments
    if added_kha.mechanisms or added_kha.attention is not None:
        args |= model.kha.to_entries(multi_latent=is_latent)
    return args


def _scaling_arguments(model: ModelConfig) -> dict[str, Any]:
    scaling = model.scaling
    args: dict[str, Any] = {"use_rope_scaling": isinstance(scaling, Llama3Scaling)}
    if isinstance(scaling, Yarn) and not model.multi_latent_attention:
        # Megatron accepts add_position_embedding=False only for rope
        args |= {"position_embedding_type": "yarn", "add_position_embedding": True}
    if model.multi_latent_attention:
        args["rope_type"] = "rope" if scaling is None else scaling.rope_type
        args["rotary_scaling_factor"] = 1.0
    if scaling is not None:
        # stock scripts do not have all of these arguments, so leave out the defaults
        for field, argument in scaling.arguments.items():
            value = getattr(scaling, field)
            default = getattr(type(scaling), field, None)
            if value != default:
                args[argument] = value
    return args


def _expert_arguments(model: ModelConfig) -> dict[str, Any]:
    names = (
        *_EXPERT_FIELDS,
        *_EXPERT_GROUP_FIELDS,
        "moe_ffn_hidden_size",
        "moe_router_topk_scaling_factor",
    )
    args: dict[str, Any] = {name: getattr(model, name) for name in names}
    if model.is_uniform:
        args["moe_layer_freq"] = 1
    else:
        args["moe_layer_freq"] = list(model.moe_layers)
    is_softmax = model.moe_router_score_function == "softmax"
    args["moe_router_pre_softmax"] = is_softmax and not model.normalizes_topk
    args["moe_router_load_balancing_type"] = "none"
    args["moe_router_dtype"] = model.moe_router_dtype
    return args


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
    if not args.get(PATTERN_ARGUMENT):
        words.append("--gpt-model")
    passed_names: tuple[str, ...] = _NOT_FROM_CHECKPOINT
    if args.get("kha_attention") == "gta":  # checked by our entry point before loading
        passed_names += ("position_embedding_type", "rotary_percent")
    for name in passed_names:
        value = args.get(name)
        if value is None or value is False:
            continue
        words.append(flag_of(name))
        if value is not True:
            words.append(str(value))
    return words
