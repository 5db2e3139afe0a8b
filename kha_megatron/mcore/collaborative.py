"""Self-attention with collaborative heads (arXiv 2006.16362): one query and one key for all.

The two shared projections are modules beside ``linear_qkv``, which has the values. All TP ranks
compute them fully, so their gradients are sums over ranks (``mcore.head_inputs``). The key is
repeated for each value head, because kernels need equal counts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Module

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.mcore.attention import KHASelfAttention


class KHACollaborativeAttention(KHASelfAttention):
    """``SelfAttention`` with collaborative heads. Same inputs and outputs.

    ``collaborative_query`` and ``collaborative_key`` are ``[dim, h]``, ``collaborative_mixing`` is
    this rank's part of ``[heads, dim]``. QK-norms are ``dim`` wide. Logits are scaled by
    ``config.softmax_scale`` or ``dim ** -0.5``.
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
        if config.add_bias_linear or config.add_qkv_bias:
            raise ConfigError(
                "collaborative heads have no biases: remove --add-qkv-bias and --add-bias-linear"
            )
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
        """Return a builder of a core attention with keys of the shared width."""

        def built(*, config: TransformerConfig, softmax_scale: float | None, **options: Any) -> Any:
            widths = {"k_channels": self.width, "v_channels": config.kv_channels}
            scale = self.width**-0.5 if softmax_scale is None else softmax_scale
            return build(config=config, softmax_scale=scale, **widths, **options)

        return built


def _as_wide(build: Callable[..., Module], width: int) -> Callable[..., Module]:
    """Return a builder of a norm of ``width`` features."""

    def built(*, hidden_size: int, **options: Any) -> Any:
        return build(hidden_size=width, **options)

    return built
