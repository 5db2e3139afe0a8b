"""What all knocked attentions share, and Megatron's self-attention (MHA, MQA, GQA) among them.

Order in the layer: QKV projection, split, knock q, k and v, QK-norm, RoPE, core attention (paper
section 4.5.2 for the place before QK-norm, which is what lets KHA-Linear fold into the projection).
"""

from typing import Any

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kha_megatron.config import AttentionKind, KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadFacts, Projection
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.mcore.compat import check_family_version
from kha_megatron.mcore.folding import Folding
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.mcore.layout import fp8_recipe_of, layout_of, model_of
from kha_megatron.mcore.prologue import FusedPrologue
from kha_megatron.model.rules import check_layout


class KnockedAttention:
    """Beside a Megatron attention: one :class:`KnockingHeads` for each knocked projection.

    They are ``knock_query``, ``knock_key`` and ``knock_value``, or None.
    """

    kind: AttentionKind | None = None
    """What ``KHAConfig.attention`` calls it; None for the kinds that Megatron's flags choose."""

    kha: KHAConfig

    def _add_knocking(self, kha: KHAConfig) -> None:
        self.kha = kha
        for projection in PROJECTIONS:
            setattr(self, f"knock_{projection}", self._knocking(projection))

    def _knocking(self, projection: Projection) -> KnockingHeads | None:
        if projection not in self.kha.variants:
            return None
        return KnockingHeads(
            self.config,
            self.kha,
            projection,
            layer_number=self.layer_number,
            head_dim=self._head_dim(projection),
            tp_group=self.tp_group,
        )

    def _head_dim(self, projection: Projection) -> int:
        """Features of a head that are knocked."""
        return self.hidden_size_per_attention_head

    @property
    def cache_elements_per_token(self) -> int:
        """Numbers that decoding must keep of each token for this layer, over all heads.

        Megatron's own static cache of MLA, GLA and GTA is larger: it holds whole keys and values.
        """
        return 2 * self.kv_projection_size


class KHASelfAttention(KnockedAttention, FusedPrologue, SelfAttention):
    """Self-attention whose heads knock on each other before the scaled dot product.

    Takes and returns what Megatron's ``SelfAttention`` does (``[s, b, h]``).

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
        self._add_knocking(kha)
        self.folding = Folding(self, self._heads_of_projection())
        # Megatron splits and normalises in one method: the only door between the two is the norm's
        for knocking, norm in self._knocked_before_norm():
            norm.register_forward_pre_hook(knocking.before_norm)

    def _knocked_before_norm(self) -> list[tuple[KnockingHeads, Any]]:
        pairs = ((self.knock_query, self.q_layernorm), (self.knock_key, self.k_layernorm))
        return [(knocking, norm) for knocking, norm in pairs if None not in (knocking, norm)]

    def _heads_of_projection(self) -> tuple[Projection | None, ...]:
        """What each head of ``linear_qkv`` is, over all ranks, in the order of its rows."""
        groups = self.config.num_query_groups
        queries: list[Projection | None] = ["query"] * (self.config.num_attention_heads // groups)
        gates = [None] * len(queries) if self.config.attention_output_gate else []
        return (*queries, *gates, "key", "value") * groups

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
        with self.folding(hidden_states):
            query, key, value, *gate = super().get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate, split_qkv
            )
            if self.is_fused:
                return query, key, value
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
    kha.check(
        HeadFacts(
            multi_latent=config.multi_latent_attention,
            qk_norm=config.qk_layernorm,
            flash_decode=config.flash_decode,
        )
    )
    if kha.attention or config.multi_latent_attention:
        check_family_version()
    check_layout(model_of(config, kha), layout_of(config), fp8=fp8_recipe_of(config), trains=False)
    if config.fused_single_qkv_rope:
        raise ConfigError(_UNSPLIT)
    if config.multi_latent_attention and config.num_query_groups != config.num_attention_heads:
        raise ConfigError(
            f"num_query_groups={config.num_query_groups} with multi-latent attention, each of "
            f"whose {config.num_attention_heads} query heads has a key: leave it out"
        )
