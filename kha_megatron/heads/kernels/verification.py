"""Self-check of the Triton kernels against a float64 reference, which ``auto`` requires.

The first call with a new layout triggers one comparison on random data. It uses more rows than the
concurrent programs process in one loop iteration and ends with a partial tile, and each row is
checked separately. The check temporarily needs a few hundred MB. Since kernels and PyTorch compute
the same function and all-reduce the same gradients, each rank can decide independently.
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
from kha_megatron.heads.kernels.tilings import Kernel, tiling
from kha_megatron.heads.knock import MATRICES, Variant

MAX_RELATIVE_ERROR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Maximum relative error (by norm) of a row or matrix. It allows for a few roundings of half a unit
in the last place, for the worst of many rows."""

CHUNK = 4096
"""Number of rows per float64 computation, which limits the memory."""


@dataclass(frozen=True)
class KnockCase:
    """A KHA variant and the memory layout of its rows."""

    variant: Variant
    head_dim: int
    dtype: torch.dtype
    strides: Strides
    shift: int
    """Offset of the first row in bytes, modulo 16, because Triton specializes on alignment."""
    device: torch.device = field(repr=False)

    def __str__(self) -> str:
        return f"KHA {self.variant} (head dim {self.head_dim}, {self.dtype})"

    @classmethod
    def of(cls, x: Tensor, variant: Variant) -> "KnockCase":
        """Return the case of ``knock(x, weight, variant)``, where unsupported strides are
        copied."""
        strides, shift = strides_of(x), x.data_ptr() % 16
        if strides is None:
            strides, shift = Strides(1, x.shape[-1], 0), 0
        return cls(variant, x.shape[-1], x.dtype, strides, shift, x.device)

    def find_error(self) -> str | None:
        """Return a description of the first wrong result, or None. Kernel exceptions are
        propagated."""
        from kha_megatron.heads.kernels import knock_launch as kernels

        generator = torch.Generator(self.device).manual_seed(0)  # keep the global RNG state
        draw = functools.partial(torch.randn, generator=generator, device=self.device)
        at_once = kernels.processors(self.device)
        cuts = [tiling(k, self.variant, self.head_dim, self.dtype) for k in get_args(Kernel)]
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
        step = max(1, CHUNK // self.strides.heads)
        for part in (slice(first, first + step) for first in range(0, tokens, step)):
            inputs = x[part].double()
            want_y = knocking.knock(inputs, exact, self.variant)
            want_dx, term = knocking.gradients(inputs, dy[part].double(), exact, self.variant)
            want_dw += term
            for name, got, want in (("result", y, want_y), ("input gradient", dx, want_dx)):
                if why := self._difference(name, got[part], want):
                    return why
        return self._difference("gradient of the matrices", dw.flatten(1), want_dw.flatten(1))

    def _draw_rows(self, tokens: int, draw: Callable[..., Tensor]) -> Tensor:
        """Return random ``[tokens, heads, D]`` rows with these strides, and NaN in all gaps."""
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
    """Return whether the kernels agree with PyTorch in this case.

    The first call runs the comparison and logs a warning on every rank if it fails. During CUDA
    graph capture the comparison is not possible, so PyTorch is used and a later call compares.
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


def _emphasis(count: int, turn: int, tile: int, device: torch.device) -> Tensor:
    """Return factors ``[count]`` that scale up the rows after the first turn and of the last tile.

    In a sum of squares these rows then have as much weight as all others, so that omitting them is
    detected.
    """
    factors = torch.ones(count, device=device)
    for rest in (count - turn, count % tile):
        if 0 < rest < count:
            factors[-rest:] = math.sqrt((count - rest) / rest)
    return factors
