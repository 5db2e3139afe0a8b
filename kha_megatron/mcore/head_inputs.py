"""Projections of the attention's normed input for head mechanisms.

Without sequence parallelism, all TP ranks see the same tokens. The weight's gradient is then
complete once that of the output is. With it, a rank sees its part of the sequence, and a copy on
the weight sums the gradient over the ranks. The gradient of the output depends on its reader: see
:class:`InputProjection`.
"""

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
    """A parameter ``[features, hidden]`` or ``[heads, features, hidden]`` that reads the input.

    Maps this rank's tokens ``[s / tp or s, b, hidden]`` to, by ``HeadTensor.gradient`` and
    ``per_head``:

    ==========  ================================  ==========================================
    per head    ``[s, b, this rank's heads, f]``  every rank has its own
    ``heads``   ``[s, b, 1, f]``                  heads of all ranks read it: partial gradients,
                                                  summed here
    ``whole``   ``[s, b, f]``                     every rank computes the same from it
    ``tokens``  ``[s / tp or s, b, f]``           used for this rank's tokens only
    ==========  ================================  ==========================================
    """

    def forward(self, hidden: Tensor | None = None) -> Tensor:
        """Project ``hidden``; without it, return the weight."""
        if hidden is None:
            return super().forward()
        group, is_sharded = self.tp_group, self.config.sequence_parallel
        if self.tensor.per_head:
            weight = super().forward()
            score = torch.nn.functional.linear(self._sum_over_heads(hidden), weight.flatten(0, 1))
            return score.unflatten(-1, weight.shape[:2])
        weight = self.weight
        if is_sharded:
            weight = copy_to_tensor_model_parallel_region(weight, group=group)
        score = torch.nn.functional.linear(hidden, weight)
        if self.tensor.gradient == "heads":
            return self._sum_over_heads(score).unsqueeze(-2)
        if self.tensor.gradient == "whole" and is_sharded:
            # every rank has the whole gradient and keeps the part of its own tokens
            score = gather_from_sequence_parallel_region(
                score, tensor_parallel_output_grad=False, group=group
            )
        return score

    def _sum_over_heads(self, x: Tensor) -> Tensor:
        """Return ``x`` of all tokens; its gradient is summed over the ranks."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group)


class NormedInput:
    """Returns the normed input of an attention, also if Transformer Engine fuses the norm.

    Args:
        attention: the attention module.
        name: name of its first projection. A projection with a fused norm also returns the normed
            input, which a hook removes from the result.
    """

    def __init__(self, attention: Module, name: str) -> None:
        self._normed: Tensor | None = None
        self._attention, self._name = attention, name
        linear: Any = getattr(attention, name, None)
        if hasattr(linear, "return_layernorm_output"):
            linear.return_layernorm_output = True
            linear.register_forward_hook(self._take_normed)

    def _take_normed(self, module: Any, inputs: Any, result: Any) -> Any:
        if module.return_layernorm_output_gathered:
            raise ConfigError(
                f"Remove {self._name} from target_modules, or turn off sequence_parallel: the "
                "adapter gathers the input that head mechanisms read."
            )
        (output, self._normed), bias = result
        if getattr(self._attention, self._name) is not module:
            return result  # an adapter around the module reads the normed input, too
        return output, bias

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Return the normed input ``[s, b, h]``; ``hidden_states`` if no norm is fused."""
        normed, self._normed = self._normed, None
        return hidden_states if normed is None else normed
