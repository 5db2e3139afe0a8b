"""``kha-megatron launch``: train a recipe with NeMo-Run and follow it."""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.cli.plan import memory_of
from kha_megatron.errors import ConfigError
from kha_megatron.model.run import hear, say
from kha_megatron.plan.search import planned
from kha_megatron.recipes import Command, Job, LaunchResult, Recipe, Step

MegatronArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- MEGATRON ARGS]",
        help="Megatron's and --kha-* arguments; each replaces the recipe's own value.",
    ),
]


def launch(
    recipe: Annotated[str, typer.Argument(help="A name of `kha-megatron recipes list`.")],
    megatron: MegatronArguments = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder made by `kha-megatron data prepare`.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints and TensorBoard files; default runs/RECIPE."),
    ] = None,
    executor: Annotated[
        str, typer.Option(help=f"Where it runs: {', '.join(recipes.EXECUTORS)}.")
    ] = "local",
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks on each machine; the recipe's, or 8 on a cluster, if not given."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; the recipe's if not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in --output.")
    ] = False,
    nodes: Annotated[int | None, typer.Option(help="Machines of the cluster.")] = None,
    container_image: Annotated[str | None, typer.Option(help="Image of the ranks.")] = None,
    mount: Annotated[
        list[str] | None, typer.Option(help="HERE:THERE in the container. May be repeated.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the ranks. May be repeated.")
    ] = None,
    code: Annotated[
        str | None, typer.Option(help="Ship `git` (the committed tree) or a folder with the job.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's.")] = None,
    time: Annotated[
        str | None,
        typer.Option(help="Slurm's limit, HH:MM:SS; the run saves and ends before it."),
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="Start a failed job again so often.")] = 0,
    chain: Annotated[
        int, typer.Option(min=1, help="Slurm jobs in a row, each going on from the last.")
    ] = 1,
    fault_tolerant: Annotated[
        bool, typer.Option("--fault-tolerant", help="Start ranks with NVIDIA's ft_launcher.")
    ] = False,
    host: Annotated[
        str | None, typer.Option(help="USER@HOST of Slurm's login node; this machine if not given.")
    ] = None,
    folder: Annotated[
        str | None, typer.Option(help="Folder for the jobs' files on the Slurm cluster.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of a field of NeMo-Run's executor; repeatable."),
    ] = None,
    layout: Annotated[
        Literal["plan", "recipe"] | None,
        typer.Option(help="Parallel sizes: the best of `plan` (on clusters), or the recipe's."),
    ] = None,
    gpu_memory: Annotated[
        str, typer.Option(help="Memory of one GPU, for the plan: 80GB or 80GiB.")
    ] = "80GB",
    detach: Annotated[
        bool, typer.Option("--detach", help="Hand the job to the cluster and return.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the exact command and environment; start nothing."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a recipe with NeMo-Run, and follow it.

    Exit codes: 0 trained (or handed over with --detach), 1 the job failed, 2
    refused as bad input, 130 interrupted. On a cluster the parallel sizes are
    the best that `plan` finds for its GPUs; sizes given after -- stay.

    \b
    Example:
      kha-megatron data prepare --from src --glob '*.py' --out data/mine
      kha-megatron launch quickstart --data data/mine --output runs/first
      kha-megatron launch quickstart --data data/mine --dry-run -- --train-iters 50
      kha-megatron launch table2/mlp-v --data /data/mine --executor slurm --nodes 4
          --account acme --time 04:00:00 --chain 6 --dry-run
    """
    chosen = recipes.get_recipe(recipe)
    given = {
        "nodes": nodes,
        "gpus": nproc,
        "image": container_image,
        "mounts": tuple(mount or ()) or None,
        "environment": _pairs("--env", env) or None,
        "code": code,
        "partition": partition,
        "account": account,
        "time": time,
        "retries": retries or None,
        "chain": None if chain == 1 else chain,
        "fault_tolerant": fault_tolerant or None,
        "host": host,
        "folder": folder,
        "settings": _pairs("--set", set_) or None,
    }
    cluster = _cluster(executor, {name: value for name, value in given.items() if value})
    if output is None and cluster is not None and not cluster.shares_files:
        raise ConfigError(f"--executor {executor} needs --output, a folder as the ranks see it")
    overrides = list(megatron or [])
    if (layout or ("recipe" if cluster is None else "plan")) == "plan":
        ranks = cluster.ranks if cluster else nproc or chosen.ranks
        chosen = _planned(chosen, ranks, memory_of(gpu_memory), overrides)
    job = recipes.prepare(
        chosen,
        data=data,
        output=output or Path("runs", chosen.name),
        overrides=overrides,
        ranks=nproc,
        device=device,
        resume=resume,
        cluster=cluster,
    )
    if cluster is not None:
        _on_a_cluster(job, dry_run=dry_run, detach=detach, as_json=as_json)
        return
    if detach:
        raise ConfigError("--detach is for clusters: start a local run with nohup or in tmux")
    if dry_run:
        command = recipes.dry_run(job)
        _print_data(asdict(command)) if as_json else _print(_as_shell(command))
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
        _print_data({"succeeded": result.succeeded, "output": job.output, **asdict(result)})
    if not result.succeeded:
        refused = result.failure is not None and result.failure.exit_code == 2
        raise typer.Exit(2 if refused else 1)


def _planned(recipe: Recipe, ranks: int, memory: float, words: list[str]) -> Recipe:
    """The recipe in the layout that is planned for so many GPUs; sizes among ``words`` stay."""
    sizes = planned(recipe.run_for(words), ranks, memory, fixed=hear(words))
    text = " ".join(" ".join([one.flag, *one.words]) for one in say(**sizes).values())
    console.log.print(f"layout for {ranks} GPUs: {text}", markup=False)
    return recipe.updated(**sizes)


def _cluster(executor: str, given: dict[str, Any]) -> recipes.Cluster | None:
    """The cluster that the options name; None for this machine."""
    if executor != "local":
        return recipes.Cluster(executor=executor, **given)
    for name in given:
        if name != "gpus":
            raise ConfigError(
                f"--executor local runs on this machine as it is, without {name}: remove it, or "
                f"choose an executor of {', '.join(recipes.EXECUTORS[1:])}"
            )
    return None


def _pairs(flag: str, words: list[str] | None) -> dict[str, str]:
    pairs = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ConfigError(f"{flag} {word}: give NAME=VALUE")
        pairs[name] = value
    return pairs


def _on_a_cluster(job: Job, *, dry_run: bool, detach: bool, as_json: bool) -> None:
    if dry_run:
        submission = recipes.dry_submission(job)
        if as_json:
            _print_data(asdict(submission))
        else:
            _print("\n".join(submission.requests))
            _print(f"# scripts/train.sh, which every rank runs\n{submission.script}")
        return
    try:
        result = recipes.submit(job, detach=detach)
    except KeyboardInterrupt:
        console.log.print("no longer waiting; what was submitted may go on", markup=False)
        raise typer.Exit(130) from None
    if result.reason is not None:
        console.error(result.reason)
    jobs = ", ".join(result.jobs) or "none"
    console.log.print(f"{result.status}; jobs: {jobs}; files: {result.folder}", markup=False)
    if as_json:
        _print_data({"succeeded": result.succeeded, **asdict(result)})
    if not result.succeeded:
        raise typer.Exit(1)


@contextmanager
def training_progress(job: Job) -> Iterator[Callable[[Step], None]]:
    """A bar with loss and time left on stderr; plain lines where stderr is no terminal."""
    title = f"{job.recipe.name} on {job.ranks} ranks"
    if not console.log.is_terminal:
        console.log.print(f"{title}: starting", markup=False)
        yield _plain_progress()
        return

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console.log) as bar:
        task = bar.add_task(f"{title}: starting", total=None, loss="")

        def on_step(step: Step) -> None:
            bar.update(
                task,
                description=title,
                completed=step.iteration,
                total=step.total,
                loss=_loss(step),
            )

        yield on_step


def _plain_progress(every_seconds: float = 10.0) -> Callable[[Step], None]:
    last = -every_seconds

    def on_step(step: Step) -> None:
        nonlocal last
        now = monotonic()
        if now - last >= every_seconds or step.iteration == step.total:
            last = now
            console.log.print(f"iteration {step.iteration}/{step.total} {_loss(step)}")

    return on_step


def _loss(step: Step) -> str:
    return "loss not finite" if step.loss is None else f"loss {step.loss:.4f}"


def report(result: LaunchResult) -> None:
    """Say on stderr how a run ended; after a failure, with the last lines of the guilty rank."""
    if result.succeeded:
        console.log.print(f"trained in {result.seconds:.0f} s; log: {result.log}", markup=False)
        return
    if result.failure is not None:
        for line in result.failure.lines:
            console.log.print(f"  {line}", markup=False, emoji=False)
        console.error(f"training {result.status}: {result.failure}; its log: {result.failure.log}")
    console.log.print(f"log of all ranks: {result.log}", markup=False)


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


def _print_data(data: dict[str, Any]) -> None:
    _print(json.dumps(data, indent=2, default=str))


def _print(text: str) -> None:
    console.out.print(text, markup=False, emoji=False)
