"""What FP8 does to a training, on a CPU: losses of the quickstart's model in bf16 and in FP8.

Every run is the training entry point under torchrun. Transformer Engine runs on the test double in
`tests/transformer_engine`, which has the arithmetic of FP8 and not its speed. All runs begin with
the same weights and read the same text in the same order, at a learning rate of 2e-3: at four times
that any rounding moves the end by tenths. `local` is bf16 in Megatron's own layers: other sums in
the same precision, whose distance is what any rounding leads to.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from bench import in_words, positive

from kha_megatron.history.tensorboard import LOSS, read_history
from kha_megatron.recipes import Job, get_recipe, prepare

EXAMPLE = """example:
  python tools/bench.py fp8 --json fp8.json
  python tools/bench.py fp8 --steps 20 --contenders bf16 tensorwise --data quickstart/data
"""

ENGINE = ("--transformer-impl", "transformer_engine")
CONTENDERS: dict[str, tuple[str, ...]] = {
    "bf16": ENGINE,
    "local": (),
    "tensorwise": (*ENGINE, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "delayed": (*ENGINE, "--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
    "blockwise": (*ENGINE, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),
}
"""By name, what it adds to the quickstart's command; the first is what the others are held to."""

BOUND = 0.05
"""Nats that the end of a loss curve may be from that of bf16 after 200 steps: some times what other
sums in bf16 lead to (benchmarks/fp8.md)."""

DEFAULTS = {device: {"steps": 200} for device in ("cuda", "cpu")}
HEADER = [
    "contender",
    "steps",
    "first loss",
    "last loss",
    "from bf16",
    f"target: {BOUND} from bf16",
]


def options(add: Callable[..., Any]) -> None:
    """What the user may ask for."""
    add("--steps", type=positive, help="of every run (default: 200)")
    add("--batch", type=positive, default=4, help="sequences of 256 tokens in a step (default: 4)")
    add("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--data", type=Path, help="folder of `kha-megatron data prepare` (default: made anew)")


def job_of(name: str, data: Path, folder: Path, *, steps: int, batch: int) -> Job:
    """The quickstart's run with the arguments of a contender; its losses go to ``folder``."""
    words = ["--bf16", "--train-iters", str(steps), "--tensorboard-dir", str(folder)]
    words += ["--micro-batch-size", str(batch), "--global-batch-size", str(batch)]
    words += ["--lr", "2e-3", "--min-lr", "2e-4", *CONTENDERS[name]]
    return prepare(get_recipe("quickstart"), data=data, overrides=words)


def train(name: str, data: Path, given: argparse.Namespace) -> list[float]:
    """The loss of every step of one run."""
    with tempfile.TemporaryDirectory(prefix="kha-fp8-") as folder:
        job = job_of(name, data, Path(folder), steps=given.steps, batch=given.batch)
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        python, _, *target = job.command
        if ENGINE[1] in target:
            target[target.index("kha_megatron.training")] = "tests.transformer_engine"
        done = subprocess.run(
            [python, *torchrun, *target],
            env=os.environ | job.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if "Error" in line]
            raise RuntimeError(lines[0] if lines else f"exit code {done.returncode}")
        return [loss for _, loss in read_history(Path(folder))[LOSS]]


def compared(losses: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """First loss, mean of the last quarter, and how far that is from the first contender's."""
    found = {}
    for name, of_steps in losses.items():
        end = fmean(of_steps[-max(1, len(of_steps) // 4) :])
        found[name] = {"first": of_steps[0], "end": end}
    reference = found[next(iter(found))]["end"]
    for figures in found.values():
        figures["distance"] = figures["end"] - reference
        figures["target"] = {"met": abs(figures["distance"]) <= BOUND}
    return found


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for all: the losses by contender."""
    with tempfile.TemporaryDirectory(prefix="kha-fp8-") as folder:
        data = given.data
        if data is None:
            data = Path(folder) / "data"
            words = ["data", "prepare", "--vocab-size", "512", "--out", str(data)]
            subprocess.run([sys.executable, "-m", "kha_megatron", *words], check=True)
        losses: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        for name in given.contenders:
            try:
                losses[name] = train(name, data, given)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed[name] = str(error)
                continue
            end = compared(losses)[name]["end"]
            print(f"{name}: {losses[name][0]:.4f} to {end:.4f}", file=sys.stderr, flush=True)
    yield {"cell": "quickstart", "losses": losses, "figures": compared(losses), "failed": failed}


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Of the table."""
    return [
        [
            name,
            str(len(result["losses"][name])),
            f"{figures['first']:.4f}",
            f"{figures['end']:.4f}",
            f"{figures['distance']:+.4f}",
            in_words(figures["target"]),
        ]
        for name, figures in result["figures"].items()
    ]
