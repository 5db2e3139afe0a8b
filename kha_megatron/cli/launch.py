"""``kha-megatron launch``: train a recipe with NeMo-Run and follow it."""

import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

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
from kha_megatron.errors import ConfigError
from kha_megatron.recipes import Command, Job, LaunchResult, Step

EXECUTORS = ("local",)


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
        str, typer.Option(help=f"Where NeMo-Run starts it: {', '.join(EXECUTORS)}.")
    ] = "local",
    nproc: Annotated[
        int | None, typer.Option(help="Ranks on this machine; the recipe's number if not given.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; the recipe's if not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in --output.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the exact command and environment; start nothing."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a recipe with NeMo-Run, and follow it.

    Exit codes: 0 trained, 1 a rank failed, 2 refused as bad input, 130 interrupted.

    \b
    Example:
      kha-megatron data prepare --from src --glob '*.py' --out data/mine
      kha-megatron launch quickstart --data data/mine --output runs/first
      kha-megatron launch quickstart --data data/mine --dry-run -- --train-iters 50
    """
    if executor not in EXECUTORS:
        raise ConfigError(f"unknown executor {executor!r}: choose one of {', '.join(EXECUTORS)}")
    chosen = recipes.get_recipe(recipe)
    job = recipes.prepare(
        chosen,
        data=data,
        output=output or Path("runs", chosen.name),
        overrides=megatron or [],
        ranks=nproc,
        device=device,
        resume=resume,
    )
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
        now = time.monotonic()
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
