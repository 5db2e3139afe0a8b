"""Self-attention with collaborative heads (arXiv 2006.16362): one query and one key for all heads.

The two shared projections stand beside ``linear_qkv``, which holds the values. All tensor-parallel
ranks compute both whole, and their heads read them through mixing vectors of their own, so that the
gradients of both are sums over ranks (``mcore.head_inputs``). Keys are one head, given to the core
attention once for each value head, because kernels want as many of both.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.mcore.attention import KHASelfAttention


class KHACollaborativeAttention(KHASelfAttention):
    """Takes and returns what Megatron's ``SelfAttention`` does.

    ``collaborative_query`` and ``collaborative_key`` are ``[dim, h]``, ``collaborative_mixing`` is
    this rank's part of ``[heads, dim]``, and ``linear_qkv`` has rows for values only. QK-norms are
    ``dim`` wide. Logits are scaled by ``dim ** -0.5``, or by ``config.softmax_scale`` if it is set.

    Raises:
        ConfigError: an option of ``config`` has no meaning here, or the model's rotary embedding
            turns more features than there are.
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
        assert kha.collaborative is not None, "what its spec is made for"
        self.width = kha.collaborative.dim
        check_shared(config)
        norms = {
            name: _as_wide(found, self.width)
            for name in ("q_layernorm", "k_layernorm")
            if (found := getattr(submodules, name) or (TENorm if config.qk_layernorm else None))
            not in (None, IdentityOp)
        }
        wide = replace(submodules, core_attention=self._core(submodules.core_attention), **norms)
        super().__init__(config, wide, layer_number, *args, kha=kha, **kwargs)
        self.key_hidden_size = self.width

    def _core(self, build: Callable[..., Module]) -> Callable[..., Module]:
        """A core attention whose keys are as wide as the shared one."""

        def built(*, config: TransformerConfig, softmax_scale: float | None, **options: Any) -> Any:
            widths = {"k_channels": self.width, "v_channels": config.kv_channels}
            scale = self.width**-0.5 if softmax_scale is None else softmax_scale
            return build(config=config, softmax_scale=scale, **widths, **options)

        return built

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As ``SelfAttention.forward``."""
        rotary = kwargs.get("rotary_pos_emb")
        found = rotary if rotary is None or torch.is_tensor(rotary) else rotary[0]
        turned = 0 if found is None else found.shape[-1]
        if turned > self.width:
            assert self.kha.collaborative is not None
            raise ConfigError(self.kha.collaborative.too_narrow(turned))
        context = kwargs.get("inference_context")
        if context is not None and not context.is_static_batching():
            raise ConfigError(
                f"collaborative.dim={self.width} with dynamic batching, whose cache has heads of "
                f"{self.config.kv_channels} features: generate with a static batch"
            )
        return super().forward(hidden_states, *args, **kwargs)


def _as_wide(build: Callable[..., Module], width: int) -> Callable[..., Module]:
    """What makes a norm of so many features, whatever Megatron's attention says."""

    def built(*, hidden_size: int, **options: Any) -> Any:
        return build(hidden_size=width, **options)

    return built


def check_shared(config: TransformerConfig) -> None:
    """Refuse what has no meaning for shared queries and keys.

    Raises:
        ConfigError: naming the option and what to do.
    """
    for option, flag in (
        ("add_bias_linear", "the biases: add --disable-bias-linear and remove --add-bias-linear"),
        ("add_qkv_bias", "--add-qkv-bias"),
    ):
        if getattr(config, option):
            raise ConfigError(f"collaborative heads have no {option}: remove {flag}")
