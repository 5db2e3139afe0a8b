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
from typing import Any, NamedTuple
from unittest import mock

import torch
from bench import positive
from measuring import Call, Cells, Report, interleaved, ratios, spreads
from torch import Tensor

from kha_megatron.errors import KHAError
from kha_megatron.heads import knock as knocking
from kha_megatron.heads.kernels import fused
from kha_megatron.heads.kernels.tilings import KERNEL_VARIANTS
from kha_megatron.heads.knock import MATRICES

# Of norms: roundings of hidden features and their gradients, several times half a last place.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}
QUERIES_PER_GROUP = 8  # of the paper's models; determines the gaps between rows of the QKV buffer

Knock = Callable[..., Tensor]

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
        draw = functools.partial(torch.randn, dtype=self.dtype, device=self.device)
        width = (QUERIES_PER_GROUP + 2) * self.head_dim
        buffer = draw(self.tokens, self.heads, width)
        x = buffer[..., -self.head_dim :]
        matrices = len(MATRICES[self.variant])
        weight = draw(matrices, self.head_dim, self.head_dim) / self.head_dim**0.5
        dy = draw(x.shape)
        return x, dy, weight


def call(work: str, knock: Knock, case: Case) -> Call:
    """Return a call that does the work. The forward pass before a single gradient is not timed."""
    x, dy, weight = case.tensors()
    run_forward = functools.partial(knock, x, weight, case.variant)
    if work == "forward":
        return torch.no_grad()(run_forward)
    # the backward pass of a kernel computes every gradient that the forward pass was asked for
    x.requires_grad_(work != "weight gradients")
    weight.requires_grad_(work != "input gradient")
    leaves = [tensor for tensor in (x, weight) if tensor.requires_grad]
    if work == "forward + all gradients":
        return lambda: torch.autograd.grad(run_forward(), leaves, dy)
    y = run_forward()
    return functools.partial(torch.autograd.grad, y, leaves, dy, retain_graph=True)


def products(work: str, case: Case) -> Call:
    """Return a call that computes the matrix products of the work on contiguous tensors."""
    x, dy, weight = case.tensors()
    x = x.reshape(-1, case.head_dim).contiguous()
    dy = dy.reshape(-1, case.head_dim).contiguous()
    matrix = weight[0]
    factors = {
        "forward": [(x, matrix)],
        "input gradient": [(dy, matrix.t())],
        "weight gradients": [(x.t(), dy)],
    }
    factors["forward + all gradients"] = list(itertools.chain(*factors.values()))

    def multiply() -> None:
        for left, right in factors[work]:
            for _ in weight:
                left @ right

    return multiply


def check(case: Case) -> dict[str, float]:
    """Return the relative errors of the kernels. Raise KHAError if one is too large."""
    x, dy, weight = case.tensors()

    def results(knock: Knock, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = x[:2048].detach().to(dtype).requires_grad_()
        matrices = weight.detach().to(dtype).requires_grad_()
        y = knock(inputs, matrices, case.variant)
        dx, dw = torch.autograd.grad(y, [inputs, matrices], dy[:2048].to(dtype))
        return {"y": y.detach(), "dx": dx, "dw": dw}

    expected = results(knocking.knock, torch.float64)
    errors = {}
    for name, tensor in results(fused.fused_knock, case.dtype).items():
        difference = tensor.double() - expected[name]
        errors[name] = (difference.norm() / expected[name].norm()).item()
    if not all(error < TOLERANCE[case.dtype] for error in errors.values()):
        relative = list(errors.values())
        raise KHAError(f"The kernels are wrong for {case}: relative errors are {relative}.")
    return errors


class Ways(NamedTuple):
    """The ways to knock that run on this machine."""

    functions: dict[str, Knock]
    skipped: dict[str, str]
    """Why other ways do not run."""
    errors: dict[str, float] | None
    """Relative errors of the kernels."""


def find_ways(case: Case) -> Ways:
    x, _, weight = case.tensors()
    ways: dict[str, Knock] = {}
    skipped = {}
    errors = None
    reason = fused.unsupported_reason(x, weight)
    if reason:
        skipped["kernels"] = reason
    else:
        errors = check(case)
        ways["kernels"] = fused.fused_knock
    ways["eager"] = knocking.knock
    if case.device.type == "cpu":
        skipped["compiled"] = "torch.compile takes minutes on a CPU"
    else:
        torch.compiler.reset()  # otherwise the sizes become dynamic
        ways["compiled"] = torch.compile(knocking.knock)
    return Ways(ways, skipped, errors)


def measure(case: Case, work: str, find: Callable[[], Ways], repetitions: int) -> Report:
    """Measure one work of a case. ``find`` returns :func:`find_ways` of the case."""
    ways = find()
    x = case.tensors()[0]
    size = WORKS[work] * x.nbytes
    calls = {name: call(work, knock, case) for name, knock in ways.functions.items()}
    calls["gemms"] = products(work, case)
    source = torch.empty(size // 2, dtype=torch.uint8, device=case.device)
    calls["copy"] = functools.partial(torch.empty_like(source).copy_, source)
    times = interleaved(calls, case.device, repetitions=repetitions)
    ours = times.get("kernels")
    ratios_to_ours = {}
    if ours:
        ratios_to_ours = {name: ratios(ours, seconds) for name, seconds in times.items()}
    return {
        "case": str(case),
        "work": work,
        "bytes": size,
        "relative_errors": ways.errors,
        "skipped": ways.skipped,
        "microseconds": spreads(times, lambda seconds: 1e6 * seconds),
        "kernels_over": ratios_to_ours,
    }


def rows(result: Report) -> list[list[str]]:
    lines = []
    for name, spread in result["microseconds"].items():
        ratio = result["kernels_over"].get(name)
        over = ratio.text(3) if ratio else "not measured"
        has_target = result["work"] == "forward" and result["case"].startswith("mlp")
        if name == "copy" and ratio and has_target:
            over += f", {ratio.verdict(COPY_RATIO)}"
        terabytes_per_second = result["bytes"] / spread.median / 1e6
        lines.append(
            [
                result["case"],
                result["work"],
                name,
                spread.text(1),
                f"{terabytes_per_second:.2f}",
                over,
            ]
        )
    return lines


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


def cells(args: argparse.Namespace, device: torch.device) -> Cells:
    """Yield the name of each case and work, and a function that measures it."""
    sizes = itertools.product(args.variants, args.dtypes, args.head_dims, args.tokens)
    # an error instead of torch
    with mock.patch.dict(os.environ, {fused.KERNELS_VARIABLE: "triton"}):
        for variant, dtype, head_dim, tokens in sizes:
            case = Case(variant, tokens, args.heads, head_dim, getattr(torch, dtype), device)
            find = functools.cache(functools.partial(find_ways, case))
            for work in WORKS:
                call = functools.partial(measure, case, work, find, args.repetitions)
                yield f"{case}, {work}", call
