"""Which checkpoint training would continue from, and is it of the same KHA configuration?"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist import METADATA, TorchDistFolder
from kha_megatron.checkpoint.tracker import (
    COMMIT_MARK,
    RELEASE,
    TRACKER,
    folder_name,
    iteration_of,
    judge,
    resolve,
    tracker_word,
)
from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.mcore import compat, cpu
from kha_megatron.model.recorded import check_same_heads, kha_of
from kha_megatron.model.run import kha_asked

_STATELESS = ("tensorwise", "blockwise", "mxfp8")
"""Megatron's names of the recipes of FP8 without a memory."""


def check_saving(args: Namespace) -> None:
    """Refuse ways of saving that would fail, be turned off or escape :func:`check_same_kha`.

    Raises:
        ConfigError: naming the argument to change.
    """
    if args.ckpt_format == "torch":
        raise ConfigError(
            "--ckpt-format torch: Megatron loads this format into a model of other tensors, so a "
            "checkpoint of another KHA configuration would go unnoticed: use torch_dist"
        )
    if args.non_persistent_ckpt_type == "local":
        raise ConfigError(
            "--non-persistent-ckpt-type local: its files cannot be checked for their KHA "
            "configuration: use --non-persistent-ckpt-type global"
        )
    if not args.async_save:
        return
    if not args.use_persistent_ckpt_worker:
        raise ConfigError(
            "--async-save alone: Megatron would turn it off: add --use-persistent-ckpt-worker"
        )
    if args.async_strategy == "nvrx" and (cpu.is_installed() or not compat.has_nvrx()):
        why = "works with CUDA only" if cpu.is_installed() else "is not installed"
        raise ConfigError(
            f"--async-save uses nvidia-resiliency-ext, which {why}: add --async-strategy mcore"
        )


def checkpoint_to_load(args: Namespace) -> Path | None:
    """The folder of the iteration that Megatron's ``load_checkpoint`` will choose.

    ``--load`` if it has a tracker file or ``--ckpt-step`` names an iteration in it, else
    ``--pretrained-checkpoint``; the global non-persistent checkpoint if that is as new. None if
    training starts from scratch. What lies in an object store is not looked at.

    Raises:
        CheckpointError: the tracker file of a folder that this run does not save into, where it is
            repaired, is missing or torn, or names another than the newest complete iteration.
    """
    folder = _folder_to_load(args)
    if folder is None or _is_remote(folder):
        return None
    chosen = None
    if args.ckpt_step:  # as in Megatron, 0 is none
        chosen = Path(folder) / folder_name(args.ckpt_step)
    elif _holds_saves(folder) or starts_from_pretrained(args):
        chosen = _as_megatron_reads(Path(folder))
    if args.non_persistent_ckpt_type == "global":
        passing = args.non_persistent_global_ckpt_dir or Path(folder) / "non_persistent"
        if _is_tracked(passing):
            newest = _as_megatron_reads(Path(passing))
            if chosen is None or (iteration_of(newest) or 0) >= (iteration_of(chosen) or 0):
                chosen = newest
    return chosen


def object_store(args: Namespace) -> str | None:
    """What of checkpoints lies where no file system reaches, such as ``msc://bucket/run``."""
    return next(filter(_is_remote, (args.load, args.save, args.pretrained_checkpoint)), None)


def _is_remote(folder: str | Path | None) -> bool:
    return "://" in str(folder)


def _folder_to_load(args: Namespace) -> str | None:
    return args.pretrained_checkpoint if starts_from_pretrained(args) else args.load


def starts_from_pretrained(args: Namespace) -> bool:
    """Whether Megatron passes over ``--load``, which holds no checkpoint yet."""
    return bool(args.pretrained_checkpoint) and not _is_tracked(args.load)


def restored_kha(args: Namespace) -> KHAConfig | None:
    """With ``--use-checkpoint-args``, what the checkpoint to be loaded knocks.

    Returns:
        None if the command line says it, or no checkpoint records it.
    """
    asked = kha_asked(vars(args))
    if not args.use_checkpoint_args or asked or not (path := checkpoint_to_load(args)):
        return None
    stored = _stored(path)[0]
    return stored and replace(stored, fold=args.kha_fold)


def check_same_kha(args: Namespace, kha: KHAConfig) -> None:
    """Refuse to load a checkpoint that was trained with another configuration, or does not move.

    Raises:
        CheckpointError: it was trained with another configuration or without KHA, with the tensors
            that differ, with other heads, its optimizer's state fits its own layout only, or it is
            damaged or incomplete.
    """
    if (path := checkpoint_to_load(args)) is None:
        return
    stored, shapes, saved_args = _stored(path)
    check_same_heads(path, stored, shapes, vars(args), kha)
    _check_optimizer_moves(path, saved_args, args)


