"""Numbers that say how far a head-shared matrix has come from its start (paper section 4.5.2), and
what attention does with the first token (arXiv 2505.06708)."""

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


SINK_QUERIES = 64
"""Of how many tokens of a sequence the attention to the first one is measured, spread evenly."""


def sink_queries(length: int, device: torch.device | None = None) -> Tensor:
    """Positions ``[n]`` of those tokens; the first, which can see nothing else, is not one."""
    n = min(SINK_QUERIES, length - 1)
    return torch.linspace(1, max(length - 1, 1), max(n, 0), device=device).round().long()


def sink_terms(
    query: Tensor, key: Tensor, scale: float, at: Tensor, held: Tensor
) -> tuple[Tensor, Tensor]:
    """What the share of causal attention that the first token gets is made of, in float32.

    With all keys here it is ``exp(first - total)``; parts of the keys add up to it by the sum of
    ``first`` and the logsumexp of ``total``. Fused attention never forms it, so it is computed
    anew: ``2 n s D`` FLOPs a head and ``4 n s`` bytes, of ``n`` queries instead of all.

    Args:
        query: ``[n, heads, D]``, any floating dtype.
        key: ``[s, groups, D]``.
        scale: of the logits.
        at: ``[n]``, positions of the queries.
        held: ``[s]``, positions of the keys.

    Returns:
        ``first`` ``[heads, n]``, the logit of the key at position 0, or 0 if it is not here, and
        ``total`` ``[heads, n]``, the logarithm of the sum of the exponents of all logits of keys
        that a query sees; minus infinity for none.
    """
    groups = key.shape[1]
    query = query.detach().float().unflatten(1, (groups, -1))
    logits = scale * torch.einsum("ngrd,sgd->grns", query, key.detach().float()).flatten(0, 1)
    first = logits.masked_fill(held != 0, 0).sum(-1)
    unseen = held > at.unsqueeze(-1)
    return first, logits.masked_fill(unseen, -torch.inf).logsumexp(-1)
