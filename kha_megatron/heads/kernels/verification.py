"""Self-check of the Triton kernels against a float64 reference (for ``KHA_KERNELS=auto``).

We compare the kernels with PyTorch on random data when a new layout is first used. The check covers
more rows than the GPU processes at a time plus a partial tile, looks at each row separately, and
temporarily needs a few hundred MB. There is no need for ranks to agree: Triton and PyTorch compute
the same function, so each rank can decide for itself.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from kha_megatron.announcements import announce
from kha_megatron.heads import knock as knocking
from kha_megatron.heads.kernels.rows import Strides, strides_of
from kha_megatron.heads.kernels.tilings import Kernel, Tiling, architecture, tiling
from kha_megatron.heads.knock import MATRICES, Variant

MAX_RELATIVE_ERROR = {
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
    torch.float32: 1e-4,
}
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
        shift = x.data_ptr() % 16
        return _case_of_layout(x.shape, x.stride(), shift, x.dtype, x.device, variant)

    def find_error(self) -> str | None:
        """Run the kernels and return an error message if a result is wrong, otherwise None."""
        from kha_megatron.heads.kernels.knock_launch import processors

        x, weight, dy = self._draw_inputs(processors(self.device))
        if self.device.type == "cuda":
            # compile the kernels, so that we check the repeated launches of `launches`
            _run_kernels(x, weight, dy, self.variant)
        _fill_free_memory(dy, weight)
        results = _run_kernels(x, weight, dy, self.variant)
        comparisons = self._compare_with_torch(x, weight, dy, results)
        tolerance = MAX_RELATIVE_ERROR[self.dtype]
        for comparison in comparisons:
            error = comparison.find_row_error(tolerance)
            if error is not None:
                return error
        for comparison in comparisons:
            error = comparison.find_scale_error()
            if error is not None:
                return error
        return None

    def _compare_with_torch(
        self,
        x: Tensor,
        weight: Tensor,
        dy: Tensor,
        results: "_Results",
    ) -> list["_Comparison"]:
        """Compare the results with those of PyTorch in float64, which are computed in chunks."""
        weight = weight.double()
        expected_dw = torch.zeros_like(weight)
        y_comparison = _Comparison("result")
        dx_comparison = _Comparison("input gradient")
        dw_comparison = _Comparison("gradient of the matrices")
        tokens_per_chunk = max(1, CHUNK // self.strides.heads)
        chunks = zip(
            x.split(tokens_per_chunk),
            dy.split(tokens_per_chunk),
            results.y.split(tokens_per_chunk),
            results.dx.split(tokens_per_chunk),
            strict=True,
        )
        for x_chunk, dy_chunk, y_chunk, dx_chunk in chunks:
            inputs = x_chunk.double()
            expected_y = knocking.knock(inputs, weight, self.variant)
            expected_dx, chunk_dw = knocking.gradients(
                inputs,
                dy_chunk.double(),
                weight,
                self.variant,
            )
            expected_dw += chunk_dw
            y_comparison.add(y_chunk, expected_y)
            dx_comparison.add(dx_chunk, expected_dx)
        dw_comparison.add(results.dw.flatten(1), expected_dw.flatten(1))
        return [y_comparison, dx_comparison, dw_comparison]

    def _draw_inputs(self, processors: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input, the weights and the gradient of the output."""
        generator = torch.Generator(self.device).manual_seed(0)  # keep the global RNG state
        heads = self.strides.heads
        tokens = math.ceil(self._rows_to_check(processors) / heads)
        if tokens % 2 == 0:
            tokens += 1  # odd, so that the last tile is not full
        x = self._draw_rows(tokens, generator)
        num_matrices = len(MATRICES[self.variant])
        weight_shape = (num_matrices, self.head_dim, self.head_dim)
        weight = torch.randn(weight_shape, generator=generator, device=self.device)
        weight /= self.head_dim**0.5
        weight_tile = self._tiling("backward_weight")
        row_scales = _scale_rarely_summed_rows(
            row_count=tokens * heads,
            rows_per_round=processors * weight_tile.rows,
            tile_rows=weight_tile.rows,
            device=self.device,
        )
        dy = torch.randn(x.shape, generator=generator, device=self.device)
        dy *= row_scales.view(tokens, heads, 1)
        return x, weight.to(self.dtype), dy.to(self.dtype)

    def _rows_to_check(self, processors: int) -> int:
        """Return more rows than the GPU processes at a time, plus a tile and one row."""
        largest_tile = 0
        rows_at_once = 0
        for kernel in get_args(Kernel):
            tile = self._tiling(kernel)
            programs = processors * tile.per_processor
            largest_tile = max(largest_tile, tile.rows)
            rows_at_once = max(rows_at_once, programs * tile.rows)
        return rows_at_once + largest_tile + 1

    def _tiling(self, kernel: Kernel) -> Tiling:
        arch = architecture(self.device)
        return tiling(
            kernel,
            self.variant,
            self.head_dim,
            self.dtype,
            arch,
        )

    def _draw_rows(self, tokens: int, generator: torch.Generator) -> Tensor:
        """Return random rows with the layout of this case. Gaps in memory are filled with NaN."""
        sizes = (tokens, self.strides.heads, self.head_dim)
        token_stride = self.strides.token
        head_stride = self.strides.head
        strides = (token_stride, head_stride, 1)
        start = self.shift // self.dtype.itemsize
        length = start  # of the buffer, at least up to the last element
        for size, stride in zip(sizes, strides, strict=True):
            length += size * stride
        repeats_tokens = token_stride == 0
        repeats_heads = head_stride == 0 and self.strides.heads > 1
        if repeats_tokens or repeats_heads:  # rows share memory
            buffer = torch.randn(length, generator=generator, device=self.device)
            return buffer.to(self.dtype).as_strided(sizes, strides, start)
        values = torch.randn(sizes, generator=generator, device=self.device)
        buffer = torch.full(
            (length,),
            math.nan,
            dtype=self.dtype,
            device=self.device,
        )
        return buffer.as_strided(sizes, strides, start).copy_(values)


