"""The rows of the attention, of each kind of the family: adding a kind is adding rows.

Every row says which of its tensor's rows a projection knocks; that is all that folding needs.
"""

from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.layouts import InterleavedHeads, LatentHeads, Same, SharedMatrices
from kha_megatron.conversion.rows import Knocked, KnockedRows, Row, hidden, is_latent, tensor_row
from kha_megatron.heads import Projection
from kha_megatron.heads.knock import MATRICES


def _grouped(model: Architecture, layer: int) -> bool:
    return not (is_latent(model, layer) or _tied(model, layer))


def _tied(model: Architecture, layer: int) -> bool:
    return model.is_tied


def _compressed_queries(model: Architecture, layer: int) -> bool:
    return is_latent(model, layer) and model.latent.query_rank is not None


def _normed_heads(model: Architecture, layer: int) -> bool:
    return model.qk_norm and not is_latent(model, layer)


def _qkv(model: Architecture) -> int:
    return (model.heads + 2 * model.kv_heads) * model.head_dim


def _whole_heads(*projections: Projection) -> KnockedRows:
    return lambda m: [[Knocked(projection, m.head_dim)] for projection in projections]


def _query_rows(model: Architecture) -> int:
    return model.latent.plain_dim + model.latent.rotary_dim


def _key_value_rows(model: Architecture) -> int:
    return model.latent.plain_dim + model.latent.value_dim


def _expanded(model: Architecture) -> list[list[Knocked]]:
    rows = _key_value_rows(model)
    heads = [Knocked("key", rows), Knocked("value", rows, start=model.latent.plain_dim)]
    return [heads] * model.latent_heads


def _knock(projection: Projection) -> Row:
    return tensor_row(
        SharedMatrices(projection),
        lambda m: (len(MATRICES[m.kha.variants[projection]]), *[m.knocked_dim(projection)] * 2),
        f"self_attention.knock_{projection}.weight",
        when=lambda model, layer: projection in model.kha.variants,
    )


KNOCKS: dict[Projection, Row] = {p: _knock(p) for p in ("query", "key", "value")}
"""The head-shared matrices."""

_GROUPED: tuple[Row, ...] = (
    tensor_row(
        InterleavedHeads("self_attn.{}_proj.weight"),
        lambda m: (_qkv(m), m.hidden_size),
        "self_attention.linear_qkv.weight",
        when=_grouped,
        knocked=_whole_heads("query", "key", "value"),
    ),
    tensor_row(
        InterleavedHeads("self_attn.{}_proj.bias"),
        lambda m: (_qkv(m),),
        "self_attention.linear_qkv.bias",
        when=lambda model, layer: model.qkv_bias,
        knocked=_whole_heads("query", "key", "value"),
    ),
)
"""Multi-head, multi-query and grouped-query attention."""

_TIED: tuple[Row, ...] = (
    tensor_row(
        InterleavedHeads("self_attn.{}_proj.weight", ("q", "kv")),
        lambda m: ((m.heads + m.kv_heads) * m.head_dim, m.hidden_size),
        "self_attention.linear_qkv.weight",
        when=_tied,
        knocked=_whole_heads("query", "value"),
    ),
    tensor_row(
        Same("self_attn.k_rope_proj.weight"),
        lambda m: (m.head_dim // 2, m.hidden_size),
        "self_attention.linear_k_rope.weight",
        when=_tied,
    ),
)
"""Grouped-tied attention. Both sides have the rotary half of a head first."""

_LATENT: tuple[Row, ...] = (
    tensor_row(
        Same("self_attn.q_proj.weight"),
        lambda m: (m.heads * _query_rows(m), m.hidden_size),
        "self_attention.linear_q_proj.weight",
        when=lambda model, layer: is_latent(model, layer) and model.latent.query_rank is None,
        knocked=lambda m: [[Knocked("query", _query_rows(m))]],
    ),
    tensor_row(
        Same("self_attn.q_a_proj.weight"),
        lambda m: (m.latent.query_rank, m.hidden_size),
        "self_attention.linear_q_down_proj.weight",
        when=_compressed_queries,
    ),
    tensor_row(
        Same("self_attn.q_a_layernorm.weight"),
        lambda m: (m.latent.query_rank,),
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.q_layernorm.weight",
        when=lambda model, layer: _compressed_queries(model, layer) and model.qk_norm,
        both=True,
    ),
    tensor_row(
        Same("self_attn.q_b_proj.weight"),
        lambda m: (m.heads * _query_rows(m), m.latent.query_rank),
        "self_attention.linear_q_up_proj.weight",
        when=_compressed_queries,
        knocked=lambda m: [[Knocked("query", _query_rows(m))]],
    ),
    tensor_row(
        Same("self_attn.kv_a_proj_with_mqa.weight"),
        lambda m: (m.latent.kv_rank + m.latent.rotary_dim, m.hidden_size),
        "self_attention.linear_kv_down_proj.weight",
        when=is_latent,
    ),
    tensor_row(
        Same("self_attn.kv_a_layernorm.weight"),
        lambda m: (m.latent.kv_rank,),
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight",
        when=lambda model, layer: is_latent(model, layer) and model.qk_norm,
        both=True,
    ),
    tensor_row(
        LatentHeads("self_attn.kv_b_proj{}.weight"),
        lambda m: (m.heads * _key_value_rows(m), m.latent.kv_rank // m.latent_heads),
        "self_attention.linear_kv_up_proj.weight",
        when=is_latent,
        knocked=_expanded,
    ),
)
"""Multi-latent attention and grouped latent attention. Per head both sides hold the part without
position, then the rotary part or the value, and both rotate neighbouring features."""

ATTENTION_OUTPUT = tensor_row(
    Same("self_attn.o_proj.weight"),
    lambda m: (m.hidden_size, m.heads * (m.latent.value_dim if m.latent else m.head_dim)),
    "self_attention.linear_proj.weight",
)

ATTENTION: tuple[Row, ...] = (
    tensor_row(
        Same("input_layernorm.weight"),
        hidden,
        "self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
        when=_grouped,
    ),
    tensor_row(
        Same("input_layernorm.weight"),
        hidden,
        "input_layernorm.weight",
        "self_attention.linear_qkv_down_proj.layer_norm_weight",
        when=lambda model, layer: not _grouped(model, layer),
    ),
    *_GROUPED,
    *_TIED,
    *KNOCKS.values(),
    tensor_row(
        Same("self_attn.q_norm.weight"),
        lambda m: (m.head_dim,),
        "self_attention.q_layernorm.weight",
        when=_normed_heads,
    ),
    tensor_row(
        Same("self_attn.k_norm.weight"),
        lambda m: (m.head_dim,),
        "self_attention.k_layernorm.weight",
        when=_normed_heads,
    ),
    *_LATENT,
    ATTENTION_OUTPUT,
)
"""Tensors of one layer's attention, with the norm before it."""
