"""``kha-megatron plan``: parameters, FLOPs and memory of a recipe on a number of GPUs."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.cli.options import (
    AsJSON,
    GPUMemory,
    HeadsFrom,
    MegatronArguments,
    RecipeName,
    parse_size,
    warn_about_unused,
)
from kha_megatron.errors import ConfigError
from kha_megatron.model.layout import Layout
from kha_megatron.plan.counts import ARGUMENTS_NOT_COUNTED
from kha_megatron.plan.estimate import ESTIMATED_ARGUMENTS, USABLE_MEMORY, Estimate, estimate_run
from kha_megatron.plan.memory import Memory
from kha_megatron.recipes import Recipe
from kha_megatron.recipes.prepare import fit_micro_batch

_ASSUMED = (
    "Memory is estimated for Transformer Engine with flash attention, Adam, no dropout and "
    "balanced experts."
)


def plan(
    recipe: RecipeName,
    megatron: MegatronArguments = None,
    *,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=2**31, help="Number of GPUs (default: set by recipe)."),
    ] = None,
    gpu_memory: GPUMemory = "80GB",
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Estimate the parameters, FLOPs and GPU memory of a recipe, and check that it fits.

    The layout (parallel sizes) is the recipe's, unless you pass another one after --. The memory is
    the peak of the rank that needs the most. It fits if it is at most 90% of the GPU memory. FLOPs
    are those of forward and backward pass, without a discount for the causal mask.

    With a pattern instead of a name, you get a table of all matching recipes for GPUs.

    Exit codes: 0 if the largest rank fits into the GPU memory, 1 if it does not fit, 2 for invalid
    arguments.

    Examples:
      kha-megatron plan moe-a0.8b-6.6b --gpus 64
      kha-megatron plan 'table2/*'
      kha-megatron plan dense-3.9b --gpus 256 --gpu-memory 40GB -- \\
        --tensor-model-parallel-size 2 --sequence-parallel
    """
    bytes_per_gpu = parse_size("--gpu-memory", gpu_memory)
    overrides = megatron or []
    warn_about_unused(overrides, used=(*ARGUMENTS_NOT_COUNTED, *ESTIMATED_ARGUMENTS))
    if _is_pattern(recipe):
        _plan_all(recipe, overrides, gpus, bytes_per_gpu, as_json=as_json)
        return
    estimate = _estimate(recipes.get_recipe(recipe), overrides, gpus)
    if as_json:
        console.print_json(_as_data(recipe, estimate, bytes_per_gpu))
    else:
        _print(recipe, estimate)
        console.out.print(estimate.explain_fit(bytes_per_gpu), _ASSUMED, sep="\n")
    if not estimate.fits(bytes_per_gpu):
        raise typer.Exit(1)


def _is_pattern(recipe: str) -> bool:
    """Return whether the argument selects several recipes, e.g. ``table2/*``."""
    if recipes.is_own_recipe(recipe):  # the path of a file may contain these symbols
        return False
    return any(symbol in recipe for symbol in "*?[")


def _estimate(recipe: Recipe, overrides: list[str], gpus: int | None) -> Estimate:
    if gpus is None:
        gpus = recipe.ranks
    requested_run = recipe.run.updated(overrides)
    run = fit_micro_batch(recipe, requested_run, gpus)
    return estimate_run(run, gpus)


def _plan_all(
    pattern: str,
    overrides: list[str],
    gpus: int | None,
    bytes_per_gpu: int,
    *,
    as_json: bool,
) -> None:
    """Print the memory of all recipes for GPUs whose name matches the pattern."""
    estimates = {}
    for recipe in recipes.find_recipes(pattern):
        if recipe.run.training.device == "cuda":
            estimates[recipe.name] = _estimate(recipe, overrides, gpus)
    if not estimates:
        raise ConfigError(
            f"No recipe for GPUs matches {pattern!r}. Run `kha-megatron recipes list`."
        )
    if as_json:
        data = []
        for name, estimate in estimates.items():
            data.append(_as_data(name, estimate, bytes_per_gpu))
        console.print_json(data)
    else:
        console.out.print(_memory_table(estimates, bytes_per_gpu), _ASSUMED, sep="\n")
    if not all(estimate.fits(bytes_per_gpu) for estimate in estimates.values()):
        raise typer.Exit(1)


