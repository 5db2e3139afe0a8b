"""Which Megatron tensor is which Hugging Face tensors: the whole conversion as data.

Adding an architecture is adding rows. A tensor without a row is an error, never dropped; so is a
row without its tensor. All Hugging Face architectures that we know share these names.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kha_megatron.conversion.architecture import Architecture, Experts
from kha_megatron.conversion.attention_rows import ATTENTION
from kha_megatron.conversion.layouts import GateUp, Same, Vocabulary
from kha_megatron.conversion.rows import Row, When, hidden, is_latent, tensor_row


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


def _dense(model: Architecture, layer: int) -> bool:
    return not model.is_sparse(layer)


def _sparse(model: Architecture, layer: int) -> bool:
    return model.is_sparse(layer)


def _experts(when: Callable[[Experts], bool]) -> When:
    return lambda model, layer: model.is_sparse(layer) and when(model.experts)


EXPERT_BIAS = tensor_row(
    Same("mlp.gate.e_score_correction_bias"),
    lambda m: (m.experts.count,),
    "mlp.router.expert_bias",
    when=_experts(lambda experts: experts.bias),
)
"""Keeps float32 whatever dtype is asked for."""

SHARED_EXPERT: tuple[Row, ...] = (
    tensor_row(
        GateUp("mlp.shared_experts.{}_proj.weight"),
        lambda m: (2 * m.experts.shared_size, m.hidden_size),
        "mlp.shared_experts.linear_fc1.weight",
        when=_experts(lambda experts: experts.shared_size > 0),
    ),
    tensor_row(
        Same("mlp.shared_experts.down_proj.weight"),
        lambda m: (m.hidden_size, m.experts.shared_size),
        "mlp.shared_experts.linear_fc2.weight",
        when=_experts(lambda experts: experts.shared_size > 0),
    ),
)

MODEL: tuple[Row, ...] = (
    tensor_row(
        Vocabulary("model.embed_tokens.weight"),
        lambda m: (m.padded_vocab_size, m.hidden_size),
        "embedding.word_embeddings.weight",
    ),
    tensor_row(
        Same("model.norm.weight"),
        hidden,
        "decoder.final_layernorm.weight",
        "decoder.final_norm.weight",
    ),
    tensor_row(
        Vocabulary("lm_head.weight"),
        lambda m: (m.padded_vocab_size, m.hidden_size),
        "output_layer.weight",
        when=lambda model, layer: not model.tied,
    ),
)
"""Tensors outside of the layers."""

LAYER: tuple[Row, ...] = (
    *ATTENTION,
    tensor_row(
        Same("post_attention_layernorm.weight"),
        hidden,
        "mlp.linear_fc1.layer_norm_weight",
        "pre_mlp_layernorm.weight",
        when=lambda model, layer: _dense(model, layer) and not is_latent(model, layer),
    ),
    tensor_row(
        Same("post_attention_layernorm.weight"),
        hidden,
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        when=lambda model, layer: _sparse(model, layer) or is_latent(model, layer),
        both=True,
    ),
    tensor_row(
        GateUp("mlp.{}_proj.weight"),
        lambda m: (2 * m.ffn_size, m.hidden_size),
        "mlp.linear_fc1.weight",
        when=_dense,
    ),
    tensor_row(
        Same("mlp.down_proj.weight"),
        lambda m: (m.hidden_size, m.ffn_size),
        "mlp.linear_fc2.weight",
        when=_dense,
    ),
    tensor_row(
        Same("mlp.gate.weight"),
        lambda m: (m.experts.count, m.hidden_size),
        "mlp.router.weight",
        when=_sparse,
    ),
    EXPERT_BIAS,
    tensor_row(
        GateUp("{}_proj.weight"),
        lambda m: (2 * m.experts.size, m.hidden_size),
        "mlp.experts.experts.linear_fc1.weight",
        when=_sparse,
        per_expert=True,
    ),
    tensor_row(
        Same("down_proj.weight"),
        lambda m: (m.hidden_size, m.experts.size),
        "mlp.experts.experts.linear_fc2.weight",
        when=_sparse,
        per_expert=True,
    ),
    *SHARED_EXPERT,
    tensor_row(
        Same("mlp.shared_expert_gate.weight"),
        lambda m: (1, m.hidden_size),
        "mlp.shared_experts.gate_weight",
        when=_experts(lambda experts: experts.shared_size > 0 and experts.shared_gate),
    ),
)
"""Tensors of one decoder layer, below ``decoder.layers.{i}.`` and ``model.layers.{i}.``; those of
an expert are below ``mlp.experts.{e}.`` there, and stacked ``[E, ...]`` here."""
