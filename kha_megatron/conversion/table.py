"""Which Megatron tensor is which Hugging Face tensors: the whole conversion as data.

Adding an architecture or a kind of attention is adding rows. A tensor without a row is an error,
never dropped; so is a row without its tensor. All Hugging Face architectures that we know share
these names. Every row says which of its tensor's rows a projection knocks; that is all that
folding needs.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from kha_megatron.checkpoint.megatron import other_names
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.packing import (
    HeadParameter,
    LatentHeads,
    Packing,
    QKVRows,
    Vocabulary,
)
from kha_megatron.heads import HeadTensor, Projection
from kha_megatron.heads.knock import PROJECTIONS

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

    packing: Packing
    names: tuple[str, ...]
    """In Megatron checkpoints. Transformer Engine fuses norms into the linear layer behind them, so
    some have two; the first is the one to write."""
    shape: Shape
    """Of the Megatron tensor."""
    when: When = lambda model, layer: True
    """Whether layer ``i`` (from 0) of a model has it."""
    both: bool = False
    """Write it under all its names: Megatron's two backends ask for different ones."""
    per_expert: bool = False
    trained: bool = True
    """Whether it is a parameter, which gradients move."""
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
        return [prefix + name for name in self.row.packing.names(model)]


def places(model: Architecture) -> Iterator[Place]:
    """Every place of a model, in the order of its layers."""
    first, *last = (Place(row) for row in MODEL if row.when(model, 0))
    yield first
    rows = (*_INTO_HEADS, *map(head_row, model.head_tensors), *_BEHIND_HEADS)
    for layer in range(model.num_layers):
        for row in rows:
            if not row.when(model, layer):
                continue
            if row.per_expert:
                yield from (Place(row, layer, expert) for expert in range(model.num_experts))
            else:
                yield Place(row, layer)
    yield from last


def _norm(name: str) -> tuple[str, ...]:
    """What a norm is called, beginning with the name to write."""
    return (name, *other_names(name))


def _latent(model: Architecture, layer: int) -> bool:
    return model.multi_latent_attention


def _grouped(model: Architecture, layer: int) -> bool:
    return not model.multi_latent_attention and not model.qkv.tied


def _compressed_queries(model: Architecture, layer: int) -> bool:
    return model.multi_latent_attention and model.q_lora_rank is not None


def _sparse(model: Architecture, layer: int) -> bool:
    return model.is_moe(layer)


def _dense(model: Architecture, layer: int) -> bool:
    return not model.is_moe(layer)


def _shared_expert(model: Architecture, layer: int) -> bool:
    return model.is_moe(layer) and bool(model.moe_shared_expert_intermediate_size)


def _hidden(model: Architecture) -> tuple[int, ...]:
    """The shape of a norm in the residual stream."""
    return (model.hidden_size,)


def _vocabulary(model: Architecture) -> tuple[int, ...]:
    return (model.padded_vocab_size, model.hidden_size)


def _query_rows(model: Architecture) -> int:
    return model.qk_head_dim + model.qk_pos_emb_head_dim


def _key_value_rows(model: Architecture) -> int:
    return model.qk_head_dim + model.v_head_dim


def _whole_heads(model: Architecture) -> list[list[Knocked]]:
    return [
        [Knocked(projection, model.kv_channels) for projection in PROJECTIONS if projection == part]
        for part in model.qkv.parts
    ]


def _latent_queries(model: Architecture) -> list[list[Knocked]]:
    return [[Knocked("query", _query_rows(model))]]


def _expanded(model: Architecture) -> list[list[Knocked]]:
    rows = _key_value_rows(model)
    heads = [Knocked("key", rows), Knocked("value", rows, start=model.qk_head_dim)]
    return [heads] * model.latent_heads


@cache
def head_row(tensor: HeadTensor) -> Row:
    """The row of a parameter of a mechanism of the heads (``heads``)."""
    return Row(HeadParameter("", tensor=tensor), (tensor.key,), lambda m: tensor.shape)


