"""Replacement for ``transformer_engine_torch``, the compiled extension of Transformer Engine.

Functions have the names and arguments of the extension and compute in float32 what its kernels
compute. Any other name of the extension raises NotImplementedError when it is called.

Shapes: ``[..., columns]`` is a matrix whose rows are all leading dimensions. A dtype is a member of
:data:`DType`, or of Transformer Engine's enum with the same names.
"""

import functools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NoReturn

import torch
from torch import Tensor

from tests.transformer_engine import fp8

__all__: list[str] = []
"""What ``from transformer_engine_torch import *`` takes: everything here but the imports."""


def _enum(name: str, members: str) -> Any:
    """An enum whose values are the members' places; nobody looks at the extension's own."""
    __all__.append(name)
    return IntEnum(name, members, start=0, module=__name__)


DType = _enum(
    "DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
)
_TORCH = {
    "kByte": torch.uint8,
    "kInt32": torch.int32,
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
}
FP8FwdTensors = _enum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _enum(
    "FP8BwdTensors",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
)
NVTEScalingMode = _enum(
    "NVTEScalingMode",
    "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
    "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
)
Float8BlockScaleTensorFormat = _enum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
CommOverlapType = _enum("CommOverlapType", "RS AG")
CommOverlapAlgo = _enum(
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
    "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P "
    "EXTERNAL_BULK_OVERLAP_AG",
)
NVTE_Bias_Type = _enum(
    "NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI"
)
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _enum(
    "NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX"
)
NVTE_QKV_Format = _enum(
    "NVTE_QKV_Format",
    "NVTE_BSHD NVTE_SBHD NVTE_THD NVTE_SBHD_2BSHD NVTE_BSHD_2SBHD NVTE_THD_2BSHD NVTE_THD_2SBHD "
    "NVTE_BHSD NVTE_QKV_Format_NOT_SET",
)
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD "
    "NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD "
    "NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD "
    "NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD "
    "NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD "
    "NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD "
    "NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET",
)
NVTE_Fused_Attn_Backend = _enum(
    "NVTE_Fused_Attn_Backend", "NVTE_F16_arbitrary_seqlen NVTE_FP8 NVTE_No_Backend"
)
NVTERoutingMapFormat = _enum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
NVTEQBHistogramMode = _enum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")


class FP8TensorMeta:
    """Scales and histories of the largest values of one module, for delayed scaling."""

    scale: Tensor
    scale_inv: Tensor
    amax_history: Tensor


__all__ += ["FP8TensorMeta"]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """What the extension has and this module has not: it may be named, and not be called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"transformer_engine_torch.{name} has no stand-in on the CPU: switch off the option "
            "that asks for it, or run on a GPU"
        )

    absent.__name__ = name
    return absent


def _binding[Function: Callable[..., Any]](function: Function) -> Function:
    __all__.append(function.__name__)

    @functools.wraps(function)
    def without_gradients(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return without_gradients  # type: ignore[return-value]


def _dtype(te_dtype: Any) -> torch.dtype:
    return _TORCH[te_dtype.name]


# What Transformer Engine asks of the machine


@_binding
def get_cublasLt_version() -> int:
    """CUDA 13.0's: new enough for every FP8 recipe."""
    return 130000


@_binding
def get_cudnn_version() -> int:
    """9.13, which nothing here calls."""
    return 91300


@_binding
def get_num_cublas_streams() -> int:
    """Of which each asks for a workspace."""
    return 1


@_binding
def get_fused_attn_backend(*arguments: Any, **more: Any) -> tuple[Any, str]:
    """None, and why: what is left is Transformer Engine's unfused attention, plain torch."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "there are no kernels on the CPU"


# Casts


@_binding
def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """``tensor`` in the quantizer's format; into ``output`` where given, unless ``noop`` is set."""
    if output is None:
        return fp8.quantise(tensor, quantizer)
    if noop is None or noop.item() == 0:
        fp8.quantise_into(tensor, quantizer, output)
    return output


