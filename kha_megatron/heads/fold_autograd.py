"""Fold KHA-Linear into the weight of the projection before it, inside autograd (eq. 8).

For ``y = x W^T``, ``y_h T = x (T^T W_h)^T``. Gradients reach the weight and the matrices.

Shape legend: ``D`` head dim; ``n`` heads of the projection; ``K`` its input features, absent for a
bias; ``m`` matrices.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def fold_matrices(
    rows: Tensor, matrices: Sequence[Tensor], owners: tuple[int | None, ...]
) -> Tensor:
    """Return ``W'_h = T^T W_h`` for the heads that have a matrix, and ``W_h`` for the others.

    One batched product forward and two backward, ``2 n D^2 K`` FLOPs each for any number of tokens.

    Args:
        rows: ``[n * D, K]`` weight or ``[n * D]`` bias, heads outermost.
        matrices: ``m`` of ``[D, D]``, applied as ``x @ T``; same dtype.
        owners: index of the matrix of each of the ``n`` heads, or None.

    Returns:
        Same shape and dtype as ``rows``; differentiable once. With ``T = I`` it equals ``rows``. A
        matrix without heads gets a zero gradient, so that every rank enters its all-reduce.
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
            # index_add would sum in a random order on a GPU
            places = _indices(ctx.owners, len(matrices), rows.device)[1]
            of_matrices = [each[place].sum(0) for place in places]
        return of_rows, None, *of_matrices


def _heads(rows: Tensor, owners: tuple[int | None, ...]) -> Tensor:
    """Return ``[n, D, K]``, with ``K = 1`` for a bias."""
    return rows.reshape(len(owners), rows.shape[0] // len(owners), -1)


def _of_heads(matrices: Sequence[Tensor], owners: tuple[int | None, ...]) -> Tensor:
    """Return the matrix of every head, ``[n, D, D]``; the identity for heads without one."""
    first = matrices[0]
    identity = torch.eye(first.shape[-1], dtype=first.dtype, device=first.device)
    return torch.stack([*matrices, identity])[_indices(owners, len(matrices), first.device)[0]]


@cache
def _indices(
    owners: tuple[int | None, ...], matrices: int, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return the matrix index of every head (``m`` for the identity), and each matrix's heads."""
    chosen = [matrices if owner is None else owner for owner in owners]
    places = [[h for h, owner in enumerate(owners) if owner == i] for i in range(matrices)]
    return (
        torch.tensor(chosen, device=device),
        [torch.tensor(place, dtype=torch.long, device=device) for place in places],
    )
