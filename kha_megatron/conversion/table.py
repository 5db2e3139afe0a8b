"""The table of tensors: which Megatron tensor holds which Hugging Face tensors.

A new kind of attention or MLP is new rows. A tensor without a row, or a row without its tensor, is
an error. Splitting and joining also work on meta tensors.

Shapes: ``H`` query heads, ``G`` key/value heads, ``C`` hidden size, ``F`` features inside an MLP,
``E`` experts, ``V`` vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kha_megatron.checkpoint.megatron import other_names
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.heads import HeadTensor

Shape = Callable[[Architecture], tuple[int, ...]]
When = Callable[[Architecture, int], bool]


@dataclass(frozen=True, eq=False)
class Row:
    """One tensor of a layer, of an expert or of the whole model.

    The Hugging Face tensors of a row have one shape and lie one below the other in the Megatron
    tensor: ``[2F, C]`` of ``("gate", "up")`` is all of the gate, then all of the up projection.
    """

    hf: str
    """Hugging Face name, below ``model.layers.{i}.`` in a layer, with ``{}`` for each part."""
    names: tuple[str, ...]
    """Megatron names, below ``decoder.layers.{i}.`` in a layer. The first one is written."""
    shape: Shape
    """Shape of the Megatron tensor."""
    when: When = lambda model, layer: True
    """Whether the layer (counted from 0) has this tensor."""
    parts: tuple[str, ...] = ("",)
    both: bool = False
    """Write the tensor under all its names, because Megatron's two backends ask for different
    ones."""
    per_expert: bool = False
    trained: bool = True
    """Whether it is a parameter that gradients move."""

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        """Return the names of the Hugging Face tensors, without the prefix of a layer."""
        return tuple(self.hf.format(part) for part in self.parts)

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Return the tensors of :meth:`hf_names` from the Megatron tensor."""
        return list(tensor.chunk(len(self.hf_names(model))))

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """Return the Megatron tensor of the parts as blocks that lie one below the other."""
        return list(parts)


@dataclass(frozen=True, eq=False)
class VocabularyRow(Row):
    """``[V padded, C]``. Hugging Face has no padding; it is written as zeros."""

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Return the rows without padding."""
        return [tensor[: model.vocab_size]]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """Return the rows, and zeros below them."""
        missing = model.padded_vocab_size - parts[0].shape[0]
        padding = [parts[0].new_zeros(missing, *parts[0].shape[1:])] if missing else []
        return [parts[0], *padding]


@dataclass(frozen=True, eq=False)
class QKVRow(Row):
    """``linear_qkv``, laid out as :class:`kha_megatron.model.qkv.QKVLayout` describes."""

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        """Return one name for each part of a group."""
        return tuple(self.hf.format(part.hf) for part in model.qkv.parts.values())

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Return ``[heads * rows of one head, ...]`` for each part, without the group padding."""
        groups = tensor.unflatten(0, (model.qkv.groups, -1))
        return [groups[:, part.rows].flatten(0, 1) for part in model.qkv.parts.values()]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """Return one block: the heads interleaved again, groups padded with zeros."""
        layout = model.qkv
        blocks = [part.unflatten(0, (layout.groups, -1)) for part in parts]
        if padding := layout.padding.stop - layout.padding.start:
            zeros = blocks[0].new_zeros(layout.groups, padding, *parts[0].shape[1:])
            blocks.insert(layout.parts_before_padding, zeros)
        return [torch.cat(blocks, dim=1).flatten(0, 1)]


@dataclass(frozen=True, eq=False)
class LatentRow(Row):
    """``[H * rows, latent / c]``: up projections from ``c`` latent heads, one tensor for each.

    MLA has one latent head, and no number in its tensor's name.
    """

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        """Return one name for each latent head."""
        numbers = [""] if model.latent_heads == 1 else [f".{n}" for n in range(model.latent_heads)]
        return tuple(self.hf.format(number) for number in numbers)


@dataclass(frozen=True, eq=False)
class HeadRow(Row):
    """A parameter of a head mechanism.

    Stacked matrices ``[n, D, D]`` (``x @ W``) are one ``nn.Linear`` each on the Hugging Face side,
    so they are transposed there. A projection of the layer's input ``[heads, features, C]`` is one
    ``nn.Linear``. Everything else is the same tensor on both sides.
    """

    tensor: HeadTensor | None = None

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        """Return one name for each matrix, or one."""
        assert self.tensor is not None
        return self.tensor.hf_names

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Return each matrix transposed, or the projection with its heads flattened."""
        assert self.tensor is not None
        if self.tensor.matrices:
            return [matrix.T for matrix in tensor]
        return [tensor.flatten(0, -2) if self.tensor.reads_input else tensor]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """Return one block with the shape of the Megatron parameter."""
        assert self.tensor is not None
        if self.tensor.matrices:
            return [torch.stack([part.T for part in parts])]
        return [parts[0].view(self.tensor.shape) if self.tensor.reads_input else parts[0]]


@cache
def head_row(tensor: HeadTensor) -> HeadRow:
    """Return the row of a head mechanism's parameter."""
    return HeadRow("", (tensor.key,), lambda m: tensor.shape, tensor=tensor)


