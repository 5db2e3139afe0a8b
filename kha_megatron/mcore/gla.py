"""Grouped Latent Attention (GLA): MLA whose latent is cut into heads (Zadouri et al. 2025).

Every latent head is normalised by itself and gives keys and values to its own group of query heads,
so that tensor-parallel ranks need (and at inference cache) only the latent heads of their own
queries. The rest is MLA: GLA is :mod:`kha_megatron.mcore.mla` with the two submodules here.
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
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from kha_megatron.errors import ConfigError


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
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        if config.init_model_with_meta_device:
            device = "meta"
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, latent: Tensor) -> Tensor:
        """Normalise."""
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
