"""Differentiable version of folding KHA-Linear into the preceding projection (eq. 8).

Multiplying a head's output by ``T`` is the same as multiplying the rows of its weight by ``T^T``:
with ``y = x W^T``, we have ``y_h T = x (T^T W_h)^T`` for head ``h``. Both ``T`` and ``W`` get
gradients.
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
    """Compute ``T^T W_h`` for each head ``h`` with a KHA matrix ``T``. Other heads are copied.

    Note: Double backward is not supported. Matrices that no local head uses get a zero gradient
    instead of None, so that all ranks take part in the gradient all-reduce.

    Args:
        rows (Tensor): Projection weight of shape [num_heads * head_dim, in_features], or its bias.
        matrices (Sequence[Tensor]): Matrices of shape [head_dim, head_dim] in the dtype of
            ``rows``.
        owners (tuple): For each head, the index of its matrix (None if it has no matrix).
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
            # not index_add, which is not deterministic on GPUs
            places = _indices(ctx.owners, len(matrices), rows.device)[1]
            of_matrices = [each[place].sum(0) for place in places]
        return of_rows, None, *of_matrices


def _heads(rows: Tensor, owners: tuple[int | None, ...]) -> Tensor:
    return rows.reshape(len(owners), rows.shape[0] // len(owners), -1)


def _of_heads(matrices: Sequence[Tensor], owners: tuple[int | None, ...]) -> Tensor:
    first = matrices[0]
    identity = torch.eye(first.shape[-1], dtype=first.dtype, device=first.device)
    return torch.stack([*matrices, identity])[_indices(owners, len(matrices), first.device)[0]]


@cache
def _indices(
    owners: tuple[int | None, ...], matrices: int, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Convert ``owners`` to index tensors (head to matrix, and matrix to heads)."""
    chosen = [matrices if owner is None else owner for owner in owners]
    places = [[h for h, owner in enumerate(owners) if owner == i] for i in range(matrices)]
    return (
        torch.tensor(chosen, device=device),
        [torch.tensor(place, dtype=torch.long, device=device) for place in places],
    )
