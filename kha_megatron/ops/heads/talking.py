"""Talking-heads attention on plain tensors (arXiv 2003.02436, section 2).

Shape legend: ``B`` batch, ``H`` heads, ``G`` key/value heads, ``S`` queries, ``K`` keys, ``D``
features of a key, ``V`` of a value.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Tensor | None,
    post: Tensor | None,
    *,
    scale: float,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention whose heads mix their logits and their weights.

    Logits are mixed before the mask: behind it, ``-inf * 0`` is NaN. So with the identity for both
    matrices this is ordinary attention bit for bit. The softmax is computed in float32 at least.

    Args:
        query: ``[B, H, S, D]``, all heads of the layer, any floating dtype.
        key: ``[B, G, K, D]``; each serves ``H / G`` query heads that follow one another.
        value: ``[B, G, K, V]``.
        pre: ``[H, H]`` from heads (rows) to heads, for the logits; None for none.
        post: the same for the weights behind the softmax.
        scale: of the logits.
        mask: to broadcast to ``[B, H, S, K]``: booleans that are true where a key is hidden, or
            numbers to add to the mixed logits. A query from which all is hidden sees all alike.
        dropout: of the weights that meet the values.

    Returns:
        ``[B, H, S, V]`` and the weights ``[B, H, S, K]`` before dropout, in the dtype of ``query``.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    # the product that Megatron's own attention takes, so that both round alike
    logits = torch.baddbmm(
        query.new_empty(1, 1, 1),
        query.flatten(0, 1),
        key.flatten(0, 1).mT,
        beta=0.0,
        alpha=scale,
    ).unflatten(0, query.shape[:2])
    if pre is not None:
        logits = mix(logits, pre)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is not None:
        lowest = torch.finfo(logits.dtype).min
        hidden = mask.dtype == torch.bool
        logits = logits.masked_fill(mask, lowest) if hidden else (logits + mask).clamp(min=lowest)
    weights = logits.softmax(-1).to(query.dtype)
    if post is not None:
        weights = mix(weights, post)
    met = weights if dropout is None else dropout(weights)
    output = torch.bmm(met.flatten(0, 1), value.flatten(0, 1))
    return output.unflatten(0, query.shape[:2]), weights


def mix(x: Tensor, weight: Tensor) -> Tensor:
    """``[B, H, S, K]``: head ``k`` becomes the sum over heads ``h`` of ``x_h * weight[h, k]``."""
    return (weight.mT @ x.flatten(2)).unflatten(2, x.shape[2:])
