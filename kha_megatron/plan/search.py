"""List the valid layouts of a run on a number of GPUs, with their estimated cost.

Layouts that fit into the GPU's memory come first, ordered by the pipeline's idle time (in steps of
five percentage points, the accuracy of this estimate), bytes sent and memory.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kha_megatron.errors import ConfigError
from kha_megatron.model.fields import rows
from kha_megatron.model.layout import Batch, Layout, divisors
from kha_megatron.model.model_config import ModelConfig
from kha_megatron.model.rules import build_head_facts, check_layout
from kha_megatron.model.run import Run
from kha_megatron.plan.communication import Communication, communication
from kha_megatron.plan.counts import Flops, counted, flops
from kha_megatron.plan.memory import Memory, memory
from kha_megatron.plan.rank import Precision, Rank, Recompute, Setup

USABLE = 0.9
"""Share of the GPU's memory that a layout may fill; see :mod:`kha_megatron.plan.memory`."""

NODE = 8
"""GPUs joined by NVLink. Larger tensor- and context-parallel sizes must be requested."""

MOST_GPUS = 131_072

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")
"""Fields of :class:`Layout` that a caller may fix."""


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A valid layout and its cost."""

    layout: Layout
    microbatches: int
    """Microbatches of a replica in one step."""
    stage: int
    """Pipeline rank with the largest memory, from 0."""
    memory: Memory
    """Bytes of that rank without KHA."""
    kha_memory: Memory
    communication: Communication
    """Bytes of the pipeline rank that sends most."""
    idle: float
    """Mean idle share of a step over pipeline ranks."""

    @property
    def total_memory(self) -> float:
        """Bytes including KHA."""
        return self.memory.total + self.kha_memory.total


def setup_of(
    run: Run,
    *,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
    precision: Precision | None = None,
    recompute: Recompute = "none",
) -> Setup:
    """Return a run in the planner's terms. Arguments replace the run's values.

    Raises:
        ConfigError: the planner does not support the run.
    """
    model, batch = counted(run.model), run.batch
    if model.attention_type != "gqa" or batch is None:
        found = "no batch size" if batch is None else model.attention_type.upper()
        raise ConfigError(f"Expected a run with grouped-query attention and a batch, got {found}.")
    default: Precision = "fp8" if model.fp8 else "bf16" if run.training.bf16 else "fp32"
    precision = precision or default
    return Setup(
        model=replace(model, fp8="hybrid" if precision == "fp8" else None),
        kha=run.kha,
        batch=Batch(
            seq_length=seq_length or batch.seq_length,
            micro_batch_size=micro_batch_size or batch.micro_batch_size,
            global_batch_size=global_batch_size or batch.global_batch_size,
        ),
        precision=precision,
        recompute=recompute,
        distributed_optimizer=run.training.use_distributed_optimizer,
    )


def plan_layouts(
    setup: Setup, gpus: int, gpu_memory: float, fixed: Mapping[str, int | None]
) -> list[PlannedLayout]:
    """Return all legal layouts on ``gpus`` GPUs with their cost, best first.

    Args:
        gpu_memory: bytes of one GPU.
        fixed: sizes of :data:`SIZES` that are given; None or absent leaves one open.

    Raises:
        ConfigError: no layout is legal, or a mechanism does not fit the run.
    """
    setup.kha.check(build_head_facts(setup.model, setup.batch))
    if not 1 <= gpus <= MOST_GPUS:
        raise ConfigError(f"Expected 1 to {MOST_GPUS} GPUs, got {gpus}.")
    given = {name: size for name, size in fixed.items() if size is not None}
    plans: list[PlannedLayout] = []
    work = flops(setup.model, setup.kha, setup.batch.seq_length)
    refusal: ConfigError | None = None
    for layout in _candidates(setup, gpus, given):
        try:
            check_layout(setup.model, layout, setup.batch)
        except ConfigError as error:
            refusal = refusal or error
        else:
            plans.append(_plan(setup, layout, work))
    if refusal and not plans:
        raise refusal

    def order(plan: PlannedLayout) -> tuple[bool, int, float, float]:
        idle = int(plan.idle / 0.05)
        return not fits(plan, gpu_memory), idle, plan.communication.total, plan.total_memory

    return sorted(plans, key=order)


def arguments_of(layout: Layout, model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's arguments, by name, that request a layout."""
    sizes = [n for n in SIZES if model.num_experts or n not in ("ep", "etp")]
    whole = replace(layout, etp=layout.expert_tp)
    return {
        row.argument: value
        for row in rows(Layout)
        if row.field in (*sizes, "sequence_parallel", "loss_as_layer")
        and (value := getattr(whole, row.field))
    }


def fits(plan: PlannedLayout, gpu_memory: float) -> bool:
    """Return True if the layout needs at most :data:`USABLE` of the memory."""
    return plan.total_memory <= USABLE * gpu_memory


def _candidates(setup: Setup, gpus: int, fixed: Mapping[str, int]) -> Iterator[Layout]:
    """Yield layouts to check, small sizes first."""
    model = setup.model

    def sizes(name: str, open_to: list[int]) -> list[int]:
        return [fixed[name]] if name in fixed else open_to

    whole = divisors(gpus)
    tensor = sizes("tp", [n for n in whole if n <= NODE])
    pipeline = sizes("pp", [n for n in whole if n <= model.layers])
    context = sizes("cp", [n for n in whole if n <= NODE])
    experts = sizes("ep", [n for n in whole if n == 1 or not (model.experts or 1) % n])
    for tp, pp, cp, ep in itertools.product(tensor, pipeline, context, experts):
        # a size that is 1 already is not split twice
        for etp in sizes("etp", sorted({1, tp}) if model.num_experts else [tp]):
            loss_as_layer = bool(model.layers % pp) and not (model.layers + 1) % pp
            deepest = max(1, (model.layers + loss_as_layer) // pp) if pp > 1 else 1
            for vpp in sizes("vpp", divisors(deepest)):
                yield Layout(
                    world_size=gpus,
                    tp=tp,
                    pp=pp,
                    vpp=vpp if vpp > 1 else None,
                    cp=cp,
                    ep=ep,
                    etp=etp,
                    sequence_parallel=tp > 1,
                    loss_as_layer=loss_as_layer,
                )


def _plan(setup: Setup, layout: Layout, work: Flops) -> PlannedLayout:
    # the second stage has most of what the first has but for the ends; later ones have fewer passes
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    ranks = [Rank(setup, layout, stage) for stage in stages]
    costs = [memory(rank) for rank in ranks]
    worst = max(range(len(ranks)), key=lambda i: sum(part.total for part in costs[i]))
    microbatches = ranks[0].microbatches
    return PlannedLayout(
        layout=layout,
        microbatches=microbatches,
        stage=ranks[worst].stage,
        memory=costs[worst][0],
        kha_memory=costs[worst][1],
        communication=max(map(communication, ranks), key=lambda c: c.total),
        idle=_idle(layout, setup.model.layers, microbatches, work),
    )


def _idle(layout: Layout, layers: int, microbatches: int, work: Flops) -> float:
    """Return the pipeline's idle share after Narayanan et al. 2021, section 2.2.

    The slowest stage sets the pace; with a large vocabulary that is the last one.
    """
    of_layer = (work.forward - work.logits) / layers
    stages = [
        of_layer * sum(map(len, layout.stage_layers(layers, stage))) for stage in range(layout.pp)
    ]
    stages[-1] += work.logits
    slowest, whole = max(stages), sum(stages)
    step = microbatches * slowest + (whole - slowest) / (layout.vpp or 1)
    return 1 - microbatches * whole / layout.pp / step
