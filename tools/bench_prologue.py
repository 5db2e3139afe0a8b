"""Time the fused prologue beside every other way from the QKV projection to the core attention.

Split, knock, QK-norm and RoPE, of a whole QKV buffer, forward and with all gradients, by

  kernels    kha_megatron.ops.kernels.prologue_launch
  eager      kha_megatron.ops.prologue and autograd
  compiled   the same under torch.compile
  te         what Megatron does with Transformer Engine, where that is installed: its two norms, its
             fused RoPE, twice, and knocking in plain torch
  copy       torch's copy of as many bytes as the work must read and write

in turn, many times, in another order each time. Printed is what the benchmark `kernels` prints;
before they are timed, the kernels' results are compared with float64.

On a CPU, with sizes of its own, the kernels run only in Triton's interpreter, for the sake of this
tool's tests (TRITON_INTERPRET=1).
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from bench import positive
from bench_kernels import CHECKED_TOKENS, HEADER, TOLERANCE, copy, right, rows, timed
from shapes import has
from torch import Tensor

from kha_megatron.heads.knock import MATRICES, PROJECTIONS
from kha_megatron.ops import fused
from kha_megatron.ops.heads.knock import knock
from kha_megatron.ops.prologue import PrologueSettings, prologue

__all__ = ["DEFAULTS", "EXAMPLE", "HEADER", "options", "results", "rows"]

EXAMPLE = """example:
  python tools/bench.py prologue --tokens 8192 32768 --json benchmarks/prologue.json
  python tools/bench.py prologue --variants none --head-dims 64 128
"""

QUERIES_PER_GROUP = 8  # of the paper's models

# How often each work reads or writes as much as the QKV buffer, at the least: the buffer and what
# core attention takes; then the buffer, the gradients of that, and its own.
WORKS = {"forward": 2, "forward + all gradients": 5}

Leaves = dict[str, Tensor]
"""``qkv``, ``query norm``, ``key norm``, and ``value``'s matrices where it is knocked."""


@dataclass(frozen=True)
class Case:
    """One set of sizes."""

    variant: str
    """How values are knocked, or ``none``."""
    tokens: int
    """Of one sequence."""
    groups: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"{self.tokens} x {self.groups} x {QUERIES_PER_GROUP + 2} x {self.head_dim}"
        return f"prologue, {self.variant}, {sizes}, {dtype}"

    @property
    def settings(self) -> PrologueSettings:
        """Of a group's heads all are wanted."""
        r = QUERIES_PER_GROUP
        return PrologueSettings(
            head_dim=self.head_dim,
            heads={"query": (0, r), "key": (r, r + 1), "value": (r + 1, r + 2)},
            variants={} if self.variant == "none" else {"value": self.variant},
        )

    def leaves(self) -> Leaves:
        """Random ones, none of which leaves a gradient at zero."""
        torch.manual_seed(0)
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        width = (QUERIES_PER_GROUP + 2) * self.head_dim
        found = {"qkv": torch.randn(self.tokens, 1, self.groups, width, **options)}
        found |= {
            f"{p} norm": 1 + torch.randn(self.head_dim, **options) / 4 for p in PROJECTIONS[:2]
        }
        if self.variant != "none":
            shape = (len(MATRICES[self.variant]), self.head_dim, self.head_dim)
            found["value"] = torch.randn(shape, **options) / self.head_dim**0.5
        return {name: leaf.requires_grad_() for name, leaf in found.items()}

    def angles(self) -> Tensor:
        """As Megatron's rotary embedding gives them: ``[s, 1, 1, D]`` in float32."""
        half = torch.arange(0, self.head_dim, 2, device=self.device) / self.head_dim
        half = torch.arange(self.tokens, device=self.device)[:, None] * 10000**-half
        return torch.cat([half, half], dim=-1)[:, None, None].float()


Way = Callable[[Leaves], tuple[Tensor, ...]]
"""From the leaves to query, key and value."""


def through(function: Callable[..., Any], case: Case, angles: Tensor) -> Way:
    """A way that computes in one call of the prologue's."""

    def way(leaves: Leaves) -> tuple[Tensor, ...]:
        weights = {p: leaves[p] for p in case.settings.variants}
        norms = leaves["query norm"], leaves["key norm"]
        return function(leaves["qkv"], weights, *norms, angles, case.settings)

    return way


