"""Which Megatron tensor is which Hugging Face tensors: the whole conversion as data.

Adding an architecture is adding rows. A tensor without a row is an error, never dropped; so is a
row without its tensor. All Hugging Face architectures that we know share these names.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kha_megatron.config import MATRICES, Projection
from kha_megatron.conversion.architecture import Architecture, Experts
from kha_megatron.conversion.layouts import (
    GateUp,
    InterleavedHeads,
    LatentHeads,
    Layout,
    Same,
    SharedMatrices,
    Vocabulary,
)

Shape = Callable[[Architecture], tuple[int, ...]]
When = Callable[[Architecture, int], bool]


class Knocked(NamedTuple):
    """What a projection knocks of a tensor's rows: ``knocked_dim`` of each head's, from ``start``.

    A linear knock folds into them.
    """

    projection: Projection
    head_rows: int
    start: int = 0


KnockedRows = Callable[[Architecture], Sequence[Sequence[Knocked]]]


class Row(NamedTuple):
    """A tensor of one layer, or of one expert, or of the model as a whole."""

    layout: Layout
    shape: Shape
    """Of the Megatron tensor."""
    names: tuple[str, ...]
    """In Megatron checkpoints. Transformer Engine fuses norms into the linear layer behind them, so
    some have two; the first is the one to write."""
    when: When
    """Whether layer ``i`` (from 0) of a model has it."""
    both: bool = False
    """Write it under all its names: Megatron's two backends ask for different ones."""
    per_expert: bool = False
    knocked: KnockedRows = lambda model: ()
    """For each of its Hugging Face tensors, what knocks it."""


class Place(NamedTuple):
    """One row's tensor somewhere in a model: the unit that a conversion moves."""

    row: Row
    layer: int | None = None
    expert: int | None = None

    def hf_names(self, model: Architecture) -> list[str]:
        """Full names of its Hugging Face tensors."""
        prefix = "" if self.layer is None else f"model.layers.{self.layer}."
        if self.expert is not None:
            prefix += f"mlp.experts.{self.expert}."
        return [prefix + name for name in self.row.layout.names(model)]


def places(model: Architecture) -> Iterator[Place]:
    """Every place of a model, in the order of its layers."""
    first, *last = (Place(row) for row in MODEL if row.when(model, 0))
    yield first
    for layer in range(model.layers):
        for row in LAYER:
            if not row.when(model, layer):
                continue
            if row.per_expert:
                yield from (Place(row, layer, expert) for expert in range(model.experts.count))
            else:
                yield Place(row, layer)
    yield from last


def _row(
    layout: Layout,
    shape: Shape,
    *names: str,
    when: When = lambda model, layer: True,
    both: bool = False,
    per_expert: bool = False,
    knocked: KnockedRows = lambda model: (),
) -> Row:
    return Row(layout, shape, names, when, both, per_expert, knocked)


def _dense(model: Architecture, layer: int) -> bool:
    return not model.is_sparse(layer)


def _sparse(model: Architecture, layer: int) -> bool:
    return model.is_sparse(layer)


def _experts(when: Callable[[Experts], bool]) -> When:
    return lambda model, layer: model.is_sparse(layer) and when(model.experts)


def _grouped(model: Architecture, layer: int) -> bool:
    return not (_latent(model, layer) or _tied(model, layer))


def _tied(model: Architecture, layer: int) -> bool:
    return model.is_tied


def _latent(model: Architecture, layer: int) -> bool:
    return model.latent is not None


def _compressed_queries(model: Architecture, layer: int) -> bool:
    return _latent(model, layer) and model.latent.query_rank is not None


def _normed_heads(model: Architecture, layer: int) -> bool:
    return model.qk_norm and not _latent(model, layer)


def _hidden(model: Architecture) -> tuple[int, ...]:
    return (model.hidden_size,)


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
    return _row(
        SharedMatrices(projection),
        lambda m: (len(MATRICES[m.kha.variants[projection]]), *[m.knocked_dim(projection)] * 2),
        f"self_attention.knock_{projection}.weight",
        when=lambda model, layer: projection in model.kha.variants,
    )


