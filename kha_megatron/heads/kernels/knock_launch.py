"""Launch the KHA kernels, with autograd support. Requires Triton."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
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
        launch(_prepare_forward, (variant,), (x, weight), y)
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
        launch(_prepare_backward_input, (variant,), (x, dy, weight), dx)
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
    splits = _count_splits(row_count, variant, head_dim, weight.dtype, weight.device)
    partials = weight.new_empty((splits, *weight.shape), dtype=torch.float32)
    launch(_prepare_backward_weight, (variant,), (x, dy, weight), partials)
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


@functools.lru_cache(1024)
def _count_splits(
    row_count: int,
    variant: Variant,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Return the number of partial sums in ``backward_weight``."""
    tile = tiling("backward_weight", variant, head_dim, dtype, architecture(device))
    # each split has one program per block, and all programs should run at the same time
    blocks = _count_column_blocks(head_dim, tile)
    max_splits = max(1, processors(device) // blocks)
    return min(_count_programs(row_count, tile, device), max_splits)


def _count_column_blocks(head_dim: int, tile: Tiling) -> int:
    blocks: int = triton.cdiv(head_dim, tile.columns)
    return blocks


def _count_programs(row_count: int, tile: Tiling, device: torch.device) -> int:
    max_programs = processors(device) * tile.per_processor
    return min(triton.cdiv(row_count, tile.rows), max_programs)


def _prepare_forward(variant: Variant, x: Rows, weight: Rows, y: Rows) -> Launch:
    return _prepare_rowwise(kernels.knock_forward_kernel, "forward", variant, [x], weight, y)


def _prepare_backward_input(
    variant: Variant,
    x: Rows,
    dy: Rows,
    weight: Rows,
    dx: Rows,
) -> Launch:
    function = kernels.knock_backward_input_kernel
    return _prepare_rowwise(function, "backward_input", variant, [x, dy], weight, dx)


def _prepare_rowwise(
    function: Any,
    kernel: Kernel,
    variant: Variant,
    inputs: Sequence[Rows],
    weight: Rows,
    output: Rows,
) -> Launch:
    """Prepare a kernel whose output has the same rows as its inputs."""
    tiles = _split_into_tiles(kernel, variant, weight.tensor, [*inputs, output])
    arguments: list[Any] = []
    for operand in inputs:
        arguments += tiles.arguments_for(operand)
    arguments.append(weight.tensor)
    arguments += tiles.arguments_for(output)
    arguments.append(tiles.row_count)
    grid = (_count_programs(tiles.row_count, tiles.tiling, weight.tensor.device),)
    return Launch(function, grid, arguments, tiles.options)


def _prepare_backward_weight(
    variant: Variant,
    x: Rows,
    dy: Rows,
    weight: Rows,
    partials: Rows,
) -> Launch:
    tiles = _split_into_tiles("backward_weight", variant, weight.tensor, [x, dy])
    arguments = (
        *tiles.arguments_for(x),
        *tiles.arguments_for(dy),
        weight.tensor,
        partials.tensor,
        tiles.row_count,
    )
    splits = len(partials.tensor)
    head_dim = weight.tensor.shape[-1]
    grid = (splits, _count_column_blocks(head_dim, tiles.tiling))
    return Launch(kernels.knock_backward_weight_kernel, grid, arguments, tiles.options)


@dataclass(frozen=True)
class _HeadTiles:
    """How a kernel processes tensors of heads in tiles of rows."""

    tiling: Tiling
    row_count: int
    use_tma: bool
    options: dict[str, Any]

    def arguments_for(self, operand: Rows) -> tuple[Any, ...]:
        """Return the arguments for a tensor: pointer or descriptor, and its :class:`Strides`."""
        tensor = operand.tensor
        if not self.use_tma:
            return (tensor, *operand.strides)
        head_dim = tensor.shape[-1]
        descriptor = TensorDescriptor(
            tensor,
            shape=[self.row_count, head_dim],
            strides=[operand.strides.token, 1],
            block_shape=[self.tiling.rows, padded(head_dim)],
        )
        return (descriptor, *operand.strides)


def _split_into_tiles(
    kernel: Kernel,
    variant: Variant,
    weight: Tensor,
    operands: Sequence[Rows],
) -> _HeadTiles:
    """Choose the tile size, and decide whether to use TMA for the ``operands``."""
    head_dim = weight.shape[-1]
    arch = architecture(weight.device)
    tile = tiling(kernel, variant, head_dim, weight.dtype, arch)
    allows_descriptors = tile.allows_descriptors(variant, head_dim, weight.dtype, arch)
    use_tma = allows_descriptors and all(map(_fits_a_descriptor, operands))
    return _HeadTiles(
        tiling=tile,
        row_count=operands[0].tensor.numel() // head_dim,
        use_tma=use_tma,
        options=tile.options(variant, head_dim) | {"TMA": use_tma},
    )


def _fits_a_descriptor(operand: Rows) -> bool:
    """Return whether TMA can load a tensor: it needs a uniform stride and 16-byte alignment."""
    tensor = operand.tensor
    strides = operand.strides
    is_uniform = strides.is_uniform and strides.token > 0
    bytes_between_rows = strides.token * tensor.element_size()
    is_aligned = bytes_between_rows % 16 == 0 and tensor.data_ptr() % 16 == 0
    return is_uniform and is_aligned


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


@functools.cache
def processors(device: torch.device) -> int:
    if INTERPRETED:
        return PROCESSORS_INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
