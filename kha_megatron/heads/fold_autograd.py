"""Fold KHA-Linear into the preceding projection inside autograd (eq. 8).

Because ``y = x W^T`` implies ``y_h T = x (T^T W_h)^T``, gradients reach both the weight and the
matrices.
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
    """Compute ``W'_h = T^T W_h`` for every head that has a matrix. Other heads are unchanged.

    The result can be differentiated once. Matrices without heads get a zero gradient, so that every
    rank takes part in their all-reduce.

    Args:
        rows: Weight ``[n * D, K]`` or bias ``[n * D]`` with ``n`` heads outermost.
        matrices: Matrices ``[D, D]`` with the dtype of ``rows``, applied as ``x @ T``.
        owners: Matrix index of each head, or None for heads without a matrix.
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
    """Stack each head's matrix to ``[n, D, D]``. Heads without one get the identity."""
    first = matrices[0]
    identity = torch.eye(first.shape[-1], dtype=first.dtype, device=first.device)
    return torch.stack([*matrices, identity])[_indices(owners, len(matrices), first.device)[0]]


@cache
def _indices(
    owners: tuple[int | None, ...], matrices: int, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return each head's matrix index (``m`` for the identity), and the heads of each matrix."""
    chosen = [matrices if owner is None else owner for owner in owners]
    places = [[h for h, owner in enumerate(owners) if owner == i] for i in range(matrices)]
    return (
        torch.tensor(chosen, device=device),
        [torch.tensor(place, dtype=torch.long, device=device) for place in places],
    )
