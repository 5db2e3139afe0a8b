"""FP8 as Transformer Engine's kernels make it and as Hopper's tensor cores read it, in torch.

A quantizer of Transformer Engine says what is wanted; here are the numbers. Casts round to nearest
even and saturate, as the kernels' do. A scale multiplies what is cast; its inverse is kept.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Parts = dict[str, Tensor | None]
"""Data and scales of a quantised tensor, by the names that its constructor gives them."""

_FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
_BLOCK = 128  # of the blockwise recipe
_MX_BLOCK = 32  # of MXFP8
_ATTRIBUTES = {
    "data": "_data",
    "data_transpose": "_transpose",
    "fp8_scale_inv": "_scale_inv",
    "rowwise_data": "_rowwise_data",
    "rowwise_scale_inv": "_rowwise_scale_inv",
    "columnwise_data": "_columnwise_data",
    "columnwise_scale_inv": "_columnwise_scale_inv",
}


def is_quantised(tensor: Any) -> bool:
    """Whether this is one of Transformer Engine's own tensors, of whatever format."""
    return hasattr(tensor, "_quantizer")


def quantise(x: Tensor, quantizer: Any, dtype: torch.dtype | None = None) -> Any:
    """``x`` in the format of ``quantizer``, in those directions (``rowwise_usage``,
    ``columnwise_usage``) that it asks for.

    Args:
        x: any shape ``[..., columns]``, any floating dtype; one that is quantised already is read
            back first.
        dtype: what the result says to be outside, if not ``x``'s.

    Raises:
        NotImplementedError: a format that is not FP8.
    """
    x = plain(x)
    return _tensor(quantizer, _parts(x, quantizer), x.shape, dtype or x.dtype)


def quantise_into(x: Tensor, quantizer: Any, output: Any) -> None:
    """``x`` over the data and scales of ``output``, a tensor that was quantised before."""
    for name, new in _parts(plain(x), quantizer).items():
        old = getattr(output, _ATTRIBUTES[name])
        if new is None:
            continue
        if old is None:
            setattr(output, _ATTRIBUTES[name], new)
        else:
            old.copy_(new.view(old.shape))
    if hasattr(output, "_transpose_invalid"):
        output._transpose_invalid = output._transpose is None or not quantizer.columnwise_usage


