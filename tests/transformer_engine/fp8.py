"""FP8 tensors in torch, as Transformer Engine's kernels write and Hopper's tensor cores read them.

Casts round to nearest even and saturate, as the kernels do. Values are multiplied by a scale before
the cast, and the inverse of the scale is stored.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Parts = dict[str, Tensor | None]
"""Data and scales of a quantised tensor, by the names that its constructor gives them."""

_FORMATS = {
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
}
_BLOCK = 128  # of the blockwise recipe
_MX_BLOCK = 32  # of MXFP8


def is_quantised(tensor: Any) -> bool:
    return hasattr(tensor, "_quantizer")


def quantise(x: Tensor, quantizer: Any, dtype: torch.dtype | None = None) -> Any:
    """Quantise ``x`` [..., columns] row-wise and column-wise, as ``quantizer`` requests.

    Args:
        dtype: nominal dtype of the result, if not that of ``x``.

    Raises:
        NotImplementedError: the format is not FP8.
    """
    x = plain(x)
    return _tensor(quantizer, _parts(x, quantizer), x.shape, dtype or x.dtype)


def quantise_into(x: Tensor, quantizer: Any, output: Any) -> None:
    """Overwrite the data and scales of the quantised tensor ``output``."""
    for name, new in _parts(plain(x), quantizer).items():
        attribute = "_" + name.removeprefix("fp8_").removeprefix("data_")
        old = getattr(output, attribute)
        if new is not None and old is None:
            setattr(output, attribute, new)
        elif new is not None:
            old.copy_(new.view(old.shape))
    if hasattr(output, "_transpose_invalid"):
        output._transpose_invalid = output._transpose is None or not quantizer.columnwise_usage


def empty(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return a quantised tensor of zeros, before any scale is known."""
    zeros = torch.zeros(shape, dtype=dtype)
    if _kind(quantizer) in _PER_TENSOR:
        parts = _scaled(zeros, quantizer, torch.ones(1))
    else:
        parts = _parts(zeros, quantizer)
    return _tensor(quantizer, parts, shape, dtype)


def plain(x: Any) -> Tensor:
    """Return ``x`` as an ordinary tensor, dequantised if necessary."""
    if not is_quantised(x):
        return x.contiguous()
    rowwise_data = getattr(x, "_rowwise_data", getattr(x, "_data", None))
    values = operand(x, rowwise=rowwise_data is not None)
    return values.reshape(x.size()).to(x.dtype)


