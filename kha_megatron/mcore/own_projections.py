"""Adapt attention modules to queries and keys that a mechanism computes (collaborative heads).

Their modules are beside ``linear_qkv``, which has the values, and their heads may have another
width. The key is repeated for each value head, because kernels need equal counts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Module


def set_key_width(
    submodules: SelfAttentionSubmodules, config: TransformerConfig, width: int
) -> SelfAttentionSubmodules:
    """Return ``submodules`` with a core attention and QK-norms for keys of ``width`` features.

    Logits are scaled by ``config.softmax_scale`` or ``width ** -0.5``.
    """

    def core(*, config: TransformerConfig, softmax_scale: float | None, **options: Any) -> Any:
        scale = width**-0.5 if softmax_scale is None else softmax_scale
        options |= {"k_channels": width, "v_channels": config.kv_channels}
        return submodules.core_attention(config=config, softmax_scale=scale, **options)

    def norm(build: Callable[..., Module]) -> Callable[..., Module]:
        return lambda *, hidden_size, **options: build(hidden_size=width, **options)

    norms = {
        name: norm(found)
        for name in ("q_layernorm", "k_layernorm")
        if (found := getattr(submodules, name) or (TENorm if config.qk_layernorm else None))
        not in (None, IdentityOp)
    }
    return replace(submodules, core_attention=core, **norms)
