"""Which checkpoint training would continue from, and is it of the same KHA configuration?"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kha_megatron import cpu
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist import METADATA, TorchDistFolder
from kha_megatron.checkpoint.tracker import (
    COMMIT_MARK,
    TRACKER,
    folder_name,
    iteration_of,
    judge,
    resolve,
    tracker_word,
)
from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.mcore import compat
from kha_megatron.model.recorded import kha_of, matrices_stored, stacked
from kha_megatron.model.run import kha_asked

_ATTENTION = "self_attention.linear_proj.weight"
"""Every attention layer has it, so it tells how the layers of a checkpoint are named."""


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
    folder = args.pretrained_checkpoint if starts_from_pretrained(args) else args.load
    if folder is None or "://" in str(folder):
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
            that differ, its optimizer's state fits its own layout only, or it is damaged or
            incomplete.
    """
    if (path := checkpoint_to_load(args)) is None:
        return
    stored, shapes, saved_args = _stored(path)
    saved = stored or KHAConfig()
    if saved.to_dict(start=False) != kha.to_dict(start=False):
        remedy = "resume with the same --kha-* arguments, or start without --load"
        if not saved.mechanisms and saved.attention == kha.attention:
            remedy += ", or start a new run from it with --kha-upcycle"
        raise CheckpointError(
            f"{path} was trained with KHA on {saved}, and the command line asks for {kha}"
            f"{_differences(shapes, kha, bool(args.multi_latent_attention))}: {remedy}"
        )
    _check_optimizer_moves(path, saved_args, args)


def _check_optimizer_moves(path: Path, saved: Mapping[str, Any], args: Namespace) -> None:
    """The distributed optimizer's usual state is cut for one layout; Megatron's advice is wrong."""
    if not args.use_distributed_optimizer or args.use_mp_args_from_checkpoint_args:
        return
    if args.no_load_optim or args.finetune or saved.get("no_save_optim"):
        return
    layouts = [
        (a.get("tensor_model_parallel_size", 1), a.get("pipeline_model_parallel_size", 1))
        for a in (saved, vars(args))
    ]
    fits = saved.get("use_distributed_optimizer") and saved.get("dist_ckpt_optim_fully_reshardable")
    if layouts[0] != layouts[1] and not fits:
        was, now = ("TP {} and PP {}".format(*layout) for layout in layouts)
        raise CheckpointError(
            f"{path} holds optimizer state for {was} only, and this run has {now}: train on with "
            f"{was} and --dist-ckpt-optim-fully-reshardable until the next save, which moves, or "
            "add --no-load-optim to start the optimizer anew"
        )


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


def _differences(shapes: Mapping[str, tuple[int, ...]], kha: KHAConfig, latent: bool) -> str:
    """The tensors by which a checkpoint differs from a model of this configuration."""
    wanted = {
        key.removesuffix(_ATTENTION) + name: matrices
        for key in shapes
        if key.endswith(_ATTENTION)
        for name, matrices in stacked(kha, multi_latent=latent).items()
    }
    stored = matrices_stored(shapes)
    kinds = {
        "missing": wanted.keys() - stored.keys(),
        "unexpected": stored.keys() - wanted.keys(),
        "with another number of matrices": {
            key for key in wanted.keys() & stored.keys() if wanted[key] != stored[key]
        },
    }
    return "".join(f" ({_named(keys)} {kind})" for kind, keys in kinds.items() if keys)


def _named(keys: set[str]) -> str:
    first = sorted(keys)[:3]
    more = f" and {len(keys) - len(first)} more" if len(keys) > len(first) else ""
    return f"{len(keys)} tensor{'s' * (len(keys) > 1)} {', '.join(first)}{more}"


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
