"""Replacement for ``transformer_engine_torch``, the compiled extension of Transformer Engine.

Functions have the names and arguments of the extension and compute in float32 what its kernels
compute. Any other name of the extension raises NotImplementedError when it is called.

Shapes: ``[..., columns]`` is a matrix whose rows are all leading dimensions. A dtype is a member of
:data:`DType`, or of Transformer Engine's enum with the same names.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NoReturn

import torch
from torch import Tensor

from tests.transformer_engine import fp8


def _enum(name: str, members: str) -> Any:
    """Return an enum with values from 0 on. Nothing reads the extension's own values."""
    return IntEnum(name, members, start=0, module=__name__)


DType = _enum(
    "DType",
    "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
)
FP8FwdTensors = _enum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _enum(
    "FP8BwdTensors",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
)
NVTE_Fused_Attn_Backend = _enum(
    "NVTE_Fused_Attn_Backend",
    "NVTE_F16_arbitrary_seqlen NVTE_FP8 NVTE_No_Backend",
)


class _Numbers:
    """An enum that creates a member, with the next number, when the member is first read."""

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, len(self.__dict__))


NVTEScalingMode = CommOverlapType = CommOverlapAlgo = _Numbers()
NVTE_Bias_Type = NVTE_Mask_Type = NVTE_Softmax_Type = _Numbers()
NVTE_QKV_Format = NVTE_QKV_Layout = _Numbers()
NVTERoutingMapFormat = NVTEQBHistogramMode = _Numbers()


class FP8TensorMeta:
    """Scales and histories of the largest values of one module, for delayed scaling."""


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotImplementedError, for a name that this module lacks."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"The test double of Transformer Engine has no {name}. Switch off the option that "
            "needs it, or run on a GPU."
        )

    absent.__name__ = name
    return absent


# Transformer Engine looks these up for models with RMSNorm, too
layernorm_fwd = __getattr__("layernorm_fwd")
layernorm_bwd = __getattr__("layernorm_bwd")


def _dtype(te_dtype: Any) -> torch.dtype:
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    return TE_DType_To_Torch[te_dtype]


# Properties of the machine


def get_cublasLt_version() -> int:
    return 130000  # of CUDA 13.0, new enough for every FP8 recipe


def get_cudnn_version() -> int:
    return 91300


def get_num_cublas_streams() -> int:
    return 1


def get_fused_attn_backend(*arguments: Any, **more: Any) -> tuple[Any, str]:
    """Return no backend and the reason. The unfused attention, which is plain torch, then runs."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "there are no kernels on the CPU"


# Casts


@torch.no_grad()
def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Quantise ``tensor``, into ``output`` if given. ``noop`` leaves ``output`` unchanged."""
    if output is None:
        return fp8.quantise(tensor, quantizer)
    if noop is None or noop.item() == 0:
        fp8.quantise_into(tensor, quantizer, output)
    return output


@torch.no_grad()
def dequantize(tensor: Any, dtype: Any) -> Tensor:
    return fp8.plain(tensor).to(_dtype(dtype))


@torch.no_grad()
def split_quantize(tensor, sizes, quantizers, *more, **options):
    """Quantise each part of the rows with its own quantizer."""
    pieces = torch.split(tensor, list(sizes))
    quantised = []
    for piece, quantizer in zip(pieces, quantizers, strict=True):
        quantised.append(fp8.quantise(piece, quantizer))
    return quantised


@torch.no_grad()
def bgrad_quantize(gradient: Tensor, quantizer: Any) -> list[Any]:
    """Return the gradient of a bias, and the quantised gradient."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    bias_gradient = rows.float().sum(0).to(gradient.dtype)
    return [bias_gradient, fp8.quantise(gradient, quantizer)]


@torch.no_grad()
def create_empty_quantized_tensor(quantizer, shape, dtype, *more):
    return fp8.empty(quantizer, tuple(shape), dtype)


@torch.no_grad()
def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Return bytes ``[..., columns]`` as ``[columns, ...]``."""
    transposed = fp8.transposed(data)
    return transposed if out is None else out.copy_(transposed)


@torch.no_grad()
def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


@torch.no_grad()
def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    amax.fill_(tensor.float().abs().max() if tensor.numel() else 0.0)


# Products


