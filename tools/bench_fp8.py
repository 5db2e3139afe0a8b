"""Losses of the quickstart's model in FP8 and in bf16, on the CPU.

Every run is the training entry point under torchrun. Transformer Engine runs on the test double in
`tests/transformer_engine`, which has the arithmetic of FP8 and not its speed. All runs start from
the same weights and read the same text in the same order. `local` is bf16 in Megatron's own layers:
its distance shows what another order of the same sums leads to.
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from bench import positive
from measuring import Cells

from kha_megatron.recipes import get_recipe, prepare_job
from kha_megatron.recipes.log_lines import LOSS, read_history

ENGINE = ("--transformer-impl", "transformer_engine")
CONTENDERS: dict[str, tuple[str, ...]] = {
    "bf16": ENGINE,
    "local": (),
    "tensorwise": (*ENGINE, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "delayed": (*ENGINE, "--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
    "blockwise": (*ENGINE, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),
}
"""Additional arguments by contender. The first contender is the reference."""

BOUND = 0.05
"""Target: largest distance in nats from bf16 at the end, a few times that of `local`."""

DEFAULTS = {device: {"steps": 200} for device in ("cuda", "cpu")}
HEADER = ["contender", "steps", "first loss", "last loss", "from bf16", "target"]


def options(add: Callable[..., Any]) -> None:
    add("--steps", type=positive, help="of every run (default: 200)")
    add(
        "--contenders",
        nargs="+",
        choices=list(CONTENDERS),
        default=list(CONTENDERS),
    )


def train(name: str, data: Path, folder: Path, steps: int) -> list[float]:
    """Return the loss of every step of one run. Raise RuntimeError if it fails."""
    words = ["--bf16", "--train-iters", str(steps), "--tensorboard-dir", str(folder)]
    words += ["--micro-batch-size", "4", "--global-batch-size", "4"]
    words += ["--lr", "2e-3", "--min-lr", "2e-4", *CONTENDERS[name]]
    job = prepare_job(get_recipe("quickstart"), data=data, overrides=words)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    python, _, *target = job.command
    if ENGINE[1] in target:
        target[target.index("kha_megatron.training")] = "tests.transformer_engine"
    environment = os.environ | job.environment
    done = subprocess.run(
        [python, *torchrun, *target],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RuntimeError(lines[0] if lines else f"exit code {done.returncode}")
    return [loss for _, loss in read_history(folder)[LOSS]]


def cells(args: argparse.Namespace, device: torch.device) -> Cells:
    """Yield the name of each contender and a function that returns its losses and the reference."""
    with tempfile.TemporaryDirectory(prefix="kha-fp8-") as made:
        folder = Path(made)
        words = ["data", "prepare", "--vocab-size", "512", "--out", str(folder / "data")]
        subprocess.run([sys.executable, "-m", "kha_megatron", *words], check=True)

        @functools.cache
        def losses(name: str) -> list[float]:
            return train(name, folder / "data", folder / name, args.steps)

        def compare(name: str) -> dict[str, Any]:
            try:
                return {"losses": losses(name), "reference": losses(args.contenders[0])}
            except RuntimeError as error:
                return {"failed": {name: str(error)}}

        for name in args.contenders:
            yield name, functools.partial(compare, name)


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the row of the table. The last loss is the mean of the last quarter."""
    if "failed" in result:
        return []
    losses = result["losses"]
    last = mean_of_last_quarter(losses)
    distance = last - mean_of_last_quarter(result["reference"])
    met = "met" if abs(distance) <= BOUND else "MISSED"
    return [
        [
            result["cell"],
            str(len(losses)),
            f"{losses[0]:.4f}",
            f"{last:.4f}",
            f"{distance:+.4f}",
            f"{met} (at most {BOUND})",
        ]
    ]


def mean_of_last_quarter(losses: list[float]) -> float:
    return fmean(losses[-max(1, len(losses) // 4) :])
