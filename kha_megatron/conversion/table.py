"""Which Megatron tensor becomes which Hugging Face tensors: the whole conversion as data.

Adding an architecture is adding rows. A tensor without a row is an error, never dropped.
"""

from typing import NamedTuple

from kha_megatron.conversion.layouts import (
    Experts,
    GateUp,
    InterleavedQKV,
    Layout,
    Same,
    SharedMatrices,
    Vocabulary,
)


class Row(NamedTuple):
    """A tensor's names in Megatron checkpoints, and its layout."""

    layout: Layout
    names: tuple[str, ...]
    """Transformer Engine fuses norms into the linear layer behind them, so some have two names."""


def _row(layout: Layout, *names: str) -> Row:
    return Row(layout, names)


MODEL: tuple[Row, ...] = (
    _row(Vocabulary("model.embed_tokens.weight"), "embedding.word_embeddings.weight"),
    _row(Same("model.norm.weight"), "decoder.final_layernorm.weight"),
    _row(Vocabulary("lm_head.weight"), "output_layer.weight"),
)
"""Tensors outside of the layers."""

LAYER: tuple[Row, ...] = (
    _row(
        Same("input_layernorm.weight"),
        "self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
    ),
    _row(InterleavedQKV("self_attn.{}_proj.weight"), "self_attention.linear_qkv.weight"),
    _row(InterleavedQKV("self_attn.{}_proj.bias"), "self_attention.linear_qkv.bias"),
    _row(SharedMatrices("query"), "self_attention.knock_query.weight"),
    _row(SharedMatrices("key"), "self_attention.knock_key.weight"),
    _row(SharedMatrices("value"), "self_attention.knock_value.weight"),
    _row(Same("self_attn.q_norm.weight"), "self_attention.q_layernorm.weight"),
    _row(Same("self_attn.k_norm.weight"), "self_attention.k_layernorm.weight"),
    _row(Same("self_attn.o_proj.weight"), "self_attention.linear_proj.weight"),
    _row(
        Same("post_attention_layernorm.weight"),
        "mlp.linear_fc1.layer_norm_weight",
        "pre_mlp_layernorm.weight",
    ),
    _row(GateUp("mlp.{}_proj.weight"), "mlp.linear_fc1.weight"),
    _row(Same("mlp.down_proj.weight"), "mlp.linear_fc2.weight"),
    _row(Same("mlp.gate.weight"), "mlp.router.weight"),
    _row(Same("mlp.gate.e_score_correction_bias"), "mlp.router.expert_bias"),
    _row(
        Experts("mlp.experts.{}.", GateUp("{}_proj.weight")),
        "mlp.experts.experts.linear_fc1.weight",
    ),
    _row(
        Experts("mlp.experts.{}.", Same("down_proj.weight")),
        "mlp.experts.experts.linear_fc2.weight",
    ),
    _row(GateUp("mlp.shared_experts.{}_proj.weight"), "mlp.shared_experts.linear_fc1.weight"),
    _row(Same("mlp.shared_experts.down_proj.weight"), "mlp.shared_experts.linear_fc2.weight"),
    _row(Same("mlp.shared_expert_gate.weight"), "mlp.shared_experts.gate_weight"),
)
"""Tensors of one decoder layer, below ``decoder.layers.{i}.`` and ``model.layers.{i}.``."""

FLOAT32 = ("mlp.gate.e_score_correction_bias",)
"""Hugging Face names (of a layer) that keep float32 whatever dtype is asked for."""