@torch.no_grad()
def generic_gemm(a, transpose_a, b, transpose_b, out, quantizer, out_dtype, bias, *more, **options):
    """Return ``b`` times ``a`` in Transformer Engine's order: a linear layer's forward is "TN", its
    input gradient "NN", its weight gradient "NT".

    Returns:
        The product (``out`` if given, to which ``accumulate`` adds); the gradient of the bias if
        ``grad`` and a bias are given; None; ``extra_output``.

    Raises:
        NotImplementedError: communication or GELU is fused into the product.
        RuntimeError: see :func:`fp8.operand`.
    """
    _, gelu, _, grad, *_, accumulate, _ = more
    if gelu or options["comm_overlap"] is not None:
        what = "GELU" if gelu else "communication (--tp-comm-overlap)"
        raise NotImplementedError(f"The test double has no product with fused {what}.")
    product, bias_gradient = _product(a, transpose_a, b, transpose_b, bias, grad)
    product = product * options["alpha"]
    if not transpose_b:
        product = product.view(*b.size()[:-1], product.shape[-1])
    if out is not None and not fp8.is_quantised(out):
        product = _put(product, out, accumulate)
    else:
        product = product.to(a.dtype if out_dtype is None else _dtype(out_dtype))
        if quantizer is not None:
            product = quantize(product, quantizer, out)
    return product, bias_gradient, None, options["extra_output"]


@torch.no_grad()
def te_general_grouped_gemm(a, transpose_a, b, transpose_b, out, out_dtype, sizes, bias, *more):
    """Compute a product for each expert as :func:`generic_gemm` does. ``single_output`` writes them
    into consecutive rows of ``out[0]``; ``grad`` writes the gradients of biases into ``bias``."""
    _, single_output, _, grad, _, _, accumulate, _, _ = more
    if single_output:
        rows = out[0].view(-1, out[0].shape[-1])
        out = rows.split(list(sizes))
    for expert in range(len(a)):
        product, bias_gradient = _product(
            a[expert],
            transpose_a,
            b[expert],
            transpose_b,
            bias[expert],
            grad,
        )
        if bias_gradient is not None:
            bias[expert].copy_(bias_gradient)
        _put(product, out[expert], accumulate)
    return bias


def _product(a, transpose_a, b, transpose_b, bias, grad):
    b_values = fp8.operand(b, rowwise=not transpose_b)
    a_values = fp8.operand(a, rowwise=transpose_a)
    left = b_values.t() if transpose_b else b_values
    right = a_values.t() if transpose_a else a_values
    product = left @ right
    if bias is None or not bias.numel():
        return product, None
    if grad:
        return product, b_values.sum(0).to(bias.dtype)
    return product + bias.float(), None


def _put(product: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    product = product.view(out.shape)
    if accumulate:
        product = out.float() + product
    return out.copy_(product)


# Rows of experts, padded to what FP8 products take


@torch.no_grad()
def fused_multi_row_padding(rows, out, sizes, padded):
    """Copy each expert's rows into ``out``, with rows of zeros behind them."""
    out.zero_()
    for dense_rows, padded_rows in _rows_of_experts(rows, out, sizes, padded):
        padded_rows.copy_(dense_rows)


@torch.no_grad()
def fused_multi_row_unpadding(rows, out, padded, sizes):
    """Copy each expert's rows back into ``out``, without the padding."""
    for dense_rows, padded_rows in _rows_of_experts(out, rows, sizes, padded):
        dense_rows.copy_(padded_rows)


def _rows_of_experts(dense, padded, sizes, padded_sizes):
    """Yield for each expert its rows in the dense and in the padded tensor, without padding."""
    dense_parts = dense.split(list(sizes))
    padded_parts = padded.split(list(padded_sizes))
    for dense_rows, padded_rows in zip(dense_parts, padded_parts, strict=True):
        yield dense_rows, padded_rows[: len(dense_rows)]


# Packed sequences: [t, heads, d] for all tokens, padded to [b, s, heads, d]


def convert_thd_to_bshd(packed: Tensor, ends: Tensor, batch: int, longest: int) -> Tensor:
    out = packed.new_zeros(batch, longest, *packed.shape[1:])
    sequences = packed.split(ends.diff().tolist())
    for padded, tokens in zip(out, sequences, strict=True):
        padded[: len(tokens)] = tokens
    return out


def convert_bshd_to_thd(padded: Tensor, ends: Tensor, tokens: int) -> Tensor:
    lengths = ends.diff().tolist()
    assert sum(lengths) == tokens
    sequences = []
    for sequence, length in zip(padded, lengths, strict=True):
        sequences.append(sequence[:length])
    return torch.cat(sequences)


# Normalisation: statistics are float32, for each row


@torch.no_grad()
def rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, sm_margin, zero_centered_gamma):
    """Return the normalised rows, None, and the reciprocal of their root mean square."""
    x32 = x.float()
    reciprocal = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    y = x32 * reciprocal * _gamma(weight, zero_centered_gamma)
    return [_normalised(y, out, quantizer, dtype), None, reciprocal.reshape(-1)]