def goes_on_with_scales(args: Namespace) -> bool:
    """Whether FP8's scales come from the checkpoint to be loaded, if there is any.

    Only delayed scaling carries them from step to step, so they go from run to run between its own;
    says so where they do not.
    """
    if _is_remote(_folder_to_load(args)):
        return _keeps_scales(vars(args))  # taken to be in there; loading ends where they are not
    if (path := checkpoint_to_load(args)) is None:
        return False
    stored = path.name != RELEASE and _keeps_scales(_stored(path)[2])
    wanted = _keeps_scales(vars(args))
    if wanted and not stored:
        announce(f"{path} holds no FP8 scales of delayed scaling: they start afresh")
    elif stored and not wanted:
        announce(f"the FP8 scales of delayed scaling in {path} are left behind: nothing uses them")
    return wanted and stored


def _keeps_scales(args: Mapping[str, Any]) -> bool:
    engine = args.get("transformer_impl") == "transformer_engine"
    return engine and bool(args.get("fp8")) and args.get("fp8_recipe") not in _STATELESS


def _check_optimizer_moves(path: Path, saved: Mapping[str, Any], args: Namespace) -> None:
    """Experts that ranks divide have an optimizer of their own, whichever it is. The distributed
    optimizer's usual state lies as its own run's parameters do in buffers.

    Under another layout of ranks Megatron's advice is wrong. Layers of another kind have their
    parameters in another order: Megatron would mix up main weights and moments without a word.
    """
    if args.use_mp_args_from_checkpoint_args or args.no_load_optim or args.finetune:
        return
    if saved.get("no_save_optim") or path.name == RELEASE or starts_from_pretrained(args):
        return  # Megatron finetunes what is pretrained
    old, new = (a.get("expert_model_parallel_size", 1) for a in (saved, vars(args)))
    if old != new and 1 in (old, new):
        raise CheckpointError(
            f"{path} holds optimizer state for EP {old} only, and this run has EP {new}: none "
            f"moves between EP 1 and more: use --expert-model-parallel-size {old}, or add "
            "--no-load-optim to start the optimizer anew"
        )
    if not args.use_distributed_optimizer:
        return
    before, here = (_placing(a) for a in (saved, vars(args)))
    fits = saved.get("use_distributed_optimizer") and saved.get("dist_ckpt_optim_fully_reshardable")
    if before == here or fits:
        return
    shown = [i for i in range(len(here)) if i < 2 or before[i] != here[i]]
    was, now = (" and ".join(words[i] for i in shown) for words in (before, here))
    raise CheckpointError(
        f"{path} holds optimizer state for {was} only, and this run has {now}: train on with "
        f"{was} and --dist-ckpt-optim-fully-reshardable until the next save, which moves, or "
        "add --no-load-optim to start the optimizer anew"
    )


def _placing(args: Mapping[str, Any]) -> tuple[str, ...]:
    """What decides where a parameter lies in the distributed optimizer's buffers."""
    return (
        f"TP {args.get('tensor_model_parallel_size', 1)}",
        f"PP {args.get('pipeline_model_parallel_size', 1)}",
        f"EP {args.get('expert_model_parallel_size', 1)}",
        f"--transformer-impl {args.get('transformer_impl', 'transformer_engine')}",
    )


@cache
def _stored(
    path: Path,
) -> tuple[KHAConfig | None, Mapping[str, tuple[int, ...]], Mapping[str, Any]]:
    """What a checkpoint knocks, the shapes of its model's tensors, and its arguments."""
    if not (path / COMMIT_MARK).is_file() and (path / METADATA).is_file():
        folder = TorchDistFolder.open(path)
        if "args" in folder.objects:  # of FSDP, which writes PyTorch's own format
            args = folder.read_object("args").state
            shapes = {key: tensor.shape for key, tensor in folder.tensors.items()}
            return KHAConfig.recorded(args), shapes, args
    checkpoint = MegatronCheckpoint.open(path)
    shapes = {key: info.shape for key, info in checkpoint.keys().items()}
    return kha_of(checkpoint), shapes, checkpoint.args


def _is_tracked(folder: str | Path | None) -> bool:
    return folder is not None and (Path(folder) / TRACKER).is_file()


def _holds_saves(folder: str | Path) -> bool:
    """Without any, Megatron starts from scratch."""
    return _is_tracked(folder) or (Path(folder).is_dir() and judge(Path(folder)).newest is not None)


def _as_megatron_reads(folder: Path) -> Path:
    """What the tracker file names; Megatron would exit with 0, or start anew, without a good one.

    Raises:
        CheckpointError: it is not to be followed, or there is nothing to load.
    """
    verdict = judge(folder) if folder.is_dir() else None
    if verdict and verdict.problem and verdict.newest:
        raise CheckpointError(
            f"{folder / TRACKER} {verdict.problem}, and only a folder that the run saves into is "
            f"repaired: write {tracker_word(verdict.newest)} into it"
        )
    return resolve(folder)
