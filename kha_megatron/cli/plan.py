"""``kha-megatron plan``: estimate memory and communication of parallel layouts."""

import shlex
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.cli.options import (
    AsJSON,
    GPUMemory,
    HeadsFrom,
    MegatronArguments,
    RecipeName,
    parse_size,
)
from kha_megatron.model.layout import Layout
from kha_megatron.model.run import Run
from kha_megatron.plan import search as planner
from kha_megatron.plan.counts import count_model
from kha_megatron.plan.rank import Setup

_ASSUMED = (
    "Estimates assume Transformer Engine with flash attention, no dropout and balanced experts. A "
    f"layout fits if it uses at most {planner.USABLE_MEMORY:.0%} of the GPU memory. Layouts are "
    "sorted by fit and by time in steps of 5 %. Times are lower bounds for nodes of 8 H100 GPUs."
)
Fixed = Annotated[int | None, typer.Option(min=1, max=2**31, help="Only list this size.")]


def plan(
    recipe: RecipeName,
    megatron: MegatronArguments = None,
    *,
    gpus: Annotated[int, typer.Option(help=f"Number of GPUs, up to {planner.MAX_GPUS}.")],
    gpu_memory: GPUMemory = "80GB",
    tp: Fixed = None,
    pp: Fixed = None,
    vpp: Fixed = None,
    cp: Fixed = None,
    ep: Fixed = None,
    etp: Fixed = None,
    limit: Annotated[int, typer.Option(min=1, max=10**6, help="Number of layouts to list.")] = 15,
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """List the valid parallel layouts of a recipe with estimated memory, communication and time.

    Prints three tables. The first two show the peak memory of the fullest rank, and how much data
    each rank sends per training step (also to other nodes), with a separate column for KHA. The
    third one shows rows per GEMM and per expert, memory traffic of fp32 gradients (GB), seconds of
    computation and of communication that isn't overlapped, the pipeline bubble, and the seconds of
    a step. Note that these are estimates based on the model size. In the layout column, e.g. pp4x2
    means four pipeline ranks with two virtual stages each.

    The last line shows the arguments for the first layout. `kha-megatron launch --layout plan` uses
    them.

    Examples:
      kha-megatron plan moe-a0.8b-6.6b --gpus 64
      kha-megatron plan dense-3.9b --gpus 256 --gpu-memory 80GB --tp 2 --pp 4 --json
      kha-megatron plan moe-a0.8b-6.6b --gpus 512 -- --recompute-granularity full
    """
    setup = planner.build_setup(recipes.get_recipe(recipe).run.updated(megatron or []))
    capacity = parse_size("--gpu-memory", gpu_memory)
    fixed = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "etp": etp}
    plans = planner.plan_layouts(setup, gpus, capacity, fixed)
    whole = count_model(setup.model, setup.kha)
    fitting = sum(planner.fits(p, capacity) for p in plans)
    if as_json:
        result = {
            "recipe": recipe,
            "gpus": gpus,
            "gpu_memory": capacity,
            "batch": asdict(setup.batch),
            "precision": setup.precision,
            "recompute": setup.recompute,
            "parameters": {"total": whole.total, "active": whole.active, "kha": whole.kha},
            "assumed": _ASSUMED,
            "legal": len(plans),
            "fitting": fitting,
            "layouts": [_as_data(p, setup, capacity) for p in plans[:limit]],
        }
        console.print_json(result)
        return
    console.out.print(
        f"{recipe}: {whole.total:,} parameters ({whole.active:,} active, {whole.kha:,} "
        f"for KHA on {setup.kha}), {setup.precision}, recompute {setup.recompute}, sequence length "
        f"{setup.batch.seq_length}, global batch size {setup.batch.global_batch_size}"
    )
    _print(plans[:limit], capacity)
    console.out.print(
        f"{len(plans)} valid layouts on {gpus} GPUs, {fitting} fit into {gpu_memory}"
        + (f" (use --limit to list more than {limit})" if len(plans) > limit else "")
    )
    console.out.print(_ASSUMED)
    console.out.print(f"Arguments of the first layout: {_arguments(plans[0], setup)}")


def _as_data(plan: planner.PlannedLayout, setup: Setup, capacity: float) -> dict[str, Any]:
    layout = plan.layout
    derived = {"etp": layout.expert_tp, "dp": layout.dp, "expert_dp": layout.expert_dp}
    return asdict(plan) | {
        "layout": asdict(layout) | derived,
        "fits": planner.fits(plan, capacity),
        "total_memory": plan.total_memory,
        "arguments": _arguments(plan, setup),
    }


def _arguments(plan: planner.PlannedLayout, setup: Setup) -> str:
    sizes = planner.get_layout_arguments(plan.layout, setup.model)
    return shlex.join(Run.from_values(**sizes).words())


def _print(plans: list[planner.PlannedLayout], capacity: float) -> None:
    parts = "weights", "grads", "optim", "activ", "KHA", "total", "fits"
    memory = console.number_table("layout", *parts, title="peak memory (GB)")
    paths = "TP", "CP", "PP", "EP", "DP", "KHA", "all", "nodes"
    sent = console.number_table("layout", *paths, title="data sent per rank and step (GB)")
    costs = "rows", "expert", "grads", "comp", "comm", "idle", "step"
    times = console.number_table("layout", *costs, title="estimated time per step")
    for plan in plans:
        own, path, name = plan.memory, plan.communication, _name(plan.layout)
        spent = [own.weights, own.gradients, own.optimizer, own.activations]
        spent += [plan.kha_memory.total, plan.total_memory]
        fits = "yes" if planner.fits(plan, capacity) else "no"
        memory.add_row(name, *map(_gigabytes, spent), fits)
        bytes_sent = [path.tensor, path.context, path.pipeline, path.expert]
        bytes_sent += [path.data + path.expert_data, path.kha + path.kha_data, path.total]
        time = plan.time
        sent.add_row(name, *map(_gigabytes, [*bytes_sent, time.node_bytes]))
        rows = f"{time.rows:.0f}", f"{time.expert_rows:.0f}" if time.expert_rows else "-"
        busy = f"{time.compute:.2f}", f"{time.sent + time.data:.2f}"
        gradients = _gigabytes(time.gradient_bytes)
        times.add_row(name, *rows, gradients, *busy, f"{time.idle:.0%}", f"{time.total:.2f}")
    console.out.print(memory, "", sent, "", times)


def _name(layout: Layout) -> str:
    stages = f"{layout.pp}x{layout.vpp}" if layout.vpp else layout.pp
    sizes = {"tp": layout.tp, "pp": stages, "cp": layout.cp, "ep": layout.ep}
    names = [f"{name}{size}" for name, size in sizes.items() if size != 1]
    if layout.expert_tp != layout.tp:
        names.append(f"etp{layout.expert_tp}")
    return " ".join([*names, f"dp{layout.dp}"])


def _gigabytes(count: float) -> str:
    value = count / 1e9
    if value < 0.01:
        return "<.01" if count else "-"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