def transformer_engine(case: Case, angles: Tensor) -> Way | str:
    """Megatron's own steps, or why not."""
    if not has("transformer_engine"):
        return "Transformer Engine is not installed"
    if case.device.type == "cpu":
        return "Transformer Engine needs a CUDA device"
    import transformer_engine.pytorch as te
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

    options = {"params_dtype": case.dtype, "device": case.device}
    norms = {p: te.RMSNorm(case.head_dim, **options) for p in PROJECTIONS[:2]}

    def way(leaves: Leaves) -> tuple[Tensor, ...]:
        found = {p: x.flatten(2, 3) for p, x in case.settings.places(leaves["qkv"]).items()}
        for p, variant in case.settings.variants.items():
            found[p] = knock(found[p], leaves[p], variant)
        for p, norm in norms.items():
            found[p] = fused_apply_rotary_pos_emb(norm(found[p]), angles)
        return tuple(found.values())

    return way


def ways(case: Case) -> dict[str, Way | str]:
    """Every way, or why it is not there."""
    angles = case.angles()
    buffer = case.leaves()["qkv"]
    found: dict[str, Way | str] = {
        "kernels": fused.refusal(buffer, buffer.new_empty(0, case.head_dim, case.head_dim)) or "",
        "eager": through(prologue, case, angles),
        "compiled": "torch.compile takes minutes on a CPU",
        "te": transformer_engine(case, angles),
    }
    if not found["kernels"]:
        from kha_megatron.ops.kernels.prologue_launch import fused_prologue

        found["kernels"] = through(fused_prologue, case, angles)
    if case.device.type != "cpu":
        torch.compiler.reset()  # see bench_kernels.compiled
        found["compiled"] = through(torch.compile(prologue), case, angles)
    return found


def gradients(case: Case) -> list[Tensor]:
    """Of query, key and value, as core attention would send them: ``[s, 1, heads, D]``."""
    heads = (case.groups * QUERIES_PER_GROUP, case.groups, case.groups)
    options: dict[str, Any] = {"dtype": case.dtype, "device": case.device}
    return [torch.randn(case.tokens, 1, n, case.head_dim, **options) for n in heads]


def call(work: str, way: Way, case: Case) -> Callable[[], Any]:
    """Do the work in that way, whose norms may have weights of their own."""
    leaves, upstream = case.leaves(), gradients(case)
    if work == "forward":
        return lambda: torch.no_grad()(way)(leaves)
    inputs = list(leaves.values())
    return lambda: torch.autograd.grad(way(leaves), inputs, upstream, allow_unused=True)


def check(case: Case) -> dict[str, float]:
    """Relative errors of the kernels against float64, on some of the tokens."""
    case = replace(case, tokens=min(case.tokens, CHECKED_TOKENS))
    angles, upstream = case.angles(), gradients(case)
    kernels = ways(case)["kernels"]
    assert callable(kernels)

    def outcome(way: Way, dtype: torch.dtype) -> list[Tensor]:
        leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in case.leaves().items()}
        outputs = way(leaves)
        sent = [g.to(dtype) for g in upstream]
        return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), sent)]

    got = outcome(kernels, case.dtype)
    want = outcome(through(prologue, case, angles), torch.float64)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
    names = [*PROJECTIONS, *(f"d {name}" for name in case.leaves())]
    return right(dict(zip(names, errors, strict=True)), case)


def measure(case: Case, repetitions: int) -> Iterator[dict[str, Any]]:
    """One result for each work of a case."""
    found = ways(case)
    skipped = {name: way for name, way in found.items() if isinstance(way, str)}
    errors = None if "kernels" in skipped else check(case)
    buffer = case.leaves()["qkv"]
    for work, moves in WORKS.items():
        size = moves * buffer.numel() * buffer.element_size()
        calls = {n: call(work, way, case) for n, way in found.items() if callable(way)}
        calls["copy"] = copy(size, case.device)
        yield {
            "cell": f"{case}, {work}",
            "case": str(case),
            "work": work,
            "relative_errors": errors,
            "skipped": skipped,
            **timed(calls, size, case.device, repetitions),
        }


DEFAULTS = {
    "cuda": {"tokens": [8192, 32768], "repetitions": 50},
    "cpu": {"tokens": [16], "repetitions": 3},
}


def options(add: Callable[..., Any]) -> None:
    """What the user may ask for; sizes depend on the device."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in TOLERANCE]
    add("--variants", nargs="+", default=["none", "mlp"], choices=["none", *MATRICES])
    add("--tokens", nargs="+", type=positive, help="default: 8192 32768; on a CPU: 16")
    add("--heads", type=positive, default=4, help="KV heads (default: the paper's 4)")
    add("--head-dims", nargs="+", type=positive, default=[128])
    add("--dtypes", nargs="+", default=["bfloat16"], choices=dtypes)


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for each case and work."""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    sizes = itertools.product(given.variants, given.dtypes, given.head_dims, given.tokens)
    for variant, dtype, head_dim, tokens in sizes:
        case = Case(variant, tokens, given.heads, head_dim, getattr(torch, dtype), device)
        print(case, file=sys.stderr, flush=True)
        yield from measure(case, given.repetitions)
