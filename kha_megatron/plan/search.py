"""Search for parallel layouts.

All valid layouts are ranked by the following criteria:

1. whether they fit into GPU memory
2. estimated step time in steps of 5%, see :mod:`kha_megatron.plan.timing`
3. fewer ranks that share a sequence, as the Megatron-Core MoE guide recommends
4. estimated step time
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kha_megatron.errors import ConfigError
from kha_megatron.model.fields import rows
from kha_megatron.model.layout import Layout, divisors
from kha_megatron.model.model_config import ModelConfig
from kha_megatron.model.rules import build_head_facts, check_layout
from kha_megatron.model.run import Run, parse_arguments
from kha_megatron.plan.communication import Communication, estimate_communication
from kha_megatron.plan.counts import get_countable_model
from kha_megatron.plan.memory import Memory, estimate_memory
from kha_megatron.plan.rank import Rank, Setup
from kha_megatron.plan.timing import GPUS_PER_NODE, StepTime, estimate_time

USABLE_MEMORY = 0.9
"""Leave some headroom for everything that isn't part of the estimate (e.g. the CUDA context)."""

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
    time: StepTime

    @property
    def total_memory(self) -> float:
        return self.memory.total + self.kha_memory.total


def build_setup(run: Run) -> Setup:
    """Extract what the planner needs from a run.

    Raises:
        ConfigError: If the planner doesn't support the model, or there is no batch size.
    """
    model, batch, training = get_countable_model(run.model), run.batch, run.training
    if model.attention_type != "gqa" or model.mtp_num_layers or batch is None:
        found = "multi-token prediction" if model.mtp_num_layers else model.attention_type.upper()
        found = "a run without a batch size" if batch is None else found
        raise ConfigError(f"Planning is not supported for {found}.")
    return Setup(
        model=model,
        kha=run.kha,
        batch=batch,
        precision="fp8" if model.fp8 else "bf16" if training.bf16 else "fp32",
        recompute=training.recompute_granularity or "none",
        distributed_optimizer=training.use_distributed_optimizer,
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
    setup.kha.check(build_head_facts(setup.model))
    if not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(f"The number of GPUs must be between 1 and {MAX_GPUS}, got {gpus}.")
    given = {name: size for name, size in fixed.items() if size is not None}
    plans: list[PlannedLayout] = []
    refusal: ConfigError | None = None
    for layout in _candidates(setup, gpus, given):
        try:
            check_layout(setup.model, layout, setup.batch)
        except ConfigError as error:
            refusal = refusal or error
        else:
            plans.append(_plan(setup, layout))
    if refusal and not plans:
        raise refusal

    def order(plan: PlannedLayout) -> tuple[bool, int, int, float]:
        layout, seconds = plan.layout, plan.time.total
        shared = layout.tp * layout.pp * layout.cp
        return not fits(plan, gpu_memory), round(math.log(seconds, 1.05)), shared, seconds

    return sorted(plans, key=order)


def get_layout_arguments(layout: Layout, model: ModelConfig) -> dict[str, Any]:
    """Convert a layout to Megatron arguments, e.g. ``{"tensor_model_parallel_size": 4}``.

    If the model was given as a layer pattern, the result contains a pattern with its stages.
    """
    sizes = [*SIZES, "sequence_parallel", "embedding_as_layer", "loss_as_layer"]
    if not model.num_experts:
        sizes = [name for name in sizes if name not in ("ep", "etp")]
    if model.hybrid_layer_pattern:
        sizes = [name for name in sizes if name != "vpp" and not name.endswith("as_layer")]
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


def plan_arguments(
    run: Run, words: Sequence[str], gpus: int, gpu_memory: float = 80e9
) -> dict[str, Any]:
    """Return the arguments of the best layout for a run with additional command-line arguments.

    Parallel sizes in ``words`` are fixed.
    """
    given = {name: one.value for name, one in parse_arguments(words).items()}
    fixed = {row.field: given.get(row.argument) for row in rows(Layout) if row.field in SIZES}
    setup = build_setup(run.updated(words))
    return get_layout_arguments(plan_layouts(setup, gpus, gpu_memory, fixed)[0].layout, setup.model)


def fits(plan: PlannedLayout, gpu_memory: float) -> bool:
    return plan.total_memory <= USABLE_MEMORY * gpu_memory


def _candidates(setup: Setup, gpus: int, fixed: Mapping[str, int]) -> Iterator[Layout]:
    model = setup.model

    def sizes(name: str, open_to: list[int]) -> list[int]:
        return [fixed[name]] if name in fixed else open_to

    whole = divisors(gpus)
    # TP and CP are limited to one node unless the user asks for more
    tensor = sizes("tp", [n for n in whole if n <= GPUS_PER_NODE])
    pipeline = sizes("pp", [n for n in whole if n <= model.layers])
    context = sizes("cp", [n for n in whole if n <= GPUS_PER_NODE])
    experts = sizes("ep", [n for n in whole if n == 1 or not (model.experts or 1) % n])
    for tp, pp, cp, ep in itertools.product(tensor, pipeline, context, experts):
        # etp is either 1 or tp by default
        for etp in sizes("etp", sorted({1, tp}) if model.num_experts else [tp]):
            ends = next((n for n in range(3) if not (model.layers + n) % pp), 0)
            deepest = max(1, (model.layers + ends) // pp) if pp > 1 else 1
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
                    embedding_as_layer=ends > 1,
                    loss_as_layer=ends > 0,
                )


def _plan(setup: Setup, layout: Layout) -> PlannedLayout:
    # The other stages have fewer microbatches in flight than the second, so they need less memory.
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    ranks = [Rank(setup, layout, stage) for stage in stages]
    costs = [estimate_memory(rank) for rank in ranks]
    worst = max(range(len(ranks)), key=lambda i: sum(part.total for part in costs[i]))
    sent = list(map(estimate_communication, ranks))
    return PlannedLayout(
        layout=layout,
        microbatches=ranks[0].microbatches,
        stage=ranks[worst].stage,
        memory=costs[worst][0],
        kha_memory=costs[worst][1],
        communication=max(sent, key=lambda c: c.total),
        time=estimate_time(ranks, sent),
    )
