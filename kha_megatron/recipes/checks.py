"""What can be refused before a rank starts, from the command line and the file system alone."""

import os
from pathlib import Path

from kha_megatron.config import check_head_layout, check_latent_attention
from kha_megatron.datasets import BLENDS, check_blend, check_tokenizer
from kha_megatron.errors import CheckpointError, ConfigError, DataError, OutputError
from kha_megatron.recipes.arguments import Arguments, integer_of, word_of
from kha_megatron.recipes.recipe import kha_of

_BLEND_FILES = ("--data-args-path", "--per-split-data-args-path")
_TRACKER = "latest_checkpointed_iteration.txt"


def check_layout(arguments: Arguments, ranks: int) -> None:
    """Heads, experts and ranks against the parallel sizes, and the names of the KHA settings.

    Args:
        arguments: the whole command line.
        ranks: number of processes.

    Raises:
        ConfigError: naming the numbers and the flag to change.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks: give --nproc a whole number from 1 up")
    kha = kha_of(arguments)
    if "--multi-latent-attention" in arguments:
        check_latent_attention(kha)
    device = word_of(arguments, "--device")
    if device not in (None, "cuda", "cpu"):
        raise ConfigError(f"unknown device {device!r}: choose cuda or cpu")

    def size(flag: str, default: int = 1) -> int:
        return integer_of(arguments, flag, default)

    tensor, pipeline = size("--tensor-model-parallel-size"), size("--pipeline-model-parallel-size")
    if "--num-attention-heads" in arguments:
        heads = size("--num-attention-heads")
        grouped = "--group-query-attention" in arguments
        check_head_layout(heads, size("--num-query-groups") if grouped else heads, tensor)
    context = size("--context-parallel-size")
    if ranks % (model := tensor * pipeline * context):
        raise ConfigError(
            f"{ranks} ranks cannot be divided by tensor {tensor} x pipeline {pipeline} x context "
            f"{context} = {model}: change --nproc or those Megatron sizes"
        )
    if "--num-experts" in arguments:
        _check_experts(
            size("--num-experts"),
            expert=size("--expert-model-parallel-size"),
            expert_tensor=size("--expert-tensor-parallel-size", tensor),
            pipeline=pipeline,
            ranks=ranks,
        )


def _check_experts(
    experts: int, *, expert: int, expert_tensor: int, pipeline: int, ranks: int
) -> None:
    if experts % expert:
        raise ConfigError(
            f"{experts} experts cannot be divided over {expert} expert-parallel ranks: change "
            "--expert-model-parallel-size or --num-experts"
        )
    if ranks % (model := expert_tensor * expert * pipeline):
        raise ConfigError(
            f"{ranks} ranks cannot be divided by expert-tensor {expert_tensor} x expert {expert} x "
            f"pipeline {pipeline} = {model}: change --nproc, --expert-model-parallel-size or "
            "--expert-tensor-parallel-size"
        )


def check_data(arguments: Arguments) -> None:
    """The datasets and the tokenizer must exist on this machine.

    Raises:
        DataError: naming the file that is missing and the command that makes it.
    """
    if "--mock-data" in arguments:
        return
    blends = {flag: arguments[flag] for flag in BLENDS if flag in arguments}
    if not blends and not any(flag in arguments for flag in _BLEND_FILES):
        raise DataError(
            "no training data: give --data a folder made by `kha-megatron data prepare`"
        )
    for flag, words in blends.items():
        check_blend(flag, words)
    if "--tokenizer-type" not in arguments:
        raise DataError(
            "no tokenizer: give --data a folder made by `kha-megatron data prepare`, "
            "or Megatron's --tokenizer-type"
        )
    check_tokenizer(word_of(arguments, "--tokenizer-model"))


def check_folders(arguments: Arguments, output: Path | None, *, resume: bool) -> None:
    """Nothing is overwritten, and a checkpoint to continue from is complete.

    Args:
        arguments: the whole command line.
        output: the run's own folder, which must be empty unless ``resume``.
        resume: continue from the last checkpoint under ``--save``.

    Raises:
        OutputError: the output folder is not empty, is a file or cannot be written.
        CheckpointError: there is no complete checkpoint to load.
    """
    save = word_of(arguments, "--save")
    load = Path(word).absolute() if (word := word_of(arguments, "--load")) else None
    if load is not None:
        _check_checkpoint(load, word_of(arguments, "--ckpt-format") or "torch_dist")
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


def _check_checkpoint(folder: Path, ckpt_format: str) -> None:
    """Megatron starts from random weights where the tracker file is missing: refuse instead."""
    try:
        word = (folder / _TRACKER).read_text().strip()
    except OSError:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint: start again in an empty --output, "
            "without --resume"
        ) from None
    if word != "release" and not word.isdecimal():
        raise CheckpointError(
            f"{folder / _TRACKER} is damaged: it must hold the number of an iteration, not {word!r}"
        )
    checkpoint = folder / (word if word == "release" else f"iter_{int(word):07d}")
    # metadata.json is written last, so it marks a finished torch_dist checkpoint
    mark = checkpoint / "metadata.json" if ckpt_format == "torch_dist" else checkpoint
    if not mark.exists():
        raise CheckpointError(
            f"checkpoint {checkpoint} is missing or unfinished: write the number of a finished one "
            f"into {folder / _TRACKER}, or start again in an empty --output"
        )