def operand(x: Any, *, rowwise: bool) -> Tensor:
    """Return an operand of a product as float32 ``[rows, columns]`` from the kernel's buffer.

    Hopper multiplies FP8 matrices only if both are contiguous along the summed dimension. If they
    are not, it reads a transposed copy, which Transformer Engine must have made.

    Args:
        rowwise: whether the columns are summed over.

    Raises:
        RuntimeError: Transformer Engine has not provided that buffer. On a GPU the product fails.
    """
    if not is_quantised(x):
        return x.float().reshape(-1, x.shape[-1])
    if hasattr(x, "_scale_inv"):
        return _operand_with_one_scale(x, rowwise)
    side = "rowwise" if rowwise else "columnwise"
    data = _provided(getattr(x, f"_{side}_data"), x, side)
    inverse_scales = getattr(x, f"_{side}_scale_inv")
    if hasattr(x, "_is_2D_scaled"):
        return _operand_in_blocks(x, data, inverse_scales, rowwise)
    values = _rows(data, _format(x))
    rows, columns = values.shape
    scales = torch.exp2(inverse_scales.float() - 127)
    if rowwise:
        scales = scales[:rows, : columns // _MX_BLOCK]
        return values * scales.repeat_interleave(_MX_BLOCK, 1)
    scales = scales[: rows // _MX_BLOCK, :columns]
    return values * scales.repeat_interleave(_MX_BLOCK, 0)


def _operand_with_one_scale(x: Any, rowwise: bool) -> Tensor:
    if rowwise or _any_layout():
        data = _provided(x._data, x, "row-wise")
        return _rows(data, _format(x)) * x._scale_inv
    transpose = None if x._transpose_invalid else x._transpose
    data = _provided(transpose, x, "transposed")
    return _columns(data, _format(x)).t() * x._scale_inv


def _operand_in_blocks(x: Any, data: Tensor, inverse_scales: Tensor, rowwise: bool) -> Tensor:
    """Return an operand of the blockwise recipe, whose column-wise data is stored transposed."""
    values = _rows(data, _format(x)) if rowwise else _columns(data, _format(x))
    rows, columns = values.shape
    per_row = inverse_scales.repeat_interleave(_BLOCK, 0) if x._is_2D_scaled else inverse_scales.t()
    scales = per_row[:rows]
    scales = scales.repeat_interleave(_BLOCK, 1)[:, :columns]
    values = values * scales
    return values if rowwise else values.t()


def scale_from(amax: Tensor, largest: float, *, power_of_two: bool, epsilon: float = 0.0) -> Tensor:
    """Return the float32 scale from ``amax`` to the ``largest`` value of a format. It is 1 if
    ``amax`` is zero or infinite (``compute_scale_from_amax`` of Transformer Engine)."""
    amax = amax.float().clamp(min=epsilon)
    scale = largest / amax
    scale = torch.where(torch.isinf(scale), torch.finfo(torch.float32).max, scale)
    scale = torch.where((amax == 0) | torch.isinf(amax), 1.0, scale)
    if power_of_two:  # the mantissa is cut off
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return scale


def largest(fp8_dtype: Any) -> float:
    """Return the largest value of a format: 448 of E4M3, 57344 of E5M2."""
    return torch.finfo(_FORMATS[fp8_dtype.name]).max


def cast(x: Tensor, fp8_dtype: Any) -> Tensor:
    """Cast scaled values to bytes. NaN stays NaN."""
    limit = largest(fp8_dtype)
    return x.clamp(-limit, limit).to(_FORMATS[fp8_dtype.name]).view(torch.uint8)


def e8m0(ratio: Tensor) -> Tensor:
    """Return the exponent of the smallest power of two >= ``ratio``, with bias 127, as uint8."""
    bits = ratio.float().view(torch.int32)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    is_smallest = (exponent == 0) & (mantissa <= 0x400000)
    up = (mantissa > 0) & (exponent != 254) & ~is_smallest
    return (exponent + up.int()).clamp(max=254).to(torch.uint8)


def _kind(quantizer: Any) -> str:
    return type(quantizer).__name__


def _format(x: Any) -> torch.dtype:
    """Return torch's dtype of the data of a quantised tensor."""
    return _FORMATS[x._fp8_dtype.name]


def _parts(x: Tensor, quantizer: Any) -> Parts:
    kind = _kind(quantizer)
    if kind in _PER_TENSOR:
        return _scaled(x, quantizer, _PER_TENSOR[kind](x, quantizer))
    if kind not in _PER_BLOCK:
        raise NotImplementedError(
            f"The test double has one scale per tensor, per block of 128 or per 32 values (MXFP8), "
            f"got {kind}."
        )
    parts: Parts = {}
    for side in ("rowwise", "columnwise"):
        data = None
        inverse_scales = None
        if getattr(quantizer, f"{side}_usage"):
            data, inverse_scales = _PER_BLOCK[kind](x, quantizer, side == "columnwise")
        parts[f"{side}_data"] = data
        parts[f"{side}_scale_inv"] = inverse_scales
    return parts


def _delayed_scale(x: Tensor, quantizer: Any) -> Tensor:
    """Return the scale of an earlier step, and add the largest value to the history."""
    amax = x.float().abs().max() if x.numel() else torch.zeros(())
    quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.to(quantizer.amax)))
    return quantizer.scale.float().reshape(1)


def _current_scale(x: Tensor, quantizer: Any) -> Tensor:
    amax = x.float().abs().max().reshape(1) if x.numel() else torch.zeros(1)
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(
            amax,
            op=torch.distributed.ReduceOp.MAX,
            group=group,
        )
    return scale_from(
        amax,
        largest(quantizer.dtype),
        power_of_two=quantizer.force_pow_2_scales,
        epsilon=quantizer.amax_epsilon,
    )


def _scaled(x: Tensor, quantizer: Any, scale: Tensor) -> Parts:
    data = cast(x.float() * scale, quantizer.dtype)
    parts: Parts = {
        "data": None,
        "data_transpose": None,
        "fp8_scale_inv": 1.0 / scale,
    }
    if quantizer.rowwise_usage or _any_layout():
        parts["data"] = data
    if quantizer.columnwise_usage and not _any_layout():
        parts["data_transpose"] = transposed(data)
    return parts


def transposed(data: Tensor) -> Tensor:
    """Return ``[..., columns]`` as ``[columns, ...]``."""
    return data.movedim(-1, 0).contiguous()


