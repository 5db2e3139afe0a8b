"""KHA-Linear inside the weight of the projection before it, with exact gradients (eq. 8).

Knocking every head of ``y = x W^T`` with ``T`` is the projection by another weight: ``y_h T`` is
``x (T^T W_h)^T``. Made inside autograd from the weight and the matrices as they are, that other
weight trains both.

Shape legend: ``D`` head dim; ``n`` heads of the projection; ``K`` its input features, absent for a
bias; ``m`` matrices.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def fold_heads(rows: Tensor, matrices: Sequence[Tensor], owners: tuple[int | None, ...]) -> Tensor:
    """``W'_h = T^T W_h`` for the heads that have a matrix; the other heads stay as they are.

    Costs one batched product forward and two backward, ``2 n D^2 K`` FLOPs and about ``2 n D K``
    elements of memory traffic each, however many tokens the projection then sees.

    Args:
        rows: ``[n * D, K]`` weight or ``[n * D]`` bias, heads outermost.
        matrices: ``m`` of ``[D, D]``, applied to a head from the right (``x @ T``); same dtype.
        owners: for each of the ``n`` heads the index of its matrix, or None.

    Returns:
        Same shape and dtype as ``rows``; differentiable once. With ``T = I`` it equals ``rows``. A
        matrix that owns no head here gets a gradient of zero rather than none, so that a
        collective on that gradient is entered by every rank.
    """
    return _FoldHeads.apply(rows, owners, *matrices)


class _FoldHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, owners: tuple[int | None, ...], *matrices: Tensor):
        ctx.save_for_backward(rows, *matrices)
        ctx.owners = owners
        return torch.bmm(_of_heads(matrices, owners).mT, _heads(rows, owners)).view(rows.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        rows, *matrices = ctx.saved_tensors
        for_rows, _, *for_matrices = ctx.needs_input_grad
        heads, gradient = _heads(rows, ctx.owners), _heads(gradient, ctx.owners)
        of_rows: Tensor | None = None
        of_matrices: Sequence[Tensor | None] = [None] * len(matrices)
        if for_rows:
            of_rows = torch.bmm(_of_heads(matrices, ctx.owners), gradient).view(rows.shape)
        if any(for_matrices):
            each = torch.bmm(heads, gradient.mT)
            # not a scattered addition: a GPU leaves its order, and so its rounding, to chance
            places = _indices(ctx.owners, len(matrices), rows.device)[1]
            of_matrices = [each[place].sum(0) for place in places]
        return of_rows, None, *of_matrices


def _heads(rows: Tensor, owners: tuple[int | None, ...]) -> Tensor:
    """``[n, D, K]``, with ``K = 1`` for a bias."""
    return rows.reshape(len(owners), rows.shape[0] // len(owners), -1)


def _of_heads(matrices: Sequence[Tensor], owners: tuple[int | None, ...]) -> Tensor:
    """The matrix of every head, ``[n, D, D]``: the identity for one that has none."""
    first = matrices[0]
    identity = torch.eye(first.shape[-1], dtype=first.dtype, device=first.device)
    return torch.stack([*matrices, identity])[_indices(owners, len(matrices), first.device)[0]]


@cache
def _indices(
    owners: tuple[int | None, ...], matrices: int, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """The matrix of every head (one more than there are: the identity), the heads of every one."""
    chosen = [matrices if owner is None else owner for owner in owners]
    places = [[h for h, owner in enumerate(owners) if owner == i] for i in range(matrices)]
    return (
        torch.tensor(chosen, device=device),
        [torch.tensor(place, dtype=torch.long, device=device) for place in places],
    )
