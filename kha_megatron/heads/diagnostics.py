"""Diagnostics of KHA matrices (paper section 4.5.2) and attention sinks (arXiv 2505.06708)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.knock import MATRICES, Variant, initial_values


@dataclass(frozen=True)
class MatrixDiagnostics:
    """Summary statistics of a single KHA matrix."""

    matrix: str  # e.g. "up", see MATRICES

    diagonal_mean: float  # 1 for the identity

    off_diagonal_share: float  # fraction of the squared norm (0 to 1)

    distance: float
    """Frobenius distance to the initialization (zero for gates, else identity) / sqrt(head_dim)."""


def measure(weight: Tensor, variant: Variant) -> Tensor:
    """Compute the statistics in :class:`MatrixDiagnostics` for all matrices at once.

    Args:
        weight (Tensor): Stacked matrices of shape [num_matrices, head_dim, head_dim].
        variant (Variant): KHA variant, needed to know the initialization.

    Returns:
        Tensor: float64 tensor of shape [num_matrices, 3].
    """
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
"""To measure attention sinks, we only look at this many evenly spaced queries."""


def sink_queries(length: int, device: torch.device | None = None) -> Tensor:
    """Return the query positions to measure (all except position 0, up to ``SINK_QUERIES``)."""
    n = min(SINK_QUERIES, length - 1)
    return torch.linspace(1, max(length - 1, 1), max(n, 0), device=device).round().long()


def sink_terms(
    query: Tensor, key: Tensor, scale: float, at: Tensor, held: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute how much attention goes to the first token (causal attention, in float32).

    The attention probability of the first token is ``exp(first - total)``. If the keys are sharded
    across ranks, first combine the two terms: sum ``first`` and take the logsumexp of ``total``.

    Args:
        query (Tensor): Queries of shape [num_queries, num_heads, head_dim].
        key (Tensor): Local keys of shape [num_keys, num_kv_heads, head_dim].
        scale (float): Softmax scale.
        at (Tensor): Position of each query.
        held (Tensor): Position of each local key.

    Returns:
        tuple[Tensor, Tensor]: ``first``, the logit of the first token (0 if another rank has it),
            and ``total``, the logsumexp over all visible local keys. Both are
            [num_heads, num_queries].
    """
    groups = key.shape[1]
    query = query.detach().float().unflatten(1, (groups, -1))
    logits = scale * torch.einsum("ngrd,sgd->grns", query, key.detach().float()).flatten(0, 1)
    first = logits.masked_fill(held != 0, 0).sum(-1)
    unseen = held > at.unsqueeze(-1)
    return first, logits.masked_fill(unseen, -torch.inf).logsumexp(-1)