class _Results(NamedTuple):
    """Output of KHA, and the gradients of its input and its matrices."""

    y: Tensor
    dx: Tensor
    dw: Tensor


def _run_kernels(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    variant: Variant,
) -> _Results:
    from kha_megatron.heads.kernels import knock_launch as kernels

    return _Results(
        y=kernels.knock_forward(x, weight, variant),
        dx=kernels.knock_backward_input(x, dy, weight, variant),
        dw=kernels.knock_backward_weight(x, dy, weight, variant),
    )


def _fill_free_memory(dy: Tensor, weight: Tensor) -> None:
    """Fill the memory that the allocator will use for the three results with NaN.

    If a kernel does not write an element, it is then still NaN. ``dy`` and ``weight`` have the
    sizes of the results.
    """
    freed_on_return = []
    for tensor in (dy, dy, weight):
        freed_on_return.append(torch.full_like(tensor, math.nan))


@lru_cache(1024)
def _case_of_layout(
    shape: torch.Size,
    stride: tuple[int, ...],
    shift: int,
    dtype: torch.dtype,
    device: torch.device,
    variant: Variant,
) -> KnockCase:
    head_dim = shape[-1]
    strides = strides_of(shape, stride)
    if strides is None:  # rows_of will make a contiguous copy
        strides = Strides(heads=1, token=head_dim, head=0)
        shift = 0
    return KnockCase(
        variant=variant,
        head_dim=head_dim,
        dtype=dtype,
        strides=strides,
        shift=shift,
        device=device,
    )


class _Comparison:
    """Compares a result with the expected one, for each row and over all rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.largest_errors: list[Tensor] = []
        self.products: list[Tensor] = []
        self.squares: list[Tensor] = []

    def add(self, actual: Tensor, expected: Tensor) -> None:
        """Compare some rows (or matrices). Errors are relative to the norms of expected rows."""
        norms = expected.norm(dim=-1).clamp_min(1e-30)
        differences = actual.double() - expected
        errors = differences.norm(dim=-1) / norms
        errors = errors.nan_to_num(nan=math.inf)
        products = actual * expected
        squares = expected.square()
        self.largest_errors.append(errors.max())
        self.products.append(products.sum())
        self.squares.append(squares.sum())

    def find_row_error(self, tolerance: float) -> str | None:
        largest_errors = torch.stack(self.largest_errors)
        largest_error = largest_errors.max().item()
        if largest_error <= tolerance:
            return None
        return f"the {self.name} has a relative error of {largest_error:.2g}"

    def find_scale_error(self) -> str | None:
        product = torch.stack(self.products).sum()
        square = torch.stack(self.squares).sum()
        scale = (product / square).item()
        if abs(scale - 1) <= MAX_SCALE_ERROR:
            return None
        return f"the {self.name} is {scale:.4f} times the expected one"


_trusted: dict[KnockCase, bool] = {}


def is_trusted(case: KnockCase) -> bool:
    """Return True if the kernels agree with PyTorch. Runs the check on the first call.

    A failed check logs a warning on every rank. We cannot run the check during CUDA graph capture,
    so this returns False and tries again later.
    """
    if case in _trusted:
        return _trusted[case]
    if case.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        announce(
            f"WARNING: Falling back to torch for {case}, because a CUDA graph is being "
            "captured before the kernels were compared with torch. Use more warm-up steps.",
            once=("captured", case),
        )
        return False
    error = _compare(case)
    _trusted[case] = error is None
    if error is not None:
        announce(
            f"WARNING: Falling back to torch for {case}, because on this device {error}. Set "
            "KHA_KERNELS=triton to skip this check.",
            every_rank=True,
        )
    return _trusted[case]


def _compare(case: KnockCase) -> str | None:
    """Run :meth:`KnockCase.find_error`. An exception is also an error."""
    try:
        # a new thread does not inherit autocast, inference mode or saved-tensor hooks
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_find_error_on_device, case).result()
    except Exception as error:
        error_type = type(error).__name__
        message = " ".join(str(error).split())[:500]
        return f"the kernels failed ({error_type}: {message})"


def _find_error_on_device(case: KnockCase) -> str | None:
    if case.device.type != "cuda":
        return case.find_error()
    with torch.cuda.device(case.device):
        return case.find_error()


def _scale_rarely_summed_rows(
    row_count: int,
    rows_per_round: int,
    tile_rows: int,
    device: torch.device,
) -> Tensor:
    """Return a factor for the output gradient of each row, ``[row_count]``.

    The weight gradient is a sum over all rows. It would hardly change if a kernel skipped the few
    rows of the last, incomplete tile, or those that remain after each program has processed its
    first tile (``rows_per_round`` rows in total). So we scale these rows until they contribute as
    much to the sum as all others.
    """
    factors = torch.ones(row_count, device=device)
    rows_after_first_round = row_count - rows_per_round
    rows_in_last_tile = row_count % tile_rows
    for rows in (rows_after_first_round, rows_in_last_tile):
        if 0 < rows < row_count:
            other_rows = row_count - rows
            factors[-rows:] = math.sqrt(other_rows / rows)
    return factors
