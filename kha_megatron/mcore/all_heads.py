"""Core attention for mechanisms that mix heads, with tensor and context parallelism.

If the logits of a head depend on other heads, we cannot shard attention by head. With TP, the
queries are sharded by sequence instead: an all-to-all for the queries, an all-gather for keys and
values, and another all-to-all for the output. Note that logits are materialized, i.e.
``num_heads * sequence^2 / tp_size`` elements per rank.

In the shapes below, ``H`` is the number of heads and ``h`` the number of heads on this TP rank.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all_hp2sp, all_to_all_sp2hp, get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_pg_rank
from torch import Tensor

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Mechanism
from kha_megatron.mcore.local_modules import GatheredDotProductAttention

_UNSUPPORTED_OPTIONS = (
    "window_size",
    "softmax_type",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
)
"""Fields of ``TransformerConfig``."""
_DISABLED = (None, False, "vanilla")
"""Values of these fields that we support."""
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class AllHeadsAttention(GatheredDotProductAttention):
    """``DotProductAttention`` that calls :meth:`Mechanism.attend` with all heads."""

    mechanism: Mechanism
    weights: Mapping[str, Tensor]

    def set_mechanism(self, mechanism: Mechanism, weights: Mapping[str, Tensor]) -> None:
        """Must be called before the first forward pass, with the mechanism's parameters."""
        for option in _UNSUPPORTED_OPTIONS:
            value = getattr(self.config, option)
            if value not in _DISABLED:
                raise ConfigError(f"{mechanism} does not support {option}={value}. Remove it.")
        self.mechanism = mechanism
        self.weights = weights

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute attention.

        The mask has shape ``[batch or 1, 1, queries or 1, keys]`` (True means masked).
        """
        if kwargs.get("packed_seq_params") is not None:
            raise ConfigError(f"{self.mechanism} does not support packed sequences (--sft).")
        num_queries = len(query)
        key = self._gather(key)
        value = self._gather(value)
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type in _CAUSAL:
            attention_mask = self._with_causal(attention_mask, num_queries, len(key))
        query = self._shard_queries(query)
        key = self._all_heads(key)
        value = self._all_heads(value)
        output, _ = self.mechanism.attend(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            self.weights,
            scale=self.logit_scale,
            mask=self._shard_mask(attention_mask, num_queries),
            dropout=self._dropout,
        )
        output = output.permute(2, 0, 1, 3)
        return self._shard_heads(output, num_queries)

    def _with_causal(
        self,
        mask: Tensor | None,
        num_queries: int,
        num_keys: int,
    ) -> Tensor:
        """Add the causal mask to a mask that does not depend on the query."""
        if mask is not None and mask.shape[-2] == num_queries:
            return mask  # includes the causal mask
        causal_mask = self._causal_mask(num_queries, num_keys)
        if mask is None:
            return causal_mask
        return mask | causal_mask

    def _shard_mask(self, mask: Tensor | None, num_queries: int) -> Tensor | None:
        """Return the rows of the attention mask for this rank's part of the queries."""
        if mask is None or mask.shape[-2] == 1:
            return mask
        ranks = self.tp_group.size()
        num_local_queries = math.ceil(num_queries / ranks)
        first_query = get_pg_rank(self.tp_group) * num_local_queries
        rows = torch.arange(num_local_queries, device=mask.device)
        rows += first_query
        rows = rows.clamp(max=num_queries - 1)  # for padding
        return mask[..., rows, :]

    def _shard_queries(self, query: Tensor) -> Tensor:
        """Reshard ``[queries, batch, h, head_dim]`` to ``[queries / tp, batch, H, head_dim]``."""
        ranks = self.tp_group.size()
        if ranks == 1:
            return query
        num_queries, batch, _, features = query.shape
        padding = -num_queries % ranks  # to a multiple of the TP size
        no_padding = (0, 0, 0, 0, 0, 0)  # for the last three dimensions
        padded = torch.nn.functional.pad(query, (*no_padding, 0, padding))
        rows = padded.flatten(0, 1)
        rows = rows.flatten(1)
        sharded = all_to_all_hp2sp(rows, group=self.tp_group)
        sharded = sharded.unflatten(0, (-1, batch))
        return sharded.unflatten(-1, (-1, features))

    def _shard_heads(self, output: Tensor, num_queries: int) -> Tensor:
        """Undo :meth:`_shard_queries` for the output, and merge heads and features."""
        if self.tp_group.size() == 1:
            return output.flatten(2)
        batch = output.shape[1]
        rows = output.flatten(0, 1)
        rows = rows.flatten(1)
        sharded = all_to_all_sp2hp(rows, group=self.tp_group)
        sharded = sharded.unflatten(0, (-1, batch))
        return sharded[:num_queries]  # without padding

    def _all_heads(self, x: Tensor) -> Tensor:
        """All-gather the heads of keys or values (reduce-scatter in the backward pass)."""
        if self.tp_group.size() == 1:
            return x
        features = x.shape[-1]
        gathered = all_gather_last_dim_from_tensor_parallel_region(
            x.flatten(2),
            group=self.tp_group,
        )
        return gathered.unflatten(-1, (-1, features))

    def _dropout(self, weights: Tensor) -> Tensor:
        """Apply dropout to the attention weights."""
        # needs a different RNG state on each TP rank, which SP already has by default
        if self.config.sequence_parallel:
            return self.attention_dropout(weights)
        with get_cuda_rng_tracker().fork():
            return self.attention_dropout(weights)
