"""What can be refused before a rank starts, from the command line and the file system alone."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kha_megatron.checkpoint.tracker import judge
from kha_megatron.errors import CheckpointError, ConfigError, OutputError
from kha_megatron.model.rules import check_arguments, check_attention
from kha_megatron.model.run import Run, hear
from kha_megatron.model.words import render
from kha_megatron.recipes.recipe import Recipe

_OTHERWISE = ("kha_upcycle", "use_checkpoint_args", "--ckpt-step", "--non-persistent-ckpt-type")
"""With these the newest checkpoint's heads may differ, or another is loaded: the ranks compare."""


def check_words(recipe: Recipe, words: Sequence[str]) -> None:
    """A user's words must be ones that Megatron's parser takes.

    The table of ``model`` has read numbers and switches; about the flags that it does not have, and
    text that may be one of a few, Megatron is asked, in some seconds, where it is installed and the
    recipe runs our entry point.

    Raises:
        ConfigError: one is not, in its parser's words.
    """
    doubtful = {
        one.flag: one.words
        for name, one in hear(words).items()
        if name == one.flag or isinstance(one.value, str)
    }
    if not doubtful or recipe.entry != "kha_megatron.training" or not _has_megatron():
        return
    command = [sys.executable, "-m", "kha_megatron.training.words", *render(doubtful)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        complaint = done.stderr.strip().rpartition("error: ")[2]
        raise ConfigError(f"{complaint}: `python -m {recipe.entry} --help` lists what there is")


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.training") is not None
    except ModuleNotFoundError:
        return False


def check_layout(run: Run, ranks: int) -> None:
    """The model, the batch and the ranks against the parallel sizes, and the KHA settings.

    Args:
        run: the whole of it.
        ranks: number of processes.

    Raises:
        ConfigError: naming the numbers and what to change.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks: give --nproc a whole number from 1 up")
    check_attention(run.arguments, run.kha)
    device = run.training.device
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"unknown device {device!r}: choose cuda or cpu")
    check_arguments(run.arguments, ranks, run.kha)


def check_folders(run: Run, output: Path | None, *, resume: bool) -> None:
    """Nothing is overwritten, and a checkpoint to continue from is complete.

    Args:
        run: the whole of it.
        output: the run's own folder, which must be empty unless ``resume``.
        resume: continue from the last checkpoint under ``--save``.

    Raises:
        OutputError: the output folder is not empty, is a file or cannot be written.
        CheckpointError: there is no complete checkpoint to load, or it is of other heads.
    """
    save = run.files.save
    load = Path(run.files.load).absolute() if run.files.load else None
    if load is not None:
        _check_checkpoint(load, run)
    for folder in dict.fromkeys(f.absolute() for f in (output, save and Path(save)) if f):
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"{folder} is a file: choose another --output")
        if not resume and folder != load and folder.is_dir() and any(folder.iterdir()):
            raise OutputError(
                f"{folder} is not empty: choose another --output, remove it, or continue it "
                "with --resume"
            )
        parent = next(p for p in (folder, *folder.parents) if p.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise OutputError(f"{parent} cannot be written: choose another --output")


def _check_checkpoint(folder: Path, run: Run) -> None:
    """Refuse what has nothing to load, where Megatron starts from random weights, and other heads
    than the checkpoint's, which the ranks refuse too: on a cluster, after the queue."""
    verdict = judge(folder) if folder.is_dir() else None
    if verdict and verdict.newest:
        if not any(run.arguments.get(name) for name in _OTHERWISE):
            _check_heads(verdict.newest, run)
        return
    # the commit mark is of torch_dist alone: of another format, the tracker file's word is taken
    if verdict and verdict.named and run.training.ckpt_format != "torch_dist":
        return
    raise CheckpointError(
        f"{folder} holds no complete checkpoint: start again in an empty --output, without --resume"
    )


def _check_heads(path: Path, run: Run) -> None:
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint  # imports torch
    from kha_megatron.model.recorded import check_same_heads, kha_of

    checkpoint = MegatronCheckpoint.open(path, verify=False)
    shapes = {key: info.shape for key, info in checkpoint.keys().items()}
    check_same_heads(path, kha_of(checkpoint), shapes, run.arguments, run.kha)
