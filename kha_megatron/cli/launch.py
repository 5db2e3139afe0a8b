"""``kha-megatron launch``: train a recipe with NeMo-Run and follow it."""

import shlex
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.cli.destination import placed
from kha_megatron.cli.following import print_lines, report, training_progress
from kha_megatron.cli.options import (
    AsJSON,
    DataFolder,
    GPUMemory,
    MegatronArguments,
    RecipeName,
    TrainingDevice,
    parse_size,
)
from kha_megatron.errors import ConfigError
from kha_megatron.model.run import hear, say
from kha_megatron.plan.search import planned
from kha_megatron.recipes import Cluster, Command, Job, Recipe


@placed
def launch(
    recipe: RecipeName,
    to: Cluster,
    megatron: MegatronArguments = None,
    data: DataFolder = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints and TensorBoard files; default runs/RECIPE."),
    ] = None,
    device: TrainingDevice = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in --output.")
    ] = False,
    layout: Annotated[
        Literal["plan", "recipe"] | None,
        typer.Option(help="Parallel sizes: the best of `plan` (GPU clusters), or the recipe's."),
    ] = None,
    gpu_memory: GPUMemory = "80GB",
    detach: Annotated[
        bool, typer.Option("--detach", help="Hand the job to the cluster and return.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the exact command and environment; start nothing."),
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Train a recipe with NeMo-Run, and follow it.

    Exit codes: 0 trained (or handed over with --detach), 1 the job failed, 2
    refused as bad input, 130 interrupted. On a cluster the parallel sizes are
    the best that `plan` finds for its GPUs; sizes given after -- stay. A job
    that a cluster starts again goes on from the checkpoints in --output.

    Examples:
      kha-megatron data prepare --from src --glob '*.py' --out data/mine
      kha-megatron launch quickstart --data data/mine --output runs/first
      kha-megatron launch quickstart --data data/mine --dry-run -- --train-iters 50
      kha-megatron launch table2/mlp-v --data /data/mine --executor slurm \\
        --nodes 4 --account acme --time 04:00:00 --chain 6 --dry-run
    """
    chosen = recipes.get_recipe(recipe)
    cluster = None if to.executor == "local" else to
    if output is None and cluster is not None and not cluster.shares_files:
        raise ConfigError(f"--executor {to.executor} needs --output, a folder as the ranks see it")
    words = megatron or []
    recipes.check_words(chosen, words)
    on_gpus = (device or chosen.run.training.device) != "cpu"
    if (layout or ("plan" if cluster and on_gpus else "recipe")) == "plan":
        ranks = cluster.ranks if cluster else to.gpus or chosen.ranks
        chosen = _planned(chosen, ranks, parse_size("--gpu-memory", gpu_memory), words)
    job = recipes.prepare(
        chosen,
        data=data,
        output=output or Path("runs", chosen.name),
        overrides=words,
        ranks=to.gpus,
        device=device,
        resume=resume,
        cluster=cluster,
    )
    if cluster is not None:
        _on_a_cluster(job, dry_run=dry_run, detach=detach, as_json=as_json)
    elif detach:
        raise ConfigError("--detach is for clusters: start a local run with nohup or in tmux")
    else:
        _on_this_machine(job, dry_run=dry_run, as_json=as_json)


def _planned(recipe: Recipe, ranks: int, memory: float, words: list[str]) -> Recipe:
    """The recipe in the layout that is planned for so many GPUs; sizes among ``words`` stay."""
    sizes = planned(recipe.run_for(words), ranks, memory, fixed=hear(words))
    text = " ".join(" ".join([one.flag, *one.words]) for one in say(**sizes).values())
    console.log.print(f"layout for {ranks} GPUs: {text}", markup=False)
    return recipe.updated(**sizes)


def _on_this_machine(job: Job, *, dry_run: bool, as_json: bool) -> None:
    if dry_run:
        command = recipes.dry_run(job)
        console.print_json(asdict(command)) if as_json else _print(_as_shell(command))
        return
    try:
        with training_progress(job) as on_step:
            result = recipes.launch(job, on_step=on_step)
    except KeyboardInterrupt:
        console.log.print(
            f"stopped; --resume continues a run that left a checkpoint in {job.output}"
        )
        raise typer.Exit(130) from None
    report(result)
    if as_json:
        console.print_json({"succeeded": result.succeeded, "output": job.output, **asdict(result)})
    if not result.succeeded:
        refused = result.failure is not None and result.failure.exit_code == 2
        raise typer.Exit(2 if refused else 1)


def _on_a_cluster(job: Job, *, dry_run: bool, detach: bool, as_json: bool) -> None:
    if dry_run:
        submission = recipes.dry_submission(job)
        if as_json:
            console.print_json(asdict(submission))
        else:
            _print("\n".join(submission.requests))
            _print(f"# scripts/train.sh, which every rank runs\n{submission.script}")
        return
    try:
        with training_progress(job) if not detach else nullcontext() as on_step:
            result = recipes.submit(job, detach=detach, on_step=on_step)
    except KeyboardInterrupt:
        console.log.print("no longer waiting; what was submitted may go on", markup=False)
        raise typer.Exit(130) from None
    if result.failure is not None:
        print_lines(result.failure)
    if result.reason is not None:
        console.error(result.reason)
    jobs = ", ".join(result.jobs) or "none"
    console.log.print(f"{result.status}; jobs: {jobs}; files: {result.folder}", markup=False)
    if result.log is not None:
        console.log.print(f"log of all ranks: {result.log}", markup=False)
    if as_json:
        console.print_json({"succeeded": result.succeeded, **asdict(result)})
    if not result.succeeded:
        raise typer.Exit(1)


def _as_shell(command: Command) -> str:
    """The command as text that a shell runs: one variable, one flag with its values, per line."""
    lines = [f"cd {shlex.quote(str(command.folder))} &&"]
    for name, value in command.environment.items():
        tail = ':"$PATH"' if name == "PATH" else ""
        lines.append(f"{name}={shlex.quote(value)}{tail}")
    words: list[str] = []
    for word in command.words:
        if word.startswith("--") and words:
            lines.append(" ".join(words))
            words = []
        words.append(shlex.quote(word))
    lines.append(" ".join(words))
    return " \\\n  ".join(lines)


def _print(text: str) -> None:
    console.out.print(text, markup=False, emoji=False)
