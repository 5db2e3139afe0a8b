"""The attention family on paper: what one layer holds, computes and caches.

Shapes: ``d`` hidden size, ``n`` query heads, ``g`` key/value heads, ``D`` features of a head, ``r``
those that carry the position. Multi-head and multi-query attention are grouped-query attention with
``g = n`` and ``g = 1``.
"""

from dataclasses import dataclass

from kha_megatron.heads import HeadSizes
from kha_megatron.model.model import Model


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One layer without what KHA adds."""

    weights: int
    """Parameters of its linear layers; each costs one multiply-add a token."""
    norms: int
    """Parameters of its norms."""
    pair: int
    """Multiply-adds for one query and one key with its value, over all heads."""
    cache: int
    """Numbers that decoding keeps of one token."""
    heads: HeadSizes
    """What the mechanisms act on, over all tensor-parallel ranks."""

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.weights + self.norms


def attention_of(model: Model) -> Attention:
    """The attention of one layer."""
    if model.multi_latent_attention:
        return latent(model)
    return grouped_tied(model) if model.kha_attention == "gta" else grouped_query(model)


def grouped_query(model: Model) -> Attention:
    """MHA, MQA and GQA: q, k and v from one projection, ``2 g D`` numbers cached."""
    d, n, g, head = _sizes(model)
    return Attention(
        weights=model.qkv.rows * d + n * head * d,
        norms=_qk_norms(model),
        pair=2 * n * head,
        cache=2 * g * head,
        heads=HeadSizes(query_heads=n, kv_heads=g, head_dim=head),
    )


def grouped_tied(model: Model) -> Attention:
    """GTA (Zadouri et al. 2025, section 3.3.1): one state of ``D`` a group is its value and half of
    its key; the rotary half of all keys is one projection of ``D / 2``."""
    d, n, g, head = _sizes(model)
    return Attention(
        weights=d * (n + g) * head + d * head // 2 + n * head * d,
        norms=_qk_norms(model),
        pair=2 * n * head,
        cache=g * head + head // 2,
        heads=HeadSizes(query_heads=n, kv_heads=g, head_dim=head),
    )


def latent(model: Model) -> Attention:
    """MLA, and GLA, each of whose latent heads serves its own share of the query heads (Zadouri et
    al. 2025, section 3.3.2)."""
    d, n = model.hidden_size, model.num_attention_heads
    query_rank, rank = model.q_lora_rank or 0, model.kv_lora_rank
    key, position, value = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    queries = n * (key + position)
    weights = query_rank * (d + queries) if query_rank else d * queries
    weights += d * (rank + position)
    weights += rank // model.latent_heads * n * (key + value)  # of its own query heads only
    weights += n * value * d
    return Attention(
        weights=weights,
        norms=(query_rank + rank) * model.norm_parameters if model.qk_layernorm else 0,
        pair=n * (key + position + value),
        cache=rank + position,
        heads=HeadSizes(query_heads=n, kv_heads=n, head_dim=key, value_dim=value),
    )


def _sizes(model: Model) -> tuple[int, int, int, int]:
    return model.hidden_size, model.num_attention_heads, model.num_query_groups, model.kv_channels


def _qk_norms(model: Model) -> int:
    return 2 * model.kv_channels * model.norm_parameters if model.qk_layernorm else 0
