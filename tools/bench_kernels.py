"""Time the fused kernels beside every other way to knock, in one run.

Each work (forward, input gradient, weight gradients, forward with all gradients) is done by

  kernels    kha_megatron.ops.fused
  eager      kha_megatron.ops.heads.knock and autograd
  compiled   the same under torch.compile
  gemms      only the work's matrix products by the library, on contiguous tensors
  te         Transformer Engine's Linear layers with the same products, where it is installed, and
             the same under each of its FP8 recipes: why KHA's matrices stay in bf16
  copy       torch's copy of as many bytes as the work must read and write

in turn, many times, in another order each time. Printed are medians with the quarters around them,
the ratio of the kernels to each contender turn by turn, and the bytes that the work must move over
its time. Before it is timed, each result of the kernels is compared with float64.

On a CPU, with sizes of its own, the kernels run only in Triton's interpreter, for the sake of this
tool's tests (TRITON_INTERPRET=1).
"""

import argparse
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from bench import positive
from measuring import Spread, interleaved, ratios
from shapes import has
from torch import Tensor

from kha_megatron.heads.knock import MATRICES
from kha_megatron.ops import fused
from kha_megatron.ops.heads import knock as knocking

EXAMPLE = """example:
  python tools/bench.py kernels --tokens 8192 32768 --json benchmarks/kernels.json
  python tools/bench.py kernels --variants mlp gate --dtypes bfloat16 --head-dims 64 128 256
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


def compiled(case: Case, data: Tensors) -> Way | str:
    """Plain torch under torch.compile."""
    if case.device.type == "cpu":
        return "torch.compile takes minutes on a CPU"
    weight = data.weight.detach().requires_grad_()
    torch.compiler.reset()  # or it is compiled for any size at once, and after eight forms no more
    knock = torch.compile(knocking.knock)
    return Way(lambda x: knock(x, weight, case.variant), [weight])


def transformer_engine(case: Case, data: Tensors) -> dict[str, Way | str]:
    """Linear layers of Transformer Engine, with torch between them: in the case's dtype, and under
    each FP8 recipe that this GPU has. FP8 must first quantise its input and the weight, which for
    matrices this small is more memory traffic than the product itself."""
    if not has("transformer_engine"):
        return {"te": "Transformer Engine is not installed"}
    if case.device.type == "cpu":
        return {"te": "Transformer Engine needs a CUDA device"}
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    options = {"bias": False, "params_dtype": case.dtype, "device": case.device}
    layers = [te.Linear(case.head_dim, case.head_dim, **options) for _ in data.weight]

    def knock(x: Tensor, context: Callable[[], AbstractContextManager] = nullcontext) -> Tensor:
        with context():
            if case.variant == "linear":
                return layers[0](x)
            if case.variant == "gate":
                return 2 * x * torch.sigmoid(layers[0](x))
            return layers[2](2 * layers[0](x) * torch.sigmoid(layers[1](x)))

    weights = [layer.weight for layer in layers]
    found: dict[str, Way | str] = {"te": Way(knock, weights)}
    for name, make, available in (
        ("delayed", recipe.DelayedScaling, te.is_fp8_available),
        ("tensorwise", recipe.Float8CurrentScaling, te.is_fp8_available),
        ("blockwise", recipe.Float8BlockScaling, te.is_fp8_block_scaling_available),
        ("mxfp8", recipe.MXFP8BlockScaling, te.is_mxfp8_available),
    ):
        can, why = available(return_reason=True)
        quantised = functools.partial(te.fp8_autocast, enabled=True, fp8_recipe=make())
        way = Way(functools.partial(knock, context=quantised), weights)
        found[f"te {name}"] = way if can else why
    return found


def call(work: str, way: Way, data: Tensors) -> Callable[[], Any]:
    """Do the work in that way. The forward pass before a gradient alone is not timed."""
    x = data.x.detach().requires_grad_(work != "weight gradients")
    if work == "forward":
        return lambda: torch.no_grad()(way.knock)(x)
    if work == "forward + all gradients":
        return lambda: torch.autograd.grad(way.knock(x), [x, *way.weights], data.dy)
    leaves = [x] if work == "input gradient" else way.weights
    # a kernel's backward pass computes every gradient that its forward pass was told of
    for weight in way.weights:
        weight.requires_grad_(work != "input gradient")
    y = way.knock(x)
    for weight in way.weights:
        weight.requires_grad_()
    return functools.partial(torch.autograd.grad, y, leaves, data.dy, retain_graph=True)


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
        elif name.startswith(("compiled", "te")) and work not in WHOLE:
            skipped[name] = "its backward pass cannot be timed for one gradient alone"
        else:
            calls[name] = call(work, way, data)
    calls["gemms"] = products(work, case, data)
    calls["copy"] = copy(size, case.device)
    return calls, skipped


def right(found: dict[str, float], case: Any) -> dict[str, float]:
    """The errors of the kernels, by name.

    Raises:
        SystemExit: one is too large: what is wrong is not worth timing.
    """
    if not all(error < TOLERANCE[case.dtype] for error in found.values()):
        sys.exit(f"error: the kernels are wrong for {case}: {found}")
    return found


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
    return right(found, case)


def measure(case: Case, repetitions: int) -> list[dict[str, Any]]:
    """One result for each work of a case."""
    data = Tensors.of(case)
    ways = {
        "kernels": kernels(case, data),
        "eager": eager(case, data),
        "compiled": compiled(case, data),
        **transformer_engine(case, data),
    }
    errors = check(case, data) if isinstance(ways["kernels"], Way) else None
    results = []
    for work, moves in WORKS.items():
        size = moves * data.x.numel() * data.x.element_size()
        calls, skipped = contenders(work, size, case, data, ways)
        results.append(
            {
                "cell": f"{case}, {work}",
                "case": str(case),
                "work": work,
                "relative_errors": errors,
                "skipped": skipped,
                **timed(calls, size, case.device, repetitions),
            }
        )
    return results


def timed(
    calls: dict[str, Callable[[], Any]], size: int, device: torch.device, repetitions: int
) -> dict[str, Any]:
    """The figures of a result: of work that must move ``size`` bytes, done by each contender."""
    times = interleaved(calls, device, repetitions=repetitions)
    ours = times.get("kernels")
    return {
        "bytes": size,
        "microseconds": {n: Spread.of([1e6 * s for s in t]) for n, t in times.items()},
        "terabytes_per_second": {
            n: Spread.of([size / s / 1e12 for s in t]) for n, t in times.items()
        },
        "kernels_over": {n: ratios(ours, t) for n, t in times.items()} if ours else {},
    }


HEADER = ["case", "work", "contender", "µs", "TB/s", "kernels / contender"]
DEFAULTS = {
    "cuda": {"tokens": [8192, 32768], "repetitions": 50},
    "cpu": {"tokens": [16], "repetitions": 3},
}


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Of the table."""
    found = []
    for name, spread in result["microseconds"].items():
        ratio = result["kernels_over"].get(name)
        over = ratio.text(3) if ratio else "not measured"
        is_judged = result["work"] == "forward" and result["case"].startswith("mlp")
        if name == "copy" and ratio and is_judged:
            over += f", {'met' if ratio.median <= COPY_RATIO else 'MISSED'} (at most {COPY_RATIO})"
        speed = result["terabytes_per_second"][name].text(2)
        found.append([result["case"], result["work"], name, spread.text(1), speed, over])
    return found


def options(add: Callable[..., Any]) -> None:
    """What the user may ask for; sizes depend on the device."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in TOLERANCE]
    add("--variants", nargs="+", default=["mlp"], choices=list(MATRICES))
    add("--tokens", nargs="+", type=positive, help="default: 8192 32768; on a CPU: 16")
    add("--heads", type=positive, default=4, help="KV heads (default: the paper's 4)")
    add("--head-dims", nargs="+", type=positive, default=[128])
    add("--dtypes", nargs="+", default=["bfloat16"], choices=dtypes)


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for each case and work."""
    os.environ[fused.KERNELS_VARIABLE] = "triton"  # an error where they would fall back
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    sizes = itertools.product(given.variants, given.dtypes, given.head_dims, given.tokens)
    for variant, dtype, head_dim, tokens in sizes:
        case = Case(variant, tokens, given.heads, head_dim, getattr(torch, dtype), device)
        print(case, file=sys.stderr, flush=True)
        yield from measure(case, given.repetitions)
