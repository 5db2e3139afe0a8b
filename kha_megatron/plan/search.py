"""Search for parallel layouts.

All valid layouts are ranked by the following criteria:

1. whether they fit into GPU memory
2. pipeline bubble, in steps of 5% because the estimate isn't more accurate than that
3. communication volume
4. memory
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
from kha_megatron.plan.communication import Communication, estimate_communication
from kha_megatron.plan.counts import Flops, compute_flops, get_countable_model
from kha_megatron.plan.memory import Memory, estimate_memory
from kha_megatron.plan.rank import Precision, Rank, Recompute, Setup

USABLE_MEMORY = 0.9
"""Leave some headroom for everything that isn't part of the estimate (e.g. the CUDA context)."""

GPUS_PER_NODE = 8
"""TP and CP are limited to this size unless the user asks for more."""

MAX_GPUS = 131_072

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A valid layout with its estimated cost."""

    layout: Layout
    microbatches: int  # per step
    stage: int  # pipeline stage that needs the most memory
    memory: Memory  # of that stage, excluding KHA
    kha_memory: Memory
    communication: Communication  # of the pipeline stage that sends the most
    idle: float  # pipeline bubble / step time

    @property
    def total_memory(self) -> float:
        return self.memory.total + self.kha_memory.total


def build_setup(
    run: Run,
    *,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
    precision: Precision | None = None,
    recompute: Recompute = "none",
) -> Setup:
    """Extract what the planner needs from a run. Optional arguments override the run's settings.

    Raises:
        ConfigError: If the planner doesn't support the model, or there is no batch size.
    """
    model, batch = get_countable_model(run.model), run.batch
    if model.attention_type != "gqa" or model.mtp_num_layers or batch is None:
        found = "multi-token prediction" if model.mtp_num_layers else model.attention_type.upper()
        found = "a run without a batch size" if batch is None else found
        raise ConfigError(f"Planning is not supported for {found}.")
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
    """Find all valid layouts and rank them, best first.

    Args:
        gpu_memory: Memory per GPU in bytes.
        fixed: Sizes that are already decided, e.g. ``{"tp": 4}``. We search over all others
            (see :data:`SIZES`).

    Raises:
        ConfigError: If no layout is valid.
    """
    setup.kha.check(build_head_facts(setup.model, setup.batch))
    if not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(f"The number of GPUs must be between 1 and {MAX_GPUS}, got {gpus}.")
    given = {name: size for name, size in fixed.items() if size is not None}
    plans: list[PlannedLayout] = []
    work = compute_flops(setup.model, setup.kha, setup.batch.seq_length)
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


def get_layout_arguments(layout: Layout, model: ModelConfig) -> dict[str, Any]:
    """Convert a layout to Megatron arguments, e.g. ``{"tensor_model_parallel_size": 4}``.

    If the model was given as a layer pattern, the result contains a pattern with its stages.
    """
    sizes = [*SIZES, "sequence_parallel", "loss_as_layer"]
    if not model.num_experts:
        sizes = [name for name in sizes if name not in ("ep", "etp")]
    if model.hybrid_layer_pattern:
        sizes = [name for name in sizes if name not in ("vpp", "loss_as_layer")]
    whole = replace(layout, etp=layout.expert_tp)
    arguments = {
        row.argument: value
        for row in rows(Layout)
        if row.field in sizes and (value := getattr(whole, row.field))
    }
    if model.hybrid_layer_pattern:
        stages = itertools.chain.from_iterable(layout.chunk_layers(model.layers))
        arguments["hybrid_layer_pattern"] = str(model.layer_pattern(stages))
    return arguments


def fits(plan: PlannedLayout, gpu_memory: float) -> bool:
    return plan.total_memory <= USABLE_MEMORY * gpu_memory


def _candidates(setup: Setup, gpus: int, fixed: Mapping[str, int]) -> Iterator[Layout]:
    model = setup.model

    def sizes(name: str, open_to: list[int]) -> list[int]:
        return [fixed[name]] if name in fixed else open_to

    whole = divisors(gpus)
    tensor = sizes("tp", [n for n in whole if n <= GPUS_PER_NODE])
    pipeline = sizes("pp", [n for n in whole if n <= model.layers])
    context = sizes("cp", [n for n in whole if n <= GPUS_PER_NODE])
    experts = sizes("ep", [n for n in whole if n == 1 or not (model.experts or 1) % n])
    for tp, pp, cp, ep in itertools.product(tensor, pipeline, context, experts):
        # etp is either 1 or tp by default
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
    # The other stages have fewer microbatches in flight than the second, so they need less memory.
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    ranks = [Rank(setup, layout, stage) for stage in stages]
    costs = [estimate_memory(rank) for rank in ranks]
    worst = max(range(len(ranks)), key=lambda i: sum(part.total for part in costs[i]))
    microbatches = ranks[0].microbatches
    return PlannedLayout(
        layout=layout,
        microbatches=microbatches,
        stage=ranks[worst].stage,
        memory=costs[worst][0],
        kha_memory=costs[worst][1],
        communication=max(map(estimate_communication, ranks), key=lambda c: c.total),
        idle=_estimate_bubble(layout, setup.model.layers, microbatches, work),
    )


def _estimate_bubble(layout: Layout, layers: int, microbatches: int, work: Flops) -> float:
    """Estimate pipeline bubble / step time, see section 2.2 of https://arxiv.org/abs/2104.04473.

    The step time depends on the slowest stage (e.g. the last one if the vocabulary is large).
    """
    per_layer = (work.forward - work.logits) / layers
    stages = [
        per_layer * sum(map(len, layout.stage_layers(layers, stage))) for stage in range(layout.pp)
    ]
    stages[-1] += work.logits
    slowest, whole = max(stages), sum(stages)
    step = microbatches * slowest + (whole - slowest) / (layout.vpp or 1)
    return 1 - microbatches * whole / layout.pp / step
