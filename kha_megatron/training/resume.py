"""Find the checkpoint to resume from, and check that it matches the current run."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.foreign import refuse_foreign_checkpoint, refuse_hf_model
from kha_megatron.checkpoint.integrity import FileChecks
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist import METADATA, TorchDistFolder
from kha_megatron.checkpoint.tracker import (
    COMMIT_MARK,
    NON_PERSISTENT,
    RELEASE,
    TRACKER,
    find_checkpoint,
    folder_name,
    is_object_store,
    iteration_of,
    select_iteration,
    tracker_word,
)
from kha_megatron.errors import CheckpointError, ConfigError, show_value
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore.patches import LLAMA3_ROPE
from kha_megatron.model.config import flag_of
from kha_megatron.model.fields import as_flag
from kha_megatron.model.pattern import PATTERN_ARGUMENT
from kha_megatron.model.recorded import (
    check_same_heads,
    check_same_optimizer,
    check_same_tensors,
    read_kha_config,
)
from kha_megatron.model.rules import check_attention
from kha_megatron.model.run import parse_kha_config
from kha_megatron.training.arguments import kha_from_args
from kha_megatron.training.recovery import repair_tracker, warn_of_a_fresh_start

_RECIPES_WITHOUT_SCALES = ("tensorwise", "blockwise", "mxfp8")
"""FP8 recipes without state, i.e. without scaling factors to save."""

_ROPE_PREFIXES = (
    "position_embedding_type",
    "use_rope_scaling",
    "rope_",
    "rotary_",
    "yarn_",
    "mscale",
)
"""Prefixes of arguments for RoPE."""

_ROPE_SCALING = tuple(f"rope_{name}" for name in LLAMA3_ROPE)
"""Arguments that are only used with ``--use-rope-scaling``."""

_RESTORED_ROPE = ("position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved")
"""Arguments for RoPE that ``--use-checkpoint-args`` restores."""

_OUTPUT_ARGUMENTS = (
    "activation_func_clamp_value",
    "apply_residual_connection_post_layernorm",
    "glu_linear_offset",
    "layernorm_epsilon",
    "mup_attn_scale_power",
    "mup_base_head_dim",
    "mup_base_hidden_size",
    "mup_embedding_mult",
    "mup_output_mult",
    "no_rope_freq",
    "openai_gelu",
    "qk_l2_norm",
    "quick_geglu",
    "softmax_type",
    "squared_relu",
    "swiglu",
    "use_mup",
    "window_attn_skip_freq",
    "window_size",
)
"""Arguments that change the outputs of a model, but none of its tensors."""

_EXPERT_OUTPUT_ARGUMENTS = (
    "moe_apply_probs_on_input",
    "moe_expert_capacity_factor",
    "moe_mlp_glu_interleave_size",
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_glu_interleave_size",
)
"""The same for models with experts."""

_OPTIONAL_STATES = {"optim": "optimizer state", "rng": "states of random number generators"}
"""What ``--no-save-NAME`` leaves out of checkpoints."""

_MAX_ELEMENTS = 2**16
_MAX_DEPTH = 16
_MAX_BITS = 64
"""Limits for recorded arguments, since a malicious checkpoint could exhaust the memory.

Larger values are ignored.
"""


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from, and what all ranks need to know about it."""

    is_pretrained: bool = False
    """Whether it is ``--pretrained-checkpoint``, because ``--load`` has no checkpoint yet."""
    is_remote: bool = False
    """Whether it is in an object store, where we do not read it."""
    path: str | None = None
    """None when starting from scratch or from an object store."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The recorded arguments of Megatron, except for objects and enums."""
    is_tracker_repaired: bool = False

    @property
    def kha(self) -> HeadsConfig | None:
        """The recorded KHA config. None without KHA, and without a checkpoint."""
        return HeadsConfig.from_entries(self.arguments)

    @property
    def is_release(self) -> bool:
        return self.path is not None and Path(self.path).name == RELEASE

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-serializable dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


def choose_start(args: Namespace) -> Start:
    """Repair the tracker file, find the checkpoint to load, and check that it fits this run.

    This is the only place where we read the checkpoint before Megatron does. Only rank 0 needs to
    call it.

    Raises:
        CheckpointError: If the checkpoint is corrupted, or has another configuration.
        ConfigError: If the arguments are not compatible with its head mechanisms.
    """
    is_tracker_repaired = repair_tracker(args)
    warn_of_a_fresh_start(args)
    start = replace(find_start(args), is_tracker_repaired=is_tracker_repaired)
    _check_checkpoint_exists(start, args)
    kha = choose_kha(start, args)
    check_attention(vars(args), kha)
    if not is_upcycled(start, args, kha):
        check_same_kha(start, args, kha)
    return start


