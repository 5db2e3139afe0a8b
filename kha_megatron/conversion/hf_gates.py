"""Architectures with a gate on what attention gives: what they say of it in ``config.json``.

Stock classes of transformers with full attention in every layer, and the layout in which the
authors of gated attention published their models (github.com/qiuzh20/gated_attention).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, Qwen3Config

from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.dialects import Dialect
from kha_megatron.heads import Gate

ELEMENT = Gate(output="element")
"""Megatron's ``--attention-output-gate``."""
HEAD = Gate(output="head")


class OutputGate(NamedTuple):
    """Which gates an architecture can have, and which its configuration says that it has."""

    fields: Mapping[str, Gate] = {}
    """Configuration fields that are true where there is that gate; none where it always has it."""
    always: Gate | None = None
    """The one that no field speaks of."""

    @property
    def known(self) -> tuple[Gate | None, ...]:
        """All of which it can have one, None among them where it can do without."""
        return (*self.fields.values(), self.always)

    def of(self, config: PreTrainedConfig) -> Gate | None:
        """The one that a configuration asks for."""
        asked = (gate for name, gate in self.fields.items() if getattr(config, name))
        return next(asked, self.always)

    def to(self, gate: Gate | None) -> dict[str, bool]:
        """The configuration fields of a model."""
        return {name: gate == its for name, its in self.fields.items()}


@strict
class PublishedConfig(Qwen3Config):
    """The authors' configuration, whose ``model_type`` is ``qwen3`` too."""

    elementwise_attn_output_gate: bool = False
    headwise_attn_output_gate: bool = False
    use_qk_norm: bool = True
    qkv_bias: bool = False
    """Biases of all four projections."""


PUBLISHED = OutputGate({"headwise_attn_output_gate": HEAD, "elementwise_attn_output_gate": ELEMENT})

QWEN3_NEXT = Dialect(
    {"mlp.shared_experts.": "mlp.shared_expert."}, gate_beside="head", norms_minus_one=True
)
"""Of ``qwen3_5`` and ``qwen3_5_moe`` as well."""
LFM3 = Dialect(
    {
        "self_attn.gate_output.": "self_attn.gate_proj.",
        "input_layernorm.": "operator_norm.",
        "post_attention_layernorm.": "ffn_norm.",
        "mlp.gate_proj.": "feed_forward.w1.",
        "mlp.up_proj.": "feed_forward.w3.",
        "mlp.down_proj.": "feed_forward.w2.",
        "model.norm.": "model.embedding_norm.",
    }
)


def all_attend(model: Architecture) -> dict[str, Any]:
    """``layer_types`` of a model without recurrent layers."""
    return {"layer_types": ["full_attention"] * model.num_layers}


def of_lfm3(model: Architecture) -> dict[str, Any]:
    """Its further fields: no recurrent layers, and no token ids of its own vocabulary."""
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return all_attend(model) | {"sliding_window": None} | ids


def with_sections(rope: dict[str, Any], model: Architecture) -> dict[str, Any]:
    """``rope_parameters`` with the sections that positions in pictures would turn; text, whose
    positions are alike in all three, computes the same whatever they are."""
    pairs = int(model.kv_channels * model.rotary_percent) // 2
    sections = [(pairs + rest) // 3 for rest in (2, 1, 0)]
    return rope | {"mrope_section": sections, "mrope_interleaved": True}


def by_kind(rope: dict[str, Any], model: Architecture) -> dict[str, Any]:
    """``rope_parameters`` by the kind of a layer."""
    return {kind: dict(rope) for kind in ("full_attention", "sliding_attention")}
