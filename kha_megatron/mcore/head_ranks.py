"""Tensor- and context-parallel communication for head mechanisms."""

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


def layers_per_attention(config: TransformerConfig) -> int:
    """Return the ratio of a model's layers to its attention layers.

    In hybrid models, MLP layers are counted separately. If this matters for a mechanism,
    ``hybrid.py`` checks that attention and MLP layers alternate.
    """
    return 2 if config.is_hybrid_model else 1


class HeadRanks(Ranks):
    """Implementation of :class:`Ranks` for one layer of a Megatron model.

    Args:
        config (TransformerConfig): The model's config, or in hybrid models that of the layer. Do
            not pass another copy, because :class:`LossScale` is registered in this object.
        groups (ProcessGroupCollection): Must contain ``tp`` and ``cp``.
        is_training (callable): Returns whether the layer is in training mode.
        adds_loss (bool): Whether some mechanism calls :meth:`add_loss`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: Any,
        *,
        is_training: Callable[[], bool],
        adds_loss: bool,
    ) -> None:
        self.config = config
        self.tp = groups.tp
        self.cp = groups.cp
        self.is_training = is_training
        self.loss_scale = LossScale.of(config) if adds_loss else None
        self.listeners: list[Listener] = []

    @property
    def trains(self) -> bool:
        """Whether the layer is training (False in the first forward pass if it is recomputed)."""
        return self.is_training() and torch.is_grad_enabled()

    @property
    def layers(self) -> int:
        return self.config.num_layers // layers_per_attention(self.config)

    def iteration(self, setting: str) -> int | None:
        arguments = vars(training_arguments())
        counts = []
        for name in ("iteration", "curr_iteration"):
            count = arguments.get(name)
            if count is not None:
                counts.append(count)
        is_unknown = self.trains and not counts
        # a CUDA graph would replay the number of heads of the captured iteration
        if is_unknown or self.config.cuda_graph_impl != "none":
            raise ConfigError(
                f"{setting} requires the iteration count of Megatron's training loop and "
                f"--cuda-graph-impl none. Please remove {setting}."
            )
        return max(counts, default=None)

    def all_heads(self, x: Tensor) -> Tensor:
        return gather_from_tensor_model_parallel_region(x, group=self.tp)

    def own_heads(self, x: Tensor) -> Tensor:
        return scatter_to_tensor_model_parallel_region(x, group=self.tp)

    def token_mean(self, x: Tensor) -> Tensor:
        mean = super().token_mean(x)
        if self.cp.size() > 1:
            torch.distributed.all_reduce(mean, group=self.cp)
            mean /= self.cp.size()
        return mean

    def add_loss(self, carrier: Tensor, loss: Tensor) -> Tensor:
        if self.config.calculate_per_token_loss:  # gradients are divided by the tokens
            loss = loss * (carrier.numel() // carrier.shape[-1])
        else:  # Megatron's schedules multiply the loss scale by the CP size
            loss = loss / self.cp.size()
        assert self.loss_scale is not None
        return with_loss(carrier, loss, self.loss_scale)
