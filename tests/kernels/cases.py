"""What is tested of the kernels, on any device: in the interpreter on the CPU, and on a GPU.

Shape legend: ``R`` rows (every head of every token), ``D`` head dim. Everything is compared with
``ops.heads.knock.knock`` in float64, which ``tests/ops`` holds to the oracle.
"""

import itertools

import torch

from kha_megatron.heads.knock import MATRICES, starts_of
from kha_megatron.ops import initial_weight, knock
from kha_megatron.ops.heads import knock as knocking

ROWS = {1: (1,), 7: (7,), 63: (21, 3), 129: (43, 3)}
"""Ugly numbers of rows, as leading dimensions: three heads where they divide."""
MANY = (33335, 3)
"""Rows that take every program of the largest GPU more than two turns, the last one ragged."""


def weight_of(variant, head_dim, dtype, device="cpu"):
    """Matrices whose products are of the size of their factors."""
    shape = (len(MATRICES[variant]), head_dim, head_dim)
    return (torch.randn(shape, device=device) / head_dim**0.5).to(dtype)


def strided(lead, head_dim, dtype, device="cpu"):
    """``[*lead, D]`` between gaps of NaN, as the split of Megatron's QKV buffer gives values."""
    buffer = torch.full((*lead, 3 * head_dim), torch.nan, dtype=dtype, device=device)
    view = buffer[..., 2 * head_dim :]
    view.copy_(torch.randn(view.shape, device=device))
    return view


def relative_error(got, want):
    """Of norms; NaN anywhere makes it NaN."""
    return ((got.double() - want).norm() / want.norm()).item()


