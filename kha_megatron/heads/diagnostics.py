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
        Tensor: float64 tensor of shape [num_matrices, 3]. The columns are the mean of the
            diagonal, the off-diagonal share and the distance.
    """
    weight = weight.detach().double()
    head_dim = weight.shape[-1]
    start = initial_weight(weight.clone(), initial_values(variant))
    diagonal = weight.diagonal(dim1=1, dim2=2)
    off_diagonal = weight - diagonal.diag_embed()
    change = weight - start
    squared_norm = _squared_norms(weight)
    is_zero = squared_norm == 0
    share = _squared_norms(off_diagonal) / squared_norm
    off_diagonal_share = torch.where(is_zero, 0, share)
    distance = _squared_norms(change).sqrt() / head_dim**0.5
    statistics = [
        diagonal.mean(1),
        off_diagonal_share,
        distance,
    ]
    return torch.stack(statistics, dim=1)


def _squared_norms(matrices: Tensor) -> Tensor:
    return matrices.square().sum((1, 2))


def diagnose(
    weight: Tensor,
    variant: Variant,
) -> Iterator[MatrixDiagnostics]:
    """Compute the statistics of each matrix in a stacked weight, see :func:`measure`."""
    statistics = measure(weight, variant).tolist()
    for matrix, row in zip(MATRICES[variant], statistics, strict=True):
        diagonal_mean, off_diagonal_share, distance = row
        yield MatrixDiagnostics(
            matrix=matrix,
            diagonal_mean=diagonal_mean,
            off_diagonal_share=off_diagonal_share,
            distance=distance,
        )


SINK_QUERIES = 64
"""To measure attention sinks, we only look at this many evenly spaced queries."""


def sink_queries(length: int, device: torch.device | None = None) -> Tensor:
    """Return the query positions to measure (all except position 0, up to ``SINK_QUERIES``)."""
    candidates = max(length - 1, 0)
    count = min(SINK_QUERIES, candidates)
    last_position = max(candidates, 1)
    positions = torch.linspace(1, last_position, count, device=device)
    return positions.round().long()


def sink_terms(
    query: Tensor,
    key: Tensor,
    scale: float,
    query_positions: Tensor,
    key_positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute how much attention goes to the first token (causal attention, in float32).

    The attention probability of the first token is ``exp(first - total)``. If the keys are sharded
    across ranks, first combine the two terms: sum ``first`` and take the logsumexp of ``total``.

    Args:
        query (Tensor): Queries of shape [num_queries, num_heads, head_dim].
        key (Tensor): Local keys of shape [num_keys, num_kv_heads, head_dim].
        scale (float): Softmax scale.
        query_positions (Tensor): Position of each query.
        key_positions (Tensor): Position of each local key.

    Returns:
        tuple[Tensor, Tensor]: ``first``, the logit of the first token (0 if another rank has it),
            and ``total``, the logsumexp over all visible local keys. Both are
            [num_heads, num_queries].
    """
    kv_heads = key.shape[1]
    query = query.detach().float()
    key = key.detach().float()
    grouped_query = query.unflatten(1, (kv_heads, -1))
    # n: query, s: key, g: KV head, r: query head of this KV head, d: feature
    products = torch.einsum("ngrd,sgd->grns", grouped_query, key)
    logits = scale * products.flatten(0, 1)
    is_not_first = key_positions != 0
    is_later = key_positions > query_positions.unsqueeze(-1)
    first_logits = logits.masked_fill(is_not_first, 0)
    visible_logits = logits.masked_fill(is_later, -torch.inf)
    return first_logits.sum(-1), visible_logits.logsumexp(-1)