def empty(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A quantised tensor of zeros, before any scale is known."""
    zeros = torch.zeros(shape, dtype=dtype)
    if _kind(quantizer) in _PER_TENSOR:
        parts = _scaled(zeros, quantizer, torch.ones(1))
    else:
        parts = _parts(zeros, quantizer)
    return _tensor(quantizer, parts, shape, dtype)


def plain(x: Any) -> Tensor:
    """``x`` as an ordinary tensor: read back where it is quantised."""
    if not is_quantised(x):
        return x.contiguous()
    rowwise = getattr(x, "_rowwise_data", getattr(x, "_data", None)) is not None
    return operand(x, rowwise=rowwise).reshape(x.size()).to(x.dtype)


def operand(x: Any, *, rowwise: bool) -> Tensor:
    """The matrix that a product multiplies, float32 ``[rows, columns]`` with all leading dimensions
    in the rows, read from the buffer that the kernel reads.

    Hopper multiplies FP8 matrices only where both lie along the dimension that is summed over: the
    other way around it reads a transposed copy, which Transformer Engine must have made.

    Args:
        rowwise: whether the columns are summed over.

    Raises:
        RuntimeError: Transformer Engine has not provided that buffer; on a GPU the product fails.
    """
    if not is_quantised(x):
        return x.float().reshape(-1, x.shape[-1])
    form = _FORMATS[x._fp8_dtype.name]
    if hasattr(x, "_scale_inv"):  # one scale for all of it
        if rowwise or _any_layout():
            return _rows(_provided(x._data, x, "row-wise"), form) * x._scale_inv
        transpose = None if x._transpose_invalid else x._transpose
        return _columns(_provided(transpose, x, "transposed"), form).t() * x._scale_inv
    side = "rowwise" if rowwise else "columnwise"
    data = _provided(getattr(x, f"_{side}_data"), x, side)
    inverse = getattr(x, f"_{side}_scale_inv")
    if hasattr(x, "_is_2D_scaled"):  # the column-wise data is stored transposed
        values = _rows(data, form) if rowwise else _columns(data, form)
        per_row = inverse.repeat_interleave(_BLOCK, 0) if x._is_2D_scaled else inverse.t()
        rows, columns = values.shape
        values = values * per_row[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
        return values if rowwise else values.t()
    values = _rows(data, form)
    rows, columns = values.shape
    scales = torch.exp2(inverse.float() - 127)
    if rowwise:
        return values * scales[:rows, : columns // _MX_BLOCK].repeat_interleave(_MX_BLOCK, 1)
    return values * scales[: rows // _MX_BLOCK, :columns].repeat_interleave(_MX_BLOCK, 0)


def scale_from(amax: Tensor, largest: float, *, power_of_two: bool, epsilon: float = 0.0) -> Tensor:
    """The scale that takes ``amax`` to the ``largest`` value of a format, float32; 1 where ``amax``
    is zero or infinite (``compute_scale_from_amax`` of Transformer Engine)."""
    amax = amax.float().clamp(min=epsilon)
    scale = largest / amax
    scale = torch.where(torch.isinf(scale), torch.finfo(torch.float32).max, scale)
    scale = torch.where((amax == 0) | torch.isinf(amax), 1.0, scale)
    if power_of_two:  # the mantissa is cut off
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return scale


def largest(fp8_dtype: Any) -> float:
    """The largest value of a format: 448 of E4M3, 57344 of E5M2."""
    return torch.finfo(_FORMATS[fp8_dtype.name]).max


def cast(x: Tensor, fp8_dtype: Any) -> Tensor:
    """``x``, scaled already, as bytes; NaN stays NaN."""
    limit = largest(fp8_dtype)
    return x.clamp(-limit, limit).to(_FORMATS[fp8_dtype.name]).view(torch.uint8)


def e8m0(ratio: Tensor) -> Tensor:
    """The exponent, with bias 127, of the power of two that is not below ``ratio`` (uint8)."""
    bits = ratio.float().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    return (exponent + up.int()).clamp(max=254).to(torch.uint8)


def _kind(quantizer: Any) -> str:
    return type(quantizer).__name__


def _parts(x: Tensor, quantizer: Any) -> Parts:
    """Data and scales of ``x`` [..., columns]."""
    kind = _kind(quantizer)
    if kind in _PER_TENSOR:
        return _scaled(x, quantizer, _PER_TENSOR[kind](x, quantizer))
    if kind not in _PER_BLOCK:
        raise NotImplementedError(
            f"{kind}: the test double has FP8 with one scale a tensor, a block of 128, or 32 "
            "values (MXFP8), and no other format"
        )
    parts: Parts = {}
    sides = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    for side, asked in sides.items():
        made = _PER_BLOCK[kind](x, quantizer, side == "columnwise") if asked else (None, None)
        parts[f"{side}_data"], parts[f"{side}_scale_inv"] = made
    return parts


def _delayed_scale(x: Tensor, quantizer: Any) -> Tensor:
    """The scale of an earlier step; today's largest value goes into the history."""
    amax = x.float().abs().max() if x.numel() else torch.zeros(())
    quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.to(quantizer.amax)))
    return quantizer.scale.float().reshape(1)


def _current_scale(x: Tensor, quantizer: Any) -> Tensor:
    amax = x.float().abs().max().reshape(1) if x.numel() else torch.zeros(1)
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    return scale_from(
        amax,
        largest(quantizer.dtype),
        power_of_two=quantizer.force_pow_2_scales,
        epsilon=quantizer.amax_epsilon,
    )


def _scaled(x: Tensor, quantizer: Any, scale: Tensor) -> Parts:
    data = cast(x.float() * scale, quantizer.dtype)
    transposed = data.reshape(-1, x.shape[-1]).t().reshape(x.shape[-1], *x.shape[:-1])
    once = _any_layout()
    return {
        "data": data if quantizer.rowwise_usage or once else None,
        "data_transpose": transposed.contiguous()
        if quantizer.columnwise_usage and not once
        else None,
        "fp8_scale_inv": 1.0 / scale,
    }


