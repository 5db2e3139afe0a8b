"""What is planned for, and what of it one rank has: the numbers that its bytes are counted from."""

from dataclasses import dataclass
from typing import Literal, Self

from kha_megatron.config import KHAConfig
from kha_megatron.heads import HeadSizes
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.model import Model
from kha_megatron.plan.counts import Parameters, parameters

Precision = Literal["fp32", "bf16", "fp8"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything but the layout that memory and communication depend on."""

    model: Model
    kha: KHAConfig
    batch: Batch
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    distributed_optimizer: bool = True

    @property
    def width(self) -> int:
        """Bytes of an activation, and of a weight that is not in FP8."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank of one pipeline rank; all of them have the same."""

    setup: Setup
    layout: Layout
    stage: int
    """Pipeline rank, counted from 0."""
    chunks: list[list[int]]
    """Layers, counted from 0, of each virtual stage."""
    counts: Parameters
    heads: HeadSizes
    microbatches: int
    """Passes of a step."""
    tokens: float
    """Of a microbatch, inside tensor-parallel regions."""
    share: float
    """Of a microbatch, between those: sequence parallelism divides them."""

    @classmethod
    def of(cls, setup: Setup, layout: Layout, stage: int) -> Self:
        """What the layout gives to a rank of pipeline rank ``stage``."""
        model, batch = setup.model, setup.batch
        tokens = batch.seq_length * batch.micro_batch_size / layout.cp
        return cls(
            setup=setup,
            layout=layout,
            stage=stage,
            chunks=layout.stage_layers(model.layers, stage),
            counts=parameters(model, setup.kha, layout, stage),
            heads=model.head_sizes.on_rank(layout.tp),
            microbatches=batch.microbatches(layout.dp),
            tokens=tokens,
            share=tokens / layout.tp if layout.sequence_parallel else tokens,
        )

    @property
    def model(self) -> Model:
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

    @property
    def forwards(self) -> int:
        """How often a pass runs forward: full recomputation does it twice."""
        return 2 if self.setup.recompute == "full" else 1

    @property
    def layers(self) -> list[int]:
        """Those of all its virtual stages."""
        return [layer for chunk in self.chunks for layer in chunk]

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer."""
        return self.stage == self.layout.pp - 1
