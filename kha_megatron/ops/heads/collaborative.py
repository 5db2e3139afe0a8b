"""Collaborative heads on plain tensors (arXiv 2006.16362, equation 6)."""

from collections.abc import Mapping

from torch import Tensor

from kha_megatron.heads.collaborative import CollaborativeHeads
from kha_megatron.ops.heads.ranks import Ranks


def apply(
    tensors: dict[str, Tensor],
    weights: Mapping[str, Tensor],
    collaborative: CollaborativeHeads,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """``query``: the one that all heads share, ``[..., 1, dim]``, becomes one for each head."""
    return {"query": mixed(tensors["query"], weights["collaborative_mixing"])}


def mixed(query: Tensor, mixing: Tensor) -> Tensor:
    """Each head's own reading of the shared query.

    Args:
        query: ``[..., 1, dim]``, any floating dtype.
        mixing: ``[heads, dim]``, same dtype.

    Returns:
        ``[..., heads, dim]``.
    """
    return query * mixing


def fold(projection: Tensor, mixing: Tensor) -> Tensor:
    """The query projection of ordinary heads: ``W_Q diag(m_i)`` for each.

    Computed in float64, a head at a time, and rounded once to the projection's dtype.

    Args:
        projection: ``[dim, hidden]``, the shared query projection.
        mixing: ``[H, dim]``.

    Returns:
        ``[H * dim, hidden]``, heads outermost.
    """
    shared = projection.double()
    folded = projection.new_empty(len(mixing), *projection.shape)
    for head in range(len(folded)):
        folded[head] = mixing[head].double()[:, None] * shared
    return folded.flatten(0, 1)
