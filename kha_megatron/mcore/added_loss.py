"""Add an auxiliary loss to the backward pass without adding it to the reported loss.

Megatron passes the scale of the main loss to its auxiliary losses only in models with experts
(``pipeline_parallel/schedules.py``). For every model it calls
``config.experimental_attention_variant_loss_scale_func``, which is :class:`LossScale` here.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

_SCALE_FUNCTION = "experimental_attention_variant_loss_scale_func"


class LossScale:
    """Scale of the gradient of an added loss; 1 outside of Megatron's schedules.

    A schedule calls it with the loss scale times CP ranks divided by microbatches, or for a loss
    per token with the loss scale. ``others`` is called as well.
    """

    def __init__(self, others: Callable[[Tensor], None] | None = None) -> None:
        self.others = others
        self.value: Tensor | float = 1.0

    def __call__(self, scale: Tensor) -> None:
        if isinstance(self.value, Tensor):
            self.value.copy_(scale)  # in place, because a CUDA graph reads this tensor
        else:
            self.value = scale.detach().clone()
        if self.others is not None:
            self.others(scale)

    @classmethod
    def of(cls, config: TransformerConfig) -> "LossScale":
        """Return the model's instance, created if needed. ``config`` must not be a copy."""
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
    """Return ``carrier``, whose backward pass adds ``scale`` times that of ``loss`` (0-d)."""
    return _Added.apply(carrier, loss, scale)