@_binding
def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """A quantised tensor read back."""
    return fp8.plain(tensor).to(_dtype(dtype))


@_binding
def split_quantize(
    tensor: Tensor, sizes: Sequence[int], quantizers: Sequence[Any], *more: Any, **options: Any
) -> list[Any]:
    """Each part of the rows by a quantizer of its own."""
    parts = torch.split(tensor, list(sizes))
    return [fp8.quantise(part, q) for part, q in zip(parts, quantizers, strict=True)]


@_binding
def bgrad_quantize(gradient: Tensor, quantizer: Any) -> list[Any]:
    """The gradient of a bias, and the gradient quantised."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    return [rows.float().sum(0).to(gradient.dtype), fp8.quantise(gradient, quantizer)]


@_binding
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """A tensor to be quantised into."""
    return fp8.empty(quantizer, tuple(shape), dtype)


@_binding
def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Bytes ``[..., columns]`` as ``[columns, ...]``."""
    turned = data.reshape(-1, data.shape[-1]).t().reshape(data.shape[-1], *data.shape[:-1])
    return turned.contiguous() if out is None else out.copy_(turned)


@_binding
def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``[a, b, ...]`` as ``[b, a, ...]``: what ranks gathered one after the other, interleaved."""
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


@_binding
def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    """The largest absolute value, into ``amax`` (one float32)."""
    amax.fill_(tensor.float().abs().max() if tensor.numel() else 0.0)


# Products


@_binding
def generic_gemm(
    a: Any,
    transpose_a: bool,
    b: Any,
    transpose_b: bool,
    out: Any,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, None, Any]:
    """``b`` times ``a`` in Transformer Engine's order: a linear layer's forward is "TN", its input
    gradient "NN", its weight gradient "NT".

    Returns:
        The product (``out`` where given, added to what it holds where ``accumulate``), the bias's
        gradient where ``grad`` and a bias are given, None, ``extra_output``.

    Raises:
        NotImplementedError: communication or GELU fused into the product.
        RuntimeError: see :func:`fp8.operand`.
    """
    if comm_overlap is not None or gelu:
        what = "GELU" if gelu else "communication (--tp-comm-overlap)"
        raise NotImplementedError(f"{what} fused into a product has no stand-in on the CPU")
    product, bias_gradient = _product(a, transpose_a, b, transpose_b, bias, grad)
    product = product * alpha
    if not transpose_b:
        product = product.view(*b.size()[:-1], product.shape[-1])
    if out is not None and not fp8.is_quantised(out):
        return _put(product, out, accumulate), bias_gradient, None, extra_output
    product = product.to(a.dtype if out_dtype is None else _dtype(out_dtype))
    if quantizer is not None:
        product = quantize(product, quantizer, out)
    return product, bias_gradient, None, extra_output


@_binding
def te_general_grouped_gemm(
    a: Sequence[Any],
    transpose_a: bool,
    b: Sequence[Any],
    transpose_b: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    sizes: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    pre_gelu: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sms: int,
) -> Sequence[Tensor]:
    """A product for each expert, as :func:`generic_gemm`'s; where ``single_output``, into parts of
    the rows of ``out[0]``. Biases' gradients go into ``bias`` where ``grad``."""
    start = 0
    for index, (one, other) in enumerate(zip(a, b, strict=True)):
        product, gradient = _product(one, transpose_a, other, transpose_b, bias[index], grad)
        if gradient is not None:
            bias[index].copy_(gradient)
        if single_output:
            rows = out[0].view(-1, out[0].shape[-1])
            _put(product, rows[start : start + len(product)], accumulate)
            start += len(product)
        else:
            _put(product, out[index], accumulate)
    return bias


def _product(a, transpose_a, b, transpose_b, bias, grad):
    left = fp8.operand(b, rowwise=not transpose_b)
    right = fp8.operand(a, rowwise=transpose_a)
    product = (left.t() if transpose_b else left) @ (right.t() if transpose_a else right)
    if bias is None or not bias.numel():
        return product, None
    if grad:
        return product, left.sum(0).to(bias.dtype)
    return product + bias.float(), None