class Place(NamedTuple):
    """The tensor of one row in one layer and expert: the unit that a conversion moves."""

    row: Row
    layer: int | None = None
    expert: int | None = None

    def hf_names(self, model: Architecture) -> list[str]:
        """Return the full names of its Hugging Face tensors."""
        prefix = "" if self.layer is None else f"model.layers.{self.layer}."
        if self.expert is not None:
            prefix += f"mlp.experts.{self.expert}."
        return [prefix + name for name in self.row.hf_names(model)]


def places(model: Architecture) -> Iterator[Place]:
    """Yield every place of a model in the order of its layers."""
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
    """Return all names of a norm, the one to write first.

    Transformer Engine fuses some norms into the linear layer behind them.
    """
    return (name, *other_names(name))


def _latent(model: Architecture, layer: int) -> bool:
    return model.multi_latent_attention


def _compressed_queries(model: Architecture, layer: int) -> bool:
    return model.multi_latent_attention and model.q_lora_rank is not None


def _fused_norm(model: Architecture, layer: int) -> bool:
    """Whether Transformer Engine fuses the input norm into ``linear_qkv``."""
    return not model.multi_latent_attention and not model.qkv.tied


def _sparse(model: Architecture, layer: int) -> bool:
    return model.is_moe(layer)


def _dense(model: Architecture, layer: int) -> bool:
    return not model.is_moe(layer)


def _shared_expert(model: Architecture, layer: int) -> bool:
    return model.is_moe(layer) and bool(model.moe_shared_expert_intermediate_size)


def _hidden(model: Architecture) -> tuple[int, ...]:
    return (model.hidden_size,)


def _vocabulary(model: Architecture) -> tuple[int, ...]:
    return (model.padded_vocab_size, model.hidden_size)


def _query_rows(model: Architecture) -> int:
    return model.num_attention_heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)


