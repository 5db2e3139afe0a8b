"""Time the Triton kernels and the other ways to knock.

Each work (forward, input gradient, weight gradients, forward with all gradients) is done by

  kernels    kha_megatron.heads.kernels.fused with KHA_KERNELS=triton
  eager      kha_megatron.heads.knock and autograd
  compiled   the same with torch.compile
  gemms      only the matrix products of the work, by cuBLAS, on contiguous tensors
  copy       torch's copy of as many bytes as the work must read and write

The results of the kernels are compared with float64 before they are timed.
"""

import argparse
import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from bench import positive
from measuring import Cells, interleaved, ratios, spreads
from torch import Tensor

from kha_megatron.errors import KHAError
from kha_megatron.heads import knock as knocking
from kha_megatron.heads.kernels import fused
from kha_megatron.heads.kernels.tilings import KERNEL_VARIANTS
from kha_megatron.heads.knock import MATRICES

# Of norms: roundings of hidden features and their gradients, several times half a last place.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}
QUERIES_PER_GROUP = 8  # of the paper's models; determines the gaps between rows of the QKV buffer

# How often each work reads or writes a tensor of the size of `x`, at least
WORKS = {
    "forward": 2,
    "input gradient": 3,
    "weight gradients": 2,
    "forward + all gradients": 7,
}
COPY_RATIO = 1.6
"""Target: largest ratio of KHA-MLP's forward kernel to a copy of the same bytes."""

HEADER = ["case", "work", "contender", "µs", "TB/s", "kernels / contender"]
DEFAULTS = {
    "cuda": {"tokens": [8192, 32768], "repetitions": 50},
    "cpu": {"tokens": [16], "repetitions": 3},
}


@dataclass(frozen=True)
class Case:
    """Values of ``heads`` KV heads within a QKV buffer."""

    variant: str
    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.variant}, {self.tokens} x {self.heads} x {self.head_dim}, {dtype}"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draw ``x`` and ``dy`` ``[tokens, heads, D]`` and the weight ``[n, D, D]``."""
        torch.manual_seed(0)
        options = {"dtype": self.dtype, "device": self.device}
        width = (QUERIES_PER_GROUP + 2) * self.head_dim
        x = torch.randn(self.tokens, self.heads, width, **options)[..., -self.head_dim :]
        shape = (len(MATRICES[self.variant]), self.head_dim, self.head_dim)
        weight = torch.randn(shape, **options) / self.head_dim**0.5
        return x, torch.randn(x.shape, **options), weight


def call(work: str, knock: Callable, case: Case) -> Callable[[], Any]:
    """Return a call that does the work. The forward pass before a single gradient is not timed."""
    x, dy, weight = case.tensors()
    if work == "forward":
        return lambda: torch.no_grad()(knock)(x, weight, case.variant)
    # the backward pass of a kernel computes every gradient that the forward pass was asked for
    x.requires_grad_(work != "weight gradients")
    weight.requires_grad_(work != "input gradient")
    leaves = [t for t in (x, weight) if t.requires_grad]
    if work == "forward + all gradients":
        return lambda: torch.autograd.grad(knock(x, weight, case.variant), leaves, dy)
    y = knock(x, weight, case.variant)
    return functools.partial(torch.autograd.grad, y, leaves, dy, retain_graph=True)


def products(work: str, case: Case) -> Callable[[], Any]:
    """Return a call that computes the matrix products of the work on contiguous tensors."""
    x, dy, weight = case.tensors()
    x, dy = (t.reshape(-1, case.head_dim).contiguous() for t in (x, dy))
    matrix = weight[0]
    one = {
        "forward": [lambda: x @ matrix],
        "input gradient": [lambda: dy @ matrix.t()],
        "weight gradients": [lambda: x.t() @ dy],
    }
    one["forward + all gradients"] = [product for part in one.values() for product in part]
    return lambda: [product() for product in one[work] for _ in weight]


