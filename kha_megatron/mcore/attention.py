"""Megatron's self-attention (MHA, MQA, GQA) with knocking heads.

Order in the layer: QKV projection, split, knock q, k and v, QK-norm, RoPE, core attention (paper
section 4.5.2 for the place before QK-norm, which is what lets KHA-Linear fold into the projection).
"""

from typing import Any

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kha_megatron.config import KHAConfig, Projection, check_latent_attention
from kha_megatron.errors import ConfigError
from kha_megatron.layout_rules import check_layout
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.mcore.layout import fp8_recipe_of, layout_of, model_of


class KHASelfAttention(SelfAttention):
    """Self-attention whose heads knock on each other before the scaled dot product.

    Takes and returns what Megatron's ``SelfAttention`` does (``[s, b, h]``). Adds one
    :class:`KnockingHeads` for each knocked projection: ``knock_query``, ``knock_key`` and
    ``knock_value``, or None.

    Args:
        kha: what is knocked; ``KHAConfig()`` makes this Megatron's own layer.

    Raises:
        ConfigError: the sizes cannot be divided over the ranks, or an option of ``config`` leaves
            no place between the split and the attention to knock.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *args: Any,
        kha: KHAConfig,
        **kwargs: Any,
    ) -> None:
        check_config(config, kha)
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.kha = kha
        self.knock_query = self._knocking("query")
        self.knock_key = self._knocking("key")
        self.knock_value = self._knocking("value")
        # Megatron splits and normalises in one method: the only door between the two is the norm's
        for knocking, norm in self._knocked_before_norm():
            norm.register_forward_pre_hook(knocking.before_norm)

    def _knocking(self, projection: Projection) -> KnockingHeads | None:
        if projection not in self.kha.variants:
            return None
        return KnockingHeads(
            self.config,
            self.kha,
            projection,
            layer_number=self.layer_number,
            head_dim=self.hidden_size_per_attention_head,
            tp_group=self.tp_group,
        )

    def _knocked_before_norm(self) -> list[tuple[KnockingHeads, Any]]:
        pairs = ((self.knock_query, self.q_layernorm), (self.knock_key, self.k_layernorm))
        return [(knocking, norm) for knocking, norm in pairs if None not in (knocking, norm)]

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, ...]:
        """Megatron's query, key, value (and output gate), knocked.

        Returns:
            query ``[s, b, heads, D]``, key and value ``[s, b, groups, D]``, and the untouched gate
            ``[s, b, heads, D]`` when ``output_gate``; heads and groups are those of this rank.
        """
        if not split_qkv:
            raise ConfigError(_UNSPLIT)
        query, key, value, *gate = super().get_query_key_value_tensors(
            hidden_states, key_value_states, output_gate, split_qkv
        )
        if self.knock_query is not None and self.q_layernorm is None:
            query = self.knock_query(query)
        if self.knock_key is not None and self.k_layernorm is None:
            key = self.knock_key(key)
        if self.knock_value is not None:
            value = self.knock_value(value)
        return query, key, value, *gate


_UNSPLIT = (
    "fused_single_qkv_rope=True rotates the unsplit QKV buffer and passes by the place where KHA "
    "knocks on q, k and v: remove --fused-single-qkv-rope"
)


def check_config(config: TransformerConfig, kha: KHAConfig) -> None:
    """Refuse, before anything is allocated, what this attention cannot honour.

    Raises:
        ConfigError: see :class:`KHASelfAttention`.
    """
    if config.multi_latent_attention:
        check_latent_attention(kha)
    check_layout(model_of(config), layout_of(config), fp8=fp8_recipe_of(config), trains=False)
    if config.fused_single_qkv_rope:
        raise ConfigError(_UNSPLIT)
    if config.flash_decode and kha.variants:
        raise ConfigError(
            f"flash_decode=True decodes in kernels that were never run with KHA on {kha}: "
            "remove --flash-decode, or use the baseline preset"
        )