def _check_checkpoint_exists(start: Start, args: Namespace) -> None:
    if start.path is not None or start.is_remote or args.non_persistent_ckpt_type == "local":
        return
    if args.exit_on_missing_checkpoint and args.load is not None:
        raise CheckpointError(
            f"{args.load} contains no checkpoint. Choose another directory for --load, or remove "
            "--exit-on-missing-checkpoint to start from scratch."
        )


def find_start(args: Namespace) -> Start:
    """Find the checkpoint to load and read its arguments.

    Raises:
        CheckpointError: If the checkpoint is corrupted or incomplete.
    """
    start = Start(
        is_pretrained=starts_from_pretrained(args),
        is_remote=is_object_store(_directory_to_load(args)),
    )
    path = path_to_load(args)
    if path is None:
        return start
    return replace(start, path=str(path), arguments=_read_arguments(path))


def path_to_load(args: Namespace) -> Path | None:
    """Find the checkpoint that Megatron's ``load_checkpoint`` is going to load.

    It is in ``--load`` if that directory has a tracker file (or ``--ckpt-step`` is set), and in
    ``--pretrained-checkpoint`` otherwise. A global non-persistent checkpoint wins if it is at least
    as new.

    Returns:
        Path to the checkpoint directory. None when starting from scratch or loading from an object
        store.

    Raises:
        CheckpointError: If the tracker file does not name the newest complete checkpoint and cannot
            be repaired, because this run does not save to the same directory.
    """
    directory = _directory_to_load(args)
    if directory is None or is_object_store(directory):
        return None
    persistent = _persistent_checkpoint(Path(directory), args)
    if args.non_persistent_ckpt_type != "global":
        return persistent
    non_persistent_directory = Path(directory) / NON_PERSISTENT
    if args.non_persistent_global_ckpt_dir:
        non_persistent_directory = Path(args.non_persistent_global_ckpt_dir)
    if not _is_tracked(non_persistent_directory):
        return persistent
    non_persistent = _tracked_iteration(non_persistent_directory)
    if persistent is None:
        return non_persistent
    is_older = (iteration_of(non_persistent) or 0) < (iteration_of(persistent) or 0)
    return persistent if is_older else non_persistent


def _persistent_checkpoint(directory: Path, args: Namespace) -> Path | None:
    if args.ckpt_step:  # 0 means unset, as in Megatron
        return directory / folder_name(args.ckpt_step)
    if starts_from_pretrained(args) or _is_tracked(directory):
        return _tracked_iteration(directory)
    if directory.is_dir() and select_iteration(directory).newest:
        return _tracked_iteration(directory)
    refuse_hf_model(directory)  # Megatron would start from scratch
    return None


def object_store(args: Namespace) -> str | None:
    """Return the first checkpoint directory that is an object-store URL (e.g. ``msc://``)."""
    for directory in (args.load, args.save, args.pretrained_checkpoint):
        if is_object_store(directory):
            return directory
    return None


def _directory_to_load(args: Namespace) -> str | None:
    return args.pretrained_checkpoint if starts_from_pretrained(args) else args.load


def starts_from_pretrained(args: Namespace) -> bool:
    """Whether to load ``--pretrained-checkpoint`` because ``--load`` has no checkpoint yet."""
    return bool(args.pretrained_checkpoint) and not _is_tracked(args.load)


def _is_tracked(directory: str | Path | None) -> bool:
    return directory is not None and (Path(directory) / TRACKER).is_file()


def _tracked_iteration(directory: Path) -> Path:
    """Resolve the tracker file, but raise an error if it is invalid.

    Megatron would exit with code 0 or start from scratch in this case.
    """
    if directory.is_dir():
        selection = select_iteration(directory)
        if selection.tracker_problem and selection.newest:
            raise CheckpointError(
                f"{directory / TRACKER} {selection.tracker_problem}. It is repaired automatically "
                "only if --save is the same directory. Write "
                f"{tracker_word(selection.newest)} into this file."
            )
        if selection.newest is None and selection.named is None:
            refuse_foreign_checkpoint(directory)
    return find_checkpoint(directory)


def choose_kha(start: Start, args: Namespace) -> HeadsConfig:
    """Return the KHA config of this run, from the checkpoint or from ``--kha-*`` arguments."""
    return restored_kha(start, args) or kha_from_args(args)


def restored_kha(start: Start, args: Namespace) -> HeadsConfig | None:
    """Return the KHA config of the checkpoint if ``--use-checkpoint-args`` is set.

    ``--kha-*`` arguments take precedence, in which case this returns None.
    """
    if not args.use_checkpoint_args or parse_kha_config(vars(args)):
        return None
    return start.kha


