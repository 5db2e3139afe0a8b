"""Run a job locally or on Slurm, with progress on stderr."""

import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from time import monotonic

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.recipes import Command, Job, LaunchResult, Step, SubmitResult
from kha_megatron.recipes.log_lines import compute_tokens_per_second

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def training_progress(job: Job, name: str = "") -> Iterator[Callable[[Step], None]]:
    """Show loss, tokens/s and remaining time (as plain lines if stderr is not a terminal).

    Runs that train in parallel need a ``name``. Each of their lines starts with it.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
    )
    length, start = job.run.arguments.get("seq_length", 0), job.resume and job.stopped_at
    title = name or f"{job.recipe.name} on {job.ranks} ranks"
    title += f": resuming from iteration {start}" if start else ": starting"
    previous: Step | None = None
    shows_lines, printed = bool(name) or not console.log.is_terminal, -math.inf
    if shows_lines:
        console.log.print(title, markup=False)
    with Progress(*columns, console=console.log, disable=shows_lines) as bar:
        task = bar.add_task(title, total=None, state="")

        def on_step(step: Step) -> None:
            nonlocal printed, previous
            done, total = step.iteration, step.total
            state = "loss not finite" if step.loss is None else f"loss {step.loss:.4f}"
            speed = compute_tokens_per_second([previous, step], length) if previous else None
            if speed and step.seconds and done < total:
                left = timedelta(seconds=round((total - done) * step.seconds))
                state += f", {speed:,.0f} tokens/s, {left} left"
            previous = step
            bar.update(task, description=job.recipe.name, completed=done, total=total, state=state)
            is_due = done == total or monotonic() - printed >= _SECONDS_BETWEEN_LINES
            if is_due and shows_lines:
                printed = monotonic()
                prefix = f"{name}: " if name else ""
                console.log.print(f"{prefix}iteration {done}/{total} {state}", markup=False)

        yield on_step


def run_job(job: Job, *, dry_run: bool, detach: bool, as_json: bool) -> None:
    """Run a job locally or on Slurm. Waits for it to end, unless ``detach`` or ``dry_run`` is set.

    Raises:
        typer.Exit: If the job failed or was interrupted.
    """
    if dry_run:
        _print_dry_run(job, as_json)
        return
    result: LaunchResult | SubmitResult
    try:
        with nullcontext() if detach else training_progress(job) as on_step:
            if job.slurm is None:
                result = recipes.launch_job(job, on_step=on_step)
            else:
                result = recipes.submit(job, detach=detach, on_step=on_step)
    except KeyboardInterrupt:
        submitted = " Jobs that were already submitted are not canceled." if job.slurm else ""
        console.log.print(f"Interrupted.{submitted}")
        _print_how_to_resume(job)
        raise typer.Exit(130) from None
    print_result(result)
    refused = result.failure is not None and result.failure.exit_code == 2
    if not refused:
        _print_how_to_resume(job)
    if as_json:
        console.print_json({"succeeded": result.succeeded, "output": job.output, **asdict(result)})
    if not result.succeeded:
        raise typer.Exit(2 if refused else 1)


def _print_dry_run(job: Job, as_json: bool) -> None:
    plan = recipes.dry_run(job) if job.slurm is None else recipes.dry_submission(job)
    if as_json:
        console.print_json(asdict(plan))
    elif isinstance(plan, Command):
        typer.echo(_as_shell(plan))
    else:
        typer.echo("\n".join(plan.requests))
        typer.echo(f"# scripts/train.sh, executed by each rank\n{plan.script}")


def print_result(result: LaunchResult | SubmitResult) -> None:
    """Report how a run ended. For failures, includes the last lines of the rank's log."""
    for line in result.failure.lines if result.failure else ():
        console.log.print(f"  {line}", markup=False, emoji=False)
    if isinstance(result, SubmitResult):
        if result.reason is not None:
            console.error(result.reason)
        jobs = ", ".join(result.jobs) or "none"
        console.log.print(f"Status: {result.status}, jobs: {jobs}", markup=False)
        console.log.print(f"NeMo-Run experiment: {result.folder}", markup=False)
    elif result.succeeded:
        state = "finished" if result.stopped_at is None else "stopped"
        console.log.print(f"Training {state} after {result.seconds:.0f} s.")
    elif result.failure is not None:
        console.error(f"Training {result.status}: {result.failure}. See {result.failure.log}.")
    if result.log is not None:
        console.log.print(f"Log of all ranks: {result.log}", markup=False)


def _print_how_to_resume(job: Job) -> None:
    """Print the current command with ``--resume``, if there is a checkpoint to resume from."""
    if (iteration := job.stopped_at) is None:
        return
    words = ["kha-megatron", *sys.argv[1:]]
    if "--resume" not in words:
        words.insert(words.index("--") if "--" in words else len(words), "--resume")
    console.log.print(
        f"The last checkpoint is at iteration {iteration} of {job.run.training.train_iters}. "
        f"To continue, run: {shlex.join(words)}",
        markup=False,
        emoji=False,
    )


def _as_shell(command: Command) -> str:
    """Format a command to paste into a shell, with one variable or flag per line."""
    lines = [f"cd {shlex.quote(str(command.folder))} &&"]
    for name, value in command.environment.items():
        tail = ':"$PATH"' if name == "PATH" else ""
        lines.append(f"{name}={shlex.quote(value)}{tail}")
    line: list[str] = []
    for word in command.words:
        if word.startswith("--") and line:
            lines.append(" ".join(line))
            line = []
        line.append(shlex.quote(word))
    return " \\\n  ".join([*lines, " ".join(line)])