def _put(product: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    product = product.view(out.shape)
    return out.copy_(out.float() + product if accumulate else product)


# Rows of experts, padded to what FP8 products take


@_binding
def fused_multi_row_padding(
    rows: Tensor, out: Tensor, sizes: Sequence[int], padded: Sequence[int]
) -> None:
    """Each expert's rows into ``out``, with rows of zeros behind them."""
    out.zero_()
    for part, place in _places(rows, out, sizes, padded):
        place.copy_(part)


@_binding
def fused_multi_row_unpadding(
    rows: Tensor, out: Tensor, padded: Sequence[int], sizes: Sequence[int]
) -> None:
    """Each expert's rows back into ``out``, without the rows behind them."""
    for part, place in _places(out, rows, sizes, padded):
        part.copy_(place)


def _places(
    dense: Tensor, padded: Tensor, sizes: Sequence[int], padded_sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    spaces = padded.split(list(padded_sizes))
    parts = dense.split(list(sizes))
    return [(part, space[: len(part)]) for part, space in zip(parts, spaces, strict=True)]


# Normalisation: statistics are float32, for each row


@_binding
def rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, sm_margin, zero_centered_gamma):
    """``x`` over its root mean square, times ``weight``; None; the reciprocal of the former."""
    x32 = x.float()
    reciprocal = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    y = x32 * reciprocal * _gamma(weight, zero_centered_gamma)
    return [_normalised(y, out, quantizer, dtype), None, reciprocal.reshape(-1)]


@_binding
def rmsnorm_bwd(dz, x, reciprocal, weight, sm_margin, zero_centered_gamma):
    """Gradients of ``x`` and ``weight``."""
    scale = reciprocal.view(*x.shape[:-1], 1)
    return _norm_gradients(dz, x, x.float() * scale, scale, weight, zero_centered_gamma)[:2]


@_binding
def layernorm_fwd(x, weight, bias, eps, out, quantizer, dtype, sm_margin, zero_centered_gamma):
    """``x`` less its mean over its deviation, times ``weight``, plus ``bias``; the mean; the
    reciprocal of the deviation."""
    x32 = x.float()
    mean = x32.mean(-1, keepdim=True)
    reciprocal = torch.rsqrt((x32 - mean).square().mean(-1, keepdim=True) + eps)
    y = (x32 - mean) * reciprocal * _gamma(weight, zero_centered_gamma)
    y = y if bias is None else y + bias.float()
    return [_normalised(y, out, quantizer, dtype), mean.reshape(-1), reciprocal.reshape(-1)]


@_binding
def layernorm_bwd(dz, x, mean, reciprocal, weight, sm_margin, zero_centered_gamma):
    """Gradients of ``x``, ``weight`` and ``bias``."""
    rows = (*x.shape[:-1], 1)
    scale = reciprocal.view(rows)
    normalised = (x.float() - mean.view(rows)) * scale
    return _norm_gradients(dz, x, normalised, scale, weight, zero_centered_gamma, centred=True)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _normalised(y: Tensor, out: Any, quantizer: Any, dtype: Any) -> Any:
    """``y`` as the kernels hand it on: the one with delayed scaling casts float32 to FP8, the
    others round to ``dtype`` first."""
    if type(quantizer).__name__ != "Float8Quantizer":
        y = y.to(_dtype(dtype))
    if quantizer is None:
        return y if out is None else out.copy_(y)
    if out is None:
        return fp8.quantise(y, quantizer, _dtype(dtype))
    return quantize(y, quantizer, out)


def _norm_gradients(dz, x, normalised, scale, weight, zero_centered, *, centred=False):
    dz32 = dz.float().view(x.shape)
    inner = dz32 * _gamma(weight, zero_centered)
    dx = inner - normalised * (inner * normalised).mean(-1, keepdim=True)
    if centred:
        dx = dx - inner.mean(-1, keepdim=True)
    rows = (-1, x.shape[-1])
    dweight, dbias = (dz32 * normalised).view(rows).sum(0), dz32.view(rows).sum(0)
    return [(dx * scale).to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)]


