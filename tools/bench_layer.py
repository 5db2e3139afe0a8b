"""Time a whole transformer layer, forward and backward: Megatron's stock layer beside ours.

Stock is Megatron's own spec of grouped-query attention: Transformer Engine's modules with fused
norms and fused rotary embedding where that is installed, Megatron's local modules elsewhere. Ours
is the same layer with KHA: `baseline` knocks nothing; `mlp`, `gate` and `linear` knock in plain
torch; `.../kernels` run what has a fused kernel in it; `linear/folded` knocks in the QKV weight.

All variants of a cell (shape, tokens, precision) take turns in one process, in another order each
time. A turn is the forward and backward passes of some microbatches, whose gradients Megatron's
data parallelism accumulates in float32; the ratio to stock is that of each turn. Printed are
medians with the quarters around them, and the targets, which are for one NVIDIA H200.

On a CPU the sizes are tiny and the figures mean nothing: that is for this tool's tests.
"""

import argparse
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from bench import add_model_options, choose_device, in_words, positive, within
from measuring import Spread, interleaved, ratios
from variants import STOCK, Variant, runnable

from kha_megatron.errors import KHAError

if TYPE_CHECKING:
    from layers import Cell, Layer

EXAMPLE = """example:
  python tools/bench.py layer --json benchmarks/layer.json
  python tools/bench.py layer --shapes moe --tokens 8192 --precisions bf16 tensorwise \\
      --variants mlp/kernels linear/folded+kernels
  python tools/bench.py layer --shapes dense --megatron=--recompute-granularity=selective
"""

DEFAULTS = {
    "cuda": {
        "shapes": ["moe", "dense"],
        "tokens": [8192, 32768],
        "sequence": 8192,
        "precisions": ["bf16", "tensorwise"],
        "repetitions": 30,
        "microbatches": 4,
    },
    "cpu": {
        "shapes": ["tiny"],
        "tokens": [64],
        "sequence": 32,
        "precisions": ["bf16"],
        "repetitions": 3,
        "microbatches": 2,
    },
}

TARGETS = {
    ("moe", 8192, "mlp/kernels"): (1.01, 1.00),
    ("moe", 32768, "mlp/kernels"): (1.007, 0.99),
    **{
        (shape, tokens, f"linear/{way}"): (limit, 1.00)
        for shape in ("moe", "dense")
        for tokens, limit in ((8192, 1.01), (32768, 1.003))
        for way in ("folded", "folded+kernels")
    },
}
"""By shape, tokens and variant: the largest ratio to stock that is good enough, and the aim."""


def measure(cell: "Cell", given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a microbatch of every variant that runs, and the ratios to stock."""
    layers, skipped, failed = of_each(cell, given, lambda variant: started(cell, variant))
    times: dict[str, list[float]] = {}
    if STOCK in layers:
        calls = {name: turn(layer, given.microbatches) for name, layer in layers.items()}
        times = interleaved(calls, device, repetitions=given.repetitions)
    over = {name: ratios(t, times[STOCK]) for name, t in times.items()}
    return {
        "cell": str(cell),
        "shape": cell.shape,
        "tokens": cell.tokens,
        "precision": cell.precision,
        "backend": next((layer.backend for layer in layers.values()), None),
        "milliseconds": {
            name: Spread.of([1e3 * seconds / given.microbatches for seconds in t])
            for name, t in times.items()
        },
        "over_stock": over,
        "targets": {name: judged(cell, name, spread) for name, spread in over.items()},
        "skipped": skipped,
        "failed": failed,
    }


def started(cell: "Cell", variant: Variant) -> "Layer":
    """A layer that has run once."""
    from layers import Layer

    layer = Layer(cell, variant)
    layer.run(1)
    return layer


def of_each[T](
    cell: "Cell", given: argparse.Namespace, make: Callable[[Variant], T]
) -> tuple[dict[str, T], dict[str, str], dict[str, str]]:
    """What is made of each variant, by its name; what cannot run here; what broke."""
    from layers import precision_refusal

    if why := precision_refusal(cell.precision):
        return {}, dict.fromkeys([STOCK, *given.variants], why), {}
    variants, skipped = runnable(given.variants, given.device)
    found, failed = {}, {}
    for variant in variants:
        try:
            found[variant.name] = make(variant)
        except KHAError as error:
            if variant.name == STOCK:
                raise  # nothing of ours is in it: an argument is wrong
            skipped[variant.name] = str(error)
        except Exception as error:  # the other variants are still worth their figures
            traceback.print_exc()
            failed[variant.name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found, skipped, failed


def turn(layer: "Layer", microbatches: int) -> Callable[[], None]:
    """What is timed."""
    return lambda: layer.run(microbatches)


def judged(cell: "Cell", variant: str, ratio: Spread) -> dict[str, Any] | None:
    """What became of the target, if there is one."""
    if (target := TARGETS.get((cell.shape, cell.tokens, variant))) is None:
        return None
    limit, aim = target
    return {"at_most": limit, "aim": aim, "aim_met": ratio.median <= aim, **within(limit, ratio)}


def verdict(target: dict[str, Any] | None) -> str:
    """In the table."""
    if target is None:
        return ""
    return f"{in_words(target)} (at most {target['at_most']:g}, aim {target['aim']:g})"


HEADER = ["shape", "tokens", "precision", "modules", "variant", "ms", "over stock", "target"]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Of the table."""
    cell = [result["shape"], str(result["tokens"]), result["precision"], str(result["backend"])]
    over, targets = result["over_stock"], result["targets"]
    return [
        [*cell, name, spread.text(3), over[name].text(4), verdict(targets[name])]
        for name, spread in result["milliseconds"].items()
    ]


def options(add: Callable[..., Any]) -> None:
    """What the user may ask for; sizes depend on the device."""
    cell_options(add)
    add("--microbatches", type=positive, help="of one turn (default: 4)")


def cell_options(add: Callable[..., Any]) -> None:
    """Which cells, of :func:`cells`."""
    add_model_options(add, many=True)
    add("--tokens", nargs="+", type=positive, help="of a microbatch (default: 8192 32768)")


def refusal(given: argparse.Namespace) -> str | None:
    """Why that cannot be measured, or None."""
    bad = [tokens for tokens in given.tokens if tokens % min(tokens, given.sequence)]
    return f"--tokens {bad[0]} is no multiple of --sequence {given.sequence}" if bad else None


def start(given: argparse.Namespace) -> torch.device:
    """Megatron in this process, on a GPU or on the CPU runtime."""
    device = choose_device(given.device)
    from layers import start_megatron

    start_megatron()
    return device


def cells(given: argparse.Namespace) -> Iterator["Cell"]:
    """What was asked for, one after the other; each is said when its turn comes."""
    from layers import Cell

    for shape, tokens, precision in itertools.product(given.shapes, given.tokens, given.precisions):
        sequence = min(tokens, given.sequence)
        cell = Cell(shape, tokens, sequence, precision, tuple(given.megatron))
        print(cell, file=sys.stderr, flush=True)
        yield cell


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for each cell."""
    return (measure(cell, given, device) for cell in cells(given))
