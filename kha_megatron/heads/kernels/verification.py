"""Self-check of the Triton kernels against a float64 reference (for ``KHA_KERNELS=auto``).

We compare the kernels with PyTorch on random data when a new layout is first used. The check covers
more rows than the GPU processes at a time plus a partial tile, looks at each row separately, and
temporarily needs a few hundred MB. There is no need for ranks to agree: Triton and PyTorch compute
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
"""Maximum deviation of ``<actual, expected> / <expected, expected>`` from 1, over all rows.

Rounding errors cancel out in this ratio, but a wrong constant does not, even if each row is within
its limit.
"""

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
        head_dim = x.shape[-1]
        strides = strides_of(x)
        shift = x.data_ptr() % 16
        if strides is None:  # rows_of will make a contiguous copy
            strides = Strides(1, head_dim, 0)
            shift = 0
        return cls(variant, head_dim, x.dtype, strides, shift, x.device)

    def find_error(self) -> str | None:
        """Run the kernels and return an error message if a result is wrong, otherwise None."""
        from kha_megatron.heads.kernels import knock_launch as kernels

        generator = torch.Generator(self.device).manual_seed(0)  # keep the global RNG state
        draw = functools.partial(torch.randn, generator=generator, device=self.device)
        x, weight, dy = self._draw_inputs(draw, kernels.processors(self.device))
        freed = [torch.full_like(tensor, math.nan) for tensor in (dy, dy, weight)]
        del freed  # so that unwritten outputs are NaN
        y = kernels.knock_forward(x, weight, self.variant)
        dx = kernels.knock_backward_input(x, dy, weight, self.variant)
        dw = kernels.knock_backward_weight(x, dy, weight, self.variant)

        exact_weight = weight.double()
        expected_dw = torch.zeros_like(exact_weight)
        y_scale = _Scale("result")
        dx_scale = _Scale("input gradient")
        dw_scale = _Scale("gradient of the matrices")
        step = max(1, CHUNK // self.strides.heads)
        for start in range(0, len(x), step):
            chunk = slice(start, start + step)
            inputs = x[chunk].double()
            upstream = dy[chunk].double()
            expected_y = knocking.knock(inputs, exact_weight, self.variant)
            expected_dx, chunk_dw = knocking.gradients(inputs, upstream, exact_weight, self.variant)
            expected_dw += chunk_dw
            if error := self._difference("result", y[chunk], expected_y):
                return error
            if error := self._difference("input gradient", dx[chunk], expected_dx):
                return error
            y_scale.add(y[chunk], expected_y)
            dx_scale.add(dx[chunk], expected_dx)
        dw_name = "gradient of the matrices"
        if error := self._difference(dw_name, dw.flatten(1), expected_dw.flatten(1)):
            return error
        dw_scale.add(dw, expected_dw)
        return y_scale.find_error() or dx_scale.find_error() or dw_scale.find_error()

    def _draw_inputs(
        self, draw: Callable[..., Tensor], processors: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input, the weights and the gradient of the output."""
        sizes = self.variant, self.head_dim, self.dtype, architecture(self.device)
        tilings = [tiling(kernel, *sizes) for kernel in get_args(Kernel)]
        rows_at_once = max(processors * each.per_processor * each.rows for each in tilings)
        rows = rows_at_once + max(each.rows for each in tilings) + 1
        tokens = -(-rows // self.strides.heads) | 1  # odd, so that the last tile is not full
        x = self._draw_rows(tokens, draw)
        matrices = len(MATRICES[self.variant])
        weight = draw(matrices, self.head_dim, self.head_dim) / self.head_dim**0.5
        tile = tilings[-1].rows
        emphasis = _emphasis(x[..., 0].numel(), processors * tile, tile, self.device)
        dy = draw(x.shape) * emphasis.view(*x.shape[:2], 1)
        return x, weight.to(self.dtype), dy.to(self.dtype)

    def _draw_rows(self, tokens: int, draw: Callable[..., Tensor]) -> Tensor:
        """Return random rows with the layout of this case. Gaps in memory are filled with NaN."""
        sizes = (tokens, self.strides.heads, self.head_dim)
        strides = (*self.strides[1:], 1)
        start = self.shift // self.dtype.itemsize
        length = start
        for size, stride in zip(sizes, strides, strict=True):
            length += size * stride
        token_stride, head_stride, _ = strides
        is_expanded = token_stride == 0 or (head_stride == 0 and self.strides.heads > 1)
        if is_expanded:  # rows share memory
            return draw(length).to(self.dtype).as_strided(sizes, strides, start)
        buffer = torch.full((length,), math.nan, dtype=self.dtype, device=self.device)
        return buffer.as_strided(sizes, strides, start).copy_(draw(sizes))

    def _difference(self, name: str, actual: Tensor, expected: Tensor) -> str | None:
        size = expected.norm(dim=-1).clamp_min(1e-30)
        errors = (actual.double() - expected).norm(dim=-1) / size
        worst = errors.nan_to_num(nan=math.inf).max().item()
        if worst <= MAX_RELATIVE_ERROR[self.dtype]:
            return None
        return f"the {name} has a relative error of {worst:.2g}"


class _Scale:
    """Compares the scale of a result with that of the expected one, over all rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.products: list[Tensor] = []
        self.squares: list[Tensor] = []

    def add(self, actual: Tensor, expected: Tensor) -> None:
        self.products.append((actual * expected).sum())
        self.squares.append(expected.square().sum())

    def find_error(self) -> str | None:
        ratio = (torch.stack(self.products).sum() / torch.stack(self.squares).sum()).item()
        if abs(ratio - 1) <= MAX_SCALE_ERROR:
            return None
        return f"the {self.name} is {ratio:.4f} times the expected one"


_trusted: dict[KnockCase, bool] = {}


def is_trusted(case: KnockCase) -> bool:
    """Return True if the kernels agree with PyTorch. Runs the check on the first call.

    A failed check logs a warning on every rank. We cannot run the check during CUDA graph capture,
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
