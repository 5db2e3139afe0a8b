"""Multi-latent attention without Transformer Engine, to compare with: Megatron has none.

Imported only where Megatron's model is built. Its local core attention computes with values of
another width than the keys already; it only does not take the arguments that say so.
"""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class LatentDotProductAttention(DotProductAttention):
    """``[s, b, heads, plain + rotary]`` queries and keys, ``[s, b, heads, v_channels]`` values."""

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:  # upstream's parent class builds one without, and drops it
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def latent_layer_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layers with this attention."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = LatentDotProductAttention
    return spec