@torch.no_grad()
def rmsnorm_bwd(dz, x, reciprocal, weight, sm_margin, zero_centered_gamma):
    """Return the gradients of ``x`` and ``weight``."""
    scale = reciprocal.view(*x.shape[:-1], 1)
    normalised = x.float() * scale
    dz32 = dz.float().view(x.shape)
    inner = dz32 * _gamma(weight, zero_centered_gamma)
    mean = (inner * normalised).mean(-1, keepdim=True)
    dx = (inner - normalised * mean) * scale
    dweight = (dz32 * normalised).view(-1, x.shape[-1]).sum(0)
    return [dx.to(x.dtype), dweight.to(weight.dtype)]


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _normalised(y: Tensor, out: Any, quantizer: Any, dtype: Any) -> Any:
    """Round ``y`` to ``dtype`` and quantise it. The kernel with delayed scaling does not round."""
    if type(quantizer).__name__ != "Float8Quantizer":
        y = y.to(_dtype(dtype))
    if quantizer is None:
        return y if out is None else out.copy_(y)
    if out is None:
        return fp8.quantise(y, quantizer, _dtype(dtype))
    return quantize(y, quantizer, out)


# The optimizer's arithmetic on lists of tensors, in float32. ``flag`` (one int32) is set if a value
# is not finite


@torch.no_grad()
def multi_tensor_scale(chunk: int, flag: Tensor, lists: list[list[Tensor]], scale: Any) -> None:
    """Set ``lists[1]`` to ``scale * lists[0]``."""
    for source, target in zip(*lists, strict=True):
        scaled = source.float() * scale
        if not torch.isfinite(scaled).all():
            flag.fill_(1)
        target.copy_(scaled)


multi_tensor_scale_tensor = multi_tensor_scale


@torch.no_grad()
def multi_tensor_l2norm(chunk, flag, lists, per_tensor=False):
    """Return the norm of all tensors together ``[1]``, and of each if ``per_tensor``."""
    squares = torch.stack([tensor.float().square().sum() for tensor in lists[0]])
    norm = squares.sum().sqrt().reshape(1)
    norms = squares.sqrt() if per_tensor else squares.new_empty(0)
    return norm, norms


@torch.no_grad()
def multi_tensor_adam(chunk, flag, lists, lr, beta1, beta2, epsilon, step, *settings):
    """Apply Adam, or AdamW if ``decoupled``, to lists of gradients, parameters, first and second
    moments, and optional float32 parameters, of which the parameters are copies."""
    decoupled, bias_correction, weight_decay = settings
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for gradient, parameter, first, second, *master in zip(*lists, strict=True):
        value = (master[0] if master else parameter).float()
        slope = gradient.float()
        if not decoupled:
            slope = slope + weight_decay * value
        moment1 = beta1 * first.float() + (1 - beta1) * slope
        moment2 = beta2 * second.float() + (1 - beta2) * slope * slope
        denominator = (moment2 / correction2).sqrt() + epsilon
        update = (moment1 / correction1) / denominator
        if decoupled:
            update = update + weight_decay * value
        value = value - lr * update
        first.copy_(moment1)
        second.copy_(moment2)
        parameter.copy_(value)
        if master:
            master[0].copy_(value)


@torch.no_grad()
def multi_tensor_compute_scale_and_scale_inv(chunk, flag, lists, largest, power_of_two, epsilon):
    """Write scales and their inverses (second, third list) for the largest values (first)."""
    for amax, scale, inverse in zip(*lists, strict=True):
        new_scale = fp8.scale_from(
            amax,
            largest,
            power_of_two=power_of_two,
            epsilon=epsilon,
        )
        scale.copy_(new_scale)
        inverse.copy_(1.0 / new_scale)


# Weights in FP8 (--fp8-param-gather): the optimizer of a rank has the range of the flat weight
# ``[rows, columns]`` from ``start`` on


@torch.no_grad()
def fp8_block_scaling_compute_partial_amax(master, amax, rows, columns, start, block):
    """Write the largest value of each block of ``block`` x ``block`` into ``amax``."""
    row, column = _range(master, columns, start)
    blocks = row // block * amax.shape[1] + column // block
    values = master.abs().flatten().to(amax.dtype)
    amax.view(-1).scatter_reduce_(0, blocks, values, "amax")


@torch.no_grad()
def fp8_block_scaling_partial_cast(master, out, scale, rows, columns, start, block, dtype):
    row, column = _range(master, columns, start)
    scales = scale[row // block, column // block]
    scaled = master.float().flatten() * scales
    out.copy_(fp8.cast(scaled, dtype).view(out.shape))


def _range(master: Tensor, columns: int, start: int) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of the elements of a rank."""
    positions = torch.arange(start, start + master.numel())
    return positions // columns, positions % columns
