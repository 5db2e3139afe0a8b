"""Diagnostics of KHA matrices (paper section 4.5.2) and attention sinks (arXiv 2505.06708)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.knock import MATRICES, Variant, initial_values


@dataclass(frozen=True)
class MatrixDiagnostics:
    """Diagnostics of one ``[D, D]`` matrix ``M``."""

    matrix: str  # a name in MATRICES

    diagonal_mean: float  # 1 for the identity

    off_diagonal_share: float  # fraction of the squared norm, 0 to 1

    distance: float
    """``||M - M_0||_F / sqrt(D)``, where ``M_0`` is zero for gates and otherwise the identity."""


def measure(weight: Tensor, variant: Variant) -> Tensor:
    """Compute ``[n, 3]`` in float64: diagonal mean, off-diagonal share and distance of each
    matrix."""
    weight = weight.detach().double()
    start = initial_weight(weight.clone(), initial_values(variant))
    diagonal = weight.diagonal(dim1=1, dim2=2)
    energy = weight.square().sum((1, 2))
    off_diagonal = (weight - diagonal.diag_embed()).square().sum((1, 2))
    share = torch.where(energy == 0, torch.zeros_like(energy), off_diagonal / energy)
    distance = (weight - start).square().sum((1, 2)).sqrt() / weight.shape[-1] ** 0.5
    return torch.stack([diagonal.mean(1), share, distance], dim=1)


def diagnose(weight: Tensor, variant: Variant) -> Iterator[MatrixDiagnostics]:
    for name, numbers in zip(MATRICES[variant], measure(weight, variant).tolist(), strict=True):
        yield MatrixDiagnostics(name, *numbers)


SINK_QUERIES = 64
"""Number of evenly spaced queries at which attention to the first token is measured."""


def sink_queries(length: int, device: torch.device | None = None) -> Tensor:
    """Return the positions ``[n]`` of these queries, excluding position 0."""
    n = min(SINK_QUERIES, length - 1)
    return torch.linspace(1, max(length - 1, 1), max(n, 0), device=device).round().long()


def sink_terms(
    query: Tensor, key: Tensor, scale: float, at: Tensor, held: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the terms of the first token's share of causal attention, in float32.

    If all keys are present, the share is ``exp(first - total)``. To combine shards of the keys, sum
    ``first`` and take the logsumexp of ``total``.

    Args:
        query: Queries ``[n, heads, D]`` at the positions ``at`` ``[n]``.
        key: Keys ``[s, groups, D]`` at the positions ``held`` ``[s]``.

    Returns:
        ``first`` and ``total`` of shape ``[heads, n]``: the logit of the key at position 0 (0 if
            absent), and the logsumexp of the logits of all visible keys.
    """
    groups = key.shape[1]
    query = query.detach().float().unflatten(1, (groups, -1))
    logits = scale * torch.einsum("ngrd,sgd->grns", query, key.detach().float()).flatten(0, 1)
    first = logits.masked_fill(held != 0, 0).sum(-1)
    unseen = held > at.unsqueeze(-1)
    return first, logits.masked_fill(unseen, -torch.inf).logsumexp(-1)