def check(case: Case) -> dict[str, float]:
    """Return the relative errors of the kernels. Raise KHAError if one is too large."""
    x, dy, weight = case.tensors()

    def results(knock: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x[:2048], weight)]
        y = knock(*leaves, case.variant)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy[:2048].to(dtype))]

    got = results(fused.fused_knock, case.dtype)
    want = results(knocking.knock, torch.float64)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
    if not all(error < TOLERANCE[case.dtype] for error in errors):
        raise KHAError(f"The kernels are wrong for {case}: relative errors are {errors}.")
    return dict(zip(("y", "dx", "dw"), errors, strict=True))


def find_ways(case: Case) -> tuple[dict[str, Callable], dict[str, str], dict[str, float] | None]:
    """Return the ways to knock, why others do not run, and the relative errors of the kernels."""
    x, _, weight = case.tensors()
    ways: dict[str, Callable] = {"kernels": fused.fused_knock, "eager": knocking.knock}
    skipped = {}
    errors = None
    if why := fused.unsupported_reason(x, weight):
        skipped["kernels"] = why
        del ways["kernels"]
    else:
        errors = check(case)
    if case.device.type == "cpu":
        skipped["compiled"] = "torch.compile takes minutes on a CPU"
    else:
        torch.compiler.reset()  # otherwise the sizes become dynamic
        ways["compiled"] = torch.compile(knocking.knock)
    return ways, skipped, errors


def measure(case: Case, work: str, find: Callable[[], tuple], repetitions: int) -> dict[str, Any]:
    """Measure one work of a case. ``find`` returns :func:`find_ways` of the case."""
    ways, skipped, errors = find()
    x = case.tensors()[0]
    size = WORKS[work] * x.numel() * x.element_size()
    calls = {name: call(work, way, case) for name, way in ways.items()}
    calls["gemms"] = products(work, case)
    source = torch.empty(size // 2, dtype=torch.uint8, device=case.device)
    calls["copy"] = functools.partial(torch.empty_like(source).copy_, source)
    times = interleaved(calls, case.device, repetitions=repetitions)
    ours = times.get("kernels")
    return {
        "case": str(case),
        "work": work,
        "bytes": size,
        "relative_errors": errors,
        "skipped": skipped,
        "microseconds": spreads(times, lambda seconds: 1e6 * seconds),
        "kernels_over": {n: ratios(ours, t) for n, t in times.items()} if ours else {},
    }


def rows(result: dict[str, Any]) -> list[list[str]]:
    found = []
    for name, spread in result["microseconds"].items():
        ratio = result["kernels_over"].get(name)
        over = ratio.text(3) if ratio else "not measured"
        has_target = result["work"] == "forward" and result["case"].startswith("mlp")
        if name == "copy" and ratio and has_target:
            over += f", {ratio.verdict(COPY_RATIO)}"
        speed = f"{result['bytes'] / spread.median / 1e6:.2f}"
        found.append([result["case"], result["work"], name, spread.text(1), speed, over])
    return found


def options(add: Callable[..., Any]) -> None:
    dtypes = [str(dtype).removeprefix("torch.") for dtype in TOLERANCE]
    add("--variants", nargs="+", default=["mlp"], choices=KERNEL_VARIANTS)
    add(
        "--tokens",
        nargs="+",
        type=positive,
        help="default: 8192 32768; on a CPU: 16",
    )
    add(
        "--heads",
        type=positive,
        default=4,
        help="KV heads (default: the paper's 4)",
    )
    add("--head-dims", nargs="+", type=positive, default=[128])
    add("--dtypes", nargs="+", default=["bfloat16"], choices=dtypes)


def cells(given: argparse.Namespace, device: torch.device) -> Cells:
    """Yield the name of each case and work, and a function that measures it."""
    sizes = itertools.product(given.variants, given.dtypes, given.head_dims, given.tokens)
    # an error instead of torch
    with mock.patch.dict(os.environ, {fused.KERNELS_VARIABLE: "triton"}):
        for variant, dtype, head_dim, tokens in sizes:
            case = Case(variant, tokens, given.heads, head_dim, getattr(torch, dtype), device)
            find = functools.cache(functools.partial(find_ways, case))
            for work in WORKS:
                call = functools.partial(measure, case, work, find, given.repetitions)
                yield f"{case}, {work}", call
