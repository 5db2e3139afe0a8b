"""Launch the KHA kernels, with autograd support. Requires Triton."""

import functools
from itertools import chain
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from kha_megatron.heads.kernels import knock_kernels as kernels
from kha_megatron.heads.kernels.rows import Rows, rows_of
from kha_megatron.heads.kernels.tiles import INTERPRETED
from kha_megatron.heads.kernels.tilings import Kernel, architecture, padded, tiling
from kha_megatron.heads.knock import Variant

PROGRAMS_INTERPRETED = 3
REDUCTION = {"SPLITS": 16, "BLOCK": 128}
"""Block sizes of ``sum_partials``: number of splits and number of elements."""


def knock_forward(x: Tensor, weight: Tensor, variant: Variant) -> Tensor:
    """Triton version of ``heads.knock.knock``. The output is always contiguous."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch("forward", variant, weight, x, y)
    return y


def knock_backward_input(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    variant: Variant,
) -> Tensor:
    """Compute the gradient of ``x``. ``weight`` must be contiguous."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(
        "backward_input",
        variant,
        weight,
        x,
        dy,
        dx,
    )
    return dx


def knock_backward_weight(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    variant: Variant,
) -> Tensor:
    """Compute the gradient of ``weight``. Deterministic, because rows are summed in a fixed order.

    Needs a temporary float32 buffer with the size of the weight for each split.
    """
    if x.numel() == 0:
        return torch.zeros_like(weight)
    partials = _launch("backward_weight", variant, weight, x, dy)
    assert partials is not None
    gradient = torch.empty_like(weight)
    count = weight.numel()
    grid = (triton.cdiv(count, REDUCTION["BLOCK"]),)
    with torch.cuda.device_of(weight):
        kernels.sum_partials[grid](
            partials,
            gradient,
            len(partials),
            count,
            **REDUCTION,
        )
    return gradient


class FusedKnock(torch.autograd.Function):
    """Saves only ``x`` (a view of Megatron's QKV buffer) and the weight for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        variant: Variant,
    ) -> Tensor:
        weight = weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.variant = variant
        return knock_forward(x, weight, variant)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        dy: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dy = dy.contiguous()  # the layout that the self-check verifies
        dx = None
        dw = None
        if needs_x:
            dx = knock_backward_input(x, dy, weight, ctx.variant)
        if needs_weight:
            dw = knock_backward_weight(x, dy, weight, ctx.variant)
        return dx, dw, None


def _launch(
    kernel: Kernel,
    variant: Variant,
    weight: Tensor,
    *tensors: Tensor,
) -> Tensor | None:
    """Launch a kernel. The last tensor is the output.

    ``backward_weight`` is different: it has no output tensor, but returns partial sums in float32.
    """
    head_dim = weight.shape[-1]
    count = tensors[0].shape[:-1].numel()
    if count == 0:
        return None
    arch = architecture(weight.device)
    tile = tiling(kernel, variant, head_dim, weight.dtype, arch)
    rows = [rows_of(tensor) for tensor in tensors]
    tma = tile.allows_descriptors(variant, head_dim, weight.dtype, arch)
    tma = tma and all(map(_fits_a_descriptor, rows))
    arguments = [_arguments(tensor_rows, count, tile.rows, tma) for tensor_rows in rows]
    options = tile.options(variant, head_dim) | {"TMA": tma}
    function = getattr(kernels, f"knock_{kernel}_kernel")
    max_programs = processors(weight.device) * tile.per_processor
    programs = min(triton.cdiv(count, tile.rows), max_programs)
    with torch.cuda.device_of(weight):
        if kernel == "backward_weight":
            blocks = triton.cdiv(head_dim, tile.columns)
            splits = min(programs, max(1, processors(weight.device) // blocks))
            partials = weight.new_empty(
                (splits, *weight.shape),
                dtype=torch.float32,
            )
            x, dy = arguments
            function[(splits, blocks)](
                *x,
                *dy,
                weight,
                partials,
                count,
                **options,
            )
            return partials
        *sources, target = arguments
        function[(programs,)](
            *chain.from_iterable(sources),
            weight,
            *target,
            count,
            **options,
        )
    return None


def _fits_a_descriptor(rows: Rows) -> bool:
    """TMA needs a uniform stride and 16-byte alignment."""
    is_uniform = rows.strides.heads == 1 and rows.strides.token > 0
    step = rows.strides.token * rows.tensor.element_size()
    is_aligned = step % 16 == 0 and rows.tensor.data_ptr() % 16 == 0
    return is_uniform and is_aligned


def _arguments(
    rows: Rows,
    count: int,
    tile_rows: int,
    tma: bool,
) -> tuple[Any, ...]:
    if not tma:
        return rows.tensor, *rows.strides
    width = rows.tensor.shape[-1]
    descriptor = TensorDescriptor(
        rows.tensor,
        shape=[count, width],
        strides=[rows.strides.token, 1],
        block_shape=[tile_rows, padded(width)],
    )
    return descriptor, *rows.strides


@functools.cache
def processors(device: torch.device) -> int:
    if INTERPRETED:
        return PROGRAMS_INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