def _blocks(x: Tensor, quantizer: Any, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Use one scale for 128 values along the summed dimension, or for 128 x 128 values. The scales
    of the former are stored transposed."""
    matrix = x.float().reshape(-1, x.shape[-1])
    shape = quantizer.get_scale_shape(tuple(matrix.shape), columnwise=columnwise)
    if columnwise:
        matrix = matrix.t()
    rows, columns = matrix.shape
    block_rows = _BLOCK if quantizer.block_scaling_dim == 2 else 1
    down = math.ceil(rows / block_rows)
    across = math.ceil(columns / _BLOCK)
    padded_rows = down * block_rows
    padded_columns = across * _BLOCK
    padded = _padded(matrix, padded_rows, padded_columns)
    tiles = padded.view(down, block_rows, across, _BLOCK)
    scale = scale_from(
        tiles.abs().amax(dim=(1, 3)),
        largest(quantizer.dtype),
        power_of_two=quantizer.force_pow_2_scales,
        epsilon=quantizer.amax_epsilon,
    )
    data = cast(tiles * scale[:, None, :, None], quantizer.dtype)
    data = data.view(padded_rows, padded_columns)[:rows, :columns]
    data = data.reshape((x.shape[-1], *x.shape[:-1]) if columnwise else x.shape)
    inverse = 1.0 / scale
    if block_rows == 1:
        inverse = inverse.t()
    return data, _padded(inverse, *shape).contiguous()


def _microscaled(x: Tensor, quantizer: Any, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Use one power of two (E8M0) for 32 values along the summed dimension."""
    matrix = x.float().reshape(-1, x.shape[-1])
    rows, columns = matrix.shape
    summed = 0 if columnwise else 1
    if matrix.shape[summed] % _MX_BLOCK:
        raise RuntimeError(f"Expected multiples of {_MX_BLOCK} for MXFP8, got {rows} x {columns}.")
    tiles = matrix.unflatten(summed, (-1, _MX_BLOCK))
    within_block = summed + 1
    amax = tiles.abs().amax(dim=within_block)
    exponents = e8m0(amax * (1.0 / largest(quantizer.dtype)))
    scale = torch.exp2(127.0 - exponents.float())
    data = cast(tiles * scale.unsqueeze(within_block), quantizer.dtype)
    shape = quantizer.get_scale_shape((rows, columns), columnwise=columnwise)
    return data.view(x.shape), _padded(exponents, *shape).contiguous()


_PER_TENSOR: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "Float8Quantizer": _delayed_scale,
    "Float8CurrentScalingQuantizer": _current_scale,
}
_PER_BLOCK: dict[str, Callable[[Tensor, Any, bool], tuple[Tensor, Tensor]]] = {
    "Float8BlockQuantizer": _blocks,
    "MXFP8Quantizer": _microscaled,
}


def _tensor(quantizer: Any, parts: Parts, shape: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of Transformer Engine with the parts, or only its storage if ``internal``."""
    from transformer_engine.pytorch import tensor as te

    name = "Float8Tensor"
    fields = {**parts, "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if _kind(quantizer) == "Float8BlockQuantizer":
        name = "Float8BlockwiseQTensor"
        fields["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    elif _kind(quantizer) == "MXFP8Quantizer":
        name = "MXFP8Tensor"
        fields["with_gemm_swizzled_scales"] = False
    if quantizer.internal:
        storage_class = getattr(te, f"{name}Storage")
        return storage_class(fake_dtype=dtype, **fields)
    tensor_class = getattr(te, name)
    return tensor_class(
        shape=tuple(shape),
        dtype=dtype,
        device=torch.device("cpu"),
        **fields,
    )


def _any_layout() -> bool:
    """Return whether the device multiplies FP8 matrices in any layout, as Blackwell does."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    return is_non_tn_fp8_gemm_supported()


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    below = rows - x.shape[0]
    right = columns - x.shape[1]
    return torch.nn.functional.pad(x, (0, right, 0, below))


def _rows(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.view(dtype).float().reshape(-1, data.shape[-1])


def _columns(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.view(dtype).float().reshape(data.shape[0], -1)


def _provided(data: Tensor | None, x: Any, what: str) -> Tensor:
    if data is None:
        raise RuntimeError(
            f"A product reads the {what} FP8 data of a {type(x).__name__} {tuple(x.size())}, which "
            "Transformer Engine has not provided. On a GPU this product fails as well."
        )
    return data
