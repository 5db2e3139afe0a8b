"""Mapping between Megatron and Hugging Face tensors.

If you want to support a new type of attention or MLP, add its tensors here.
"""

import re
from collections.abc import Iterator, Mapping

from kha_megatron.checkpoint.megatron import LAYERS, other_names
from kha_megatron.checkpoint.torch_dist import StoredTensor
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.rows import (
    EMBEDDING,
    LM_HEAD,
    LatentRow,
    QKVRow,
    Row,
    TensorSlot,
    VocabularyRow,
    When,
    head_row,
)

FINAL_NORM, _HYBRID_NORM = "decoder.final_layernorm.weight", "decoder.final_norm.weight"
_SINGLE = re.compile(re.escape(LAYERS) + r"(\d+)\.(.+)")
_PREDICTIONS = "mtp.layers."
_IN_ATTENTION = ("self_attention.", "input_layernorm.")


def megatron_name(name: str, layer: int | None, model: Architecture) -> str:
    """Return the checkpoint key of a tensor that is not stacked."""
    if layer is None:
        return _HYBRID_NORM if name == FINAL_NORM and not model.gpt_model else name
    if (number := layer - model.num_layers) < 0:
        return f"{LAYERS}{_layer_index(name, layer, model)}.{name}"
    part = "transformer_layer."
    if name.partition(".")[0] in ("enorm", "hnorm", "eh_proj", "final_layernorm"):
        part = ""
    elif not model.gpt_model:
        part = f"mtp_model_layer.layers.{_layer_index(name, 0, model)}."
    return f"{_PREDICTIONS}{number}.{part}{name}"


def _layer_index(name: str, layer: int, model: Architecture) -> int:
    """HybridModel counts attention and MLP as separate layers."""
    return layer if model.gpt_model else 2 * layer + (not name.startswith(_IN_ATTENTION))


def tensor_slots(model: Architecture) -> Iterator[TensorSlot]:
    """Yield all slots: embedding, layers (MTP layers are last), final norm and LM head."""
    first, *last = (TensorSlot(row) for row in MODEL if row.when(model, 0))
    yield first
    rows = (*_BEFORE_HEADS, *map(head_row, model.head_tensors), *_AFTER_HEADS)
    for layer in range(model.num_layers + model.predictions):
        for row in (*PREDICTION, *rows) if layer >= model.num_layers else rows:
            if not row.when(model, layer):
                continue
            if row.per_expert:
                yield from (TensorSlot(row, layer, expert) for expert in range(model.num_experts))
            else:
                yield TensorSlot(row, layer)
    yield from last


def _norm(name: str) -> tuple[str, ...]:
    """All names of a norm (Transformer Engine may fuse it into the next linear layer)."""
    return (name, *other_names(name))


def _latent(model: Architecture, layer: int) -> bool:
    return model.multi_latent_attention


def _compressed_queries(model: Architecture, layer: int) -> bool:
    return model.multi_latent_attention and model.q_lora_rank is not None


def _fused_norm(model: Architecture, layer: int) -> bool:
    """True if Transformer Engine fuses the input norm into ``linear_qkv``."""
    return not model.multi_latent_attention and not model.qkv.tied


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


_BEFORE_HEADS: tuple[Row, ...] = (
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
"""Input norm, and projections of MHA, MQA, GQA and GTA. Note that each GTA head starts with its
rotary half, both in Megatron and HF."""

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
"""MLA and GLA. Both formats use the same order within a head: features without position first, then
rotary or value features. RoPE is interleaved, i.e. it rotates adjacent features."""

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
"""Always float32. Megatron updates it based on expert load instead of gradients."""


def _mlp(hf: str, megatron: str, width: str, when: When, *, per_expert: bool = False) -> list[Row]:
    """SwiGLU MLP. ``width`` is the name of the field with its FFN hidden size."""
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

_AFTER_HEADS: tuple[Row, ...] = (
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
        lambda model, layer: model.is_moe(layer) or model.multi_latent_attention,
        both=True,
    ),
    *_mlp("mlp.", "mlp.", "ffn_hidden_size", _dense),
    Row(
        "mlp.gate.weight",
        ("mlp.router.weight",),
        lambda m: (m.num_experts, m.hidden_size),
        Architecture.is_moe,
    ),
    EXPERT_BIAS,
    *_mlp("", "mlp.experts.experts.", "moe_ffn_hidden_size", Architecture.is_moe, per_expert=True),
    *SHARED_EXPERT,
)


EH_PROJ = Row("eh_proj.weight", ("eh_proj.weight",), lambda m: (m.hidden_size, 2 * m.hidden_size))
PREDICTION: tuple[Row, ...] = (
    Row("enorm.weight", ("enorm.weight",), _hidden),
    Row("hnorm.weight", ("hnorm.weight",), _hidden),
    EH_PROJ,
    Row("shared_head.norm.weight", ("final_layernorm.weight",), _hidden),
)
"""Additional tensors of MTP layers. In both formats, the input of ``eh_proj`` is the normalized
embedding of the next token, followed by the normalized hidden state."""

OUTPUT_LAYER = VocabularyRow(
    LM_HEAD, ("output_layer.weight",), _vocabulary, lambda model, layer: not model.tied_embeddings
)

MODEL: tuple[Row, ...] = (
    VocabularyRow(EMBEDDING, ("embedding.word_embeddings.weight",), _vocabulary),
    Row("model.norm.weight", (FINAL_NORM, _HYBRID_NORM), _hidden),
    OUTPUT_LAYER,
)
"""Tensors outside of the decoder layers."""


Location = tuple[str, tuple[int, ...]]
"""Checkpoint key, plus an index such as ``(layer, expert)`` if tensors are stacked."""


_Position = tuple[int | None, str]
"""Index of a decoder layer, and the name of a tensor in it. The index is None for all others."""


def locate_tensors(
    infos: Mapping[str, StoredTensor], model: Architecture
) -> tuple[dict[TensorSlot, Location], list[str], list[str]]:
    """Find out where each slot is stored in a Megatron checkpoint.

    Layers may be stored separately (``decoder.layers.0.``) or stacked.

    Returns:
        Locations by slot, unexpected tensor names, and missing tensor names.
    """
    stored: dict[_Position, Location] = {}
    for key, info in infos.items():
        if match := _SINGLE.fullmatch(key):
            stored[int(match[1]), match[2]] = (key, ())
        elif key.startswith(LAYERS) and info.shape:
            name = key.removeprefix(LAYERS)
            for layer in range(info.shape[0]):
                stored[layer, name] = (key, (layer,))
        else:
            stored[None, key] = (key, ())
    locations: dict[TensorSlot, Location] = {}
    used: set[_Position] = set()
    missing: list[str] = []
    for slot in tensor_slots(model):
        possible = [_position(name, slot.layer, model) for name in slot.row.names]
        present = [position for position in possible if position in stored]
        used.update(present)
        if not present:
            missing.append(_full_name(possible[0]))
            continue
        key, index = stored[present[0]]
        if slot.expert is not None:
            index = (*index, slot.expert)
        locations[slot] = (key, index)
    unexpected = [_full_name(position) for position in stored.keys() - used]
    return locations, unexpected, missing


def _position(name: str, layer: int | None, model: Architecture) -> _Position:
    if layer is None:
        return None, name
    if layer >= model.num_layers:  # for multi-token prediction
        return None, megatron_name(name, layer, model)
    return _layer_index(name, layer, model), name


def _full_name(position: _Position) -> str:
    layer, name = position
    return name if layer is None else f"{LAYERS}{layer}.{name}"