def check_model_class(start: Start, args: Namespace) -> None:
    """Raise CheckpointError if Megatron cannot load the checkpoint into this kind of model.

    This needs the final ``--hybrid-layer-pattern``, see ``arguments.set_layer_pattern``.
    """
    if start.path is None:
        return
    _check_same_norm(start, args)
    contains_hybrid_model = bool(start.arguments.get(PATTERN_ARGUMENT))
    if contains_hybrid_model and args.gpt_model:
        raise CheckpointError(f"{start.path} contains a HybridModel. Remove --gpt-model.")
    if not contains_hybrid_model and not args.gpt_model:
        _check_gpt_layers(start, args)


def _check_same_norm(start: Start, args: Namespace) -> None:
    is_centered = bool(start.arguments.get("layernorm_zero_centered_gamma"))
    if is_centered == args.layernorm_zero_centered_gamma:
        return
    saved = "with" if is_centered else "without"
    remedy = "Add" if is_centered else "Remove"
    raise CheckpointError(
        f"{start.path} was trained {saved} --apply-layernorm-1p, which changes the meaning of norm "
        f"weights. {remedy} this flag."
    )


def _check_gpt_layers(start: Start, args: Namespace) -> None:
    """Raise CheckpointError if a GPTModel cannot be loaded into this HybridModel."""
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop

    try:
        gpt_checkpoint_interop.gpt_compatible_layer_maps(args.hybrid_layer_pattern)
    except ValueError as error:
        raise CheckpointError(
            f"{start.path} contains a GPTModel, which does not fit this HybridModel. {error} "
            "Convert it with `kha-megatron convert to-megatron`, or add --gpt-model."
        ) from error


def check_same_kha(start: Start, args: Namespace, kha: HeadsConfig) -> None:
    """Check that the KHA config and RoPE match the checkpoint.

    Raises:
        CheckpointError: If they differ.
    """
    if start.path is None:
        return
    check_same_heads(Path(start.path), start.kha, kha)
    if not (args.finetune or start.is_pretrained):
        _check_same_rope(start, args)


def check_same_state(start: Start, args: Namespace) -> None:
    """Check that model and optimizer have the same tensors as the checkpoint.

    Args:
        start: The checkpoint.
        args: Megatron's validated arguments, including those that ``--use-checkpoint-args`` reads.

    Raises:
        CheckpointError: If they differ. Megatron would end in a traceback, drop tensors, or assign
            optimizer state to the wrong parameters.
    """
    if start.path is None:
        return
    check_same_tensors(Path(start.path), start.arguments, vars(args))
    _check_saved_states(start, args)
    _warn_of_changed_outputs(start, args)
    if _loads_optimizer(start, args):
        check_same_optimizer(Path(start.path), start.arguments, vars(args))


def _check_saved_states(start: Start, args: Namespace) -> None:
    if args.finetune or start.is_pretrained or start.is_release:
        return
    for name, state in _OPTIONAL_STATES.items():
        is_missing = start.arguments.get(f"no_save_{name}")
        if is_missing and not getattr(args, f"no_load_{name}"):
            raise CheckpointError(
                f"{start.path} was saved with --no-save-{name} and contains no {state}. Add "
                f"--no-load-{name}, or --finetune to start a new run with its weights."
            )


def _warn_of_changed_outputs(start: Start, args: Namespace) -> None:
    """Warn about arguments with which the weights of the checkpoint give other outputs."""
    names: tuple[str, ...] = _OUTPUT_ARGUMENTS
    if getattr(args, "num_experts", None):
        names += _EXPERT_OUTPUT_ARGUMENTS
    for name in names:
        saved_value = _as_list(start.arguments.get(name))
        value = _as_list(getattr(args, name, saved_value))
        is_recorded = name in start.arguments
        if is_recorded and value != saved_value and (value or saved_value):
            announce(
                f"WARNING: {flag_of(name)} is {value}, but {start.path} was trained with "
                f"{show_value(saved_value)}. This changes the outputs of the model."
            )


def _as_list(value: Any) -> Any:
    """Convert tuples to lists, as JSON does."""
    return list(value) if isinstance(value, tuple) else value


def _loads_optimizer(start: Start, args: Namespace) -> bool:
    if args.no_load_optim or args.finetune or start.is_pretrained:
        return False
    return not start.arguments.get("no_save_optim") and not start.is_release


