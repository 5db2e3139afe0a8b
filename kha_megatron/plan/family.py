"""The attention family on paper: what one layer holds, computes and caches.

Shapes: ``d`` hidden size, ``n`` query heads, ``g`` key/value heads, ``D`` features of a head, ``r``
those that carry the position. Multi-head and multi-query attention are grouped-query attention with
``g = n`` and ``g = 1``.
"""

from dataclasses import dataclass
from typing import Any, Literal

from kha_megatron.heads import HeadSizes
from kha_megatron.model.layout import Model
from kha_megatron.model.words import Arguments, integer_of, word_of

Kind = Literal["gqa", "mla", "gta", "gla"]


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


def kind_of(arguments: Arguments) -> Kind:
    """Which member of the family a command line asks for."""
    plain = "mla" if "--multi-latent-attention" in arguments else "gqa"
    return word_of(arguments, "--kha-attention") or plain


def attention_of(model: Model, arguments: Arguments) -> Attention:
    """The attention of one layer, as the command line asks for it.

    Raises:
        ConfigError: a size is no positive integer.
    """
    kind = kind_of(arguments)
    if kind == "gqa":
        return grouped_query(model)
    if kind == "gta":
        return grouped_tied(model)
    return latent(model, key=model.kv_channels, **latent_sizes(arguments))


def latent_sizes(arguments: Arguments) -> dict[str, Any]:
    """What :func:`latent` takes of the command line besides the head size, with Megatron's
    defaults.

    Raises:
        ConfigError: a size is no positive integer.
    """
    through = "--q-lora-rank" in arguments
    grouped = kind_of(arguments) == "gla"
    return {
        "query_rank": integer_of(arguments, "--q-lora-rank", 1) if through else None,
        "rank": integer_of(arguments, "--kv-lora-rank", 32),
        "position": integer_of(arguments, "--qk-pos-emb-head-dim", 64),
        "value": integer_of(arguments, "--v-head-dim", 128),
        "groups": integer_of(arguments, "--kha-latent-heads", 2) if grouped else 1,
    }


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


def latent(
    model: Model,
    *,
    query_rank: int | None,
    rank: int,
    position: int,
    key: int,
    value: int,
    groups: int = 1,
) -> Attention:
    """MLA, and GLA where ``groups`` latent heads each serve their own share of the query heads.

    Args:
        query_rank: width of the queries' latent; None projects them at once.
        rank: width of all latent heads together.
        position: rotary features, of every query head and of the one key that all heads share.
        key: features of a head that carry no position.
        value: features of a head's value.
        groups: latent heads (Zadouri et al. 2025, section 3.3.2); 1 is MLA.
    """
    d, n = model.hidden_size, model.num_attention_heads
    queries = n * (key + position)
    weights = query_rank * (d + queries) if query_rank else d * queries
    weights += d * (rank + position)
    weights += rank // groups * n * (key + value)  # each latent head for its own heads only
    weights += n * value * d
    norms = ((query_rank or 0) + rank) * model.norm_parameters
    return Attention(
        weights=weights,
        norms=norms if model.qk_layernorm else 0,
        pair=n * (key + position + value),
        cache=rank + position,
        heads=HeadSizes(query_heads=n, kv_heads=n, head_dim=key, value_dim=value),
    )


def _sizes(model: Model) -> tuple[int, int, int, int]:
    return model.hidden_size, model.num_attention_heads, model.num_query_groups, model.kv_channels


def _qk_norms(model: Model) -> int:
    return 2 * model.kv_channels * model.norm_parameters if model.qk_layernorm else 0
