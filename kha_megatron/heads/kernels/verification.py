"""Self-check of the Triton kernels against a float64 reference (for ``KHA_KERNELS=auto``).

We compare the kernels with PyTorch on random data when a new layout is first used. The check covers
more rows than the GPU processes at a time plus a partial tile, looks at each row separately, and
temporarily needs a few hundred MB. There's no need for ranks to agree: Triton and PyTorch compute
the same function, so each rank can decide for itself.
"""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from kha_megatron.announcements import announce
from kha_megatron.heads import knock as knocking
from kha_megatron.heads.kernels.rows import Strides, strides_of
from kha_megatron.heads.kernels.tilings import Kernel, architecture, tiling
from kha_megatron.heads.knock import MATRICES, Variant

MAX_RELATIVE_ERROR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Maximum relative error (by norm) per row or matrix. This leaves room for a few rounding errors,
even in the worst of many rows."""

MAX_SCALE_ERROR = 1e-3
"""Maximum deviation of ``<got, want> / <want, want>`` from 1, over all rows. Rounding errors cancel
out in this ratio, but a wrong constant doesn't, even if each row is within its limit."""

CHUNK = 4096
"""Rows per float64 computation (to limit memory)."""


@dataclass(frozen=True)
class KnockCase:
    """KHA variant and memory layout to check."""

    variant: Variant
    head_dim: int
    dtype: torch.dtype
    strides: Strides
    shift: int
    """Address of the first row modulo 16, because Triton specializes on alignment."""
    device: torch.device = field(repr=False)

    def __str__(self) -> str:
        return f"KHA {self.variant} (head dim {self.head_dim}, {self.dtype})"

    @classmethod
    def of(cls, x: Tensor, variant: Variant) -> "KnockCase":
        strides, shift = strides_of(x), x.data_ptr() % 16
        if strides is None:  # rows_of will make a contiguous copy
            strides, shift = Strides(1, x.shape[-1], 0), 0
        return cls(variant, x.shape[-1], x.dtype, strides, shift, x.device)

    def find_error(self) -> str | None:
        """Run the kernels and return an error message if a result is wrong, otherwise None."""
        from kha_megatron.heads.kernels import knock_launch as kernels

        generator = torch.Generator(self.device).manual_seed(0)  # keep the global RNG state
        draw = functools.partial(torch.randn, generator=generator, device=self.device)
        at_once = kernels.processors(self.device)
        sizes = self.variant, self.head_dim, self.dtype, architecture(self.device)
        cuts = [tiling(kernel, *sizes) for kernel in get_args(Kernel)]
        turn = max(at_once * cut.per_processor * cut.rows for cut in cuts)
        rows = turn + max(cut.rows for cut in cuts) + 1
        tokens = -(-rows // self.strides.heads) | 1  # odd, so that the last tile is not full
        x = self._draw_rows(tokens, draw)
        matrices = len(MATRICES[self.variant])
        weight = draw(matrices, self.head_dim, self.head_dim) / self.head_dim**0.5
        weight = weight.to(self.dtype)
        last = cuts[-1].rows
        weights = _emphasis(x[..., 0].numel(), at_once * last, last, self.device)
        dy = (draw(x.shape) * weights.view(*x.shape[:2], 1)).to(self.dtype)
        freed = [torch.full_like(t, math.nan) for t in (dy, dy, weight)]
        del freed  # so that unwritten outputs are NaN
        y = kernels.knock_forward(x, weight, self.variant)
        dx = kernels.knock_backward_input(x, dy, weight, self.variant)
        dw = kernels.knock_backward_weight(x, dy, weight, self.variant)
        exact = weight.double()
        want_dw = torch.zeros_like(exact)
        products: dict[str, list[Tensor]] = {}
        step = max(1, CHUNK // self.strides.heads)
        for part in (slice(first, first + step) for first in range(0, tokens, step)):
            inputs = x[part].double()
            want_y = knocking.knock(inputs, exact, self.variant)
            want_dx, term = knocking.gradients(inputs, dy[part].double(), exact, self.variant)
            want_dw += term
            for name, got, want in (("result", y, want_y), ("input gradient", dx, want_dx)):
                if why := self._difference(name, got[part], want):
                    return why
                products.setdefault(name, []).append(_products(got[part], want))
        name = "gradient of the matrices"
        if why := self._difference(name, dw.flatten(1), want_dw.flatten(1)):
            return why
        products[name] = [_products(dw, want_dw)]
        for name, parts in products.items():
            got_want, want_want = torch.stack(parts).sum(0).tolist()
            if not abs(got_want / want_want - 1) <= MAX_SCALE_ERROR:
                return f"the {name} is {got_want / want_want:.4f} times the expected one"
        return None

    def _draw_rows(self, tokens: int, draw: Callable[..., Tensor]) -> Tensor:
        """Return random rows with the layout of this case. Gaps in memory are filled with NaN."""
        sizes = tokens, self.strides.heads, self.head_dim
        strides = (*self.strides[1:], 1)
        first = self.shift // self.dtype.itemsize
        length = first + sum(size * stride for size, stride in zip(sizes, strides, strict=True))
        if 0 in strides[: 1 + (self.strides.heads > 1)]:  # expanded rows share memory
            return draw(length).to(self.dtype).as_strided(sizes, strides, first)
        buffer = torch.full((length,), math.nan, dtype=self.dtype, device=self.device)
        return buffer.as_strided(sizes, strides, first).copy_(draw(sizes))

    def _difference(self, name: str, got: Tensor, want: Tensor) -> str | None:
        size = want.norm(dim=-1).clamp_min(1e-30)
        errors = (got.double() - want).norm(dim=-1) / size
        worst = errors.nan_to_num(nan=math.inf).max().item()
        if worst <= MAX_RELATIVE_ERROR[self.dtype]:
            return None
        return f"the {name} has a relative error of {worst:.2g}"


_trusted: dict[KnockCase, bool] = {}


def is_trusted(case: KnockCase) -> bool:
    """Return True if the kernels agree with PyTorch. Runs the check on the first call.

    A failed check logs a warning on every rank. We can't run the check during CUDA graph capture,
    so this returns False and tries again later.
    """
    if case not in _trusted:
        if case.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            announce(
                f"WARNING: Falling back to torch for {case}, because a CUDA graph is being "
                "captured before the kernels were compared with torch. Use more warm-up steps.",
                once=("captured", case),
            )
            return False
        error = _compare(case)
        _trusted[case] = error is None
        if error:
            announce(
                f"WARNING: Falling back to torch for {case}, because on this device {error}. Set "
                "KHA_KERNELS=triton to skip this check.",
                every_rank=True,
            )
    return _trusted[case]


def _compare(case: KnockCase) -> str | None:
    def compare() -> str | None:
        with torch.cuda.device(case.device) if case.device.type == "cuda" else nullcontext():
            return case.find_error()

    try:
        # a new thread does not inherit autocast, inference mode or saved-tensor hooks
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(compare).result()
    except Exception as error:
        return f"the kernels failed ({type(error).__name__}: {' '.join(str(error).split())[:500]})"


def _products(got: Tensor, want: Tensor) -> Tensor:
    return torch.stack([(got * want).sum(), want.square().sum()])


def _emphasis(count: int, turn: int, tile: int, device: torch.device) -> Tensor:
    """Return a scaling factor for each row of the test input, ``[count]``.

    The last, incomplete tile and the rows that a program processes after its first ``turn`` rows
    get larger factors. Otherwise, the weight gradient would hardly change if a kernel skipped them.
    """
    factors = torch.ones(count, device=device)
    for rest in (count - turn, count % tile):
        if 0 < rest < count:
            factors[-rest:] = math.sqrt((count - rest) / rest)
    return factors
