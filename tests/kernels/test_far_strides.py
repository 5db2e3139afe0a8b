"""Tensors whose heads lie more than 2**31 elements apart, as where they are outermost."""

import tempfile

import numpy as np
import torch

from tests.kernels import cases
from tests.kernels.prologue_cases import angles_of, heads_of
from tests.kernels.test_interpreted import TOLERANCE

FAR = 2**29
"""Elements from head to head, of which the fifth lies beyond 2**31."""


def far_apart(tokens, heads, head_dim):
    """``[tokens, 1, heads, D]`` of float16 in 5 GB, of which only what is written takes room.

    In a file, because a machine may refuse to promise more memory than it has.
    """
    with tempfile.TemporaryFile() as file:
        whole = np.memmap(file, np.float16, "w+", shape=(FAR * (heads - 1) + tokens * head_dim,))
    memory = np.lib.stride_tricks.as_strided(
        whole,
        (tokens, 1, heads, head_dim),
        (2 * head_dim, 0, 2 * FAR, 2),
    )
    view = torch.from_numpy(memory)
    view.copy_(torch.randn(view.shape))
    return view


def errors_of_the_prologue():
    """Of outputs and gradients, for a buffer whose groups lie far apart."""
    from kha_megatron.ops.kernels.prologue_launch import fused_prologue
    from kha_megatron.ops.prologue import PrologueSettings, prologue

    tokens, r, head_dim = 3, 2, 64
    leaves = [far_apart(tokens, 6, (r + 2) * head_dim), torch.ones(head_dim), torch.ones(head_dim)]
    settings = PrologueSettings(head_dim=head_dim, heads=heads_of(r))
    upstream, results = None, []
    for function, exact in ((fused_prologue, False), (prologue, True)):
        used = [x.contiguous().double() if exact else x for x in leaves]
        used = [x.detach().requires_grad_() for x in used]
        outputs = function(used[0], {}, *used[1:], angles_of(tokens, head_dim), settings)
        upstream = upstream or [torch.randn_like(x) for x in outputs]
        arriving = [g.to(x.dtype) for g, x in zip(upstream, outputs, strict=True)]
        results.append([*outputs, *torch.autograd.grad(outputs, used, arriving)])
    return [cases.relative_error(got, want) for got, want in zip(*results, strict=True)]


def errors_of_knocking():
    """Of result and gradients where heads lie far apart, of what goes in and what comes back."""
    x, dy = (far_apart(3, 6, 64) for _ in range(2))
    weight = cases.weight_of("mlp", 64, torch.float16).requires_grad_()
    y = cases.knock(x.requires_grad_(), weight, "mlp")
    found = (y, *torch.autograd.grad(y, (x, weight), dy))
    near = x.detach().contiguous(), weight, "mlp", dy.contiguous()
    return [cases.relative_error(*pair) for pair in zip(found, cases.reference(*near), strict=True)]


def test_the_prologue_reaches_every_group(interpreter):
    found = interpreter(errors_of_the_prologue)
    assert all(error < TOLERANCE[torch.float16] for error in found), found


def test_knocking_reaches_all_heads(interpreter):
    found = interpreter(errors_of_knocking)
    assert all(error < TOLERANCE[torch.float16] for error in found), found
