"""Tests of the kernels for any device: Triton's interpreter on the CPU, or a GPU.

Shape legend: ``R`` rows (every head of every token), ``D`` head dim. Everything is compared with
``heads.knock.knock`` in float64, which ``tests/heads`` compares with the oracle.
"""

import functools

import torch

from kha_megatron.heads import knock as knocking
from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.kernels.fused import fused_knock
from kha_megatron.heads.knock import MATRICES, initial_values

ROWS = {1: (1,), 7: (7,), 63: (21, 3), 129: (43, 3)}
"""Odd numbers of rows, as leading dimensions; three heads where they divide."""
MANY = (33335, 3)
"""Rows that take every program of the largest GPU more than two turns, the last one ragged."""


def weight_of(variant, head_dim, dtype, device="cpu"):
    """Draw matrices whose products are of the size of their factors."""
    shape = (len(MATRICES[variant]), head_dim, head_dim)
    weight = torch.randn(shape, device=device) / head_dim**0.5
    return weight.to(dtype)


def strided(lead, head_dim, dtype, device="cpu"):
    """Draw ``[*lead, D]`` between gaps of NaN, as the split of Megatron's QKV buffer returns it."""
    buffer = torch.full(
        (*lead, 3 * head_dim),
        torch.nan,
        dtype=dtype,
        device=device,
    )
    view = buffer[..., 2 * head_dim :]
    view.copy_(torch.randn(view.shape, device=device))
    return view


def relative_error(got, want):
    """Return the relative error of norms; NaN anywhere makes it NaN."""
    return ((got.double() - want).norm() / want.norm()).item()


def reference(x, weight, variant, dy):
    """Return the result and the gradients in float64."""
    x = x.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    y = knocking.knock(x, weight, variant)
    dx, dw = torch.autograd.grad(y, (x, weight), dy.double())
    return y.detach(), dx, dw


def errors_of(x, weight, dy, variant):
    """Return the relative errors of the result, of the input gradient and of each matrix's."""
    x = x.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    y = fused_knock(x, weight, variant)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    want_y, want_dx, want_dw = reference(x, weight, variant, dy)
    relative_errors = {
        "y": relative_error(y, want_y),
        "dx": relative_error(dx, want_dx),
    }
    for name, got, want in zip(MATRICES[variant], dw, want_dw, strict=True):
        relative_errors[f"d_{name}"] = relative_error(got, want)
    return relative_errors


def errors(variant, head_dim, dtype, lead, device="cpu"):
    """Return :func:`errors_of` random rows with leading dimensions ``lead``."""
    torch.manual_seed(lead[0])
    x = strided(lead, head_dim, dtype, device)
    dy = strided(lead, head_dim, dtype, device)
    weight = weight_of(variant, head_dim, dtype, device)
    return errors_of(x, weight, dy, variant)


def is_identity_at_start(variant, head_dim, dtype, device="cpu"):
    """Return whether the initial value changes no bit, denormal numbers of float16 included."""
    x = 100 * torch.randn(7, 3, head_dim, device=device)
    x[0] *= 10.0 ** torch.linspace(0, -36, head_dim, device=device)
    shape = (len(MATRICES[variant]), head_dim, head_dim)
    empty_weight = torch.empty(shape, dtype=dtype, device=device)
    weight = initial_weight(empty_weight, initial_values(variant))
    x = x.to(dtype)
    return torch.equal(fused_knock(x, weight, variant), x)


def errors_by_layout(variant, device="cpu"):
    """Return the worst error for several layouts of the rows and of the arriving gradient."""
    head_dim = 64
    dtype = torch.float16
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    buffer = draw(5, 2, 3, 4, head_dim)
    values = buffer[:, :, :, 3]
    views = {
        "values": values,
        "queries": buffer[:, :, :, :2],
        "transposed": values.transpose(0, 1),
        "columns apart": draw(7, 3, head_dim, 2)[..., 0],
        "odd strides": draw(7, 3, head_dim + 1)[..., 1:],
        "one row": draw(head_dim),
        "expanded": draw(1, 1, head_dim).expand(5, 3, -1),
    }
    weight = weight_of(variant, head_dim, dtype, device)
    worst = {}
    for name, x in views.items():
        dy = torch.randn_like(x)
        worst[name, False] = max(errors_of(x, weight, dy, variant).values())
        # `sum().backward()` sends a gradient without strides
        dy = torch.ones_like(x[..., :1]).expand_as(x)
        worst[name, True] = max(errors_of(x, weight, dy, variant).values())
    return worst


def repeats(variant, dtype, device="cpu", tokens=135):
    """Return whether two passes over many splits of the rows give the same bits.

    On a GPU, the second one repeats the launches of the first one without Triton's launcher.
    """
    x = strided((tokens, 3), 64, dtype, device).requires_grad_()
    weight = weight_of(variant, 64, dtype, device).requires_grad_()
    dy = torch.randn(tokens, 3, 64, device=device).to(dtype)

    def results():
        y = fused_knock(x, weight, variant)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    return all(map(torch.equal, results(), results()))


def empty(variant, device="cpu"):
    """Return the shapes of result and input gradient, and the largest weight gradient."""
    x = torch.empty(0, 3, 64, device=device, requires_grad=True)
    weight = weight_of(variant, 64, torch.float32, device).requires_grad_()
    y = fused_knock(x, weight, variant)
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    return tuple(y.shape), tuple(dx.shape), dw.abs().max().item()


def kept_for_backward(variant, device="cpu"):
    """Return the bytes that autograd saves, without the QKV buffer and the matrices."""
    x = strided((7, 3), 64, torch.float32, device).requires_grad_()
    weight = weight_of(variant, 64, torch.float32, device).requires_grad_()
    saved_bytes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = fused_knock(x, weight, variant)
    assert y.requires_grad
    for tensor in (x, weight):
        saved_bytes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(saved_bytes.values())


def ways_of_calling(variant, device="cpu"):
    """Return the largest difference of each way of calling from the plain call."""
    from torch.utils.checkpoint import checkpoint

    x = strided((7, 3), 64, torch.float32, device).requires_grad_()
    weight = weight_of(variant, 64, torch.float32, device).requires_grad_()
    dy = torch.randn(7, 3, 64, device=device)
    compiled = torch.compile(fused_knock, backend="aot_eager", fullgraph=True)
    ways = {
        "plain": lambda: fused_knock(x, weight, variant),
        "recomputed": lambda: checkpoint(fused_knock, x, weight, variant, use_reentrant=False),
        "re-entrant": lambda: checkpoint(fused_knock, x, weight, variant, use_reentrant=True),
        "compiled": lambda: compiled(x, weight, variant),
        "transposed weight": lambda: fused_knock(x, weight.mT.contiguous().mT, variant),
    }
    results = {}
    for name, way in ways.items():
        x.grad = weight.grad = None
        y = way()
        y.backward(dy)
        results[name] = (y.detach(), x.grad, weight.grad)
    differences = {}
    for name, tensors in results.items():
        pairs = zip(tensors, results["plain"], strict=True)
        differences[name] = max((a - b).abs().max().item() for a, b in pairs)
    return differences
