"""Add head mechanisms to Megatron's layer specs."""

from dataclasses import fields, replace
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import (
    FusedMLASelfAttention,
    MLASelfAttention,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore.all_heads import AllHeadsAttention
from kha_megatron.mcore.attention import KHASelfAttention
from kha_megatron.mcore.gta import KHAGroupedTiedAttention, separate_input_norm
from kha_megatron.mcore.latent import (
    KHAFusedMLASelfAttention,
    KHAMLASelfAttention,
    use_grouped_latents,
)
from kha_megatron.mcore.local_modules import GatheredDotProductAttention, TorchNorm

_LOCAL: dict[Any, type] = {
    WrappedTorchNorm: TorchNorm,
    DotProductAttention: GatheredDotProductAttention,
}
"""Local modules that do not support sequence or context parallelism, and their replacements."""

_LATENT: dict[Any, type] = {
    MLASelfAttention: KHAMLASelfAttention,
    FusedMLASelfAttention: KHAFusedMLASelfAttention,
}


def uses_transformer_engine(config: TransformerConfig) -> bool:
    """Return whether to use Transformer Engine's modules, or else Megatron's local ones.

    Raises:
        ConfigError: If the config requests other modules.
    """
    if config.transformer_impl not in ("transformer_engine", "local"):
        raise ConfigError(f"KHA does not support transformer_impl={config.transformer_impl}.")
    return config.transformer_impl == "transformer_engine"


def knocked_attention(module: Any, kha: HeadsConfig) -> type | None:
    """Return the class that adds KHA to an attention class, or None if there is no such class."""
    if kha.attention == "gta":
        return KHAGroupedTiedAttention if module is SelfAttention else None
    if module is SelfAttention and kha.attention is None:
        return KHASelfAttention
    return _LATENT.get(module)


def can_knock(layer: TransformerLayerSubmodules, kha: HeadsConfig) -> bool:
    """Return whether :func:`knock_layer` can add ``kha`` to a layer."""
    attention = layer.self_attention
    return isinstance(attention, ModuleSpec) and bool(knocked_attention(attention.module, kha))


def knock_layer(layer: TransformerLayerSubmodules, kha: HeadsConfig) -> TransformerLayerSubmodules:
    """Return a copy of a layer's submodules with KHA in its self-attention.

    Local norms and core attentions are replaced as well, to support sequence and context
    parallelism and latent attention.

    Raises:
        ConfigError: If the layer has no attention module that supports ``kha``.
    """
    if not can_knock(layer, kha):
        raise ConfigError(f"The layer spec has no attention module that supports KHA ({kha}).")
    layer = support_parallelism(layer)
    if kha.attention == "gta":
        layer = separate_input_norm(layer)
    return replace(layer, self_attention=_knock(layer.self_attention, kha))


def _knock(attention: ModuleSpec, kha: HeadsConfig) -> ModuleSpec:
    submodules: Any = support_parallelism(attention.submodules)
    if any(mechanism.acts_at("core") for mechanism in kha.mechanisms):
        submodules = replace(submodules, core_attention=AllHeadsAttention)
    if kha.attention == "gla":
        submodules = use_grouped_latents(submodules, kha.latent_heads)
    return replace(
        attention,
        module=knocked_attention(attention.module, kha),
        params={**attention.params, "kha": kha},
        submodules=submodules,
    )


def support_parallelism(submodules: Any) -> Any:
    """Return a copy of a dataclass of submodules with our versions of local modules."""
    changes = {}
    for field in fields(submodules):
        module = getattr(submodules, field.name)
        if isinstance(module, type):
            changes[field.name] = parallel_module(module)
    return replace(submodules, **changes)


def parallel_module(module: Any) -> Any:
    """Return our version of a local module without sequence or context parallelism."""
    return _LOCAL.get(module, module)
