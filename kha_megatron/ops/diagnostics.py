"""Numbers that say how far a head-shared matrix has come from its start (paper section 4.5.2)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kha_megatron.heads.knock import MATRICES, Variant, starts_of
from kha_megatron.ops.heads import initial_weight


@dataclass(frozen=True, kw_only=True)
class MatrixDiagnostics:
    """One ``[D, D]`` matrix ``M``; ``I`` is the identity."""

    matrix: str
    """Its name in :data:`kha_megatron.heads.knock.MATRICES`."""

    diagonal_mean: float
    """``sum_i M_ii / D``. 1 for ``I``; a low value means that features of the head itself have
    given way to features of the others (section 4.5.2)."""

    off_diagonal_share: float
    """``sum_{i != j} M_ij^2 / sum_{i, j} M_ij^2``, from 0 to 1. 0 for ``I``; 0 by definition for
    the zero matrix, which a gate starts as."""

    distance: float
    """``||M - M_0||_F / sqrt(D)``, where ``M_0`` is the start of section 3.3: zero for gates and
    ``I`` for the rest. ``sqrt(D)`` is ``||I||_F``, so 1 means that the change is as large as
    ``I``. With ``init="random"`` it is not the way travelled."""


def measure(weight: Tensor, variant: Variant) -> Tensor:
    """The numbers of :class:`MatrixDiagnostics`, left on the weight's device.

    Args:
        weight: ``[n, D, D]``, any floating dtype; NaN and infinity pass through to the results.
        variant: which matrices the stack holds.

    Returns:
        ``[n, 3]`` in float64: diagonal mean, off-diagonal share and distance of each matrix.
    """
    weight = weight.detach().double()
    start = initial_weight(weight.clone(), starts_of(variant))
    diagonal = weight.diagonal(dim1=1, dim2=2)
    energy = weight.square().sum((1, 2))
    off_diagonal = (weight - diagonal.diag_embed()).square().sum((1, 2))
    share = torch.where(energy == 0, torch.zeros_like(energy), off_diagonal / energy)
    distance = (weight - start).square().sum((1, 2)).sqrt() / weight.shape[-1] ** 0.5
    return torch.stack([diagonal.mean(1), share, distance], dim=1)


def diagnose(weight: Tensor, variant: Variant) -> Iterator[MatrixDiagnostics]:
    """Diagnostics of each matrix of a stacked weight, computed in float64.

    Args:
        weight: as in :func:`measure`.
        variant: which matrices the stack holds.
    """
    for name, numbers in zip(MATRICES[variant], measure(weight, variant).tolist(), strict=True):
        diagonal_mean, off_diagonal_share, distance = numbers
        yield MatrixDiagnostics(
            matrix=name,
            diagonal_mean=diagonal_mean,
            off_diagonal_share=off_diagonal_share,
            distance=distance,
        )
