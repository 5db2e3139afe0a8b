"""Auxiliary losses that contribute gradients but do not show up in the logged loss."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kha_megatron.errors import ConfigError
from kha_megatron.mcore.compat import layer_symbol

# Megatron's schedules call this for all models (MoEAuxLossAutoScaler is for MoE models only).
_SCALE_FUNCTION = "experimental_attention_variant_loss_scale_func"


class LossScale:
    """Gradient scale for auxiliary losses (1 by default), set by Megatron's schedules.

    Unless the loss is computed per token, the scale is already multiplied by the CP size and
    divided by the number of microbatches. Callbacks can be chained with ``others``.
    """

    def __init__(self, others: Callable[[Tensor], None] | None = None) -> None:
        self.others = others
        self.value: Tensor | float = 1.0

    def __call__(self, scale: Tensor) -> None:
        if isinstance(self.value, Tensor):
            self.value.copy_(scale)  # in place, because CUDA graphs capture this tensor
        else:
            self.value = scale.detach().clone()
        if self.others is not None:
            self.others(scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LossScale":
        return self  # copies of the config belong to the same model

    @classmethod
    def of(cls, config: TransformerConfig) -> "LossScale":
        """Get the instance registered in ``config``, creating it if needed.

        Raises:
            ConfigError: If ``config`` is a layer's copy without an instance. Megatron's schedules
                only read the model's config.
        """
        registered = getattr(config, _SCALE_FUNCTION)
        if isinstance(registered, cls):
            return registered
        if layer_symbol(config) is not None:
            raise ConfigError(
                "Head mechanisms with an auxiliary loss require the hybrid stack of kha_megatron. "
                "Build it with kha_megatron.mcore.specs.kha_hybrid_stack_spec."
            )
        scale = cls(registered)
        setattr(config, _SCALE_FUNCTION, scale)
        return scale

    @classmethod
    def share(cls, config: TransformerConfig, layer_configs: Sequence[TransformerConfig]) -> None:
        """Register the instance of a model's config in the configs of its layers, too."""
        scale = cls.of(config)
        for layer_config in layer_configs:
            setattr(layer_config, _SCALE_FUNCTION, scale)


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, scale: LossScale) -> Tensor:
        ctx.scale = scale
        ctx.like = loss
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = torch.as_tensor(ctx.scale.value).to(ctx.like).reshape(())
        return gradients[0], scale, None


def with_loss(carrier: Tensor, loss: Tensor, scale: LossScale) -> Tensor:
    """Attach an auxiliary loss to ``carrier``, like Megatron's ``MoEAuxLossAutoScaler``."""
    return _Added.apply(carrier, loss, scale)