def reference(x, weight, variant, dy):
    """Result and gradients in float64."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    y = knocking.knock(x, weight, variant)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy.double())


def errors(variant, head_dim, dtype, lead, device="cpu"):
    """Relative errors of the result, of the input's gradient and of each matrix's.

    Args:
        lead: leading dimensions, as in :data:`ROWS`.
    """
    torch.manual_seed(lead[0])
    x = strided(lead, head_dim, dtype, device).requires_grad_()
    weight = weight_of(variant, head_dim, dtype, device).requires_grad_()
    dy = strided(lead, head_dim, dtype, device)
    y = knock(x, weight, variant)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    want_y, want_dx, want_dw = reference(x, weight, variant, dy)
    found = {"y": relative_error(y, want_y), "dx": relative_error(dx, want_dx)}
    for name, got, want in zip(MATRICES[variant], dw, want_dw, strict=True):
        found[f"d_{name}"] = relative_error(got, want)
    return found


def is_identity_at_start(variant, head_dim, dtype, device="cpu"):
    """Whether the initial value changes no bit; float16's numbers too small to be normal included.

    Not bfloat16's: the interpreter loses them.
    """
    x = 100 * torch.randn(7, 3, head_dim, device=device)
    x[0] *= 10.0 ** torch.linspace(0, -36, head_dim, device=device)
    shape = (len(MATRICES[variant]), head_dim, head_dim)
    weight = initial_weight(torch.empty(shape, dtype=dtype, device=device), starts_of(variant))
    return torch.equal(knock(x.to(dtype), weight, variant), x.to(dtype))


def layouts_agree(variant, device="cpu"):
    """Errors for rows at one stride, at two, at more; for a gradient with strides and without."""
    found, head_dim, dtype = {}, 64, torch.float16
    buffer = torch.randn(5, 2, 3, 4, head_dim, dtype=dtype, device=device)
    views = {
        "values": buffer[:, :, :, 3],
        "queries": buffer[:, :, :, :2],
        "few heads": buffer[:, :, 1:, 3],
        "transposed": buffer[:, :, :, 3].transpose(0, 1),
        "columns apart": torch.randn(7, 3, head_dim, 2, dtype=dtype, device=device)[..., 0],
        "odd strides": torch.randn(7, 3, head_dim + 1, dtype=dtype, device=device)[..., 1:],
        "one row": torch.randn(head_dim, dtype=dtype, device=device),
        "expanded": torch.randn(1, 1, head_dim, dtype=dtype, device=device).expand(5, 3, -1),
    }
    weight = weight_of(variant, head_dim, dtype, device).requires_grad_()
    for (name, x), expanded in itertools.product(views.items(), (False, True)):
        x = x.detach().requires_grad_()
        y = knock(x, weight, variant)
        # what `sum().backward()` sends has no strides at all
        dy = torch.ones_like(y[..., :1]).expand_as(y) if expanded else torch.randn_like(y)
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
        want = reference(x, weight, variant, dy)
        found[name, expanded] = max(map(relative_error, (y, dx, dw), want))
    return found


def writes_into(variant, head_dim, dtype, device="cpu"):
    """Input gradients written into a view: their error, and whether the rest was left alone."""
    from kha_megatron.ops.kernels.knock_launch import knock_backward_input

    x, dy = (strided((7, 3), head_dim, dtype, device) for _ in range(2))
    weight = weight_of(variant, head_dim, dtype, device)
    buffer = torch.full((7, 3, 4 * head_dim), 5.0, dtype=dtype, device=device)
    out = buffer[..., head_dim : 2 * head_dim]
    knock_backward_input(x, dy, weight, variant, out=out)
    error = relative_error(out, reference(x, weight, variant, dy)[1])
    buffer[..., head_dim : 2 * head_dim] = 5.0
    return error, bool((buffer == 5).all())


def repeats(variant, dtype, device="cpu", tokens=135):
    """Whether two backward passes over many splits of the rows give the same bits."""
    torch.manual_seed(0)
    x = strided((tokens, 3), 64, dtype, device).requires_grad_()
    weight = weight_of(variant, 64, dtype, device).requires_grad_()
    dy = torch.randn(tokens, 3, 64, device=device).to(dtype)
    first, second = (
        torch.autograd.grad(knock(x, weight, variant), (x, weight), dy) for _ in range(2)
    )
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def empty(variant, device="cpu"):
    """Shapes and values for no rows."""
    x = torch.empty(0, 3, 64, device=device, requires_grad=True)
    weight = weight_of(variant, 64, torch.float32, device).requires_grad_()
    y = knock(x, weight, variant)
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    return tuple(y.shape), tuple(dx.shape), dw.abs().max().item()


def kept_for_backward(variant, device="cpu"):
    """Bytes that autograd keeps beyond the QKV buffer and the matrices."""
    x = strided((7, 3), 64, torch.float32, device).requires_grad_()
    weight = weight_of(variant, 64, torch.float32, device).requires_grad_()
    known = {x.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = knock(x, weight, variant)
    assert y.requires_grad
    return sum(size for place, size in kept.items() if place not in known)


def ways_of_calling(variant, device="cpu"):
    """Each way to call it against the plain call: largest difference of result and gradients."""
    from torch.utils.checkpoint import checkpoint

    x = strided((7, 3), 64, torch.float32, device).requires_grad_()
    weight = weight_of(variant, 64, torch.float32, device).requires_grad_()
    dy = torch.randn(7, 3, 64, device=device)
    compiled = torch.compile(knock, backend="aot_eager", fullgraph=True)
    ways = {
        "plain": lambda: knock(x, weight, variant),
        "recomputed": lambda: checkpoint(knock, x, weight, variant, use_reentrant=False),
        "recomputed by re-entering": lambda: checkpoint(
            knock, x, weight, variant, use_reentrant=True
        ),
        "compiled": lambda: compiled(x, weight, variant),
        "transposed weight": lambda: knock(x, weight.mT.contiguous().mT, variant),
    }
    results = {}
    for name, way in ways.items():
        x.grad = weight.grad = None
        y = way()
        y.backward(dy)
        results[name] = (y.detach(), x.grad, weight.grad)
    with torch.no_grad():
        y = knock(x, weight, variant)
        results["no_grad"] = (y, *results["plain"][1:])
        assert not y.requires_grad
    plain = results["plain"]
    return {
        name: max((a - b).abs().max().item() for a, b in zip(result, plain, strict=True))
        for name, result in results.items()
    }


def only_what_is_asked_for(variant, device="cpu"):
    """Which gradients exist when one of the two is asked for."""
    weight = weight_of(variant, 64, torch.float32, device)
    x = torch.randn(7, 3, 64, device=device)
    found = []
    for leaf in (x, weight):
        leaf.requires_grad_()
        knock(x, weight, variant).sum().backward()
        found.append((x.grad is not None, weight.grad is not None))
        leaf.requires_grad_(False)
        leaf.grad = None
    return found
