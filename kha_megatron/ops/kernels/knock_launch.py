"""Starting the kernels: what is launched over a tensor's rows, and autograd.

Needs Triton, and a CUDA device or Triton's interpreter (``TRITON_INTERPRET=1``). Shape legend:
``...`` any leading dimensions, ``R`` their product; ``D`` head dim; ``n`` matrices of the variant.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from kha_megatron.heads.knock import Variant
from kha_megatron.ops.kernels import knock_kernels as kernels
from kha_megatron.ops.kernels.rows import Rows, rows_of
from kha_megatron.ops.kernels.tiles import INTERPRETED
from kha_megatron.ops.kernels.tilings import Kernel, padded, tiling

PROGRAMS_INTERPRETED = 3
REDUCTION = {"SPLITS": 16, "BLOCK": 128}
"""Splits and elements that one program sums at once."""


def knock_forward(x: Tensor, weight: Tensor, variant: Variant) -> Tensor:
    """``ops.heads.knock.knock``: contiguous ``[..., D]``."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch("forward", variant, weight, [x], [y])
    return y


def knock_backward_input(
    x: Tensor, dy: Tensor, weight: Tensor, variant: Variant, out: Tensor | None = None
) -> Tensor:
    """The gradient of ``x``.

    Args:
        x: ``[..., D]``, what was knocked.
        dy: same shape and dtype, the gradient of the result.
        weight: ``[n, D, D]``, contiguous, same dtype.
        variant: which equation.
        out: where to write, e.g. a view of the gradient of the whole QKV buffer; two strides must
            say where its rows are. None makes a contiguous tensor.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if rows_of(dx).tensor is not dx:
        raise ValueError(f"the rows of `out` do not lie at two strides: {dx.stride()}")
    _launch("backward_input", variant, weight, [x, dy], [dx])
    return dx


def knock_backward_weight(x: Tensor, dy: Tensor, weight: Tensor, variant: Variant) -> Tensor:
    """The gradients of the matrices ``[n, D, D]``; arguments as in :func:`knock_backward_input`.

    Summed over rows in float32 in a fixed order: splits of the rows first, then the splits. The
    partial sums take ``4 n D^2`` bytes for each split while this runs.
    """
    if x.numel() == 0:
        return torch.zeros_like(weight)
    partials = _launch("backward_weight", variant, weight, [x, dy], [])
    assert partials is not None  # there are rows
    gradient, count = torch.empty_like(weight), weight.numel()
    grid = (triton.cdiv(count, REDUCTION["BLOCK"]),)
    with torch.cuda.device_of(weight):
        kernels.sum_partials[grid](partials, gradient, len(partials), count, **REDUCTION)
    return gradient


class FusedKnock(torch.autograd.Function):
    """Keeps ``x``, a view of the QKV buffer in Megatron, and the weight; recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, variant: Variant) -> Tensor:
        """See ``ops.heads.knock.knock``."""
        weight = weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.variant = variant
        return knock_forward(x, weight, variant)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Gradients of ``x`` and the weight, where they are asked for."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dy = dy.contiguous()  # the layout that is compared with torch (ops/verification.py)
        dx = knock_backward_input(x, dy, weight, ctx.variant) if needs_x else None
        dw = knock_backward_weight(x, dy, weight, ctx.variant) if needs_weight else None
        return dx, dw, None


def _launch(
    kernel: Kernel,
    variant: Variant,
    weight: Tensor,
    inputs: list[Tensor],
    outputs: list[Tensor],
) -> Tensor | None:
    """Run one kernel over all rows; the weight gradients' partial sums ``[S, n, D, D]``."""
    count, head_dim = inputs[0].shape[:-1].numel(), weight.shape[-1]
    if count == 0:
        return None
    sizes = tiling(kernel, variant, head_dim, weight.dtype)
    rows = [rows_of(t) for t in (*inputs, *outputs)]
    tma = sizes.allows_descriptors(variant, head_dim, weight.dtype)
    tma = tma and all(r.fit_a_descriptor for r in rows)
    arguments = [_arguments(r, count, sizes.rows, tma) for r in rows]
    options = sizes.options(variant, head_dim) | {"TMA": tma}
    programs = min(triton.cdiv(count, sizes.rows), processors(weight.device) * sizes.per_processor)
    with torch.cuda.device_of(weight):
        if kernel == "backward_weight":
            blocks = triton.cdiv(head_dim, sizes.columns)
            splits = min(programs, max(1, processors(weight.device) // blocks))
            partials = weight.new_empty((splits, *weight.shape), dtype=torch.float32)
            x, dy = arguments
            kernels.knock_backward_weight[(splits, blocks)](
                *x, *dy, weight, partials, count, **options
            )
            return partials
        *sources, target = arguments
        flat = [value for source in sources for value in source]
        function = getattr(kernels, f"knock_{kernel}")
        function[(programs,)](*flat, weight, *target, count, **options)
    return None


def _arguments(rows: Rows, count: int, block: int, tma: bool) -> tuple[Any, ...]:
    """What a kernel takes for one tensor."""
    tensor, *steps = rows
    if not tma:
        return (tensor, *steps)
    width = tensor.shape[-1]
    shape, strides = [count, width], [rows.token_stride, 1]
    return (TensorDescriptor(tensor, shape, strides, [block, padded(width)]), *steps)


@functools.cache
def processors(device: torch.device) -> int:
    """Programs that run at once: one for each multiprocessor."""
    if INTERPRETED:
        return PROGRAMS_INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