# Lists of tensors: the optimizer's arithmetic, in float32. Parameters: size of a chunk, a flag (one
# int32) that is raised where a value is not finite, lists of equal length


@_binding
def multi_tensor_scale(chunk: int, flag: Tensor, lists: list[list[Tensor]], scale: Any) -> None:
    """``lists[1] = scale * lists[0]``."""
    for source, target in zip(*lists, strict=True):
        scaled = source.float() * scale
        if not torch.isfinite(scaled).all():
            flag.fill_(1)
        target.copy_(scaled)


multi_tensor_scale_tensor = multi_tensor_scale
__all__ += ["multi_tensor_scale_tensor"]


@_binding
def multi_tensor_l2norm(
    chunk: int, flag: Tensor, lists: list[list[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of all together [1], and of each where ``per_tensor``."""
    squares = torch.stack([tensor.float().square().sum() for tensor in lists[0]])
    return squares.sum().sqrt().reshape(1), squares.sqrt() if per_tensor else squares.new_empty(0)


@_binding
def multi_tensor_adam(
    chunk, flag, lists, lr, beta1, beta2, epsilon, step, decoupled, bias_correction, weight_decay
):
    """Adam, or AdamW where ``decoupled``, on gradients, parameters, first and second moments, and
    where there is a fifth list, on float32 parameters that the second is copied from."""
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for gradient, parameter, first, second, *master in zip(*lists, strict=True):
        value = (master[0] if master else parameter).float()
        slope = gradient.float()
        if not decoupled:
            slope = slope + weight_decay * value
        moment1 = beta1 * first.float() + (1 - beta1) * slope
        moment2 = beta2 * second.float() + (1 - beta2) * slope * slope
        update = (moment1 / correction1) / ((moment2 / correction2).sqrt() + epsilon)
        if decoupled:
            update = update + weight_decay * value
        value = value - lr * update
        for target, new in ((first, moment1), (second, moment2), (parameter, value)):
            target.copy_(new)
        if master:
            master[0].copy_(value)


@_binding
def multi_tensor_compute_scale_and_scale_inv(
    chunk, flag, lists, largest, force_pow_2_scales, epsilon
):
    """Scales and their inverses (second, third list) from the largest values (first)."""
    for amax, scale, inverse in zip(*lists, strict=True):
        found = fp8.scale_from(amax, largest, power_of_two=force_pow_2_scales, epsilon=epsilon)
        scale.copy_(found)
        inverse.copy_(1.0 / found)


# Weights that are kept in FP8 (--fp8-param-gather): a rank has a range of the flat weight, from
# ``start`` on, as the optimizer holds it; ``rows`` and ``columns`` are the whole weight's. The
# largest values are reduced over ranks in between


@_binding
def fp8_block_scaling_compute_partial_amax(master, amax, rows, columns, start, block):
    """The range's largest values, by blocks of ``block`` x ``block``, into ``amax``."""
    row, column = _range(master, columns, start)
    places = row // block * amax.shape[1] + column // block
    amax.view(-1).scatter_reduce_(0, places, master.abs().flatten().to(amax.dtype), "amax")


@_binding
def fp8_block_scaling_partial_cast(master, out, scale, rows, columns, start, block, dtype):
    """The range in FP8, into the bytes ``out``, which are as many."""
    row, column = _range(master, columns, start)
    scaled = master.float().flatten() * scale[row // block, column // block]
    out.copy_(fp8.cast(scaled, dtype).view(out.shape))


def _range(master: Tensor, columns: int, start: int) -> tuple[Tensor, Tensor]:
    """Row and column of each value of a range."""
    places = torch.arange(start, start + master.numel())
    return places // columns, places % columns
