"""Describe a planned run (:class:`Setup`) and one of its ranks (:class:`Rank`)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kha_megatron.config import KHAConfig
from kha_megatron.heads import HeadSizes
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.model_config import ModelConfig
from kha_megatron.plan.counts import Parameters, parameters

Precision = Literal["fp32", "bf16", "fp8"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run without its layout."""

    model: ModelConfig
    kha: KHAConfig
    batch: Batch
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    distributed_optimizer: bool = True

    @property
    def width(self) -> int:
        """Bytes of an activation, and of a weight that is not in FP8."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True)
class Rank:
    """A rank of pipeline stage ``stage``, counted from 0."""

    setup: Setup
    layout: Layout
    stage: int

    @property
    def model(self) -> ModelConfig:
        """The whole model."""
        return self.setup.model

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return self.setup.width

    @property
    def row(self) -> int:
        """Bytes of one token between layers."""
        return self.model.hidden_size * self.width

    @cached_property
    def chunks(self) -> list[list[int]]:
        """Layers of each virtual stage, counted from 0."""
        return self.layout.stage_layers(self.model.layers, self.stage)

    @cached_property
    def layers(self) -> list[int]:
        """Layers of all virtual stages."""
        return [layer for chunk in self.chunks for layer in chunk]

    @cached_property
    def counts(self) -> Parameters:
        """Parameters of the rank."""
        return parameters(self.model, self.setup.kha, self.layout, self.stage)

    @cached_property
    def heads(self) -> HeadSizes:
        """Heads of the rank."""
        return self.model.head_sizes.on_rank(self.layout.tp)

    @cached_property
    def microbatches(self) -> int:
        """Forward passes of a step."""
        return self.setup.batch.microbatches(self.layout.dp)

    @cached_property
    def tokens(self) -> float:
        """Tokens of a microbatch inside tensor-parallel regions."""
        batch = self.setup.batch
        return batch.seq_length * batch.micro_batch_size / self.layout.cp

    @property
    def share(self) -> float:
        """Tokens of a microbatch between those regions; sequence parallelism divides them."""
        return self.tokens / self.layout.tp if self.layout.sequence_parallel else self.tokens

    @property
    def forwards(self) -> int:
        """Forward computations per pass: two with full recomputation."""
        return 2 if self.setup.recompute == "full" else 1

    @property
    def is_last(self) -> bool:
        """True if the rank has the output layer."""
        return self.stage == self.layout.pp - 1
