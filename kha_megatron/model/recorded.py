"""Read the KHA config and KHA matrices from a checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kha_megatron.errors import CheckpointError, show_value
from kha_megatron.heads import HeadSizes, HeadTensor, Knock, Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.registry import mechanism_types
from kha_megatron.model.config import MODEL_FIELDS, ModelConfig
from kha_megatron.model.fields import as_flag
from kha_megatron.model.megatron import model_from_arguments
from kha_megatron.model.pattern import PATTERN_ARGUMENT

_OUTPUT_PROJECTION = "self_attention.linear_proj.weight"
"""Every attention layer has a tensor whose key ends like this."""
_SIZE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)
"""Fields of ModelConfig that determine the shapes of tensors."""
_EXPERT_SIZE_FIELDS = (
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
)
_OTHER_SIZE_ARGUMENTS = (
    "moe_latent_size",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
)
"""Sizes that ModelConfig does not have."""
_SWITCH_FIELDS = (
    "multi_latent_attention",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "moe_router_enable_expert_bias",
)
"""Boolean fields of ModelConfig that add tensors, or remove some."""
_TOLERANT_STRICTNESS = ("log_all", "ignore_all", "return_all")
"""Values of ``--dist-ckpt-strictness`` with which Megatron initializes missing tensors."""
_ELEMENTWISE_OPTIMIZERS = ("adam", "sgd")
"""Optimizers whose distributed version has other state. The others distribute whole parameters."""
_BUFFER_ARGUMENTS: dict[str, Any] = {
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
_ANY_SIZES = HeadSizes(
    query_heads=1,
    kv_heads=1,
    head_dim=1,
)
"""For tensor names, any size will do."""


def _is_hf_model(checkpoint: Checkpoint) -> bool:
    return hasattr(checkpoint, "config")


def read_kha_config(checkpoint: Checkpoint) -> HeadsConfig | None:
    """Read the KHA config from a checkpoint's training arguments or ``config.json``.

    For Megatron checkpoints, we also make sure that the config matches the tensors. Raises
    CheckpointError if it does not.
    """
    if _is_hf_model(checkpoint):
        return HeadsConfig.from_entries(checkpoint.config)
    kha = HeadsConfig.from_entries(checkpoint.args)
    shapes = {key: info.shape for key, info in checkpoint.keys().items()}
    is_latent = bool(checkpoint.args.get("multi_latent_attention"))
    mismatch = _find_mismatch(shapes, kha or HeadsConfig(), is_latent)
    if mismatch is not None:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {show_value(mismatch)} does not match the KHA config in "
            f"the training arguments ({kha or 'nothing'}). The arguments were probably modified."
        )
    return kha


def check_same_heads(
    path: Path,
    stored: HeadsConfig | None,
    kha: HeadsConfig,
) -> None:
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


def check_same_tensors(
    path: Path,
    saved: Mapping[str, Any],
    passed: Mapping[str, Any],
) -> None:
    """Raise CheckpointError if a resumed model would have other tensors than its checkpoint.

    Args:
        path: The checkpoint, for the error message.
        saved: Megatron's arguments in the checkpoint.
        passed: Megatron's arguments of this run. If some are missing, we use Megatron's defaults.
    """
    saved_model = model_from_arguments(saved)
    model = model_from_arguments(passed)
    if saved_model is None or model is None:
        return
    _check_sizes(path, saved_model, model)
    for name in _OTHER_SIZE_ARGUMENTS:
        if name in saved and name in passed:
            _check_value(path, as_flag(name), saved[name], passed[name])
    _check_vocabulary(path, saved.get("vocab_size"), passed.get("padded_vocab_size"))
    if passed.get("dist_ckpt_strictness") in _TOLERANT_STRICTNESS:
        return
    _check_value(path, "--normalization", saved_model.normalization, model.normalization)
    switches = _list_switches(model, passed)
    for flag, was_set in _list_switches(saved_model, saved).items():
        _check_switch(path, flag, was_set, switches[flag])
    # Megatron can leave out layers and position embeddings, but not add any
    saved_predictions = _count_prediction_layers(saved_model, saved)
    predictions = _count_prediction_layers(model, passed)
    if predictions > saved_predictions:
        _check_value(path, "--mtp-num-layers", saved_predictions, predictions)
    positions = _count_learned_positions(model)
    if positions:
        saved_positions = _count_learned_positions(saved_model)
        _check_value(path, "--max-position-embeddings", saved_positions, positions)


def check_same_optimizer(
    path: Path,
    saved: Mapping[str, Any],
    passed: Mapping[str, Any],
) -> None:
    """Raise CheckpointError if Megatron cannot load the optimizer state into this optimizer.

    Args:
        path: The checkpoint, for the error message.
        saved: Megatron's arguments in the checkpoint.
        passed: Megatron's validated arguments of this run.
    """
    is_distributed = bool(saved.get("use_distributed_optimizer"))
    is_reshardable = is_distributed and bool(saved.get("dist_ckpt_optim_fully_reshardable"))
    # arguments that must not change, and Megatron's defaults
    defaults: dict[str, Any] = {"optimizer": "adam", "decoupled_lr": None}
    if saved.get("optimizer", "adam") in _ELEMENTWISE_OPTIMIZERS:
        defaults["use_distributed_optimizer"] = False
    if not is_reshardable and _has_main_weights(saved) != _has_main_weights(passed):
        defaults |= {"bf16": False, "fp16": False}
    _check_optimizer_arguments(
        path,
        saved,
        passed,
        defaults=defaults,
        remedy="Use the same value",
    )
    has_buffers = is_distributed and not is_reshardable
    if has_buffers and passed.get("use_distributed_optimizer"):
        _check_buffers(path, saved, passed)


def _check_buffers(
    path: Path,
    saved: Mapping[str, Any],
    passed: Mapping[str, Any],
) -> None:
    """Check that the buffers of the distributed optimizer have the same layout."""
    if not (saved.get(PATTERN_ARGUMENT) or passed.get("gpt_model")):
        raise CheckpointError(
            f"The optimizer state in {path} can only be loaded into a GPTModel. Save a checkpoint "
            "with --gpt-model and --dist-ckpt-optim-fully-reshardable first, or add "
            "--no-load-optim."
        )
    _check_optimizer_arguments(
        path,
        saved,
        passed,
        defaults=_BUFFER_ARGUMENTS,
        remedy="Save a checkpoint with --dist-ckpt-optim-fully-reshardable first",
    )


def _check_optimizer_arguments(
    path: Path,
    saved: Mapping[str, Any],
    passed: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    remedy: str,
) -> None:
    """Check that some arguments, whose defaults are given, have not changed."""
    for name, default in defaults.items():
        saved_value = saved.get(name, default)
        passed_value = passed.get(name, default)
        if saved_value != passed_value:
            raise CheckpointError(
                f"The optimizer state in {path} was saved {_describe_argument(name, saved_value)} "
                f"and cannot be loaded {_describe_argument(name, passed_value)}. {remedy}, or add "
                "--no-load-optim to start with a new optimizer state."
            )


def _describe_argument(name: str, value: Any) -> str:
    flag = as_flag(name)
    if value is None or value is False:
        return f"without {flag}"
    if value is True:
        return f"with {flag}"
    return f"with {flag} {show_value(value)}"


def _has_main_weights(arguments: Mapping[str, Any]) -> bool:
    """Whether the optimizer has a float32 copy of the weights."""
    return bool(arguments.get("bf16") or arguments.get("fp16"))


def _check_value(
    path: Path,
    flag: str,
    saved: Any,
    passed: Any,
) -> None:
    if not saved and not passed:  # e.g. 0 and None
        return
    if saved != passed:
        shown = show_value(saved) if saved else "none"
        raise CheckpointError(
            f"{flag} is {passed or 'not set'}, but {path} was trained with {shown}. Use the value "
            "of that run, or start a new run in another directory."
        )


def _check_switch(
    path: Path,
    flag: str,
    was_set: bool,
    is_set: bool,
) -> None:
    if was_set == is_set:
        return
    preposition = "with" if was_set else "without"
    remedy = "Add" if was_set else "Remove"
    raise CheckpointError(
        f"{path} was trained {preposition} {flag}. "
        f"{remedy} this flag, or start a new run in another directory."
    )


def _check_sizes(path: Path, saved: ModelConfig, model: ModelConfig) -> None:
    names: tuple[str, ...] = _SIZE_FIELDS
    if _may_have_experts(saved) or _may_have_experts(model):
        names += _EXPERT_SIZE_FIELDS
    if saved.num_layers is not None and model.num_layers is not None:
        for name in names:
            flag = MODEL_FIELDS[name].flag
            _check_value(path, flag, getattr(saved, name), getattr(model, name))
    _check_value(
        path,
        "--hybrid-layer-pattern",
        _main_layers(saved),
        _main_layers(model),
    )


def _check_vocabulary(path: Path, tokens: Any, rows: Any) -> None:
    """Raise CheckpointError if the embedding has fewer rows than there are tokens."""
    if isinstance(tokens, int) and isinstance(rows, int) and tokens > rows:
        raise CheckpointError(
            f"The embedding has {rows} rows, but {path} was trained with a vocabulary of {tokens} "
            "tokens. Use the tokenizer or the --vocab-size of that run."
        )


def _list_switches(
    model: ModelConfig,
    arguments: Mapping[str, Any],
) -> dict[str, bool]:
    """Return for each flag that adds tensors to a model, or removes some, whether it is set."""
    switches = {}
    for name in _SWITCH_FIELDS:
        field = MODEL_FIELDS[name]
        switches[field.flag] = getattr(model, name) != field.default
    if model.add_bias_linear:  # adds the biases of queries, keys and values, too
        switches["--add-qkv-bias"] = True
    if not _may_have_experts(model):
        switches["--moe-router-enable-expert-bias"] = False
    is_gated = arguments.get("swiglu") or arguments.get("quick_geglu")
    has_shared_gate = arguments.get("moe_shared_expert_gate") and _may_have_experts(model)
    switches["--swiglu"] = bool(is_gated)
    switches["--softmax-type learnable"] = arguments.get("softmax_type") == "learnable"
    switches["--moe-shared-expert-gate"] = bool(has_shared_gate)
    return switches


def _count_prediction_layers(
    model: ModelConfig,
    arguments: Mapping[str, Any],
) -> int:
    """Count the layers for multi-token prediction that have their own weights."""
    pattern = model.hybrid_layer_pattern or ""
    predictions = pattern.count("/") or model.predictions
    if arguments.get("mtp_use_repeated_layer"):
        return min(predictions, 1)
    return predictions


def _count_learned_positions(model: ModelConfig) -> int | None:
    if model.position_embedding_type != "learned_absolute":
        return None
    return model.max_position_embeddings


def _may_have_experts(model: ModelConfig) -> bool:
    """Whether there may be MoE layers. Megatron ignores ``--num-experts`` without any."""
    layers = _main_layers(model)
    return not layers or "E" in layers


def _main_layers(model: ModelConfig) -> str | None:
    """Return the layer pattern without pipeline stages and multi-token prediction, if known."""
    pattern = model.hybrid_layer_pattern
    if not pattern:
        if model.num_layers is None:
            return None
        pattern = str(model.layer_pattern([model.num_layers]))
    main_layers, _, _ = pattern.partition("/")
    return main_layers.replace("|", "")


def _find_mismatch(
    shapes: Mapping[str, tuple[int, ...]],
    kha: HeadsConfig,
    is_latent: bool,
) -> str | None:
    """Return the key of a KHA tensor that is missing or unexpected, if there is one.

    This only compares names and the number of stacked matrices (0 if a tensor is no stack).

    Args:
        shapes: Shapes of all tensors in the checkpoint by key.
    """
    knock_prefix = f"self_attention.{Knock.name}_"
    prefixes = [f"self_attention.{name}_" for name in mechanism_types()]
    tensors = kha.tensors(replace(_ANY_SIZES, latent=is_latent))
    expected_matrices: dict[str, int] = {}
    stored_matrices: dict[str, int] = {}
    for key, shape in shapes.items():
        if key.endswith(_OUTPUT_PROJECTION):
            layer_prefix = key.removesuffix(_OUTPUT_PROJECTION)
            for tensor in tensors:
                expected_matrices[layer_prefix + tensor.key] = len(tensor.matrices)
        if knock_prefix in key:
            is_stack = len(shape) >= 3
            stored_matrices[key] = shape[-3] if is_stack else 0
        elif any(prefix in key for prefix in prefixes):
            stored_matrices[key] = 0
    for key in sorted(expected_matrices.keys() | stored_matrices.keys()):
        if expected_matrices.get(key) != stored_matrices.get(key):
            return key
    return None


def is_folded(checkpoint: Checkpoint) -> bool:
    """Whether KHA is folded into the projections of a Hugging Face model."""
    return _is_hf_model(checkpoint) and bool(checkpoint.config.get("kha_folded"))


def read_knock_weights(checkpoint: Checkpoint) -> dict[tuple[int, Projection], Any]:
    """Load all KHA matrices. They are meant to be used as ``x @ W``.

    Returns:
        Dict from ``(attention layer, projection)`` to tensors of shape ``[num_matrices, head_dim,
        head_dim]``.

    Raises:
        CheckpointError: If there are no KHA matrices, or they do not match the config.
    """
    if is_folded(checkpoint):
        raise CheckpointError(
            f"The KHA matrices of {checkpoint.path} are folded into the projections. Please use "
            "the unfolded model, i.e. the one that was passed to `kha-megatron convert fold`."
        )
    kha = read_kha_config(checkpoint)
    knock = kha.get(Knock) if kha else None
    if knock is None:
        raise CheckpointError(
            f"No KHA matrices found in {checkpoint.path} (KHA config: {kha or 'none'})."
        )
    tensors = knock.tensors(_ANY_SIZES)
    if _is_hf_model(checkpoint):
        return _read_hf_weights(checkpoint, kha, tensors)
    weights = {}
    for tensor in tensors:
        for layer, weight in enumerate(checkpoint.layer_tensors(tensor.key)):
            weights[layer, tensor.heads] = weight
    return weights


def _read_hf_weights(
    checkpoint: Checkpoint,
    kha: HeadsConfig | None,
    tensors: Iterable[HeadTensor],
) -> dict[tuple[int, Projection], Any]:
    """Load the KHA matrices of a Hugging Face model, in which each matrix has its own key."""
    stored_keys = {key for key in checkpoint.keys() if "_knock." in key}  # noqa: SIM118
    recorded_layers = checkpoint.config.get("num_hidden_layers")
    if type(recorded_layers) is not int:
        recorded_layers = 0
    # a config.json can claim any number of layers, so do not list more keys than there can be
    layers = min(len(stored_keys), recorded_layers)
    keys_of_matrices = {}
    expected_keys: set[str] = set()
    for tensor in tensors:
        for layer in range(layers):
            keys = [f"model.layers.{layer}.{name}" for name in tensor.hf_names]
            keys_of_matrices[layer, tensor.heads] = keys
            expected_keys.update(keys)
    differing_keys = stored_keys ^ expected_keys
    if differing_keys:
        raise CheckpointError(
            f"{checkpoint.path}: {len(differing_keys)} KHA matrices are missing or unexpected for "
            f"the config {kha}, e.g. {min(differing_keys)}."
        )
    weights = {}
    for location, keys in keys_of_matrices.items():
        weights[location] = checkpoint.linears(keys)
    return weights
