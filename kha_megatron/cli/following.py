"""Report the progress and the end of a training run on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kha_megatron.cli import console
from kha_megatron.recipes import Failure, LaunchResult, Step


@contextmanager
def training_progress(title: str) -> Iterator[Callable[[Step], None]]:
    """Show a progress bar with loss and time left on stderr, or lines if stderr is no terminal."""
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
                loss=loss_words(step),
            )

        yield on_step


def _plain_progress(every_seconds: float = 10.0) -> Callable[[Step], None]:
    last = -every_seconds

    def on_step(step: Step) -> None:
        nonlocal last
        now = monotonic()
        if now - last >= every_seconds or step.iteration == step.total:
            last = now
            console.log.print(f"iteration {step.iteration}/{step.total} {loss_words(step)}")

    return on_step


def loss_words(step: Step) -> str:
    """Format the loss of a step."""
    return "loss not finite" if step.loss is None else f"loss {step.loss:.4f}"


def report(result: LaunchResult) -> None:
    """Print how a run ended; after a failure, with the last lines of the rank that failed."""
    if result.succeeded:
        console.log.print(f"trained in {result.seconds:.0f} s; log: {result.log}", markup=False)
        return
    if result.failure is not None:
        print_lines(result.failure)
        console.error(f"training {result.status}: {result.failure}; its log: {result.failure.log}")
    console.log.print(f"log of all ranks: {result.log}", markup=False)


def print_lines(failure: Failure) -> None:
    """Print the last lines of the log of the rank that failed."""
    for line in failure.lines:
        console.log.print(f"  {line}", markup=False, emoji=False)