def _blocks(x: Tensor, quantizer: Any, columnwise: bool) -> tuple[Tensor, Tensor]:
    """A scale for each 128 values along the dimension that is summed over, or for each 128 x 128;
    the scales of the former are stored transposed."""
    matrix = x.float().reshape(-1, x.shape[-1])
    shape = quantizer.get_scale_shape(tuple(matrix.shape), columnwise=columnwise)
    if columnwise:
        matrix = matrix.t()
    rows, columns = matrix.shape
    high = _BLOCK if quantizer.block_scaling_dim == 2 else 1
    down, across = math.ceil(rows / high), math.ceil(columns / _BLOCK)
    tiles = _padded(matrix, down * high, across * _BLOCK).view(down, high, across, _BLOCK)
    scale = scale_from(
        tiles.abs().amax(dim=(1, 3)),
        largest(quantizer.dtype),
        power_of_two=quantizer.force_pow_2_scales,
        epsilon=quantizer.amax_epsilon,
    )
    data = cast(tiles * scale[:, None, :, None], quantizer.dtype).view(down * high, across * _BLOCK)
    inverse = 1.0 / scale if high > 1 else (1.0 / scale).t()
    stored = (x.shape[-1], *x.shape[:-1]) if columnwise else x.shape
    return data[:rows, :columns].reshape(stored), _padded(inverse, *shape).contiguous()


def _microscaled(x: Tensor, quantizer: Any, columnwise: bool) -> tuple[Tensor, Tensor]:
    """A power of two for each 32 values along the dimension that is summed over, as E8M0."""
    matrix = x.float().reshape(-1, x.shape[-1])
    rows, columns = matrix.shape
    if (rows if columnwise else columns) % _MX_BLOCK:
        raise RuntimeError(
            f"MXFP8 of a matrix of {rows} x {columns}: Transformer Engine's kernel takes multiples "
            f"of {_MX_BLOCK}"
        )
    tiles = (
        matrix.view(rows // _MX_BLOCK, _MX_BLOCK, columns)
        if columnwise
        else matrix.view(rows, columns // _MX_BLOCK, _MX_BLOCK)
    )
    within = 1 if columnwise else 2
    exponents = e8m0(tiles.abs().amax(dim=within) * (1.0 / largest(quantizer.dtype)))
    scale = torch.exp2(127.0 - exponents.float())
    data = cast(tiles * scale.unsqueeze(within), quantizer.dtype).view(x.shape)
    shape = quantizer.get_scale_shape((rows, columns), columnwise=columnwise)
    return data, _padded(exponents, *shape).contiguous()


_PER_TENSOR: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "Float8Quantizer": _delayed_scale,
    "Float8CurrentScalingQuantizer": _current_scale,
}
_PER_BLOCK: dict[str, Callable[[Tensor, Any, bool], tuple[Tensor, Tensor]]] = {
    "Float8BlockQuantizer": _blocks,
    "MXFP8Quantizer": _microscaled,
}


def _tensor(quantizer: Any, parts: Parts, shape: Any, dtype: torch.dtype) -> Any:
    """Transformer Engine's own tensor around the parts; its storage alone where ``internal``."""
    from transformer_engine.pytorch import tensor as te

    storage, full, more = {
        "Float8Quantizer": (te.Float8TensorStorage, te.Float8Tensor, {}),
        "Float8CurrentScalingQuantizer": (te.Float8TensorStorage, te.Float8Tensor, {}),
        "Float8BlockQuantizer": (
            te.Float8BlockwiseQTensorStorage,
            te.Float8BlockwiseQTensor,
            {"is_2D_scaled": getattr(quantizer, "block_scaling_dim", 0) == 2},
        ),
        "MXFP8Quantizer": (
            te.MXFP8TensorStorage,
            te.MXFP8Tensor,
            {"with_gemm_swizzled_scales": False},  # a layout between two kernels
        ),
    }[_kind(quantizer)]
    common = {**parts, "fp8_dtype": quantizer.dtype, "quantizer": quantizer, **more}
    if quantizer.internal:
        return storage(fake_dtype=dtype, **common)
    return full(shape=tuple(shape), dtype=dtype, device=torch.device("cpu"), **common)


def _any_layout() -> bool:
    """Whether the device multiplies FP8 matrices in any layout, as Blackwell does."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    return is_non_tn_fp8_gemm_supported()


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def _rows(data: Tensor, form: torch.dtype) -> Tensor:
    return data.view(form).float().reshape(-1, data.shape[-1])


def _columns(data: Tensor, form: torch.dtype) -> Tensor:
    return data.view(form).float().reshape(data.shape[0], -1)


def _provided(data: Tensor | None, x: Any, what: str) -> Tensor:
    if data is None:
        raise RuntimeError(
            f"a product reads the {what} FP8 data of a {type(x).__name__} {tuple(x.size())}, and "
            "Transformer Engine has not provided it: on a GPU this product fails as well"
        )
    return data
