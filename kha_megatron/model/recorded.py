"""Read the KHA config and KHA matrices from a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from kha_megatron.errors import CheckpointError, show_value
from kha_megatron.heads import HeadSizes, Knock, Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.registry import mechanism_types
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.fields import rows
from kha_megatron.model.megatron import model_from_arguments

_ATTENTION = "self_attention.linear_proj.weight"
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)
_EXPERT_SIZES = ("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_OTHER_SIZES = (
    *("moe_latent_size", "mamba_state_dim", "mamba_head_dim"),
    *("mamba_num_groups", "mamba_num_heads"),
)
"""Sizes that ModelConfig does not have."""
_SWITCHES = (
    *("multi_latent_attention", "qk_layernorm", "add_bias_linear", "add_qkv_bias"),
    *("untie_embeddings_and_output_weights", "moe_router_enable_expert_bias"),
)
_TOLERANT = ("log_all", "ignore_all", "return_all")
"""Values of ``--dist-ckpt-strictness`` with which Megatron initializes missing tensors."""
_SHARDED_BY_ELEMENT = ("adam", "sgd")
"""Optimizers whose distributed version has other state. The others distribute whole parameters."""
_BUFFERS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "transformer_impl": "transformer_engine",
    "bf16": False,
    "fp16": False,
    "grad_reduce_in_bf16": False,
    "ddp_num_buckets": None,
    "ddp_bucket_size": None,
    "mtp_num_layers": None,
    "padded_vocab_size": None,
}
"""Arguments (and Megatron's defaults) that affect the layout of distributed optimizer buffers.

In its default format, Megatron saves these buffers instead of the state of each parameter. If they
had another layout, it would even assign state silently to the wrong parameters.
"""

Checkpoint = Any
"""A ``MegatronCheckpoint`` or an ``HFCheckpoint``. Only the latter has a ``config``."""
_ANY = HeadSizes(query_heads=1, kv_heads=1, head_dim=1)  # for tensor names, any size will do


def read_kha_config(checkpoint: Checkpoint) -> HeadsConfig | None:
    """Read the KHA config from a checkpoint's training arguments or ``config.json``.

    For Megatron checkpoints, we also make sure that the config matches the tensors. Raises
    CheckpointError if it does not.
    """
    if hasattr(checkpoint, "config"):
        return HeadsConfig.from_entries(checkpoint.config)
    kha = HeadsConfig.from_entries(checkpoint.args)
    shapes = {key: info.shape for key, info in checkpoint.keys().items()}
    latent = bool(checkpoint.args.get("multi_latent_attention"))
    if key := _find_mismatch(shapes, kha or HeadsConfig(), latent):
        raise CheckpointError(
            f"{checkpoint.path}: tensor {key} does not match the KHA config in the training "
            f"arguments ({kha or 'nothing'}). The arguments were probably modified."
        )
    return kha


def check_same_heads(path: Path, stored: HeadsConfig | None, kha: HeadsConfig) -> None:
    """Raise CheckpointError if a run is resumed with a different KHA config."""
    saved = stored or HeadsConfig()
    if saved.to_dict(start=False) != kha.to_dict(start=False):
        remedy = "Resume with the same --kha-* arguments, or start without --load"
        if not saved.mechanisms and saved.attention == kha.attention:
            remedy += ", or use --kha-upcycle to add KHA to this checkpoint"
        raise CheckpointError(
            f"{path} was trained with KHA on {saved}, but the command line specifies {kha}. "
            f"{remedy}."
        )


def check_same_tensors(path: Path, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a resumed model would have other tensors than its checkpoint.

    Args:
        path: The checkpoint, for the error message.
        saved: Megatron's arguments in the checkpoint.
        given: Megatron's arguments of this run. If some are missing, we use Megatron's defaults.
    """
    before, now = model_from_arguments(saved), model_from_arguments(given)
    if not (before and now):
        return
    for flag, (old, new) in _compared_sizes(before, now).items():
        _check_value(path, flag, old, new)
    for name in saved.keys() & given.keys() & {*_OTHER_SIZES}:
        _check_value(path, f"--{name.replace('_', '-')}", saved[name], given[name])
    if given.get("dist_ckpt_strictness") in _TOLERANT:
        return
    _check_value(path, "--normalization", before.normalization, now.normalization)
    switches = _switches(now, given)
    for flag, was_set in _switches(before, saved).items():
        _check_switch(path, flag, was_set, switches[flag])
    # Megatron can leave out layers and position embeddings, but not add any
    old, new = _prediction_layers(before, saved), _prediction_layers(now, given)
    if new > old:
        _check_value(path, "--mtp-num-layers", old, new)
    positions = _learned_positions(now)
    if positions:
        _check_value(path, "--max-position-embeddings", _learned_positions(before), positions)


def check_same_optimizer(path: Path, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise CheckpointError if Megatron cannot load the optimizer state into this optimizer.

    Args:
        path: The checkpoint, for the error message.
        saved: Megatron's arguments in the checkpoint.
        given: Megatron's validated arguments of this run.
    """
    is_distributed = bool(saved.get("use_distributed_optimizer"))
    is_reshardable = is_distributed and bool(saved.get("dist_ckpt_optim_fully_reshardable"))
    compared: dict[str, Any] = {"optimizer": "adam", "decoupled_lr": None}
    if saved.get("optimizer", "adam") in _SHARDED_BY_ELEMENT:
        compared["use_distributed_optimizer"] = False
    if not is_reshardable and _has_main_weights(saved) != _has_main_weights(given):
        compared |= {"bf16": False, "fp16": False}
    for name, default in compared.items():
        _check_optimizer_argument(path, name, default, saved, given, "Use the same value")
    has_buffers = is_distributed and not is_reshardable
    if not (has_buffers and given.get("use_distributed_optimizer")):
        return
    if not (saved.get("hybrid_layer_pattern") or given.get("gpt_model")):
        raise CheckpointError(
            f"The optimizer state in {path} can only be loaded into a GPTModel. Save a checkpoint "
            "with --gpt-model and --dist-ckpt-optim-fully-reshardable first, or add "
            "--no-load-optim."
        )
    for name, default in _BUFFERS.items():
        remedy = "Save a checkpoint with --dist-ckpt-optim-fully-reshardable first"
        _check_optimizer_argument(path, name, default, saved, given, remedy)


def _check_optimizer_argument(
    path: Path,
    name: str,
    default: Any,
    saved: Mapping[str, Any],
    given: Mapping[str, Any],
    remedy: str,
) -> None:
    old, new = saved.get(name, default), given.get(name, default)
    if old != new:
        raise CheckpointError(
            f"The optimizer state in {path} was saved {_describe_argument(name, old)} and cannot "
            f"be loaded {_describe_argument(name, new)}. {remedy}, or add --no-load-optim to start "
            "with a new optimizer state."
        )


def _describe_argument(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return f"without {flag}"
    return f"with {flag}" if value is True else f"with {flag} {show_value(value)}"


def _has_main_weights(arguments: Mapping[str, Any]) -> bool:
    """Whether the optimizer has a float32 copy of the weights."""
    return bool(arguments.get("bf16") or arguments.get("fp16"))


def _check_value(path: Path, flag: str, old: Any, new: Any) -> None:
    if (old or None) != (new or None):
        raise CheckpointError(
            f"{flag} is {new or 'not set'}, but {path} was trained with "
            f"{show_value(old) if old else 'none'}. Use the value of that run, or start a new "
            "run in another directory."
        )


def _check_switch(path: Path, flag: str, old: bool, new: bool) -> None:
    if old != new:
        raise CheckpointError(
            f"{path} was trained {'with' if old else 'without'} {flag}. "
            f"{'Add' if old else 'Remove'} this flag, or start a new run in another directory."
        )


def _compared_sizes(before: ModelConfig, now: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the sizes of two models by flag."""
    sizes = {}
    ignored = () if _has_experts(before) or _has_experts(now) else _EXPERT_SIZES
    if None not in (before.num_layers, now.num_layers):
        for row in rows(ModelConfig):
            if row.field in _SIZES and row.field not in ignored:
                sizes[row.flag] = getattr(before, row.field), getattr(now, row.field)
    return sizes | {"--hybrid-layer-pattern": (_main_layers(before), _main_layers(now))}


def _switches(model: ModelConfig, arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Return which of the flags are set that add tensors to a model, or remove some."""
    switches = {
        row.flag: getattr(model, row.field) != row.default
        for row in rows(ModelConfig)
        if row.field in _SWITCHES
    }
    # these include the biases of queries, keys and values
    switches["--add-qkv-bias"] |= model.add_bias_linear
    switches["--moe-router-enable-expert-bias"] &= _has_experts(model)
    is_gated = arguments.get("swiglu") or arguments.get("quick_geglu")
    has_offset = arguments.get("softmax_type") == "learnable"
    shared_gate = arguments.get("moe_shared_expert_gate") and _has_experts(model)
    return switches | {
        "--swiglu": bool(is_gated),
        "--softmax-type learnable": has_offset,
        "--moe-shared-expert-gate": bool(shared_gate),
    }


def _prediction_layers(model: ModelConfig, arguments: Mapping[str, Any]) -> int:
    """Return the number of layers for multi-token prediction that have their own weights."""
    predictions = (model.hybrid_layer_pattern or "").count("/") or model.predictions
    return min(predictions, 1) if arguments.get("mtp_use_repeated_layer") else predictions


def _learned_positions(model: ModelConfig) -> int | None:
    is_learned = model.position_embedding_type == "learned_absolute"
    return model.max_position_embeddings if is_learned else None


def _has_experts(model: ModelConfig) -> bool:
    """Whether there may be MoE layers. Megatron ignores ``--num-experts`` without any."""
    return "E" in (_main_layers(model) or "E")


def _main_layers(model: ModelConfig) -> str | None:
    """Return the layer pattern without pipeline stages and multi-token prediction."""
    if model.hybrid_layer_pattern:
        return model.hybrid_layer_pattern.partition("/")[0].replace("|", "")
    if model.num_layers is None:
        return None
    return str(model.layer_pattern([model.num_layers])).partition("/")[0]


def _find_mismatch(
    shapes: Mapping[str, tuple[int, ...]], kha: HeadsConfig, latent: bool
) -> str | None:
    """Find a KHA tensor that is missing or unexpected. This only compares names and the number of
    stacked matrices."""
    names = tuple(f"self_attention.{name}_" for name in (Knock.name, *mechanism_types()))
    wanted = {
        (key.removesuffix(_ATTENTION) + tensor.key, len(tensor.matrices))
        for key in shapes
        if key.endswith(_ATTENTION)
        for tensor in kha.tensors(replace(_ANY, latent=latent))
    }
    stored = {
        (key, (0, 0, 0, *shape)[-3] if names[0] in key else 0)
        for key, shape in shapes.items()
        if any(name in key for name in names)
    }
    return min((key for key, _ in wanted ^ stored), default=None)


def read_knock_weights(checkpoint: Checkpoint) -> dict[tuple[int, Projection], Any]:
    """Load all KHA matrices. They are meant to be used as ``x @ W``.

    Returns:
        Dict from ``(attention layer, projection)`` to tensors of shape ``[num_matrices, head_dim,
        head_dim]``.

    Raises:
        CheckpointError: If there are no KHA matrices, or they do not match the config.
    """
    kha = read_kha_config(checkpoint)
    knock = kha.get(Knock) if kha else None
    if knock is None:
        raise CheckpointError(
            f"No KHA matrices found in {checkpoint.path} (KHA config: {kha or 'none'})."
        )
    tensors = knock.tensors(_ANY)
    if not hasattr(checkpoint, "config"):
        return {
            (layer, tensor.heads): weight
            for tensor in tensors
            for layer, weight in enumerate(checkpoint.layer_tensors(tensor.key))
        }
    layers = checkpoint.config.get("num_hidden_layers")
    stored = {key for key in checkpoint.keys() if "_knock." in key}  # noqa: SIM118
    places = {
        (layer, tensor.heads): [f"model.layers.{layer}.{name}" for name in tensor.hf_names]
        for tensor in tensors
        for layer in range(min(len(stored), layers if type(layers) is int else 0))
    }
    if differing := stored.symmetric_difference(chain.from_iterable(places.values())):
        raise CheckpointError(
            f"{checkpoint.path}: {len(differing)} KHA matrices are missing or unexpected for the "
            f"config {kha}, e.g. {min(differing)}."
        )
    return {place: checkpoint.linears(keys) for place, keys in places.items()}
