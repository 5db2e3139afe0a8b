"""Time whole training steps of the real entry point: Megatron's stock layers and ours.

Every run is a process of its own and includes data, forward and backward passes
of all microbatches, gradient reduction and the optimizer. The variants take turns. The figure of a
run is the median of its steps after the warm-up. Data are random tokens.
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
from bench import positive
from layers import PRECISIONS, SHAPES, STOCK, VARIANTS, Variant, arguments_of, has, runnable
from measuring import Spread, ratios
from timed_training import ATTENTION, SECONDS

from kha_megatron.mcore import cpu
from kha_megatron.model.words import render
from kha_megatron.recipes import get_recipe

DEFAULTS = {
    "cuda": {"shapes": ["moe", "dense"], "layers": 4, "sequence": 8192}
    | {"global_batch": 8, "steps": 20, "repetitions": 3},
    "cpu": {"shapes": ["tiny"], "layers": 2, "sequence": 32}
    | {"global_batch": 2, "steps": 3, "repetitions": 2},
}
APEX_GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""Without this part of NVIDIA's apex, Megatron's output layer cannot fuse its weight gradient."""
WARM_UP = 5
"""Steps of a run that do not count."""
ENTRY = Path(__file__).with_name("timed_training.py")
HEADER = ["shape", "tokens", "precision", "variant", "s / step", "tokens/s", "over stock"]


def command(variant: Variant, shape: str, given: argparse.Namespace) -> list[str]:
    """Return the command of one run."""
    arguments = arguments_of(
        shape,
        given.precision,
        layers=given.layers,
        sequence=given.sequence,
        on_cpu=given.device == "cpu",
    )
    arguments |= {
        "--global-batch-size": (str(given.global_batch),),
        "--train-iters": (str(WARM_UP + given.steps),),
        "--mock-data": (),
        "--vocab-size": (str(get_recipe(SHAPES[shape][0]).run.vocab_size),),
        "--log-interval": ("1000000",),
        "--device": (given.device,),
    }
    if not has(APEX_GRADIENTS):
        arguments["--no-gradient-accumulation-fusion"] = ()
    stock = ["--stock"] if variant.name == STOCK else []
    return [sys.executable, str(ENTRY), *stock, *render(arguments), *variant.words()]


def run(variant: Variant, shape: str, given: argparse.Namespace) -> float:
    """Return the median seconds of the steps of one run.

    Raises:
        RuntimeError: the run failed, with its last lines, or had another attention.
    """
    environment = os.environ | (cpu.ENVIRONMENT if given.device == "cpu" else {})
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | variant.environment()
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free port
    done = subprocess.run(
        command(variant, shape, given),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    seconds = [float(line.split()[1]) for line in lines if line.startswith(f"{SECONDS} ")]
    if done.returncode or len(seconds) != WARM_UP + given.steps:
        last = "\n".join(lines[-20:])
        raise RuntimeError(f"exit code {done.returncode} after {len(seconds)} steps:\n{last}")
    found = {line.partition(" ")[2] for line in lines if line.startswith(f"{ATTENTION} ")}
    expected = "SelfAttention" if variant.name == STOCK else "KHASelfAttention"
    if found != {expected}:
        raise RuntimeError(f"expected the attention {expected}, got {found}")
    return statistics.median(seconds[WARM_UP:])


def measure(shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return seconds per step of every variant that runs, and the ratios to stock."""
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
                del times[variant.name]
                continue
            print(f"{turn + 1}: {variant.name} {times[variant.name][-1]:.4f} s", file=sys.stderr)
    stock = times.get(STOCK)
    return {
        "cell": f"{shape}, {given.layers} layers",
        "precision": given.precision,
        "tokens": given.global_batch * given.sequence,
        "seconds": {name: Spread.of(t) for name, t in times.items()},
        "over_stock": {name: ratios(t, stock) for name, t in times.items()} if stock else {},
        "skipped": skipped,
        "failed": failed,
    }


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table."""
    found = []
    for name, spread in result["seconds"].items():
        over = result["over_stock"].get(name)
        cell = [result["cell"], str(result["tokens"]), result["precision"], name, spread.text(4)]
        speed = f"{result['tokens'] / spread.median:,.0f}"
        found.append([*cell, speed, over.text(4) if over else "not measured"])
    return found


def options(add: Callable[..., Any]) -> None:
    """Add the options."""
    add("--shapes", nargs="+", choices=list(SHAPES))
    add("--sequence", type=positive, help="tokens of one sequence (default: 8192)")
    add("--precision", default="bf16", choices=list(PRECISIONS))
    variants = ["baseline", "mlp", "mlp/kernels", "linear/folded"]
    add("--variants", nargs="+", choices=list(VARIANTS), default=variants)
    add("--layers", type=positive, help="of the model (default: 4)")
    add("--global-batch", type=positive, help="sequences per step (default: 8)")
    add("--steps", type=positive, help="counted steps of one run (default: 20)")


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield one result per shape."""
    return (measure(shape, given) for shape in given.shapes)