_QKV: tuple[Row, ...] = (
    Row(
        QKVRows("self_attn.{}.weight"),
        ("self_attention.linear_qkv.weight",),
        lambda m: (m.qkv.rows, m.hidden_size),
        when=lambda model, layer: not model.multi_latent_attention,
        knocked=_whole_heads,
    ),
    Row(
        QKVRows("self_attn.{}.bias"),
        ("self_attention.linear_qkv.bias",),
        lambda m: (m.qkv.rows,),
        when=lambda model, layer: model.add_qkv_bias,
        knocked=_whole_heads,
    ),
    Row(
        Packing("self_attn.k_rope_proj.weight"),
        ("self_attention.linear_k_rope.weight",),
        lambda m: (m.kv_channels // 2, m.hidden_size),
        when=lambda model, layer: model.qkv.tied,
    ),
)
"""Multi-head, multi-query and grouped-query attention, and grouped-tied attention, of which both
sides have the rotary half of a head first."""

_LATENT: tuple[Row, ...] = (
    Row(
        Packing("self_attn.q_proj.weight"),
        ("self_attention.linear_q_proj.weight",),
        lambda m: (m.num_attention_heads * _query_rows(m), m.hidden_size),
        when=lambda model, layer: model.multi_latent_attention and model.q_lora_rank is None,
        knocked=_latent_queries,
    ),
    Row(
        Packing("self_attn.q_a_proj.weight"),
        ("self_attention.linear_q_down_proj.weight",),
        lambda m: (m.q_lora_rank, m.hidden_size),
        when=_compressed_queries,
    ),
    Row(
        Packing("self_attn.q_a_layernorm.weight"),
        _norm("self_attention.linear_q_up_proj.layer_norm_weight"),
        lambda m: (m.q_lora_rank,),
        when=lambda model, layer: _compressed_queries(model, layer) and model.qk_layernorm,
        both=True,
    ),
    Row(
        Packing("self_attn.q_b_proj.weight"),
        ("self_attention.linear_q_up_proj.weight",),
        lambda m: (m.num_attention_heads * _query_rows(m), m.q_lora_rank),
        when=_compressed_queries,
        knocked=_latent_queries,
    ),
    Row(
        Packing("self_attn.kv_a_proj_with_mqa.weight"),
        ("self_attention.linear_kv_down_proj.weight",),
        lambda m: (m.kv_lora_rank + m.qk_pos_emb_head_dim, m.hidden_size),
        when=_latent,
    ),
    Row(
        Packing("self_attn.kv_a_layernorm.weight"),
        _norm("self_attention.linear_kv_up_proj.layer_norm_weight"),
        lambda m: (m.kv_lora_rank,),
        when=lambda model, layer: _latent(model, layer) and model.qk_layernorm,
        both=True,
    ),
    Row(
        LatentHeads("self_attn.kv_b_proj{}.weight"),
        ("self_attention.linear_kv_up_proj.weight",),
        lambda m: (m.num_attention_heads * _key_value_rows(m), m.kv_lora_rank // m.latent_heads),
        when=_latent,
        knocked=_expanded,
    ),
)
"""Multi-latent attention and grouped latent attention. Per head both sides hold the part without
position, then the rotary part or the value, and both rotate neighbouring features."""

ATTENTION_OUTPUT = Row(
    Packing("self_attn.o_proj.weight"),
    ("self_attention.linear_proj.weight",),
    lambda m: (m.hidden_size, m.num_attention_heads * m.kv_channels),
)

_INTO_HEADS: tuple[Row, ...] = (
    Row(
        Packing("input_layernorm.weight"),
        _norm("self_attention.linear_qkv.layer_norm_weight"),
        _hidden,
        when=_grouped,
    ),
    Row(
        Packing("input_layernorm.weight"),
        _norm("input_layernorm.weight"),
        _hidden,
        when=lambda model, layer: not _grouped(model, layer),
    ),
    *_QKV,
)
"""Tensors of one layer up to what its heads are, with the norm before it."""

EXPERT_BIAS = Row(
    Packing("mlp.gate.e_score_correction_bias"),
    ("mlp.router.expert_bias",),
    lambda m: (m.num_experts,),
    when=lambda model, layer: model.is_moe(layer) and model.moe_router_enable_expert_bias,
    trained=False,
)
"""The load of the experts moves it. Keeps float32 whatever dtype is asked for."""


def _mlp(hf: str, megatron: str, width: str, when: When, *, per_expert: bool = False) -> list[Row]:
    """The rows of a SwiGLU MLP below two prefixes, ``width`` features inside."""
    return [
        Row(
            Packing(hf + "{}_proj.weight", ("gate", "up")),
            (megatron + "linear_fc1.weight",),
            lambda m: (2 * getattr(m, width), m.hidden_size),
            when,
            per_expert=per_expert,
        ),
        Row(
            Packing(hf + "down_proj.weight"),
            (megatron + "linear_fc2.weight",),
            lambda m: (m.hidden_size, getattr(m, width)),
            when,
            per_expert=per_expert,
        ),
    ]


SHARED_EXPERT = _mlp(
    "mlp.shared_experts.",
    "mlp.shared_experts.",
    "moe_shared_expert_intermediate_size",
    _shared_expert,
)

SHARED_EXPERT_GATE = Row(
    Packing("mlp.shared_expert_gate.weight"),
    ("mlp.shared_experts.gate_weight",),
    lambda m: (1, m.hidden_size),
    when=lambda model, layer: _shared_expert(model, layer) and model.moe_shared_expert_gate,
)

OUTPUT_LAYER = Row(
    Vocabulary("lm_head.weight"),
    ("output_layer.weight",),
    _vocabulary,
    when=lambda model, layer: not model.tied_embeddings,
)

MODEL: tuple[Row, ...] = (
    Row(
        Vocabulary("model.embed_tokens.weight"), ("embedding.word_embeddings.weight",), _vocabulary
    ),
    Row(
        Packing("model.norm.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_norm.weight"),
        _hidden,
    ),
    OUTPUT_LAYER,
)
"""Tensors outside of the layers."""

_BEHIND_HEADS: tuple[Row, ...] = (
    *(
        Row(
            Packing(f"self_attn.{head}_norm.weight"),
            (f"self_attention.{head}_layernorm.weight",),
            lambda m: (m.normed_dim,),
            when=lambda model, layer: model.qk_layernorm and not model.multi_latent_attention,
        )
        for head in "qk"
    ),
    *_LATENT,
    ATTENTION_OUTPUT,
    Row(
        Packing("post_attention_layernorm.weight"),
        _norm("mlp.linear_fc1.layer_norm_weight"),
        _hidden,
        when=lambda model, layer: _dense(model, layer) and not model.multi_latent_attention,
    ),
    Row(
        Packing("post_attention_layernorm.weight"),
        _norm("pre_mlp_layernorm.weight"),
        _hidden,
        when=lambda model, layer: _sparse(model, layer) or model.multi_latent_attention,
        both=True,
    ),
    *_mlp("mlp.", "mlp.", "ffn_hidden_size", _dense),
    Row(
        Packing("mlp.gate.weight"),
        ("mlp.router.weight",),
        lambda m: (m.num_experts, m.hidden_size),
        when=_sparse,
    ),
    EXPERT_BIAS,
    *_mlp("", "mlp.experts.experts.", "moe_ffn_hidden_size", _sparse, per_expert=True),
    *SHARED_EXPERT,
    SHARED_EXPERT_GATE,
)
"""The other tensors of one decoder layer."""

LAYER = (*_INTO_HEADS, *_BEHIND_HEADS)
"""Tensors of one decoder layer, but for those of its heads' mechanisms: below
``decoder.layers.{i}.`` and ``model.layers.{i}.``; those of an expert are below
``mlp.experts.{e}.`` there, and stacked ``[E, ...]`` here."""
