"""What ``--kha-log-interval`` costs a training iteration.

Trains a small model on the CPU, in turn without instruments and with instruments that measure every
second iteration. Shown are the median processor time of iterations without, of those that are not
measured, and of those that are, so the cost of any interval. Processor time, because that of a busy
machine's clock says more about the other programs.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench import positive
from bench_step import ENTRY, one_rank
from timed_training import PROCESSOR

WARM_UP = 4  # iterations, an even number
DEFAULTS = {device: {"repetitions": 5} for device in ("cuda", "cpu")}

TRAINING = shlex.split("""
--device cpu --kha-preset kha_mlp --mock-data --vocab-size 1000
--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8
--group-query-attention --num-query-groups 4 --kv-channels 64 --qk-layernorm
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0 --seq-length 256 --max-position-embeddings 256
--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --num-workers 0 --eval-iters 0
--eval-interval 100000 --log-interval 1
""")

HEADER = ["iteration", "number", "processor time (ms)", "ratio"]


def milliseconds(words: list[str], iterations: int) -> list[float]:
    """Of each iteration of one run after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, str(ENTRY), *TRAINING, *words]
        run += ["--train-iters", str(iterations + WARM_UP), "--tensorboard-dir", folder]
        world = os.environ | one_rank() | {"OMP_NUM_THREADS": "1"}
        output = subprocess.run(
            run, env=world, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    lines = [line.split() for line in output.splitlines()]
    return [1e3 * float(words[1]) for words in lines if words[:1] == [PROCESSOR]][WARM_UP:]


def options(add: Callable[..., Any]) -> None:
    """What the user may ask for."""
    add("--iterations", type=positive, default=20, help="counted of each run")


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for all: milliseconds by the kind of iteration."""
    times: dict[str, list[float]] = defaultdict(list)
    for repetition in range(given.repetitions):
        times["without instruments"] += milliseconds([], given.iterations)
        watched = milliseconds(["--kha-log-interval", "2"], given.iterations)
        times["with, not measured"] += watched[0::2]
        times["with, measured"] += watched[1::2]
        print(f"{repetition + 1} of {given.repetitions}", file=sys.stderr, flush=True)
    yield {"milliseconds": dict(times)}


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Of the table."""
    times = result["milliseconds"]
    medians = {name: statistics.median(values) for name, values in times.items()}
    without, not_due, due = medians.values()
    found = [
        [name, str(len(times[name])), f"{value:.1f}", f"{value / without:.4f}"]
        for name, value in medians.items()
    ]
    for interval in (10, 100):
        ratio = 1 + (due - not_due) / interval / not_due
        name = f"mean of --kha-log-interval {interval}"
        found.append([name, "", f"{ratio * not_due:.1f}", f"{ratio:.4f}"])
    return found
