"""KHA for multi-latent attention (MLA) and Grouped Latent Attention (GLA).

KHA is applied directly after the up-projections, to values and to the non-rotary parts of queries
and keys. At inference, we fold the linear matrices into the up-projections so that the latents can
still be cached.

In GLA (Zadouri et al. 2025), the latent is split into heads. Each latent head has its own norm and
is used by one group of query heads. Note that ``kv_lora_rank`` is the size of all latent heads.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import (
    FusedMLASelfAttention,
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from kha_megatron.heads import Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import fold
from kha_megatron.mcore.attention import KnockedAttention, Output, check_config
from kha_megatron.mcore.hooks import ProjectionHook
from kha_megatron.mcore.knocking import parameter_device


class LatentUpProjection(ColumnParallelLinear):
    """Replaces ``linear_kv_up_proj`` in GLA.

    Since each latent head is only projected to the keys and values of its own group, the weight has
    just ``latent_features / latent_heads`` columns.
    """

    def __init__(
        self,
        latent_features: int,
        output_size: int,
        *,
        latent_heads: int,
        **kwargs: Any,
    ) -> None:
        head_features = latent_features // latent_heads
        super().__init__(head_features, output_size, **kwargs)
        self.latent_heads = latent_heads
        ranks = self.tp_group.size()
        rank = self.tp_group.rank()
        # with fewer latent heads than ranks, several ranks use the same one
        first = rank * latent_heads // ranks
        stop = math.ceil((rank + 1) * latent_heads / ranks)
        self.local_heads = slice(first, stop)

    def forward(self, latent: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            latent = gather_from_sequence_parallel_region(latent, group=self.tp_group)
        else:
            latent = copy_to_tensor_model_parallel_region(latent, group=self.tp_group)
        all_heads = latent.unflatten(-1, (self.latent_heads, -1))
        heads = all_heads[..., self.local_heads, :]
        num_heads = heads.shape[-2]
        weights = self.weight.unflatten(0, (num_heads, -1))
        output = torch.einsum("...hi,hoi->...ho", heads, weights)
        return output.flatten(-2), None


class LatentNorm(MegatronModule):
    """RMSNorm over each latent head (in float32)."""

    def __init__(
        self,
        config: MLATransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        latent_heads: int,
    ) -> None:
        super().__init__(config)
        self.latent_heads = latent_heads
        self.eps = eps
        ones = torch.ones(
            hidden_size,
            dtype=config.params_dtype,
            device=parameter_device(config),
        )
        self.weight = torch.nn.Parameter(ones)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, latent: Tensor) -> Tensor:
        heads = latent.unflatten(-1, (self.latent_heads, -1))
        if heads.dtype in (torch.bfloat16, torch.float16):
            heads = heads.float()
        squares = heads.square()
        mean_square = squares.mean(-1, keepdim=True)
        scale = torch.rsqrt(mean_square + self.eps)
        normed_heads = heads * scale
        normed = normed_heads.flatten(-2) * self.weight
        return normed.to(latent.dtype)


def use_grouped_latents(submodules: MLASelfAttentionSubmodules, latent_heads: int) -> Any:
    """Turn an MLA spec into a GLA spec, by replacing the KV norm and up-projection."""
    norm = submodules.kv_layernorm
    projection_name = getattr(submodules.linear_kv_up_proj, "__name__", "")
    is_norm_fused = "LayerNorm" in projection_name  # e.g. TELayerNormColumnParallelLinear
    has_own_norm = norm not in (None, IdentityOp)
    if is_norm_fused or has_own_norm:
        norm = partial(LatentNorm, latent_heads=latent_heads)
    up_projection = ModuleSpec(
        module=LatentUpProjection,
        params={"latent_heads": latent_heads},
    )
    return replace(
        submodules,
        linear_kv_up_proj=up_projection,
        kv_layernorm=norm,
    )


class _KnockedLatentAttention(KnockedAttention):
    """Common base class of our MLA variants."""

    config: MLATransformerConfig
    first_projection = "linear_qkv_down_proj"  # exists in the fused class only

    def __init__(
        self,
        config: MLATransformerConfig,
        *args: Any,
        kha: HeadsConfig,
        **kwargs: Any,
    ) -> None:
        check_config(config, kha)
        super().__init__(config, *args, **kwargs)
        self._add_knocking(kha)
        if isinstance(self.linear_kv_up_proj, LatentUpProjection):
            self.kind = "gla"
        query_projection = "linear_q_up_proj"
        if config.q_lora_rank is None:
            query_projection = "linear_q_proj"
        if "query" in self.knockings:
            self._add_hook(query_projection, self._knock_query)
        if "key" in self.knockings or "value" in self.knockings:
            self._add_hook("linear_kv_up_proj", self._knock_key_value)
        self._average_query_norm_gradients()

    def _add_hook(self, projection: str, knock: Callable[[Output], Output]) -> None:
        hook = ProjectionHook(self, projection, knock)
        self.projection_hooks.append(hook)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        projections = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        self._read_input(hidden_states, {})
        return projections

    def _knock_query(self, projected: Output) -> Output:
        output, bias = projected
        widths = [self.config.qk_head_dim, self.config.qk_pos_emb_head_dim]
        heads = self._unflatten_heads(output)
        non_rotary, rotary = heads.split(widths, dim=-1)
        knocked = self._knock("query", non_rotary)
        heads = torch.cat([knocked, rotary], dim=-1)
        return heads.flatten(-2), bias

    def _knock_key_value(self, projected: Output) -> Output:
        output, bias = projected
        widths = [self.config.qk_head_dim, self.config.v_head_dim]
        heads = self._unflatten_heads(output)
        key, value = heads.split(widths, dim=-1)
        key = self._knock("key", key)
        value = self._knock("value", value)
        heads = torch.cat([key, value], dim=-1)
        return heads.flatten(-2), bias

    def _unflatten_heads(self, features: Tensor) -> Tensor:
        heads = self.num_attention_heads_per_partition
        return features.unflatten(-1, (heads, -1))

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Project like Megatron, but sum the gradients of the rotary key over TP ranks.

        All heads share this key, but Megatron only sums its gradient with sequence parallelism.
        Without the sum, the replicas of the down-projection would diverge.
        """
        query, latent = super()._qkv_down_projection(hidden_states)
        group = self.tp_group
        if group.size() == 1:
            return query, latent
        is_sequence_sharded = self.config.sequence_parallel
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        is_feature_sharded = latent.size(-1) != sum(widths)
        if is_feature_sharded:
            latent = gather_from_tensor_model_parallel_region(latent, group=group)
            if is_sequence_sharded:
                latent = scatter_to_sequence_parallel_region(latent, group=group)
        if is_sequence_sharded:
            return query, latent  # Megatron's all-gather of the key sums its gradient
        latent, key = latent.split(widths, dim=-1)
        key = copy_to_tensor_model_parallel_region(key, group=group)
        return query, torch.cat([latent, key], dim=-1)

    def _average_query_norm_gradients(self) -> None:
        """Average the gradients of the query latent's norm over TP ranks.

        Megatron sums the gradients of all parameters named ``q_layernorm``. Unless sequence
        parallelism is used, each rank already has the full gradient of this norm.
        """
        norm = getattr(self, "q_layernorm", None)
        if norm is not None and not self.config.sequence_parallel:
            for parameter in norm.parameters():
                parameter.average_gradients_across_tp_domain = True

    def prepare_for_absorption(self) -> None:
        """Fold the matrices into the up-projection, since Megatron is about to delete it."""
        is_already_absorbed = hasattr(self, "up_k_weight")
        if not is_already_absorbed:
            self._fold_up_projection()
        super().prepare_for_absorption()

    @torch.no_grad()
    def _fold_up_projection(self) -> None:
        weight = self.linear_kv_up_proj.weight
        head_rows = self.config.qk_head_dim + self.config.v_head_dim
        first_rows: dict[Projection, int] = {"key": 0, "value": self.config.qk_head_dim}
        for projection, first_row in first_rows.items():
            if projection in self.knockings:
                matrix = self.knockings[projection].weight
                folded = fold(
                    weight,
                    matrix,
                    head_rows=head_rows,
                    start=first_row,
                )
                weight.copy_(folded)


class KHAMLASelfAttention(_KnockedLatentAttention, MLASelfAttention):
    """``MLASelfAttention`` with KHA."""


class KHAFusedMLASelfAttention(_KnockedLatentAttention, FusedMLASelfAttention):
    """``FusedMLASelfAttention`` (``mla_down_proj_fusion``) with KHA."""
