"""Megatron's multi-latent attention (MLA) with knocking heads, and Grouped Latent Attention (GLA).

Knocked are the parts without position of queries and keys, and the values, right after the
up-projections that make them from the latents. So the rotary embedding (fused or not), recomputing
and Megatron's handling of packed sequences see knocked tensors. The matrices are linear: at
inference they fold into the up-projections, and what is cached stays the latent.

GLA (Zadouri et al. 2025) is MLA whose latent is cut into heads: each is normalised by itself and
gives keys and values to its own group of query heads, so that tensor-parallel ranks need (and at
inference cache) only the latent heads of their own queries. Two submodules make it of MLA.
``kv_lora_rank`` is the width of all latent heads together, as in MLA with the same cache.

Shape legend: ``C`` all latent features, ``c`` latent heads, ``H`` query heads, ``rows`` key and
value features of a head.
"""

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

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Projection
from kha_megatron.mcore.attention import KnockedAttention, check_config
from kha_megatron.mcore.hooks import PlacedHook
from kha_megatron.mcore.knocking import parameter_device
from kha_megatron.ops import fold


class LatentUpProjection(ColumnParallelLinear):
    """Keys and values of each head from its group's latent head.

    Its weight is ``[H * rows / tp, C / c]``, heads outermost, cut and stored like Megatron's
    column-parallel ``linear_kv_up_proj`` of MLA. Maps the normalised latent ``[..., C]`` (of this
    rank's part of the sequence under sequence parallelism) to ``[..., H * rows / tp]`` and None.

    Args:
        latent_features: ``C``.
        latent_heads: ``c``.
    """

    def __init__(
        self, latent_features: int, output_size: int, *, latent_heads: int, **kwargs: Any
    ) -> None:
        super().__init__(latent_features // latent_heads, output_size, **kwargs)
        self.latent_heads = latent_heads
        ranks, rank = self.tp_group.size(), self.tp_group.rank()
        self.mine = slice(rank * latent_heads // ranks, -(-(rank + 1) * latent_heads // ranks))

    def forward(self, latent: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Project the latent heads of this rank's queries."""
        if self.sequence_parallel:
            latent = gather_from_sequence_parallel_region(latent, group=self.tp_group)
        else:
            latent = copy_to_tensor_model_parallel_region(latent, group=self.tp_group)
        heads = latent.unflatten(-1, (self.latent_heads, -1))[..., self.mine, :]
        weights = self.weight.unflatten(0, (heads.shape[-2], -1))
        if len(weights) == 1:  # as when there are as many ranks as latent heads
            return torch.nn.functional.linear(heads[..., 0, :], weights[0]), None
        return torch.einsum("...gc,grc->...gr", heads, weights).flatten(-2), None


class LatentNorm(MegatronModule):
    """RMSNorm of each latent head by itself: ``[..., C]`` to the same, computed in float32.

    Its weight is ``[C]``, like that of the norm it replaces.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        latent_heads: int,
    ) -> None:
        super().__init__(config)
        self.latent_heads, self.eps = latent_heads, eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=parameter_device(config))
        )
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, latent: Tensor) -> Tensor:
        """Divide each latent head by its own root mean square, and multiply by the weight."""
        heads = latent.unflatten(-1, (self.latent_heads, -1))
        wide = heads.float() if heads.dtype in (torch.bfloat16, torch.float16) else heads
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return ((wide * scale).flatten(-2) * self.weight).to(latent.dtype)


def grouped(submodules: MLASelfAttentionSubmodules, latent_heads: int) -> Any:
    """The submodules of MLA with those of GLA in their place, for either backend."""
    up = submodules.linear_kv_up_proj
    norm = submodules.kv_layernorm
    if norm not in (None, IdentityOp) or "LayerNorm" in getattr(up, "__name__", ""):
        norm = partial(LatentNorm, latent_heads=latent_heads)
    return replace(
        submodules,
        linear_kv_up_proj=ModuleSpec(
            module=LatentUpProjection, params={"latent_heads": latent_heads}
        ),
        kv_layernorm=norm,
    )


def check_grouped(config: MLATransformerConfig) -> None:
    """Refuse what GLA cannot have.

    Raises:
        ConfigError: naming the option and what to do.
    """
    if config.normalization != "RMSNorm" and config.qk_layernorm:
        raise ConfigError(
            f"attention=gla normalises latent heads with RMSNorm, and --normalization is "
            f"{config.normalization}: use RMSNorm"
        )
    if config.layernorm_zero_centered_gamma:
        raise ConfigError(
            "attention=gla has no norm with weights around zero: remove --apply-layernorm-1p"
        )
    if config.cache_mla_latents:
        raise ConfigError(
            "cache_mla_latents absorbs the one latent head of MLA, and attention=gla has several: "
            "remove --cache-mla-latents"
        )


_Hooked = tuple[Tensor, Tensor | None]


class _KnockedLatentAttention(KnockedAttention):
    """Mixed into both of Megatron's classes for MLA.

    ``knock_query`` and ``knock_key`` hold ``[1, qk_head_dim, qk_head_dim]``, ``knock_value``
    ``[1, v_head_dim, v_head_dim]``. Takes and returns what ``MLASelfAttention`` does.

    Args:
        kha: what is knocked; with ``attention="gla"`` the spec has the submodules of
            :func:`grouped`.

    Raises:
        ConfigError: a variant that does not fold away, or sizes that cannot be divided.
    """

    config: MLATransformerConfig
    first_projection = "linear_qkv_down_proj"  # of the fused class; in the other none norms

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        *args: Any,
        kha: KHAConfig,
        **kwargs: Any,
    ) -> None:
        check_config(config, kha)
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self._add_knocking(kha)
        self.kind = "gla" if isinstance(self.linear_kv_up_proj, LatentUpProjection) else None
        query_up = "linear_q_proj" if config.q_lora_rank is None else "linear_q_up_proj"
        if "query" in self.knock_names:
            self.placed_hooks.append(PlacedHook(self, query_up, self._knock_query_heads))
        if self.knock_names.keys() - {"query"}:
            hook = PlacedHook(self, "linear_kv_up_proj", self._knock_key_value_heads)
            self.placed_hooks.append(hook)
        self._count_query_norm_once()

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Megatron's; what mechanisms read of the input is read beside it."""
        found = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        self._read_input(hidden_states, {})
        return found

    def _knock_query_heads(self, output: _Hooked) -> _Hooked:
        nope, position = self._heads(output[0]).split(
            [self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1
        )
        return torch.cat([self._knocked("query", nope), position], dim=-1).flatten(-2), output[1]

    def _knock_key_value_heads(self, output: _Hooked) -> _Hooked:
        key, value = self._heads(output[0]).split(
            [self.config.qk_head_dim, self.config.v_head_dim], dim=-1
        )
        heads = self._knocked("key", key), self._knocked("value", value)
        return torch.cat(heads, dim=-1).flatten(-2), output[1]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads_per_partition, -1))

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Megatron's, with the gradient of the rotary key summed over tensor-parallel ranks.

        All heads share this key, so each rank's gradient of it is a partial sum. Megatron-Core 0.19
        completes it only where sequence parallelism gathers the key, and takes it for the whole
        elsewhere: replicas of the down-projection, and everything below, would drift apart.
        """
        query, latent = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() == 1:
            return query, latent
        rank, position = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        if latent.size(-1) != rank + position:
            latent = gather_from_tensor_model_parallel_region(latent, group=self.tp_group)
            if self.config.sequence_parallel:
                latent = scatter_to_sequence_parallel_region(latent, group=self.tp_group)
        if self.config.sequence_parallel:
            return query, latent  # what Megatron does next completes the sum
        latent, key = latent.split([rank, position], dim=-1)
        key = copy_to_tensor_model_parallel_region(key, group=self.tp_group)
        return query, torch.cat([latent, key], dim=-1)

    def _count_query_norm_once(self) -> None:
        """Keep the gradient of a separate norm of the query latent as it is.

        Megatron sums gradients by the name ``q_layernorm``, because a QK-norm sees its rank's heads
        only. This one sees the latent of all heads: without sequence parallelism its gradient is
        complete on every rank, and the sum would be as many times too large.
        """
        norm = getattr(self, "q_layernorm", None)
        if norm is not None and not self.config.sequence_parallel:
            for parameter in norm.parameters():
                parameter.average_gradients_across_tp_domain = True

    def prepare_for_absorption(self) -> None:
        """Fold the matrices of keys and values into the up-projection that Megatron absorbs.

        Megatron then splits this projection and deletes it (inference with cached latents only).
        Queries are still knocked where they are made.
        """
        if isinstance(getattr(self, "linear_kv_up_proj", None), LatentUpProjection):
            raise ConfigError(
                "cache_mla_latents absorbs the one latent head of MLA, and this is GLA: remove "
                "--cache-mla-latents"
            )
        if not hasattr(self, "up_k_weight"):
            nope, value = self.config.qk_head_dim, self.config.v_head_dim
            weight = self.linear_kv_up_proj.weight
            with torch.no_grad():
                starts: dict[Projection, int] = {"key": 0, "value": nope}
                for projection, start in starts.items():
                    if knocking := self.knockings.get(projection):
                        folded = fold(weight, knocking.weight, head_rows=nope + value, start=start)
                        weight.copy_(folded)
        super().prepare_for_absorption()


class KHAMLASelfAttention(_KnockedLatentAttention, MLASelfAttention):
    """``MLASelfAttention`` whose heads knock."""


class KHAFusedMLASelfAttention(_KnockedLatentAttention, FusedMLASelfAttention):
    """``FusedMLASelfAttention`` (``mla_down_proj_fusion``) whose heads knock."""
