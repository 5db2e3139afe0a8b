"""A loss that a layer adds to the backward pass, and that is not part of the loss printed.

Megatron has such a door for losses of experts, but tells it the scale of the main loss only in
models that have experts (``pipeline_parallel/schedules.py``): in a dense model an auxiliary loss
would count once in each microbatch, and ignore the loss scale of fp16. It tells every model's
``config.experimental_attention_variant_loss_scale_func``, which is :class:`LossScale` here.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

_DOOR = "experimental_attention_variant_loss_scale_func"


class LossScale:
    """By what the gradient of an added loss is multiplied: 1 where no schedule of Megatron runs.

    A schedule calls it with the loss scale, times the context-parallel ranks and over the number of
    microbatches; for a loss per token with the loss scale alone.

    Args:
        others: who is told as well, because there was no place but this one.
    """

    def __init__(self, others: Callable[[Tensor], None] | None = None) -> None:
        self.others = others
        self.value: Tensor | float = 1.0

    def __call__(self, scale: Tensor) -> None:
        if isinstance(self.value, Tensor):
            self.value.copy_(scale)  # the very tensor that a CUDA graph reads
        else:
            self.value = scale.detach().clone()
        if self.others is not None:
            self.others(scale)

    @classmethod
    def of(cls, config: TransformerConfig) -> "LossScale":
        """The one of a model, made where it has none.

        Args:
            config: the object that the model keeps, which the schedules read, and no copy.
        """
        found = getattr(config, _DOOR)
        if not isinstance(found, cls):
            found = cls(found)
            setattr(config, _DOOR, found)
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
    """``carrier``, whose backward pass begins that of ``loss`` (0-d), times the scale, as well."""
    return _Added.apply(carrier, loss, scale)
