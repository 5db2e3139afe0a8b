"""Time a transformer layer, forward and backward, and count what it saves for the backward pass.

Stock is Megatron's own layer of grouped-query attention: Transformer Engine's modules if installed,
otherwise Megatron's local modules. Ours is the same layer with KHA: `baseline` knocks nothing;
`mlp`, `gate` and `linear` knock in torch; `.../kernels` use the Triton kernels.

All variants of a cell (shape, tokens, precision) take turns in one process. A turn is the forward
and backward passes of some microbatches, whose gradients Megatron's data parallelism accumulates in
float32. `kernels` is the time of the GPU's kernels alone, which a job pays whose CPU keeps up with
the GPU. The targets are ratios of these, for one NVIDIA H200. `saved` are the bytes per token that
autograd saves.
On a CPU the sizes are tiny and the times mean nothing.
"""

import argparse
import functools
import itertools
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from bench import positive, prepare_megatron
from layers import PRECISIONS, SHAPES, STOCK, VARIANTS, Cell, Layer, start_megatron
from measuring import Cells, interleaved, kernel_clock, ratios, spreads

from kha_megatron.errors import ConfigError, KHAError

DEFAULTS = {
    "cuda": {
        "shapes": ["moe", "dense"],
        "tokens": [8192, 32768],
        "sequence": 8192,
        "precisions": ["bf16", "tensorwise"],
        "repetitions": 30,
    },
    "cpu": {
        "shapes": ["tiny"],
        "tokens": [64],
        "sequence": 32,
        "precisions": ["bf16"],
        "repetitions": 3,
    },
}
MICROBATCHES = 4
"""Microbatches of one turn."""

TARGETS = {
    ("moe", 8192, "mlp/kernels"): 1.01,
    ("moe", 32768, "mlp/kernels"): 1.007,
}
"""By shape, tokens and variant: the largest ratio to stock."""

HEADER = ["shape", "tokens", "precision", "modules", "variant", "ms", "over stock"]
HEADER += ["kernels, ms", "kernels over stock", "target", "saved", "saved over stock"]


def measure(cell: Cell, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return milliseconds per microbatch and saved bytes of every variant, and the ratios."""
    layers, skipped, failed = build(cell, args)
    saved = {}
    times = {}
    kernels = {}
    if STOCK in layers:
        saved = {name: layer.saved_bytes() for name, layer in layers.items()}
        calls = {}
        for name, layer in layers.items():
            calls[name] = functools.partial(layer.run, MICROBATCHES)
        times = interleaved(calls, device, repetitions=args.repetitions)
        if device.type == "cuda":
            kernels = interleaved(
                calls,
                device,
                repetitions=3,
                warm_up=1,
                clock=kernel_clock,
            )

    def milliseconds(seconds: float) -> float:
        return 1e3 * seconds / MICROBATCHES

    return {
        "shape": cell.shape,
        "tokens": cell.tokens,
        "precision": cell.precision,
        "backend": next((layer.backend for layer in layers.values()), None),
        "milliseconds": spreads(times, milliseconds),
        "over_stock": {name: ratios(t, times[STOCK]) for name, t in times.items()},
        "kernel_milliseconds": spreads(kernels, milliseconds),
        "kernels_over_stock": {name: ratios(t, kernels[STOCK]) for name, t in kernels.items()},
        "saved": saved,
        "skipped": skipped,
        "failed": failed,
    }


def build(
    cell: Cell,
    args: argparse.Namespace,
) -> tuple[dict[str, Layer], dict[str, str], dict[str, str]]:
    """Return the layers that have run once, the variants that cannot run, and those that failed."""
    layers = {}
    skipped = {}
    failed = {}
    runs_kernels = args.device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    for name in dict.fromkeys([STOCK, *args.variants]):
        variant = VARIANTS[name]
        if variant.kernels and not runs_kernels:
            skipped[variant.name] = "the kernels need a CUDA device, or TRITON_INTERPRET=1"
            continue
        try:
            layer = Layer(cell, variant)
            layer.run(1)
            layers[variant.name] = layer
        except KHAError as error:
            if variant.name == STOCK:
                raise  # an argument is wrong
            skipped[variant.name] = str(error)
        except Exception as error:  # the other variants are still measured
            traceback.print_exc()
            failed[variant.name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return layers, skipped, failed


def rows(result: dict[str, Any]) -> list[list[str]]:
    cell = [
        result["shape"],
        str(result["tokens"]),
        result["precision"],
        str(result["backend"]),
    ]
    lines = []
    for name, spread in result["milliseconds"].items():
        line = [*cell, name, spread.text(3), result["over_stock"][name].text(4)]
        kernels = result["kernel_milliseconds"].get(name)
        if kernels:
            ratio = result["kernels_over_stock"][name]
            limit = TARGETS.get((result["shape"], result["tokens"], name))
            target = ratio.verdict(limit) if limit else ""
            line += [kernels.text(3), ratio.text(4), target]
        else:
            line += ["", "", ""]
        saved = result["saved"][name] / result["tokens"]
        more = saved - result["saved"][STOCK] / result["tokens"]
        line += [f"{saved:,.0f}", f"{more:+,.0f}"]
        lines.append(line)
    return lines


def options(add: Callable[..., Any]) -> None:
    add("--shapes", nargs="+", choices=list(SHAPES))
    add(
        "--tokens",
        nargs="+",
        type=positive,
        help="of a microbatch (default: 8192 32768)",
    )
    add("--sequence", type=positive, help="tokens of one sequence (default: 8192)")
    add("--precisions", nargs="+", choices=list(PRECISIONS))
    add("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))


def cells(args: argparse.Namespace, device: torch.device) -> Cells:
    """Yield the name of each cell and a function that measures it."""
    prepare_megatron(args.device)
    start_megatron()
    for shape, tokens, precision in itertools.product(args.shapes, args.tokens, args.precisions):
        sequence = min(tokens, args.sequence)
        if tokens % sequence:
            raise ConfigError(f"Expected --tokens to be a multiple of {sequence}, got {tokens}.")
        cell = Cell(shape, tokens, sequence, precision)
        yield str(cell), functools.partial(measure, cell, args, device)
