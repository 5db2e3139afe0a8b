"""From the QKV projection to the core attention: split, knock, QK-norm, RoPE.

Shape legend: ``s`` sequence, ``b`` batch, ``G`` key/value heads, ``r`` query heads of each, ``n``
heads of each in the buffer (``kha_megatron.model.qkv`` says which they are in Megatron's), ``D``
head dim, ``R`` features of a head that RoPE turns. :func:`prologue` says in torch what
``fused_prologue`` computes in kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kha_megatron.heads import Projection
from kha_megatron.heads.knock import Variant
from kha_megatron.ops.heads.knock import knock


@dataclass(frozen=True, kw_only=True)
class PrologueSettings:
    """What does not change from call to call."""

    head_dim: int
    """``D``."""

    heads: Mapping[Projection, tuple[int, int]] = field(hash=False)
    """Of each group's ``n`` heads in the buffer those of query, key and value (in this order) that
    are wanted: the first, and the one after the last. Where several tensor-parallel ranks share a
    key/value head, a rank gets its whole group and wants a part of its queries."""

    variants: Mapping[Projection, Variant] = field(default_factory=dict, hash=False)
    """How each projection is knocked; one that is left out is not."""

    eps: float = 1e-5
    """Of the QK-norms."""

    zero_centred: bool = False
    """Whether the QK-norms multiply by ``1 + weight`` instead of ``weight``."""

    def places(self, qkv: Tensor) -> dict[Projection, Tensor]:
        """Views of what is wanted of a buffer ``[s, b, G, n * D]``.

        Returns:
            ``[s, b, G, heads, D]``, with one head for key and value.
        """
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        return {p: heads[..., first:last, :] for p, (first, last) in self.heads.items()}

    def are_all_wanted(self, qkv: Tensor) -> bool:
        """Whether :meth:`places` are all of the buffer."""
        wanted = sum(last - first for first, last in self.heads.values())
        return wanted * self.head_dim == qkv.shape[-1]


def prologue(
    qkv: Tensor,
    weights: Mapping[Projection, Tensor],
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    angles: Tensor | None,
    settings: PrologueSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as the core attention takes them.

    Per head: ``x``, knocked (:func:`~kha_megatron.ops.heads.knock.knock`); queries and keys then
    divided by ``sqrt(mean(x^2) + eps)`` and multiplied by the norm's weight (paper section 4.5.2),
    and turned: with ``a`` and ``b`` the first and second half of the first ``R`` features,
    ``a cos - b sin`` and ``b cos + a sin``. All of it in float32 or better, rounded at the end.

    Args:
        qkv: ``[s, b, G, n * D]``, whose heads are those of ``settings.heads``; any strides.
        weights: of each knocked projection its stacked matrices ``[n, D, D]``, same dtype.
        query_norm: ``[D]``, any floating dtype, or None for no norm; likewise ``key_norm``.
        angles: ``[s, 1 or b, 1, R]`` in float32, both halves the same (Megatron's
            ``rotary_pos_emb``), or None for no RoPE.
        settings: the rest.

    Returns:
        ``[s, b, G * r, D]`` and twice ``[s, b, G, D]``, contiguous, in the dtype of ``qkv``.
    """
    tensors = {p: x.flatten(2, 3) for p, x in settings.places(qkv).items()}
    for projection, variant in settings.variants.items():
        tensors[projection] = knock(tensors[projection], weights[projection], variant)
    exact = torch.promote_types(qkv.dtype, torch.float32)
    for projection, norm in (("query", query_norm), ("key", key_norm)):
        x = tensors[projection].to(exact)
        if norm is not None:
            gain = norm.to(exact) + settings.zero_centred
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + settings.eps) * gain
        if angles is not None:
            x = _turn(x, angles)
        tensors[projection] = x.to(qkv.dtype)
    query, key, value = (x.contiguous() for x in tensors.values())
    return query, key, value


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    size = angles.shape[-1]
    angle = angles[..., : size // 2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
