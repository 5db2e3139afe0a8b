"""Inputs of the memory estimate: the run, and one of its ranks."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kha_megatron.heads import HeadSizes
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.plan.counts import Parameters, count_parameters

Precision = Literal["fp32", "fp16", "bf16", "fp8"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything about a training job except for its parallel layout."""

    model: ModelConfig
    batch: Batch
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    gradient_size: int = 4
    """Bytes per gradient."""
    distributed_optimizer: bool = True

    @property
    def element_size(self) -> int:
        """Bytes per element in activations and weights (FP8 copies not included)."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True)
class Rank:
    """A rank in a given pipeline stage (0-based)."""

    setup: Setup
    layout: Layout
    stage: int

    @property
    def model(self) -> ModelConfig:
        return self.setup.model

    @property
    def element_size(self) -> int:
        return self.setup.element_size

    @property
    def linear_input_size(self) -> int:
        """Bytes per element of the inputs that linear layers save."""
        if self.setup.precision == "fp8":
            return 1
        return self.element_size

    @property
    def token_bytes(self) -> int:
        """Bytes per hidden state."""
        return self.model.hidden_size * self.element_size

    @cached_property
    def virtual_stages(self) -> list[list[int]]:
        """Layer indices of each virtual stage. Without interleaving, there is only one."""
        return self.layout.stage_layers(self.model.layers, self.stage)

    @cached_property
    def layers(self) -> list[int]:
        return list(itertools.chain(*self.virtual_stages))

    @cached_property
    def counts(self) -> Parameters:
        return count_parameters(self.model, self.layout, self.stage)

    @cached_property
    def heads(self) -> HeadSizes:
        return self.model.head_sizes.on_rank(self.layout.tp)

    @property
    def microbatches(self) -> int:
        batch = self.setup.batch
        return batch.microbatches(self.layout.dp)

    @property
    def tokens(self) -> float:
        """Local tokens per microbatch in attention and MLP (not sharded by SP)."""
        batch = self.setup.batch
        tokens = batch.seq_length * batch.micro_batch_size
        return tokens / self.layout.cp

    @property
    def sharded_tokens(self) -> float:
        """Local tokens per microbatch in norms and residual connections (sharded by SP)."""
        if not self.layout.sequence_parallel:
            return self.tokens
        return self.tokens / self.layout.tp

    @property
    def is_last(self) -> bool:
        last_stage = self.layout.pp - 1
        return self.stage == last_stage
