"""Core attention for mechanisms that mix heads, with tensor and context parallelism.

If the logits of a head depend on other heads, we cannot shard attention by head. With TP, the
queries are sharded by sequence instead: an all-to-all for the queries, an all-gather for keys and
values, and another all-to-all for the output. Note that logits are materialized, i.e.
``num_heads * sequence^2 / tp_size`` elements per rank.

In the shapes below, ``H`` is the number of heads and ``h`` the number of heads on this TP rank.
"""

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

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class AllHeadsAttention(GatheredDotProductAttention):
    """``DotProductAttention`` that calls :meth:`Mechanism.attend` with all heads."""

    mechanism: Mechanism
    weights: Mapping[str, Tensor]

    def set_mechanism(self, mechanism: Mechanism, weights: Mapping[str, Tensor]) -> None:
        """Must be called before the first forward pass, with the mechanism's parameters."""
        for option in (
            "window_size",
            "softmax_type",
            "fp8_dot_product_attention",
            "fp8_multi_head_attention",
        ):
            if (found := getattr(self.config, option)) not in (None, False, "vanilla"):
                raise ConfigError(f"{mechanism} does not support {option}={found}. Remove it.")
        self.mechanism, self.weights = mechanism, weights

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
        key, value = self._gather(key), self._gather(value)
        causal = (attn_mask_type or self.attn_mask_type) in _CAUSAL
        mask = self._mask(attention_mask, causal, len(query), len(key))
        output, _ = self.mechanism.attend(
            self._shard_queries(query).permute(1, 2, 0, 3),
            self._all_heads(key).permute(1, 2, 0, 3),
            self._all_heads(value).permute(1, 2, 0, 3),
            self.weights,
            scale=self.logit_scale,
            mask=mask,
            dropout=self._dropout,
        )
        return self._shard_heads(output.permute(2, 0, 1, 3), len(query))

    def _mask(self, given: Tensor | None, causal: bool, queries: int, keys: int) -> Tensor | None:
        """Build the attention mask for this rank's part of the queries."""
        includes_causal = given is not None and given.shape[-2] == queries
        if causal and not includes_causal:
            future = self._causal_mask(queries, keys)
            given = future if given is None else given | future
        if given is None or given.shape[-2] == 1:
            return given
        each = -(-queries // self.tp_group.size())
        rows = torch.arange(each, device=given.device) + get_pg_rank(self.tp_group) * each
        return given[..., rows.clamp(max=queries - 1), :]  # clamped for padding

    def _shard_queries(self, x: Tensor) -> Tensor:
        """Reshard ``[queries, batch, h, head_dim]`` to ``[queries / tp, batch, H, head_dim]``."""
        ranks = self.tp_group.size()
        if ranks == 1:
            return x
        batch, features = x.shape[1], x.shape[-1]
        x = torch.nn.functional.pad(x, (0,) * 7 + (-len(x) % ranks,))
        x = all_to_all_hp2sp(x.flatten(0, 1).flatten(1), group=self.tp_group)
        return x.unflatten(0, (-1, batch)).unflatten(-1, (-1, features))

    def _shard_heads(self, x: Tensor, queries: int) -> Tensor:
        """Undo :meth:`_shard_queries` for the output, and merge heads and features."""
        if self.tp_group.size() == 1:
            return x.flatten(2)
        batch = x.shape[1]
        x = all_to_all_sp2hp(x.flatten(0, 1).flatten(1), group=self.tp_group)
        return x.unflatten(0, (-1, batch))[:queries]

    def _all_heads(self, x: Tensor) -> Tensor:
        """All-gather the heads of keys or values (reduce-scatter in the backward pass)."""
        if self.tp_group.size() == 1:
            return x
        whole = all_gather_last_dim_from_tensor_parallel_region(x.flatten(2), group=self.tp_group)
        return whole.unflatten(-1, (-1, x.shape[-1]))

    def _dropout(self, weights: Tensor) -> Tensor:
        # needs a different RNG state on each TP rank, which SP already has by default
        if self.config.sequence_parallel:
            return self.attention_dropout(weights)
        with get_cuda_rng_tracker().fork():
            return self.attention_dropout(weights)
