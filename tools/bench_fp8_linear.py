"""Time FP8 linears against bf16 for KHA's matrices: why they stay in bf16.

The matrices are D x D with D of one head (128), applied to one row for each KV head of each token.
An FP8 GEMM must first quantise its input and the weight: of a matrix this small that is more memory
traffic than the product itself. Contenders, forward alone and forward with both gradients:

  bf16      the library's product, `x @ T`
  te bf16   Transformer Engine's Linear without quantisation
  te NAME   the same under each FP8 recipe that Transformer Engine has for this GPU
  copy      a copy of the input, which any of them must at least read and write

On a CPU only `bf16` and `copy` run, for the sake of this tool's tests.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from measuring import (
    Spread,
    describe_machine,
    interleaved,
    markdown_table,
    publish,
    ratios,
)
from torch import Tensor

WORKS = ("forward", "forward + gradients")
BASELINE = "bf16"


def engine() -> tuple[dict[str, Callable[[], AbstractContextManager]], dict[str, str]]:
    """What puts Transformer Engine under each recipe; and why others are left out."""
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
    except ImportError as error:
        return {}, {"te": f"Transformer Engine cannot be imported: {error}"}
    if not torch.cuda.is_available():
        return {}, {"te": "Transformer Engine needs a GPU"}
    recipes = {
        "te delayed": (recipe.DelayedScaling, te.is_fp8_available),
        "te tensorwise": (recipe.Float8CurrentScaling, te.is_fp8_available),
        "te blockwise": (recipe.Float8BlockScaling, te.is_fp8_block_scaling_available),
        "te mxfp8": (recipe.MXFP8BlockScaling, te.is_mxfp8_available),
    }
    contexts: dict[str, Callable[[], AbstractContextManager]] = {"te bf16": nullcontext}
    absent = {}
    for name, (make, available) in recipes.items():
        can, why = available(return_reason=True)
        if can:
            contexts[name] = lambda make=make: te.fp8_autocast(enabled=True, fp8_recipe=make())
        else:
            absent[name] = why
    return contexts, absent


def contenders(
    work: str, x: Tensor, dy: Tensor
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """What is timed for one work, by name, and who does not take part, and why."""
    size = x.shape[-1]
    weight = torch.eye(size, dtype=x.dtype, device=x.device).requires_grad_()
    calls = {"copy": lambda: x.detach().clone(), BASELINE: _call(work, lambda: x @ weight, x, dy)}
    contexts, absent = engine()
    if contexts:
        import transformer_engine.pytorch as te

        for name, context in contexts.items():
            linear = te.Linear(size, size, bias=False, params_dtype=x.dtype, device=x.device)

            def forward(linear: Any = linear, context: Any = context) -> Tensor:
                with context():
                    return linear(x)

            calls[name] = _call(work, forward, x, dy)
    return calls, absent


def _call(work: str, forward: Callable[[], Tensor], x: Tensor, dy: Tensor) -> Callable[[], Any]:
    def both() -> None:
        x.grad = None
        forward().backward(dy)

    return forward if work == "forward" else both


def measure(tokens: int, given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All works at one number of tokens."""
    shape = (tokens * given.heads, given.head_dim)
    x = torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_()
    dy = torch.randn(shape, dtype=torch.bfloat16, device=device)
    results = []
    for work in WORKS:
        calls, absent = contenders(work, x, dy)
        times = interleaved(calls, device, repetitions=given.repetitions)
        base = times[BASELINE]
        results.append(
            {
                "tokens": tokens,
                "rows": shape[0],
                "head_dim": given.head_dim,
                "work": work,
                "microseconds": {n: Spread.of([1e6 * s for s in t]) for n, t in times.items()},
                "over_bf16": {n: ratios(t, base) for n, t in times.items()},
                "skipped": absent,
            }
        )
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown, and who did not take part, and why."""
    rows = [
        [str(r["tokens"]), r["work"], name, time.text(1), r["over_bf16"][name].text(2)]
        for r in results
        for name, time in r["microseconds"].items()
    ]
    header = ["tokens", "work", "contender", "µs", "over bf16"]
    absent = {f"- without {n}: {why}" for r in results for n, why in r["skipped"].items()}
    return "\n".join([markdown_table(header, rows), "", *sorted(absent)])


def arguments() -> argparse.Namespace:
    """What the user asked for; sizes depend on the device."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if cuda else "cpu", choices=["cuda", "cpu"])
    add("--tokens", nargs="+", type=int, help="default: 8192 32768; on a CPU: 16")
    add("--heads", type=int, default=4, help="KV heads (default: the paper's 4)")
    add("--head-dim", type=int, default=128)
    add("--repetitions", type=int, default=50, help="turns of all contenders")
    add("--json", type=Path, help="write the results there, with the machine's description")
    given = parser.parse_args()
    if given.device == "cuda" and not cuda:
        parser.error("--device cuda: no CUDA device was found, use --device cpu")
    given.tokens = given.tokens or ([8192, 32768] if given.device == "cuda" else [16])
    return given


def main() -> None:
    """Measure what is asked for and print it."""
    given = arguments()
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    machine = describe_machine(device)
    results = []
    for tokens in given.tokens:
        print(f"{tokens} tokens", file=sys.stderr, flush=True)
        results += measure(tokens, given, device)
    publish(table(results), machine, given, results)


if __name__ == "__main__":
    main()