def _memory_table(estimates: Mapping[str, Estimate], bytes_per_gpu: int) -> Table:
    usable = USABLE_MEMORY * bytes_per_gpu / 1e9
    title = f"Micro batch sizes, and GB of the largest rank (at most {usable:.1f} fit)"
    table = console.number_table(
        "recipe", "GPUs", "batch", "activations", "total", "fits", title=title
    )
    for name, estimate in estimates.items():
        fits = "yes" if estimate.fits(bytes_per_gpu) else "no"
        table.add_row(
            name,
            str(estimate.layout.world_size),
            str(estimate.setup.batch.micro_batch_size),
            f"{estimate.total_activations / 1e9:.1f}",
            f"{estimate.total_memory / 1e9:.1f}",
            fits,
        )
    return table


def _as_data(recipe_name: str, estimate: Estimate, bytes_per_gpu: int) -> dict[str, Any]:
    setup = estimate.setup
    layout = estimate.layout
    counts = estimate.counts
    largest_rank = estimate.largest_rank
    derived_sizes = {
        "etp": layout.expert_tp,
        "dp": layout.dp,
        "expert_dp": layout.expert_dp,
    }
    return {
        "recipe": recipe_name,
        "gpus": layout.world_size,
        "gpu_memory": bytes_per_gpu,
        "fits": estimate.fits(bytes_per_gpu),
        "layout": asdict(layout) | derived_sizes,
        "batch": asdict(setup.batch),
        "microbatches": largest_rank.microbatches,
        "precision": setup.precision,
        "recompute": setup.recompute,
        "parameters": {
            "total": counts.total,
            "active": counts.active,
            "kha": counts.kha,
            "largest_rank": largest_rank.counts.total,
        },
        "flops": {
            "token": estimate.flops_per_token,
            "step": estimate.flops_per_step,
        },
        "pipeline_stage": largest_rank.stage,
        "memory": asdict(estimate.memory),
        "kha_memory": asdict(estimate.kha_memory),
        "total_memory": estimate.total_memory,
        "assumed": _ASSUMED,
    }


def _print(recipe_name: str, estimate: Estimate) -> None:
    setup = estimate.setup
    batch = setup.batch
    counts = estimate.counts
    largest_rank = estimate.largest_rank
    layout = _format_layout(estimate.layout)
    console.print_facts(
        {
            "recipe": f"{recipe_name} (KHA: {setup.model.kha})",
            "layout": f"{layout} ({largest_rank.microbatches} microbatches)",
            "batch": f"{batch.global_batch_size} sequences of {batch.seq_length} tokens",
            "precision": f"{setup.precision}, recompute {setup.recompute}",
            "parameters": f"{counts.total:,} ({counts.active:,} active, {counts.kha:,} for KHA)",
            "on one rank": f"{largest_rank.counts.total:,} parameters",
            "per token": f"{estimate.flops_per_token / 1e9:,.2f} GFLOPs",
            "per step": f"{estimate.flops_per_step / 1e15:,.2f} PFLOPs",
        }
    )
    title = f"Memory of the largest rank (pipeline stage {largest_rank.stage})"
    table = console.number_table(
        "GB", "weights", "gradients", "optimizer", "activations", "total", title=title
    )
    table.add_row("model", *_format_memory(estimate.memory))
    table.add_row("KHA", *_format_memory(estimate.kha_memory))
    console.out.print("", table, "", sep="\n")


def _format_layout(layout: Layout) -> str:
    parallel_sizes = {"TP": layout.tp, "PP": layout.pp, "CP": layout.cp, "EP": layout.ep}
    sizes = []
    for name, size in parallel_sizes.items():
        if size != 1:
            sizes.append(f"{name} {size}")
    if layout.vpp:
        sizes.append(f"VPP {layout.vpp}")
    if layout.expert_tp != layout.tp:
        sizes.append(f"ETP {layout.expert_tp}")
    sizes.append(f"DP {layout.dp}")
    return ", ".join(sizes)


def _format_memory(memory: Memory) -> list[str]:
    sizes = (
        memory.weights,
        memory.gradients,
        memory.optimizer,
        memory.activations,
        memory.total,
    )
    return [f"{size / 1e9:.2f}" for size in sizes]