_INTO_HEADS: tuple[Row, ...] = (
    Row(
        "input_layernorm.weight",
        _norm("self_attention.linear_qkv.layer_norm_weight"),
        _hidden,
        _fused_norm,
    ),
    Row(
        "input_layernorm.weight",
        _norm("input_layernorm.weight"),
        _hidden,
        lambda model, layer: not _fused_norm(model, layer),
    ),
    QKVRow(
        "self_attn.{}.weight",
        ("self_attention.linear_qkv.weight",),
        lambda m: (m.qkv.rows, m.hidden_size),
        lambda model, layer: not model.multi_latent_attention,
    ),
    QKVRow(
        "self_attn.{}.bias",
        ("self_attention.linear_qkv.bias",),
        lambda m: (m.qkv.rows,),
        lambda model, layer: model.add_qkv_bias,
    ),
    Row(
        "self_attn.k_rope_proj.weight",
        ("self_attention.linear_k_rope.weight",),
        lambda m: (m.kv_channels // 2, m.hidden_size),
        lambda model, layer: model.qkv.tied,
    ),
)
"""The input norm, and the projections of MHA, MQA, GQA and GTA. In GTA, the rotary half of a head
comes first on both sides."""

_LATENT: tuple[Row, ...] = (
    Row(
        "self_attn.q_proj.weight",
        ("self_attention.linear_q_proj.weight",),
        lambda m: (_query_rows(m), m.hidden_size),
        lambda model, layer: model.multi_latent_attention and model.q_lora_rank is None,
    ),
    Row(
        "self_attn.q_a_proj.weight",
        ("self_attention.linear_q_down_proj.weight",),
        lambda m: (m.q_lora_rank, m.hidden_size),
        _compressed_queries,
    ),
    Row(
        "self_attn.q_a_layernorm.weight",
        _norm("self_attention.linear_q_up_proj.layer_norm_weight"),
        lambda m: (m.q_lora_rank,),
        lambda model, layer: _compressed_queries(model, layer) and model.qk_layernorm,
        both=True,
    ),
    Row(
        "self_attn.q_b_proj.weight",
        ("self_attention.linear_q_up_proj.weight",),
        lambda m: (_query_rows(m), m.q_lora_rank),
        _compressed_queries,
    ),
    Row(
        "self_attn.kv_a_proj_with_mqa.weight",
        ("self_attention.linear_kv_down_proj.weight",),
        lambda m: (m.kv_lora_rank + m.qk_pos_emb_head_dim, m.hidden_size),
        _latent,
    ),
    Row(
        "self_attn.kv_a_layernorm.weight",
        _norm("self_attention.linear_kv_up_proj.layer_norm_weight"),
        lambda m: (m.kv_lora_rank,),
        lambda model, layer: model.multi_latent_attention and model.qk_layernorm,
        both=True,
    ),
    LatentRow(
        "self_attn.kv_b_proj{}.weight",
        ("self_attention.linear_kv_up_proj.weight",),
        lambda m: (
            m.num_attention_heads * (m.qk_head_dim + m.v_head_dim),
            m.kv_lora_rank // m.latent_heads,
        ),
        _latent,
    ),
)
"""MLA and GLA. In each head, both sides have the part without position first, then the rotary part
or the value, and both rotate neighbouring features."""

ATTENTION_OUTPUT = Row(
    "self_attn.o_proj.weight",
    ("self_attention.linear_proj.weight",),
    lambda m: (m.hidden_size, m.num_attention_heads * m.kv_channels),
)

EXPERT_BIAS = Row(
    "mlp.gate.e_score_correction_bias",
    ("mlp.router.expert_bias",),
    lambda m: (m.num_experts,),
    lambda model, layer: model.is_moe(layer) and model.moe_router_enable_expert_bias,
    trained=False,
)
"""Updated from the experts' load, not by gradients. Always float32."""


def _mlp(hf: str, megatron: str, width: str, when: When, *, per_expert: bool = False) -> list[Row]:
    """Return the rows of a SwiGLU MLP with ``width`` features inside."""
    return [
        Row(
            hf + "{}_proj.weight",
            (megatron + "linear_fc1.weight",),
            lambda m: (2 * getattr(m, width), m.hidden_size),
            when,
            ("gate", "up"),
            per_expert=per_expert,
        ),
        Row(
            hf + "down_proj.weight",
            (megatron + "linear_fc2.weight",),
            lambda m: (m.hidden_size, getattr(m, width)),
            when,
            per_expert=per_expert,
        ),
    ]


SHARED_EXPERT = (
    *_mlp(
        "mlp.shared_experts.",
        "mlp.shared_experts.",
        "moe_shared_expert_intermediate_size",
        _shared_expert,
    ),
    Row(
        "mlp.shared_expert_gate.weight",
        ("mlp.shared_experts.gate_weight",),
        lambda m: (1, m.hidden_size),
        lambda model, layer: _shared_expert(model, layer) and model.moe_shared_expert_gate,
    ),
)

_BEHIND_HEADS: tuple[Row, ...] = (
    *(
        Row(
            f"self_attn.{head}_norm.weight",
            (f"self_attention.{head}_layernorm.weight",),
            lambda m: (m.normed_dim,),
            lambda model, layer: model.qk_layernorm and not model.multi_latent_attention,
        )
        for head in "qk"
    ),
    *_LATENT,
    ATTENTION_OUTPUT,
    Row(
        "post_attention_layernorm.weight",
        _norm("mlp.linear_fc1.layer_norm_weight"),
        _hidden,
        lambda model, layer: _dense(model, layer) and not model.multi_latent_attention,
    ),
    Row(
        "post_attention_layernorm.weight",
        _norm("pre_mlp_layernorm.weight"),
        _hidden,
        lambda model, layer: _sparse(model, layer) or model.multi_latent_attention,
        both=True,
    ),
    *_mlp("mlp.", "mlp.", "ffn_hidden_size", _dense),
    Row(
        "mlp.gate.weight",
        ("mlp.router.weight",),
        lambda m: (m.num_experts, m.hidden_size),
        _sparse,
    ),
    EXPERT_BIAS,
    *_mlp("", "mlp.experts.experts.", "moe_ffn_hidden_size", _sparse, per_expert=True),
    *SHARED_EXPERT,
)

LAYER = (*_INTO_HEADS, *_BEHIND_HEADS)
"""Rows of one decoder layer without head mechanisms. Experts are below ``mlp.experts.{e}.`` in
Hugging Face and stacked as ``[E, ...]`` in Megatron."""

OUTPUT_LAYER = VocabularyRow(
    "lm_head.weight",
    ("output_layer.weight",),
    _vocabulary,
    lambda model, layer: not model.tied_embeddings,
)

MODEL: tuple[Row, ...] = (
    VocabularyRow("model.embed_tokens.weight", ("embedding.word_embeddings.weight",), _vocabulary),
    Row(
        "model.norm.weight",
        ("decoder.final_layernorm.weight", "decoder.final_norm.weight"),
        _hidden,
    ),
    OUTPUT_LAYER,
)
"""Rows outside the layers."""
