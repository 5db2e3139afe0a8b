"""Time the fused kernels beside every other way to knock, in one run.

Each work (forward, input gradient, weight gradients, forward with all gradients) is done by

  kernels    kha_megatron.ops.fused
  eager      kha_megatron.ops.knocking and autograd
  compiled   the same under torch.compile
  gemms      only the work's matrix products by the library, on contiguous tensors
  te         Transformer Engine's Linear layers with the same products, where it is installed
  copy       torch's copy of as many bytes as the work must read and write

in turn, many times, in another order each time. Printed are medians with the quarters around them,
the ratio of the kernels to each contender turn by turn, and the bytes that the work must move over
its time. Before it is timed, each result of the kernels is compared with float64.

On a CPU, with sizes of its own, the kernels run only in Triton's interpreter, for the sake of this
tool's tests (TRITON_INTERPRET=1).
"""

import argparse
import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
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

from kha_megatron.heads.knock import MATRICES
from kha_megatron.ops import fused, knocking

EXAMPLE = """example:
  python tools/bench_kernels.py --tokens 8192 32768 --json benchmarks/kernels.json
  python tools/bench_kernels.py --variants mlp gate --dtypes bfloat16 --head-dims 64 128 256
"""

# Of norms: roundings of hidden features and their gradients, several times half a last place.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}
CHECKED_TOKENS = 2048
QUERIES_PER_GROUP = 8  # of the paper's models: the gaps between rows of the QKV buffer

# How often each work reads or writes a tensor of the size of `x`, at the least
WORKS = {"forward": 2, "input gradient": 3, "weight gradients": 2, "forward + all gradients": 7}
COPY_RATIO = 1.6
"""KHA-MLP's forward kernel over a copy of the same bytes: at most."""
WHOLE = ("forward", "forward + all gradients")


@dataclass(frozen=True)
class Case:
    """One set of sizes: values of ``heads`` KV heads within a QKV buffer."""

    variant: str
    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.variant}, {self.tokens} x {self.heads} x {self.head_dim}, {dtype}"


@dataclass(frozen=True)
class Tensors:
    """Of one case: ``x`` and ``dy`` ``[tokens, heads, D]``, ``x`` a view of a QKV buffer."""

    x: Tensor
    dy: Tensor
    weight: Tensor

    @classmethod
    def of(cls, case: Case) -> "Tensors":
        """Random ones whose products are of the size of their factors."""
        torch.manual_seed(0)
        options = {"dtype": case.dtype, "device": case.device}
        width = (QUERIES_PER_GROUP + 2) * case.head_dim
        x = torch.randn(case.tokens, case.heads, width, **options)[..., -case.head_dim :]
        shape = (len(MATRICES[case.variant]), case.head_dim, case.head_dim)
        weight = torch.randn(shape, **options) / case.head_dim**0.5
        return cls(x, torch.randn(x.shape, **options), weight)


@dataclass(frozen=True)
class Way:
    """One way to knock, and the weights that it has."""

    knock: Callable[[Tensor], Tensor]
    weights: list[Tensor]


def kernels(case: Case, data: Tensors) -> Way | str:
    """Ours, or why not; likewise the other ways."""
    if why := fused.refusal(data.x, data.weight):
        return why
    weight = data.weight.detach().requires_grad_()
    return Way(lambda x: fused.knock(x, weight, case.variant), [weight])


def eager(case: Case, data: Tensors) -> Way | str:
    """Plain torch."""
    weight = data.weight.detach().requires_grad_()
    return Way(lambda x: knocking.knock(x, weight, case.variant), [weight])


def compiled(case: Case, data: Tensors, *, asked_for: bool = False) -> Way | str:
    """Plain torch under torch.compile."""
    if case.device.type == "cpu" and not asked_for:
        return "torch.compile takes minutes on a CPU: ask for it with --compile"
    weight = data.weight.detach().requires_grad_()
    knock = torch.compile(knocking.knock)
    return Way(lambda x: knock(x, weight, case.variant), [weight])


def transformer_engine(case: Case, data: Tensors) -> Way | str:
    """Linear layers of Transformer Engine, with torch between them."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    if case.device.type == "cpu":
        return "Transformer Engine needs a CUDA device"
    import transformer_engine.pytorch as te

    options = {"bias": False, "params_dtype": case.dtype, "device": case.device}
    layers = [te.Linear(case.head_dim, case.head_dim, **options) for _ in data.weight]

    def knock(x: Tensor) -> Tensor:
        if case.variant == "linear":
            return layers[0](x)
        if case.variant == "gate":
            return 2 * x * torch.sigmoid(layers[0](x))
        return layers[2](2 * layers[0](x) * torch.sigmoid(layers[1](x)))

    return Way(knock, [layer.weight for layer in layers])


def call(work: str, way: Way, data: Tensors) -> Callable[[], Any]:
    """Do the work in that way. The forward pass before a gradient alone is not timed."""
    x = data.x.detach().requires_grad_()
    if work == "forward":
        return lambda: torch.no_grad()(way.knock)(x)
    if work == "forward + all gradients":
        return lambda: torch.autograd.grad(way.knock(x), [x, *way.weights], data.dy)
    leaves = [x] if work == "input gradient" else way.weights
    return functools.partial(torch.autograd.grad, way.knock(x), leaves, data.dy, retain_graph=True)


def products(work: str, case: Case, data: Tensors) -> Callable[[], Any]:
    """The matrix products that the work itself asks for, by the library, on contiguous tensors."""
    x, dy = (t.reshape(-1, case.head_dim).contiguous() for t in (data.x, data.dy))
    matrix = data.weight[0]
    one = {
        "forward": [lambda: x @ matrix],
        "input gradient": [lambda: dy @ matrix.t()],
        "weight gradients": [lambda: x.t() @ dy],
    }
    one["forward + all gradients"] = [product for part in one.values() for product in part]
    return lambda: [product() for product in one[work] for _ in data.weight]


def copy(size: int, device: torch.device) -> Callable[[], Any]:
    """Read and write ``size`` bytes together."""
    source = torch.empty(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def contenders(
    work: str, size: int, case: Case, data: Tensors, ways: dict[str, Way | str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Who does the work, and why the others do not."""
    calls, skipped = {}, {}
    for name, way in ways.items():
        if isinstance(way, str):
            skipped[name] = way
        elif name in ("compiled", "te") and work not in WHOLE:
            skipped[name] = "its backward pass cannot be timed for one gradient alone"
        else:
            calls[name] = call(work, way, data)
    calls["gemms"] = products(work, case, data)
    calls["copy"] = copy(size, case.device)
    return calls, skipped


