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
_REFUSED = 2
"""Exit code of ranks, and of this command, for invalid arguments. Resuming would not help."""


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
    start = "starting"
    if job.resume and job.stopped_at:
        start = f"resuming from iteration {job.stopped_at}"
    title = name or f"{job.recipe.name} on {job.ranks} ranks"
    title += f": {start}"
    prefix = f"{name}: " if name else ""
    seq_length = job.run.arguments.get("seq_length", 0)
    shows_lines = bool(name) or not console.log.is_terminal
    if shows_lines:
        console.log.print(title, markup=False)
    previous_step: Step | None = None
    last_print = -math.inf
    with Progress(*columns, console=console.log, disable=shows_lines) as bar:
        task = bar.add_task(title, total=None, state="")

        def on_step(step: Step) -> None:
            nonlocal last_print, previous_step
            state = _describe_step(step, previous_step, seq_length)
            previous_step = step
            bar.update(
                task,
                description=job.recipe.name,
                completed=step.iteration,
                total=step.total,
                state=state,
            )
            if not shows_lines:
                return
            is_last = step.iteration == step.total
            seconds_since_line = monotonic() - last_print
            if is_last or seconds_since_line >= _SECONDS_BETWEEN_LINES:
                last_print = monotonic()
                line = f"{prefix}iteration {step.iteration}/{step.total} {state}"
                console.log.print(line, markup=False)

        yield on_step


def _describe_step(step: Step, previous: Step | None, seq_length: int) -> str:
    """Format the loss, the speed since the previous step, and the remaining time."""
    state = "loss not finite" if step.loss is None else f"loss {step.loss:.4f}"
    if previous is None or not step.seconds:
        return state
    speed = compute_tokens_per_second([previous, step], seq_length)
    remaining_steps = step.total - step.iteration
    if speed and remaining_steps > 0:
        remaining_time = timedelta(seconds=round(remaining_steps * step.seconds))
        state += f", {speed:,.0f} tokens/s, {remaining_time} left"
    return state


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
        if job.slurm is None:
            console.log.print("Interrupted.")
            _print_how_to_resume(job)
        else:
            console.log.print("Interrupted. Jobs that were already submitted are not canceled.")
        raise typer.Exit(130) from None
    print_result(result)
    was_refused = result.failure is not None and result.failure.exit_code == _REFUSED
    has_ended = result.status != "submitted"
    if has_ended and not was_refused:
        _print_how_to_resume(job)
    if as_json:
        content = {"succeeded": result.succeeded, "output": job.output}
        console.print_json(content | asdict(result))
    if not result.succeeded:
        raise typer.Exit(_REFUSED if was_refused else 1)


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
    if result.failure is not None:
        for line in result.failure.lines:
            console.log.print(f"  {line}", markup=False)
    if isinstance(result, SubmitResult):
        _print_submission(result)
    elif result.succeeded:
        state = "finished" if result.stopped_at is None else "stopped"
        console.log.print(f"Training {state} after {result.seconds:.0f} s.")
    elif result.failure is not None:
        console.error(f"Training {result.status}: {result.failure}. See {result.failure.log}.")
    if result.log is not None:
        console.log.print(f"Log of all ranks: {result.log}", markup=False)


def _print_submission(result: SubmitResult) -> None:
    if result.reason is not None:
        console.error(result.reason)
    jobs = ", ".join(result.jobs) or "none"
    console.log.print(f"Status: {result.status}, jobs: {jobs}", markup=False)
    console.log.print(f"NeMo-Run experiment: {result.folder}", markup=False)


def _print_how_to_resume(job: Job) -> None:
    """Print the current command with ``--resume``, if there is a checkpoint to resume from."""
    iteration = job.stopped_at
    if iteration is None:
        return
    command = ["kha-megatron", *sys.argv[1:]]
    if "--resume" not in command:
        # Megatron's arguments follow after --
        end_of_options = command.index("--") if "--" in command else len(command)
        command.insert(end_of_options, "--resume")
    console.log.print(
        f"The last checkpoint is at iteration {iteration} of {job.run.training.train_iters}. "
        f"To continue, run: {shlex.join(command)}",
        markup=False,
    )


def _as_shell(command: Command) -> str:
    """Format a command to paste into a shell, with one variable or flag per line."""
    lines = [f"cd {shlex.quote(str(command.folder))} &&"]
    for name, value in command.environment.items():
        assignment = f"{name}={shlex.quote(value)}"
        if name == "PATH":
            assignment += ':"$PATH"'
        lines.append(assignment)
    program, *arguments = command.words
    lines.append(shlex.quote(program))
    for argument in arguments:
        quoted = shlex.quote(argument)
        if argument.startswith("--"):
            lines.append(quoted)
        else:  # the value of the flag in the last line
            lines[-1] += f" {quoted}"
    return " \\\n  ".join(lines)
