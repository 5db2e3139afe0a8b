"""Auxiliary losses that contribute gradients but don't show up in the logged loss."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

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

    @classmethod
    def of(cls, config: TransformerConfig) -> "LossScale":
        """Get the instance registered in ``config``, creating it if needed."""
        found = getattr(config, _SCALE_FUNCTION)
        if not isinstance(found, cls):
            found = cls(found)
            setattr(config, _SCALE_FUNCTION, found)
        return found


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, scale: LossScale) -> Tensor:
        ctx.scale, ctx.like = scale, loss
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = torch.as_tensor(ctx.scale.value).to(ctx.like).reshape(())
        return gradients[0], scale, None


def with_loss(carrier: Tensor, loss: Tensor, scale: LossScale) -> Tensor:
    """Attach an auxiliary loss to ``carrier``, like Megatron's ``MoEAuxLossAutoScaler``."""
    return _Added.apply(carrier, loss, scale)
