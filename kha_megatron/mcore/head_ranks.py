"""What a head mechanism asks of Megatron's ranks (``ops.heads.ranks``)."""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kha_megatron.ops.heads.ranks import Ranks


class HeadRanks(Ranks):
    """The tensor- and context-parallel ranks of one layer.

    Args:
        config: the model's configuration.
        layer_number: global, counted from 1.
        groups: process groups with ``tp`` and ``cp``.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, groups: Any) -> None:
        self.config, self.layer_number = config, layer_number
        self.tp, self.cp = groups.tp, groups.cp

    def all_heads(self, x: Tensor) -> Tensor:
        """``[s, b, heads]`` of every rank; a rank gets back the gradient of its own heads."""
        return gather_from_tensor_model_parallel_region(x, group=self.tp)

    def own_heads(self, x: Tensor) -> Tensor:
        """This rank's part of ``[s, b, heads]``; its backward pass gathers all parts."""
        return scatter_to_tensor_model_parallel_region(x, group=self.tp)

    def token_mean(self, x: Tensor) -> Tensor:
        """``[n]``: the mean of ``[s, b, n]`` over the tokens of all context-parallel ranks."""
        mean = super().token_mean(x)
        if self.cp.size() > 1:
            torch.distributed.all_reduce(mean, group=self.cp)
            mean /= self.cp.size()
        return mean
