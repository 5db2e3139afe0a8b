"""The job that the fault tests run: two data-parallel ranks, a checkpoint after every iteration."""

import re
import shlex
from pathlib import Path

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
    """The same words every time the job is queued: it saves where it loads."""
    return [*WORDS, "--save", str(folder), "--load", str(folder), *more]


def until(iteration: int) -> list[str]:
    """Stop after that iteration, with a checkpoint."""
    return ["--exit-interval", str(iteration)]


def resumed(output: str) -> int:
    """The iteration that Megatron says to have loaded; 0 if it started from scratch."""
    found = re.findall(r"loading distributed checkpoint from \S+ at iteration (\d+)", output)
    assert len(set(found)) <= 1
    return int(found[0]) if found else 0


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Where Megatron saves an iteration."""
    return folder / f"iter_{iteration:07d}"
