"""Time whole training steps of the real entry point: Megatron's stock layers beside ours.

Every run is a process of its own (or one for each rank): data, forward and backward passes of all
microbatches, gradient reduction, optimizer. Runs of all variants take turns, in another order each
time. What counts of a run is the median of its steps after the warm-up; printed are the medians of
the runs with the quarters around them, and the ratio to the stock run of the same turn.

Data are random tokens. On a CPU the sizes are tiny and the figures mean nothing: that is for this
tool's tests.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench import add_model_options, positive
from measuring import Spread, ratios
from shapes import SHAPES, arguments_of, has
from timed_training import ATTENTION, SECONDS
from variants import STOCK, Variant, runnable

from kha_megatron.mcore import cpu
from kha_megatron.model.words import render
from kha_megatron.recipes import get_recipe

EXAMPLE = """example:
  python tools/bench.py step --json benchmarks/step.json
  python tools/bench.py step --shapes moe --layers 18 --ranks 8 --global-batch 64 \\
      --megatron=--expert-model-parallel-size=8 --variants mlp/kernels
"""

DEFAULTS = {
    "cuda": {
        "shapes": ["moe", "dense"],
        "layers": 4,
        "sequence": 8192,
        "global_batch": 8,
        "steps": 20,
        "warm_up": 5,
        "repetitions": 3,
    },
    "cpu": {
        "shapes": ["tiny"],
        "layers": 2,
        "sequence": 32,
        "global_batch": 2,
        "steps": 3,
        "warm_up": 1,
        "repetitions": 2,
    },
}
WANTED = ["baseline", "mlp", "mlp/kernels", "linear/folded", "linear/folded+kernels"]
APEX_GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""A part of NVIDIA's apex without which Megatron's output layer cannot fuse its weight gradient."""
ENTRY = Path(__file__).with_name("timed_training.py")


def command(variant: Variant, shape: str, given: argparse.Namespace) -> list[str]:
    """One run."""
    arguments = arguments_of(
        shape,
        given.precision,
        layers=given.layers,
        sequence=given.sequence,
        on_cpu=given.device == "cpu",
        words=given.megatron,
    )
    arguments |= {
        "--global-batch-size": (str(given.global_batch),),
        "--train-iters": (str(given.warm_up + given.steps),),
        "--mock-data": (),
        "--vocab-size": (str(get_recipe(SHAPES[shape][0]).run.vocab_size),),
        "--log-interval": ("1000000",),
        "--device": (given.device,),
    }
    if not has(APEX_GRADIENTS):
        arguments["--no-gradient-accumulation-fusion"] = ()
    start = [sys.executable]
    if given.ranks > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(given.ranks)]
        start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    stock = ["--stock"] if variant.name == STOCK else []
    return [*start, str(ENTRY), *stock, *render(arguments), *variant.words()]


def environment(variant: Variant, given: argparse.Namespace) -> dict[str, str]:
    """Of one run; torchrun gives every rank its own."""
    found = {**os.environ, **cpu.ENVIRONMENT} if given.device == "cpu" else {**os.environ}
    found |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | variant.environment()
    return found | one_rank() if given.ranks == 1 else found


def one_rank() -> dict[str, str]:
    """What torchrun would have told the only rank, which takes any port: no other must know it."""
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def run(variant: Variant, shape: str, given: argparse.Namespace) -> float:
    """The median of the steps of one run, in seconds.

    Raises:
        RuntimeError: it failed (with the last lines that it printed), or trained another layer.
    """
    done = subprocess.run(
        command(variant, shape, given),
        env=environment(variant, given),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    seconds = [float(line.split()[1]) for line in lines if line.startswith(f"{SECONDS} ")]
    attention = [line.split()[1:] for line in lines if line.startswith(f"{ATTENTION} ")]
    if done.returncode or len(seconds) != given.warm_up + given.steps:
        last = "\n".join(lines[-20:])
        raise RuntimeError(f"exit code {done.returncode} after {len(seconds)} steps:\n{last}")
    wanted = "SelfAttention" if variant.name == STOCK else "KHASelfAttention"
    if attention != [[wanted]]:
        raise RuntimeError(f"the attention was {attention} instead of {wanted}")
    return statistics.median(seconds[given.warm_up :])


def measure(shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and tokens per second of every variant that runs."""
    variants, skipped = runnable(given.variants, given.device)
    failed: dict[str, str] = {}
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    shuffled = random.Random(0)
    for turn in range(given.repetitions):
        shuffled.shuffle(variants)
        for variant in [v for v in variants if v.name not in failed]:
            try:
                times[variant.name].append(run(variant, shape, given))
            except RuntimeError as error:
                print(f"{variant.name}: {error}", file=sys.stderr)
                failed[variant.name] = str(error).partition("\n")[0]
                continue
            print(f"{turn + 1}: {variant.name} {times[variant.name][-1]:.4f} s", file=sys.stderr)
    tokens = given.global_batch * given.sequence
    times = {name: t for name, t in times.items() if name not in failed}
    stock = times.get(STOCK)
    return {
        "cell": f"{shape}, {given.layers} layers",
        "shape": shape,
        "precision": given.precision,
        "layers": given.layers,
        "tokens": tokens,
        "seconds": {name: Spread.of(t) for name, t in times.items()},
        "tokens_per_second": {
            name: Spread.of([tokens / seconds for seconds in t]) for name, t in times.items()
        },
        "over_stock": {name: ratios(t, stock) for name, t in times.items()} if stock else {},
        "skipped": skipped,
        "failed": failed,
    }


HEADER = ["shape", "tokens", "precision", "variant", "s / step", "tokens/s", "over stock"]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Of the table."""
    found = []
    for name, spread in result["seconds"].items():
        over = result["over_stock"].get(name)
        cell = [result["cell"], str(result["tokens"]), result["precision"], name, spread.text(4)]
        speed = result["tokens_per_second"][name].text(0)
        found.append([*cell, speed, over.text(4) if over else "not measured"])
    return found


def options(add: Callable[..., Any]) -> None:
    """What the user may ask for; sizes depend on the device."""
    add_model_options(add, many=False, variants=WANTED)
    add("--layers", type=positive, help="of the model (default: 4)")
    add("--global-batch", type=positive, help="sequences of a step (default: 8)")
    add("--steps", type=positive, help="that count, of one run (default: 20)")
    add("--warm-up", type=positive, help="steps before them (default: 5)")
    add("--ranks", type=positive, default=1, help="processes on this machine")


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for each shape."""
    for shape in given.shapes:
        yield measure(shape, given)