def check(case: Case, data: Tensors) -> dict[str, float]:
    """Relative errors of the kernels against float64, on some of the tokens.

    Raises:
        SystemExit: one is too large: what is wrong is not worth timing.
    """
    x, dy = (t[:CHECKED_TOKENS] for t in (data.x, data.dy))

    def results(knock: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, data.weight)]
        y = knock(*leaves, case.variant)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    got, want = results(fused.knock, case.dtype), results(knocking.knock, torch.float64)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
    found = dict(zip(("y", "dx", "dw"), errors, strict=True))
    if not all(error < TOLERANCE[case.dtype] for error in errors):
        sys.exit(f"error: the kernels are wrong for {case}: {found}")
    return found


def measure(case: Case, repetitions: int, compile_on_cpu: bool) -> list[dict[str, Any]]:
    """One result for each work of a case."""
    data = Tensors.of(case)
    ways = {
        "kernels": kernels(case, data),
        "eager": eager(case, data),
        "compiled": compiled(case, data, asked_for=compile_on_cpu),
        "te": transformer_engine(case, data),
    }
    errors = check(case, data) if isinstance(ways["kernels"], Way) else None
    results = []
    for work, moves in WORKS.items():
        size = moves * data.x.numel() * data.x.element_size()
        calls, skipped = contenders(work, size, case, data, ways)
        times = interleaved(calls, case.device, repetitions=repetitions)
        ours = times.get("kernels")
        results.append(
            {
                "case": str(case),
                "work": work,
                "bytes": size,
                "relative_errors": errors,
                "skipped": skipped,
                "microseconds": {n: Spread.of([1e6 * s for s in t]) for n, t in times.items()},
                "terabytes_per_second": {
                    n: Spread.of([size / s / 1e12 for s in t]) for n, t in times.items()
                },
                "kernels_over": {n: ratios(ours, t) for n, t in times.items()} if ours else {},
            }
        )
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown, and who did not take part, and why."""
    rows = []
    for result in results:
        for name, spread in result["microseconds"].items():
            ratio = result["kernels_over"].get(name)
            is_judged = name == "copy" and result["work"] == "forward" and ratio
            is_judged = is_judged and result["case"].startswith("mlp")
            slow = is_judged and ratio.median > COPY_RATIO
            speed = result["terabytes_per_second"][name].text(2)
            over = ratio.text(3) if ratio else "not measured"
            over += f" MISSED (at most {COPY_RATIO})" if slow else ""
            rows.append([result["case"], result["work"], name, spread.text(1), speed, over])
    absent = {
        f"- {result['work']}: without {name}: {why}"
        for result in results
        for name, why in result["skipped"].items()
    }
    header = ["case", "work", "contender", "µs", "TB/s", "kernels / contender"]
    return "\n".join([markdown_table(header, rows), "", *sorted(absent)])


def arguments() -> argparse.Namespace:
    """What the user asked for; sizes depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    dtypes = [str(dtype).removeprefix("torch.") for dtype in TOLERANCE]
    add("--device", default="cuda" if cuda else "cpu", choices=["cuda", "cpu"])
    add("--variants", nargs="+", default=["mlp"], choices=list(MATRICES))
    add("--tokens", nargs="+", type=int, help="default: 8192 32768; on a CPU: 16")
    add("--heads", type=int, default=4, help="KV heads (default: the paper's 4)")
    add("--head-dims", nargs="+", type=int, default=[128])
    add("--dtypes", nargs="+", default=["bfloat16"], choices=dtypes)
    add("--repetitions", type=int, help="turns of all contenders (default: 50; on a CPU: 3)")
    add("--compile", action="store_true", help="torch.compile on a CPU, too")
    add("--json", type=Path, help="write the results there, with the machine's description")
    given = parser.parse_args()
    if given.device == "cuda" and not cuda:
        parser.error("--device cuda: no CUDA device was found, use --device cpu")
    on_gpu = given.device == "cuda"
    given.tokens = given.tokens or ([8192, 32768] if on_gpu else [16])
    given.repetitions = given.repetitions or (50 if on_gpu else 3)
    return given


def main() -> None:
    """Measure what is asked for and print it."""
    given = arguments()
    os.environ[fused.KERNELS_VARIABLE] = "triton"  # an error where they would fall back
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    machine = describe_machine(device)
    results = []
    sizes = itertools.product(given.variants, given.dtypes, given.head_dims, given.tokens)
    for variant, dtype, head_dim, tokens in sizes:
        case = Case(variant, tokens, given.heads, head_dim, getattr(torch, dtype), device)
        print(case, file=sys.stderr, flush=True)
        results += measure(case, given.repetitions, given.compile)
    publish(table(results), machine, given, results)


if __name__ == "__main__":
    main()
