"""Find the checkpoint to resume from, and check that it matches the current run."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.integrity import FileChecks
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist import METADATA, TorchDistFolder
from kha_megatron.checkpoint.tracker import (
    COMMIT_MARK,
    RELEASE,
    TRACKER,
    folder_name,
    iteration_of,
    resolve,
    select_iteration,
    tracker_word,
)
from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.mcore import compat
from kha_megatron.model.recorded import check_same_heads, check_same_sizes, read_kha_config
from kha_megatron.model.run import parse_kha_config

_STATELESS = ("tensorwise", "blockwise", "mxfp8")
"""FP8 recipes without state, i.e. without scaling factors to save."""

_ROPE = ("position_embedding_type", "use_rope_scaling", "rope_", "rotary_", "yarn_", "mscale")
_RESTORED = ("position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved")
"""Arguments of RoPE, and those that ``--use-checkpoint-args`` restores."""

_BUFFERS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "transformer_impl": "transformer_engine",
}
"""Arguments (and Megatron's defaults) that affect the layout of distributed optimizer buffers."""


def path_to_load(args: Namespace) -> Path | None:
    """Find the checkpoint that Megatron's ``load_checkpoint`` is going to load.

    It's in ``--load`` if that directory has a tracker file (or ``--ckpt-step`` is set), and in
    ``--pretrained-checkpoint`` otherwise. A global non-persistent checkpoint wins if it's at least
    as new.

    Returns:
        Path to the checkpoint directory. None when starting from scratch or loading from an object
        store.

    Raises:
        CheckpointError: If the tracker file doesn't name the newest complete checkpoint and can't
            be repaired, because this run doesn't save to the same directory.
    """
    directory = _directory_to_load(args)
    if directory is None or _is_remote(directory):
        return None
    path, chosen = Path(directory), None
    if args.ckpt_step:  # 0 means unset, as in Megatron
        chosen = path / folder_name(args.ckpt_step)
    elif (
        starts_from_pretrained(args)
        or _is_tracked(path)
        or (path.is_dir() and select_iteration(path).newest)
    ):
        chosen = _tracked_iteration(path)
    if args.non_persistent_ckpt_type == "global":
        other = Path(args.non_persistent_global_ckpt_dir or path / "non_persistent")
        if _is_tracked(other):
            newest = _tracked_iteration(other)
            if chosen is None or (iteration_of(newest) or 0) >= (iteration_of(chosen) or 0):
                chosen = newest
    return chosen


def object_store(args: Namespace) -> str | None:
    """Return the first checkpoint directory that's an object-store URL (e.g. ``msc://``)."""
    return next(filter(_is_remote, (args.load, args.save, args.pretrained_checkpoint)), None)


def _is_remote(directory: str | None) -> bool:
    return "://" in str(directory)


def _directory_to_load(args: Namespace) -> str | None:
    return args.pretrained_checkpoint if starts_from_pretrained(args) else args.load


def starts_from_pretrained(args: Namespace) -> bool:
    """Whether to load ``--pretrained-checkpoint`` because ``--load`` has no checkpoint yet."""
    return bool(args.pretrained_checkpoint) and not _is_tracked(args.load)


def _is_tracked(directory: str | Path | None) -> bool:
    return directory is not None and (Path(directory) / TRACKER).is_file()


def _tracked_iteration(directory: Path) -> Path:
    """Resolve the tracker file, but raise an error if it's invalid.

    Megatron would exit with code 0 or start from scratch in this case.
    """
    verdict = select_iteration(directory) if directory.is_dir() else None
    if verdict and verdict.problem and verdict.newest:
        raise CheckpointError(
            f"{directory / TRACKER} {verdict.problem}. It is repaired automatically only if --save "
            f"is the same directory. Write {tracker_word(verdict.newest)} into this file."
        )
    return resolve(directory)


def restored_kha(args: Namespace) -> KHAConfig | None:
    """Read the KHA config from the checkpoint if ``--use-checkpoint-args`` is set.

    ``--kha-*`` arguments take precedence, in which case this returns None.
    """
    asked = parse_kha_config(vars(args))
    if not args.use_checkpoint_args or asked or not (path := path_to_load(args)):
        return None
    stored = _stored(path)[0]
    return stored and replace(stored, fold=args.kha_fold)


def check_model_class(args: Namespace) -> None:
    """Raise CheckpointError if Megatron can't load the checkpoint into this kind of model.

    This needs the final ``--hybrid-layer-pattern``, see ``arguments.describe_layers``.
    """
    if (path := path_to_load(args)) is None:
        return
    saved = _stored(path)[1]
    centered = bool(saved.get("layernorm_zero_centered_gamma"))
    if centered != args.layernorm_zero_centered_gamma:
        raise CheckpointError(
            f"{path} was trained {'with' if centered else 'without'} --apply-layernorm-1p, which "
            f"changes the meaning of norm weights. {'Add' if centered else 'Remove'} this flag."
        )
    if saved.get("hybrid_layer_pattern"):
        if args.gpt_model:
            raise CheckpointError(f"{path} contains a HybridModel. Remove --gpt-model.")
        return
    if args.gpt_model:
        return
    try:
        compat.check_loads_gpt_checkpoint(args.hybrid_layer_pattern)
    except ValueError as error:
        raise CheckpointError(
            f"{path} contains a GPTModel, which does not fit this HybridModel. {error} "
            "Convert it with `kha-megatron convert to-megatron`, or add --gpt-model."
        ) from error


def check_same_kha(args: Namespace, kha: KHAConfig) -> None:
    """Check that the KHA config, model sizes and optimizer layout match the checkpoint.

    Raises:
        CheckpointError: If they don't match, or if the checkpoint is corrupted.
    """
    if (path := path_to_load(args)) is None:
        return
    stored, saved = _stored(path)
    check_same_heads(path, stored, kha)
    if not args.use_checkpoint_args:
        check_same_sizes(path, saved, vars(args))
    if not (args.finetune or starts_from_pretrained(args)):
        _check_same_rope(path, saved, args)
    starts_anew = args.no_load_optim or args.finetune or starts_from_pretrained(args)
    if starts_anew or saved.get("no_save_optim") or path.name == RELEASE:
        return
    if args.use_mp_args_from_checkpoint_args or not args.use_distributed_optimizer:
        return
    if saved.get("use_distributed_optimizer") and saved.get("dist_ckpt_optim_fully_reshardable"):
        return
    is_gpt_model = not saved.get("hybrid_layer_pattern")
    if saved.get("use_distributed_optimizer") and is_gpt_model and not args.gpt_model:
        raise CheckpointError(
            f"The optimizer state in {path} can only be loaded into a GPTModel. Save a checkpoint "
            "with --gpt-model and --dist-ckpt-optim-fully-reshardable first, or add "
            "--no-load-optim."
        )
    # otherwise Megatron would silently assign main weights and moments to the wrong parameters
    before, here = ({n: a.get(n, d) for n, d in _BUFFERS.items()} for a in (saved, vars(args)))
    if before != here:
        name = next(name for name in _BUFFERS if before[name] != here[name])
        flag = f"--{name.replace('_', '-')}"
        raise CheckpointError(
            f"The optimizer state in {path} can only be loaded with {flag} {before[name]}, not "
            f"{here[name]}. Save a checkpoint with {flag} {before[name]} and "
            "--dist-ckpt-optim-fully-reshardable first, or add --no-load-optim."
        )


def _check_same_rope(path: Path, saved: Mapping[str, Any], args: Namespace) -> None:
    restored = _RESTORED if args.use_checkpoint_args else ()
    for name in (n for n in saved if n.startswith(_ROPE) and n not in restored):
        old, new = saved[name], getattr(args, name, saved[name])
        if old != new and not (name == _RESTORED[0] and args.use_rotary_position_embeddings):
            raise CheckpointError(
                f"--{name.replace('_', '-')} is {new}, but {path} was trained with {old}. Use the "
                "same RoPE arguments, or add --finetune to change them."
            )


def path_to_upcycle(args: Namespace, kha: KHAConfig) -> Path | None:
    """Find the checkpoint (without KHA) that ``--kha-upcycle`` initializes the model from.

    Shared matrices start as the identity, so the initial loss is the same as without KHA. The
    optimizer, RNG state, schedule and iteration are reset, as with ``--finetune``. Returns None if
    the run isn't upcycled or already has a checkpoint of its own.

    Raises:
        ConfigError: If the same command line couldn't resume the run later.
        CheckpointError: If the checkpoint already has KHA, or is corrupted or incomplete.
    """
    if not args.kha_upcycle:
        return None
    if args.pretrained_checkpoint is None or (args.save and args.load != args.save):
        raise ConfigError(
            "--kha-upcycle requires --pretrained-checkpoint, and the same directory for --load and "
            f"--save. Got {args.pretrained_checkpoint}, {args.load} and {args.save}."
        )
    if not starts_from_pretrained(args):
        return None
    path = path_to_load(args)
    assert path is not None
    found = _stored(path)[0] or KHAConfig()
    if found.without_output_gate().mechanisms or found.has_output_gate != kha.has_output_gate:
        raise CheckpointError(
            f"--kha-upcycle requires a checkpoint without KHA, but {path} was trained with "
            f"{found}. Remove --kha-upcycle to continue with {kha}."
        )
    return path


def vocabulary_size(args: Namespace, tokenizer_size: int) -> int | None:
    """Return the number of embedding rows without padding, so that checkpoints record it.

    Pretrained models can have more rows than their tokenizer. Returns None if the checkpoint to
    load does not record the number.
    """
    if args.vocab_size:
        return int(args.vocab_size)
    if _is_remote(_directory_to_load(args)):
        return None
    if (path := path_to_load(args)) is None:
        return tokenizer_size
    recorded = _stored(path)[1].get("vocab_size")
    return max(int(recorded), tokenizer_size) if recorded else None


def loads_fp8_scales(args: Namespace) -> bool:
    """Whether to load FP8 scaling factors (delayed scaling only)."""
    wanted = _has_fp8_scales(vars(args))
    if not wanted or _is_remote(_directory_to_load(args)):
        return wanted  # assumed for an object store; loading fails if the checkpoint has none
    if (path := path_to_load(args)) is None:
        return False
    stored = path.name != RELEASE and _has_fp8_scales(_stored(path)[1])
    if not stored:
        announce(f"FP8 scaling factors are reset to defaults, because {path} contains none.")
    return stored


def _has_fp8_scales(args: Mapping[str, Any]) -> bool:
    engine = args.get("transformer_impl") == "transformer_engine"
    return engine and bool(args.get("fp8")) and args.get("fp8_recipe") not in _STATELESS


@cache
def _stored(path: Path) -> tuple[KHAConfig | None, Mapping[str, Any]]:
    """Read the KHA config and Megatron's args from a checkpoint."""
    if not (path / COMMIT_MARK).is_file() and (path / METADATA).is_file():
        folder = TorchDistFolder(path, FileChecks(path, {}))
        if "args" in folder.objects:  # written by FSDP in PyTorch's own format
            args = folder.read_object("args").state
            return KHAConfig.from_entries(args), args
    checkpoint = MegatronCheckpoint.open(path)
    return read_kha_config(checkpoint), checkpoint.args
