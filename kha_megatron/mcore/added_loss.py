"""Add the gradient of an auxiliary loss without changing the logged loss."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# Megatron's schedules call this for every model, but MoEAuxLossAutoScaler for MoE models only.
_SCALE_FUNCTION = "experimental_attention_variant_loss_scale_func"


class LossScale:
    """Callback that stores the gradient scale of auxiliary losses, which defaults to 1.

    Megatron's schedules pass the loss scale, multiplied by CP size and divided by the number of
    microbatches unless the loss is computed per token. ``others`` is an existing callback to chain.
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
        """Return the instance registered in ``config``, or register a new one."""
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
    """Return ``carrier`` and backpropagate the scalar ``loss``, times ``scale``, with it."""
    return _Added.apply(carrier, loss, scale)
