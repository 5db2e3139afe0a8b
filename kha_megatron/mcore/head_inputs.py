"""Projections of the normalized layer input, e.g. for gates and routers."""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import Module

from kha_megatron.errors import ConfigError
from kha_megatron.mcore.knocking import MechanismWeight


class InputProjection(MechanismWeight):
    """Linear projection of the layer input, with one weight per head or one for all heads.

    With sequence parallelism, the gradient of the weight is all-reduced, because each TP rank only
    sees some of the tokens. The output shape depends on ``HeadTensor.per_head`` and ``gradient``
    (``s``: sequence, ``b``: batch, ``f``: features):

    ==========  ==========================  ===================================================
    per head    ``[s, b, local heads, f]``  used by the local heads
    ``heads``   ``[s, b, 1, f]``            used by all heads; gradients are summed over TP ranks
    ``whole``   ``[s, b, f]``               used by computations that are the same on all ranks
    ``tokens``  ``[s / tp, b, f]``          used for the local tokens
    ==========  ==========================  ===================================================
    """

    def forward(self, hidden: Tensor | None = None) -> Tensor:
        """Project ``hidden``. If it is None, return the weight."""
        if hidden is None:
            return super().forward()
        group = self.tp_group
        is_sharded = self.config.sequence_parallel
        if self.tensor.per_head:
            weight = super().forward()
            rows = weight.flatten(0, 1)
            hidden = self._sum_over_heads(hidden)
            score = torch.nn.functional.linear(hidden, rows)
            return score.unflatten(-1, weight.shape[:2])
        weight = self.weight
        if is_sharded:
            weight = copy_to_tensor_model_parallel_region(weight, group=group)
        score = torch.nn.functional.linear(hidden, weight)
        if self.tensor.gradient == "heads":
            return self._sum_over_heads(score).unsqueeze(-2)
        if self.tensor.gradient == "whole" and is_sharded:
            # every rank has the full gradient, so backward only splits it
            score = gather_from_sequence_parallel_region(
                score,
                tensor_parallel_output_grad=False,
                group=group,
            )
        return score

    def _sum_over_heads(self, x: Tensor) -> Tensor:
        """All-gather the sequence. In the backward pass, sum the gradient over TP ranks."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group)


class NormedInput:
    """Gives access to the normalized input of an attention module.

    If Transformer Engine fuses the norm into the projection ``name``, we make this module return
    the normalized input as well. A forward hook then strips it from the result.
    """

    def __init__(self, attention: Module, name: str) -> None:
        self._normed: Tensor | None = None
        self._attention = attention
        self._name = name
        linear: Any = getattr(attention, name, None)
        if hasattr(linear, "return_layernorm_output"):
            linear.return_layernorm_output = True
            linear.register_forward_hook(self._take_normed)

    def _take_normed(self, module: Any, inputs: Any, result: Any) -> Any:
        if module.return_layernorm_output_gathered:
            raise ConfigError(
                f"Adapters on {self._name} are not supported with sequence_parallel, because they "
                f"gather the normalized input. Remove {self._name} from target_modules."
            )
        (output, self._normed), bias = result
        if getattr(self._attention, self._name) is not module:
            return result  # an adapter that wraps the module needs the normalized input, too
        return output, bias

    def __call__(self, hidden_states: Tensor) -> Tensor:
        normed = self._normed
        self._normed = None
        return hidden_states if normed is None else normed
