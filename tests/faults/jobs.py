"""The job of the fault tests: two data-parallel ranks, a checkpoint after every iteration."""

import contextlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

WORDS = shlex.split("""
--num-layers 2 --hidden-size 24 --ffn-hidden-size 20 --num-attention-heads 4 --kv-channels 6
--group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu --seq-length 12
--disable-bias-linear --position-embedding-type rope --max-position-embeddings 12
--attention-dropout 0 --hidden-dropout 0.1 --micro-batch-size 1 --global-batch-size 2 --lr 1e-2
--train-iters 90 --clip-grad 1 --seed 7 --mock-data --vocab-size 56 --num-workers 0
--eval-interval 1000 --eval-iters 0 --log-interval 1 --ckpt-format torch_dist --save-interval 1
--kha-preset kha_mlp --use-distributed-optimizer --device cpu
""")


def arguments(folder: Path, *more: str) -> list[str]:
    """Return the arguments of a job that saves to the directory that it loads."""
    return [*WORDS, "--save", str(folder), "--load", str(folder), *more]


def until(iteration: int) -> list[str]:
    """Return the arguments to stop after an iteration."""
    return ["--exit-interval", str(iteration)]


def resumed(output: str) -> int:
    """Return the iteration that Megatron logs to have loaded; 0 if it started from scratch."""
    found = re.findall(r"loading distributed checkpoint from \S+ at iteration (\d+)", output)
    assert len(set(found)) <= 1
    return int(found[0]) if found else 0


def iteration_folder(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of ``size`` below a directory, or skip the test."""
    mounted = folder / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mounted)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a full disk needs a mount, which this machine does not allow")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
