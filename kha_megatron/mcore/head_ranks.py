"""What a head mechanism asks of Megatron's ranks (``ops.heads.ranks``)."""

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
from kha_megatron.mcore.added_loss import LossScale, with_loss
from kha_megatron.mcore.settings import training_arguments
from kha_megatron.ops.heads.ranks import Listener, Ranks


class HeadRanks(Ranks):
    """The tensor- and context-parallel ranks of one layer.

    Args:
        config: the model's configuration, and no copy of it.
        layer_number: global, counted from 1.
        groups: process groups with ``tp`` and ``cp``.
        is_training: whether the layer is in training mode.
        adds_loss: whether :meth:`add_loss` will be called: the schedules must know it before.
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
        self.listeners: list[Listener] = []  # the instruments, where there are any

    @property
    def trains(self) -> bool:
        """In training mode, and not in the pass that recomputing repeats."""
        return self.is_training() and torch.is_grad_enabled()

    @property
    def layers(self) -> int:
        """Of the whole model; those of a hybrid model without attention among them."""
        return self.config.num_layers

    def iteration(self) -> int | None:
        """As Megatron's training loop counts.

        Raises:
            ConfigError: a layer is trained outside of it, or in a CUDA graph.
        """
        if self.config.cuda_graph_impl != "none":
            raise ConfigError(
                "moh.anneal with CUDA graphs, which keep the heads that a token had at their "
                "capture: leave out moh.anneal, or use --cuda-graph-impl none"
            )
        arguments = training_arguments()
        known = [
            count
            for name in ("iteration", "curr_iteration")
            if (count := getattr(arguments, name, None)) is not None
        ]
        if not known and self.trains:
            raise ConfigError(
                "moh.anneal counts iterations of Megatron's training loop, which does not run: "
                "leave it out"
            )
        return max(known, default=None)

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

    def add_loss(self, carrier: Tensor, loss: Tensor) -> Tensor:
        """As the schedules scale it, the mean over microbatches and over the ranks of a sequence.

        Tensor-parallel ranks add the same: it counts once, because what they compute it from has a
        ``whole`` gradient (:mod:`kha_megatron.mcore.head_inputs`) or is gathered by
        :meth:`all_heads`.
        """
        if self.config.calculate_per_token_loss:  # all gradients are divided by all tokens
            loss = loss * (carrier.numel() // carrier.shape[-1])
        else:  # of a sequence, this rank's share; the schedule multiplies by the ranks
            loss = loss / self.cp.size()
        assert self.loss_scale is not None
        return with_loss(carrier, loss, self.loss_scale)
