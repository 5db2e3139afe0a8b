"""Numbers that say how far a head-shared matrix has come from its start (paper section 4.5.2)."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kha_megatron.config import MATRICES, Variant
from kha_megatron.ops.knocking import initial_weight


@dataclass(frozen=True, kw_only=True)
class MatrixDiagnostics:
    """One ``[D, D]`` matrix ``M``; ``I`` is the identity."""

    matrix: str
    """Its name in :data:`kha_megatron.config.MATRICES`."""

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


def diagnose(weight: Tensor, variant: Variant) -> Iterator[MatrixDiagnostics]:
    """Diagnostics of each matrix of a stacked weight, computed in float64.

    Args:
        weight: ``[n, D, D]``, any floating dtype; NaN and infinity pass through to the results.
        variant: which matrices the stack holds.
    """
    weight = weight.detach().double()
    start = initial_weight(weight.clone(), variant)
    for name, matrix, initial in zip(MATRICES[variant], weight, start, strict=True):
        diagonal = matrix.diagonal()
        energy = matrix.square().sum()
        off_diagonal = (matrix - diagonal.diag()).square().sum()
        yield MatrixDiagnostics(
            matrix=name,
            diagonal_mean=diagonal.mean().item(),
            off_diagonal_share=0.0 if energy == 0 else (off_diagonal / energy).item(),
            distance=((matrix - initial).norm() / len(matrix) ** 0.5).item(),
        )