def _check_same_rope(start: Start, args: Namespace) -> None:
    is_scaled = args.use_rope_scaling or start.arguments.get("use_rope_scaling")
    for name, saved_value in start.arguments.items():
        if not name.startswith(_ROPE_PREFIXES):
            continue
        if name in _ROPE_SCALING and not is_scaled:  # had no effect
            continue
        if name in _RESTORED_ROPE and args.use_checkpoint_args:
            continue
        value = getattr(args, name, saved_value)
        if value == saved_value:
            continue
        # Megatron sets position_embedding_type from this flag later
        if name == "position_embedding_type" and args.use_rotary_position_embeddings:
            continue
        raise CheckpointError(
            f"{as_flag(name)} is {value}, but {start.path} was trained with "
            f"{show_value(saved_value)}. Use the same RoPE arguments, or add --finetune to change "
            "them."
        )


def is_upcycled(start: Start, args: Namespace, kha: HeadsConfig) -> bool:
    """Whether ``--kha-upcycle`` initializes the model from a checkpoint without KHA.

    Shared matrices start as the identity, so the initial loss is the same as without KHA. The
    optimizer, RNG state, schedule and iteration are reset, as with ``--finetune``. Returns False if
    the run is not upcycled or already has a checkpoint of its own.

    Raises:
        ConfigError: If the same command line could not resume the run later.
        CheckpointError: If the checkpoint already has KHA.
    """
    if not args.kha_upcycle:
        return False
    if args.pretrained_checkpoint is None or (args.save and args.load != args.save):
        raise ConfigError(
            "--kha-upcycle requires --pretrained-checkpoint, and the same directory for --load and "
            f"--save. Got {args.pretrained_checkpoint}, {args.load} and {args.save}."
        )
    if not start.is_pretrained:
        return False
    saved_kha = HeadsConfig.from_entries_or_empty(start.arguments)
    has_mechanisms = bool(saved_kha.without_output_gate().mechanisms)
    # the output gate is part of Megatron's linear_qkv, so both models need to have it or not
    if has_mechanisms or saved_kha.has_output_gate != kha.has_output_gate:
        raise CheckpointError(
            f"--kha-upcycle requires a checkpoint without KHA, but {start.path} was trained with "
            f"{saved_kha}. Remove --kha-upcycle to continue with {kha}."
        )
    return True


def vocabulary_size(start: Start, args: Namespace, tokenizer_size: int) -> int | None:
    """Return the number of embedding rows without padding, so that checkpoints record it.

    Pretrained models can have more rows than their tokenizer. Returns None if the checkpoint to
    load does not record the number.
    """
    if args.vocab_size:
        return int(args.vocab_size)
    if start.path is None:
        return None if start.is_remote else tokenizer_size
    recorded_size = start.arguments.get("vocab_size")
    if not recorded_size or not isinstance(recorded_size, int):
        return None
    return max(recorded_size, tokenizer_size)


def loads_fp8_scales(start: Start, args: Namespace) -> bool:
    """Whether to load FP8 scaling factors (delayed scaling only)."""
    if not _has_fp8_scales(vars(args)):
        return False
    if start.is_remote:
        return True  # loading fails if the checkpoint has none
    if start.path is None:
        return False
    are_saved = not start.is_release and _has_fp8_scales(start.arguments)
    if not are_saved:
        announce(f"FP8 scaling factors are reset to defaults, because {start.path} contains none.")
    return are_saved


def _has_fp8_scales(args: Mapping[str, Any]) -> bool:
    if args.get("transformer_impl") != "transformer_engine" or not args.get("fp8"):
        return False
    return args.get("fp8_recipe") not in _RECIPES_WITHOUT_SCALES


def _read_arguments(path: Path) -> dict[str, Any]:
    """Read Megatron's arguments from a checkpoint, and check that its tensors match its KHA config.

    Leaves out objects and enums, so that JSON can represent all values.
    """
    arguments = None
    if not (path / COMMIT_MARK).is_file() and (path / METADATA).is_file():
        folder = TorchDistFolder(path, FileChecks(path, {}))
        if "args" in folder.objects:  # written by FSDP in PyTorch's own format
            arguments = folder.read_object("args").state
    if arguments is None:
        checkpoint = MegatronCheckpoint.open(path)
        read_kha_config(checkpoint)
        arguments = checkpoint.args
    return {name: value for name, value in arguments.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Whether JSON can represent a value, and it is within the limits."""
    unchecked = [(value, 0)]
    num_checked = 0
    while unchecked:
        element, depth = unchecked.pop()
        num_checked += 1
        contained: list[Any] = []
        if isinstance(element, dict) and all(isinstance(key, str) for key in element):
            contained = list(element.values())
        elif isinstance(element, list | tuple):
            contained = list(element)
        elif not isinstance(element, int | float | str | None):
            return False
        if isinstance(element, int) and element.bit_length() > _MAX_BITS:
            return False
        for contained_element in contained:
            unchecked.append((contained_element, depth + 1))
        if depth > _MAX_DEPTH or num_checked + len(unchecked) > _MAX_ELEMENTS:
            return False
    return True