KNOCKS: dict[Projection, Row] = {p: _knock(p) for p in ("query", "key", "value")}
"""The head-shared matrices."""

_GROUPED: tuple[Row, ...] = (
    _row(
        InterleavedHeads("self_attn.{}_proj.weight"),
        lambda m: (_qkv(m), m.hidden_size),
        "self_attention.linear_qkv.weight",
        when=_grouped,
        knocked=_whole_heads("query", "key", "value"),
    ),
    _row(
        InterleavedHeads("self_attn.{}_proj.bias"),
        lambda m: (_qkv(m),),
        "self_attention.linear_qkv.bias",
        when=lambda model, layer: model.qkv_bias,
        knocked=_whole_heads("query", "key", "value"),
    ),
)
"""Multi-head, multi-query and grouped-query attention."""

_TIED: tuple[Row, ...] = (
    _row(
        InterleavedHeads("self_attn.{}_proj.weight", ("q", "kv")),
        lambda m: ((m.heads + m.kv_heads) * m.head_dim, m.hidden_size),
        "self_attention.linear_qkv.weight",
        when=_tied,
        knocked=_whole_heads("query", "value"),
    ),
    _row(
        Same("self_attn.k_rope_proj.weight"),
        lambda m: (m.head_dim // 2, m.hidden_size),
        "self_attention.linear_k_rope.weight",
        when=_tied,
    ),
)
"""Grouped-tied attention. Both sides have the rotary half of a head first."""

_LATENT: tuple[Row, ...] = (
    _row(
        Same("self_attn.q_proj.weight"),
        lambda m: (m.heads * _query_rows(m), m.hidden_size),
        "self_attention.linear_q_proj.weight",
        when=lambda model, layer: _latent(model, layer) and model.latent.query_rank is None,
        knocked=lambda m: [[Knocked("query", _query_rows(m))]],
    ),
    _row(
        Same("self_attn.q_a_proj.weight"),
        lambda m: (m.latent.query_rank, m.hidden_size),
        "self_attention.linear_q_down_proj.weight",
        when=_compressed_queries,
    ),
    _row(
        Same("self_attn.q_a_layernorm.weight"),
        lambda m: (m.latent.query_rank,),
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.q_layernorm.weight",
        when=lambda model, layer: _compressed_queries(model, layer) and model.qk_norm,
        both=True,
    ),
    _row(
        Same("self_attn.q_b_proj.weight"),
        lambda m: (m.heads * _query_rows(m), m.latent.query_rank),
        "self_attention.linear_q_up_proj.weight",
        when=_compressed_queries,
        knocked=lambda m: [[Knocked("query", _query_rows(m))]],
    ),
    _row(
        Same("self_attn.kv_a_proj_with_mqa.weight"),
        lambda m: (m.latent.kv_rank + m.latent.rotary_dim, m.hidden_size),
        "self_attention.linear_kv_down_proj.weight",
        when=_latent,
    ),
    _row(
        Same("self_attn.kv_a_layernorm.weight"),
        lambda m: (m.latent.kv_rank,),
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight",
        when=lambda model, layer: _latent(model, layer) and model.qk_norm,
        both=True,
    ),
    _row(
        LatentHeads("self_attn.kv_b_proj{}.weight"),
        lambda m: (m.heads * _key_value_rows(m), m.latent.kv_rank // m.latent_heads),
        "self_attention.linear_kv_up_proj.weight",
        when=_latent,
        knocked=_expanded,
    ),
)
"""Multi-latent attention and grouped latent attention. Per head both sides hold the part without
position, then the rotary part or the value, and both rotate neighbouring features."""

ATTENTION_OUTPUT = _row(
    Same("self_attn.o_proj.weight"),
    lambda m: (m.hidden_size, m.heads * (m.latent.value_dim if m.latent else m.head_dim)),
    "self_attention.linear_proj.weight",
)

EXPERT_BIAS = _row(
    Same("mlp.gate.e_score_correction_bias"),
    lambda m: (m.experts.count,),
    "mlp.router.expert_bias",
    when=_experts(lambda experts: experts.bias),
)
"""Keeps float32 whatever dtype is asked for."""

SHARED_EXPERT: tuple[Row, ...] = (
    _row(
        GateUp("mlp.shared_experts.{}_proj.weight"),
        lambda m: (2 * m.experts.shared_size, m.hidden_size),
        "mlp.shared_experts.linear_fc1.weight",
        when=_experts(lambda experts: experts.shared_size > 0),
    ),
    _row(
        Same("mlp.shared_experts.down_proj.weight"),
        lambda m: (m.hidden_size, m.experts.shared_size),
        "mlp.shared_experts.linear_fc2.weight",
        when=_experts(lambda experts: experts.shared_size > 0),
    ),
)

MODEL: tuple[Row, ...] = (
    _row(
        Vocabulary("model.embed_tokens.weight"),
        lambda m: (m.padded_vocab_size, m.hidden_size),
        "embedding.word_embeddings.weight",
    ),
    _row(
        Same("model.norm.weight"),
        _hidden,
        "decoder.final_layernorm.weight",
        "decoder.final_norm.weight",
    ),
    _row(
        Vocabulary("lm_head.weight"),
        lambda m: (m.padded_vocab_size, m.hidden_size),
        "output_layer.weight",
        when=lambda model, layer: not model.tied,
    ),
)
"""Tensors outside of the layers."""

LAYER: tuple[Row, ...] = (
    _row(
        Same("input_layernorm.weight"),
        _hidden,
        "self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
        when=_grouped,
    ),
    _row(
        Same("input_layernorm.weight"),
        _hidden,
        "input_layernorm.weight",
        "self_attention.linear_qkv_down_proj.layer_norm_weight",
        when=lambda model, layer: not _grouped(model, layer),
    ),
    *_GROUPED,
    *_TIED,
    *KNOCKS.values(),
    _row(
        Same("self_attn.q_norm.weight"),
        lambda m: (m.head_dim,),
        "self_attention.q_layernorm.weight",
        when=_normed_heads,
    ),
    _row(
        Same("self_attn.k_norm.weight"),
        lambda m: (m.head_dim,),
        "self_attention.k_layernorm.weight",
        when=_normed_heads,
    ),
    *_LATENT,
    ATTENTION_OUTPUT,
    _row(
        Same("post_attention_layernorm.weight"),
        _hidden,
        "mlp.linear_fc1.layer_norm_weight",
        "pre_mlp_layernorm.weight",
        when=lambda model, layer: _dense(model, layer) and not _latent(model, layer),
    ),
    _row(
        Same("post_attention_layernorm.weight"),
        _hidden,
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        when=lambda model, layer: _sparse(model, layer) or _latent(model, layer),
        both=True,
    ),
    _row(
        GateUp("mlp.{}_proj.weight"),
        lambda m: (2 * m.ffn_size, m.hidden_size),
        "mlp.linear_fc1.weight",
        when=_dense,
    ),
    _row(
        Same("mlp.down_proj.weight"),
        lambda m: (m.hidden_size, m.ffn_size),
        "mlp.linear_fc2.weight",
        when=_dense,
    ),
    _row(
        Same("mlp.gate.weight"),
        lambda m: (m.experts.count, m.hidden_size),
        "mlp.router.weight",
        when=_sparse,
    ),
    EXPERT_BIAS,
    _row(
        GateUp("{}_proj.weight"),
        lambda m: (2 * m.experts.size, m.hidden_size),
        "mlp.experts.experts.linear_fc1.weight",
        when=_sparse,
        per_expert=True,
    ),
    _row(
        Same("down_proj.weight"),
        lambda m: (m.hidden_size, m.experts.size),
        "mlp.experts.experts.linear_fc2.weight",
        when=_sparse,
        per_expert=True,
    ),
    *SHARED_EXPERT,
    _row(
        Same("mlp.shared_expert_gate.weight"),
        lambda m: (1, m.hidden_size),
        "mlp.shared_experts.gate_weight",
        when=_experts(lambda experts: experts.shared_size > 0 and experts.shared_gate),
    ),
)
"""Tensors of one decoder layer, below ``decoder.layers.{i}.`` and ``model.layers.{i}.``; those of
an expert are below ``mlp.experts.{e}.`` there, and stacked ``[E, ...]`` here."""
