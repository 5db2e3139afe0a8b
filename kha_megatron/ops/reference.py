"""The oracle: Knocking-Heads Attention written head by head, as slowly as the paper states it.

Every test compares with this file, so it shares no code with ``knocking.py`` and uses no fused or
batched form. Shape legend: ``S`` sequence, ``B`` batch, ``H`` query heads, ``G`` key/value heads,
``D`` head dim. Everything is computed in the dtype of the inputs; tests pass float64.
"""

import math

import torch
from torch import Tensor

from kha_megatron.config import KHAConfig, Variant


def knock_head(x: Tensor, matrices: list[Tensor], variant: Variant) -> Tensor:
    """One head through the shared matrices: equations 5-7 (linear), 9 (mlp), Table 2 (gate).

    Args:
        x: ``[B, S, D]``, one head.
        matrices: ``[T]``, ``[W_up, W_gate, W_down]`` or ``[W_gate]``, each ``[D, D]``.
    """

    def sigmoid(z: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-z))

    if variant == "linear":
        (t,) = matrices
        return torch.einsum("bsi,ij->bsj", x, t)
    if variant == "mlp":
        up, gate, down = matrices
        hidden = torch.einsum("bsi,ij->bsj", x, up) * sigmoid(torch.einsum("bsi,ij->bsj", x, gate))
        return 2 * torch.einsum("bsi,ij->bsj", hidden, down)
    if variant == "gate":
        (gate,) = matrices
        return 2 * x * sigmoid(torch.einsum("bsi,ij->bsj", x, gate))
    raise AssertionError(variant)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary position embedding over all ``D`` features of ``[B, S, D]``, halves convention."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=x.dtype, device=x.device) / half
    angle = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * base ** (-steps)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(
    hidden: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    w_output: Tensor,
    kha: KHAConfig,
    matrices: dict[str, list[Tensor]],
    *,
    num_query_groups: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-5,
    rotary_base: float | None = None,
) -> Tensor:
    """Causal grouped-query attention with knocking: project, knock, QK-norm, RoPE, attend, project.

    Args:
        hidden: ``[B, S, K]``.
        w_query: ``[K, H * D]`` (row-vector convention: ``hidden @ w``), likewise ``w_key`` and
            ``w_value`` ``[K, G * D]`` and ``w_output`` ``[H * D, K]``.
        kha: what is knocked.
        matrices: the shared matrices of each knocked projection, by its name.
        num_query_groups: ``G``.
        head_dim: ``D``.
        q_norm: ``[D]`` weight of the query RMSNorm, or None for no norm; likewise ``k_norm``.
        rotary_base: base of the rotary embedding, or None for no position embedding.

    Returns:
        ``[B, S, K]``.
    """
    heads = w_query.shape[1] // head_dim
    length = hidden.shape[1]
    future = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)

    def project(weight: Tensor, head: int, name: str) -> Tensor:
        x = hidden @ weight[:, head * head_dim : (head + 1) * head_dim]
        variant = getattr(kha, name)
        return x if variant is None else knock_head(x, matrices[name], variant)

    outputs = []
    for head in range(heads):
        group = head // (heads // num_query_groups)
        query = project(w_query, head, "query")
        key = project(w_key, group, "key")
        value = project(w_value, group, "value")
        if q_norm is not None:
            query = rms_norm(query, q_norm, eps)
        if k_norm is not None:
            key = rms_norm(key, k_norm, eps)
        if rotary_base is not None:
            query, key = rotate(query, rotary_base), rotate(key, rotary_base)
        scores = torch.einsum("bqd,bkd->bqk", query, key) / math.sqrt(head_dim)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("bqk,bkd->bqd", weights, value))
    return torch.cat(outputs, dim=-1) @ w_output
