"""Launch the KHA kernels, with autograd support. Requires Triton."""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from kha_megatron.heads.kernels import knock_kernels as kernels
from kha_megatron.heads.kernels.launches import Launch, launch
from kha_megatron.heads.kernels.rows import Rows
from kha_megatron.heads.kernels.tiles import INTERPRETED
from kha_megatron.heads.kernels.tilings import Kernel, Tiling, architecture, padded, tiling
from kha_megatron.heads.knock import Variant

PROCESSORS_INTERPRETED = 3
"""Assumed number of multiprocessors in Triton's interpreter."""

REDUCTION = {"SPLITS": 16, "BLOCK": 128}
"""Block sizes of ``sum_partials``: number of splits and number of elements."""


def knock_forward(x: Tensor, weight: Tensor, variant: Variant) -> Tensor:
    """Triton version of ``heads.knock.knock``. The output is always contiguous."""
    y = x.new_empty(x.shape)
    if x.numel() != 0:
        launch(_prepare_knock, ("forward", variant), (x, weight), y)
    return y


def knock_backward_input(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    variant: Variant,
) -> Tensor:
    """Compute the gradient of ``x``. ``weight`` must be contiguous."""
    dx = x.new_empty(x.shape)
    if x.numel() != 0:
        launch(_prepare_knock, ("backward_input", variant), (x, dy, weight), dx)
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
    head_dim = weight.shape[-1]
    row_count = x.numel() // head_dim
    splits, _ = _weight_grid(row_count, variant, head_dim, weight.dtype, weight.device)
    partials = weight.new_empty((splits, *weight.shape), dtype=torch.float32)
    launch(_prepare_knock, ("backward_weight", variant), (x, dy, weight), partials)
    gradient = torch.empty_like(weight)
    launch(_prepare_sum, (), (partials,), gradient)
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


def _prepare_knock(kernel: Kernel, variant: Variant, *rows: Rows) -> Launch:
    """Prepare one of the three kernels. The last rows are the weight and the output.

    The output of ``backward_weight`` are the partial sums.
    """
    *inputs, weight_rows, output = rows
    weight = weight_rows.tensor
    head_dim = weight.shape[-1]
    row_count = inputs[0].tensor.numel() // head_dim
    arch = architecture(weight.device)
    tile = tiling(kernel, variant, head_dim, weight.dtype, arch)
    has_head_output = kernel != "backward_weight"
    head_rows = [*inputs, output] if has_head_output else inputs
    allows_descriptors = tile.allows_descriptors(variant, head_dim, weight.dtype, arch)
    use_tma = allows_descriptors and all(map(_fits_a_descriptor, head_rows))

    # in the order of the kernel's parameters
    arguments: list[Any] = []
    for tensor_rows in inputs:
        arguments += _row_arguments(tensor_rows, row_count, tile.rows, use_tma)
    arguments.append(weight)
    if has_head_output:
        arguments += _row_arguments(output, row_count, tile.rows, use_tma)
    else:
        arguments.append(output.tensor)
    arguments.append(row_count)

    grid: tuple[int, ...]
    if has_head_output:
        grid = (_programs(row_count, tile, weight.device),)
    else:
        grid = _weight_grid(row_count, variant, head_dim, weight.dtype, weight.device)
    function = getattr(kernels, f"knock_{kernel}_kernel")
    options = tile.options(variant, head_dim) | {"TMA": use_tma}
    return Launch(function, grid, arguments, options)


@functools.lru_cache(1024)
def _weight_grid(
    row_count: int,
    variant: Variant,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, int]:
    """Return the number of partial sums and of column blocks in ``backward_weight``."""
    tile = tiling("backward_weight", variant, head_dim, dtype, architecture(device))
    blocks = triton.cdiv(head_dim, tile.columns)
    max_splits = max(1, processors(device) // blocks)
    splits = min(_programs(row_count, tile, device), max_splits)
    return splits, blocks


def _programs(row_count: int, tile: Tiling, device: torch.device) -> int:
    max_programs = processors(device) * tile.per_processor
    return min(triton.cdiv(row_count, tile.rows), max_programs)


def _prepare_sum(partials: Rows, gradient: Rows) -> Launch:
    num_splits = len(partials.tensor)
    num_elements = gradient.tensor.numel()
    grid = (triton.cdiv(num_elements, REDUCTION["BLOCK"]),)
    arguments = (
        partials.tensor,
        gradient.tensor,
        num_splits,
        num_elements,
    )
    return Launch(kernels.sum_partials, grid, arguments, REDUCTION)


def _fits_a_descriptor(rows: Rows) -> bool:
    """TMA needs a uniform stride and 16-byte alignment."""
    strides = rows.strides
    is_uniform = strides.heads == 1 and strides.token > 0
    bytes_between_rows = strides.token * rows.tensor.element_size()
    is_aligned = bytes_between_rows % 16 == 0 and rows.tensor.data_ptr() % 16 == 0
    return is_uniform and is_aligned


def _row_arguments(
    rows: Rows,
    row_count: int,
    tile_rows: int,
    use_tma: bool,
) -> tuple[Any, ...]:
    """Return the four arguments for a tensor of heads: pointer or descriptor, and strides."""
    if not use_tma:
        return rows.tensor, *rows.strides
    width = rows.tensor.shape[-1]
    descriptor = TensorDescriptor(
        rows.tensor,
        shape=[row_count, width],
        strides=[rows.strides.token, 1],
        block_shape=[tile_rows, padded(width)],
    )
    return descriptor, *rows.strides


@functools.cache
def processors(device: torch.device) -> int:
    if INTERPRETED:
        return PROCESSORS_INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
