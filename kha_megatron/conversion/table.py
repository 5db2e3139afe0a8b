"""Which Megatron tensor becomes which Hugging Face tensors: the whole conversion as data.

Adding an architecture is adding rows. A tensor without a row is an error, never dropped; so is a
row without its tensor.
"""

from collections.abc import Callable
from typing import NamedTuple

from kha_megatron.config import Projection
from kha_megatron.conversion.layouts import (
    Experts,
    GateUp,
    InterleavedQKV,
    Layout,
    Same,
    SharedMatrices,
    Vocabulary,
)
from kha_megatron.hf import KHAModelConfig

When = Callable[[KHAModelConfig, int], bool]


class Row(NamedTuple):
    """A tensor's names in Megatron checkpoints, its layout, and which layers have it."""

    layout: Layout
    names: tuple[str, ...]
    """Transformer Engine fuses norms into the linear layer behind them, so some have two names."""
    when: When
    """Whether layer ``i`` (from 0) of a model with this configuration has it."""


def _row(layout: Layout, *names: str, when: When = lambda config, layer: True) -> Row:
    return Row(layout, names, when)


def _knock(projection: Projection) -> Row:
    return _row(
        SharedMatrices(projection),
        f"self_attention.knock_{projection}.weight",
        when=lambda config, layer: projection in config.kha.variants,
    )


def _qk_norm(config: KHAModelConfig, layer: int) -> bool:
    return config.use_qk_norm


def _dense(config: KHAModelConfig, layer: int) -> bool:
    return config.mlp_layer_types[layer] == "dense"


def _sparse(config: KHAModelConfig, layer: int) -> bool:
    return not _dense(config, layer)


def _shared(config: KHAModelConfig, layer: int) -> bool:
    return _sparse(config, layer) and config.shared_expert_intermediate_size > 0


MODEL: tuple[Row, ...] = (
    _row(Vocabulary("model.embed_tokens.weight"), "embedding.word_embeddings.weight"),
    _row(Same("model.norm.weight"), "decoder.final_layernorm.weight"),
    _row(
        Vocabulary("lm_head.weight"),
        "output_layer.weight",
        when=lambda config, layer: not config.tie_word_embeddings,
    ),
)
"""Tensors outside of the layers."""

EXPERT_BIAS = _row(
    Same("mlp.gate.e_score_correction_bias"),
    "mlp.router.expert_bias",
    when=lambda config, layer: _sparse(config, layer) and config.scoring_func == "sigmoid",
)
"""Zeros where Megatron trained without: the architecture has it for every sigmoid router."""

LAYER: tuple[Row, ...] = (
    _row(
        Same("input_layernorm.weight"),
        "self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
    ),
    _row(InterleavedQKV("self_attn.{}_proj.weight"), "self_attention.linear_qkv.weight"),
    _row(
        InterleavedQKV("self_attn.{}_proj.bias"),
        "self_attention.linear_qkv.bias",
        when=lambda config, layer: config.attention_bias,
    ),
    _knock("query"),
    _knock("key"),
    _knock("value"),
    _row(Same("self_attn.q_norm.weight"), "self_attention.q_layernorm.weight", when=_qk_norm),
    _row(Same("self_attn.k_norm.weight"), "self_attention.k_layernorm.weight", when=_qk_norm),
    _row(Same("self_attn.o_proj.weight"), "self_attention.linear_proj.weight"),
    _row(
        Same("post_attention_layernorm.weight"),
        "mlp.linear_fc1.layer_norm_weight",
        "pre_mlp_layernorm.weight",
    ),
    _row(GateUp("mlp.{}_proj.weight"), "mlp.linear_fc1.weight", when=_dense),
    _row(Same("mlp.down_proj.weight"), "mlp.linear_fc2.weight", when=_dense),
    _row(Same("mlp.gate.weight"), "mlp.router.weight", when=_sparse),
    EXPERT_BIAS,
    _row(
        Experts("mlp.experts.{}.", GateUp("{}_proj.weight")),
        "mlp.experts.experts.linear_fc1.weight",
        when=_sparse,
    ),
    _row(
        Experts("mlp.experts.{}.", Same("down_proj.weight")),
        "mlp.experts.experts.linear_fc2.weight",
        when=_sparse,
    ),
    _row(
        GateUp("mlp.shared_experts.{}_proj.weight"),
        "mlp.shared_experts.linear_fc1.weight",
        when=_shared,
    ),
    _row(
        Same("mlp.shared_experts.down_proj.weight"),
        "mlp.shared_experts.linear_fc2.weight",
        when=_shared,
    ),
    _row(
        Same("mlp.shared_expert_gate.weight"),
        "mlp.shared_experts.gate_weight",
        when=lambda config, layer: _shared(config, layer) and config.shared_expert_gate,
    ),
)
"""Tensors of one decoder layer, below ``decoder.layers.{i}.`` and ``model.layers.{i}.``."""

FLOAT32 = ("mlp.gate.e_score_correction_bias",)
"""Hugging Face names (of a layer) that keep float32 whatever dtype is asked for."""
