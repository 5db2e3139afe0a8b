"""Communication of head mechanisms over Megatron's ranks (``heads.ranks``)."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kha_megatron.errors import ConfigError
from kha_megatron.heads.ranks import Listener, Ranks
from kha_megatron.mcore.added_loss import LossScale, with_loss
from kha_megatron.mcore.settings import training_arguments


class HeadRanks(Ranks):
    """The tensor- and context-parallel ranks of one layer.

    Args:
        config: the model's configuration, not a copy.
        layer_number: global, from 1.
        groups: process groups with ``tp`` and ``cp``.
        is_training: returns whether the layer is in training mode.
        adds_loss: whether a mechanism calls :meth:`add_loss`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        groups: Any,
        *,
        is_training: Callable[[], bool],
        adds_loss: bool = False,
    ) -> None:
        self.config, self.layer_number = config, layer_number
        self.tp, self.cp = groups.tp, groups.cp
        self.is_training = is_training
        self.loss_scale = LossScale.of(config) if adds_loss else None
        self.listeners: list[Listener] = []

    @property
    def trains(self) -> bool:
        """Whether the layer trains, except in the first forward pass of recomputation."""
        return self.is_training() and torch.is_grad_enabled()

    @property
    def layers(self) -> int:
        """Number of layers of the model, including those without attention."""
        return self.config.num_layers

    def iteration(self) -> int | None:
        """Return the iteration of Megatron's training loop.

        Raises:
            ConfigError: training runs without this loop, or in a CUDA graph.
        """
        arguments = vars(training_arguments())
        known = [arguments.get(name) for name in ("iteration", "curr_iteration")]
        known = [count for count in known if count is not None]
        # a CUDA graph would keep the heads of the captured iteration
        if self.config.cuda_graph_impl != "none" or (self.trains and not known):
            raise ConfigError(
                "moh.anneal needs Megatron's training loop, which counts iterations, and "
                "--cuda-graph-impl none. Set one of them, or remove moh.anneal."
            )
        return max(known, default=None)

    def all_heads(self, x: Tensor) -> Tensor:
        """Gather ``[s, b, heads]`` of all ranks; backward returns the gradient of own heads."""
        return gather_from_tensor_model_parallel_region(x, group=self.tp)

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's part of ``[s, b, heads]``; backward gathers all parts."""
        return scatter_to_tensor_model_parallel_region(x, group=self.tp)

    def token_mean(self, x: Tensor) -> Tensor:
        """Return the mean ``[n]`` of ``[s, b, n]`` over the tokens of all CP ranks."""
        mean = super().token_mean(x)
        if self.cp.size() > 1:
            torch.distributed.all_reduce(mean, group=self.cp)
            mean /= self.cp.size()
        return mean

    def add_loss(self, carrier: Tensor, loss: Tensor) -> Tensor:
        """Add the mean of a loss over microbatches and CP ranks.

        All TP ranks add the same loss. It counts once, because its inputs have a ``whole`` gradient
        (:mod:`kha_megatron.mcore.head_inputs`) or come from :meth:`all_heads`.
        """
        if self.config.calculate_per_token_loss:  # gradients are later divided by all tokens
            loss = loss * (carrier.numel() // carrier.shape[-1])
        else:  # the schedule multiplies by the number of CP ranks
            loss = loss / self.cp.size()
        assert self.loss_scale is not None
        return with_loss(carrier, loss, self.loss_scale)
