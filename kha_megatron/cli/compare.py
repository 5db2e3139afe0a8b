"""``kha-megatron compare``: variants of a recipe trained on the same data, and a report."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from kha_megatron import compare as comparing
from kha_megatron import recipes
from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.cli import console
from kha_megatron.cli.following import report
from kha_megatron.cli.launch import MegatronArguments
from kha_megatron.compare import runs
from kha_megatron.compare.charts import require_matplotlib
from kha_megatron.compare.statistics import final_loss
from kha_megatron.errors import KHAError

REPORT, NUMBERS = "report.html", "report.json"


def compare(
    megatron: MegatronArguments = None,
    recipe: Annotated[str, typer.Option(help="What to train: see `kha-megatron recipes list`.")] = (
        "quickstart"
    ),
    variants: Annotated[
        str,
        typer.Option(
            help="Presets, random-init, or NAME=--kha-key linear ..., with commas between them; "
            "the first is what the others are compared with."
        ),
    ] = "baseline,kha_mlp",
    seeds: Annotated[int, typer.Option(min=1, help="How many times each is trained.")] = 3,
    data: Annotated[
        Path | None, typer.Option(help="Folder made by `kha-megatron data prepare`.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder; default compare/RECIPE.")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks on this machine; the recipe's number if not given.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; the recipe's if not given.")
    ] = None,
) -> None:
    """Train variants of a recipe on the same data in the same order, and write a report.

    One run after the other; report.html and report.json are written anew after each. Interrupted,
    the same command goes on where it was: finished runs are kept, an unfinished one continues from
    its last checkpoint. More seeds or variants can be added later.

    Exit codes: 0 all trained, 1 a run failed, 2 refused as bad input, 130 interrupted.

    \b
    Example:
      kha-megatron data prepare --vocab-size 512 --out data/python
      kha-megatron compare --recipe quickstart --data data/python --seeds 3 \\
        --variants baseline,kha_mlp,kha_linear,kha_gate_v,random-init
      kha-megatron compare --variants "baseline,kv=--kha-key linear --kha-value mlp" ...
    """
    require_matplotlib()
    chosen = recipes.get_recipe(recipe)
    planned = comparing.plan(
        chosen,
        comparing.parse_variants(variants),
        seeds,
        output=output or Path("compare", chosen.name.replace("/", "-")),
        data=data,
        overrides=megatron or [],
        ranks=nproc,
        device=device,
    )
    try:
        with runs.locked(planned.folder):
            failures = _train_all(planned)
    except KeyboardInterrupt:
        console.log.print("stopped; the same command goes on from here", markup=False)
        raise typer.Exit(130) from None
    if failures:
        raise typer.Exit(1)


def _train_all(planned: comparing.Comparison) -> dict[str, str]:
    """Train what has not finished yet; the report is written after each run.

    Returns:
        Why runs failed, by their names. A failure before any run has finished ends the command: it
        would most likely be everyone's.
    """
    failures: dict[str, str] = {}
    _write(planned, failures)
    with _progress(planned) as board:
        for run in planned.runs:
            if run.result is not None:
                continue
            failure = _train(run, board)
            if failure:
                failures[run.name] = failure
                board.failed(run)
            if not _write(planned, failures):
                break
            board.refresh()
    if any(run.result for run in planned.runs):
        console.out.print(f"{planned.folder / REPORT}", markup=False)
    return failures


def _train(run: comparing.Trial, board: "Board") -> str | None:
    """One run to its end; in words why it failed, None if it did not."""
    job, start = runs.begin(run)
    board.started(run, start)
    result = recipes.launch(job, on_step=lambda step: board.step(run, step))
    if not result.succeeded:
        report(result)
        return f"{result.status}: {result.failure}"
    try:
        runs.finish(run)
    except KHAError as error:
        console.error(str(error))
        return str(error)
    return None


def _write(planned: comparing.Comparison, failures: dict[str, str]) -> bool:
    """Write the report of what has finished; whether there was anything to write."""
    finished = [(run, result) for run in planned.runs if (result := run.result) is not None]
    if not finished:
        return False
    numbers = comparing.summarise(
        planned,
        {(run.variant.name, run.seed): result for run, result in finished},
        failures=failures,
        command=["kha-megatron", *sys.argv[1:]],
    )
    pictures = {
        f"{run.name}/{file.name}": file.read_bytes()
        for run, _ in finished
        for file in run.folder.glob("*.png")
    }
    runs.write_json(planned.folder / NUMBERS, numbers)
    with staged_file(planned.folder / REPORT) as staged:
        staged.write_text(comparing.page(numbers, pictures), encoding="utf-8")
    return True


class Board:
    """The state of every run, as a table that changes or as lines where stderr is no terminal."""

    def __init__(self, planned: comparing.Comparison, live: Live | None) -> None:
        self._planned = planned
        self._live = live
        self._states: dict[str, tuple[str, ...]] = {}
        self._losses: dict[str, float] = {}
        self._last = 0.0

    def started(self, run: comparing.Trial, iteration: int) -> None:
        """A run's ranks are being started; ``iteration`` is what it goes on from."""
        words = f"goes on from {iteration}" if iteration else "starting"
        self._show(run, words)
        if self._live is None:
            console.log.print(f"{run.name}: {words}", markup=False)

    def step(self, run: comparing.Trial, step: recipes.Step) -> None:
        """Progress of the run that is being trained."""
        loss = "not finite" if step.loss is None else f"{step.loss:.4f}"
        left = step.seconds and (step.total - step.iteration) * step.seconds
        self._show(
            run,
            f"{step.iteration}/{step.total}",
            loss,
            f"{step.seconds:.3g} s" if step.seconds else "",
            f"{left // 60:.0f}:{left % 60:02.0f}" if left is not None else "",
        )
        now = time.monotonic()
        if self._live is None and (now - self._last >= 10 or step.iteration == step.total):
            self._last = now
            console.log.print(
                f"{run.name}: iteration {step.iteration}/{step.total} loss {loss}", markup=False
            )

    def failed(self, run: comparing.Trial) -> None:
        """The run ended badly."""
        self._show(run, "failed")

    def _show(self, run: comparing.Trial, *cells: str) -> None:
        self._states[run.name] = cells
        self.refresh()

    def refresh(self) -> None:
        """Draw the table anew."""
        if self._live is not None:
            self._live.update(self.table(), refresh=True)

    def table(self) -> Table:
        """One row a run."""
        table = Table(title=f"compare {self._planned.recipe.name}", title_justify="left")
        table.add_column("run")
        for name in ("iteration", "loss", "time/step", "left", "ΔL"):
            table.add_column(name, justify="right", no_wrap=True)
        reference = self._planned.variants[0].name
        for run in self._planned.runs:
            own, base = self._final(run.name), self._final(f"{reference}-seed{run.seed}")
            if own is None:
                state = self._states.get(run.name, ("waiting",))
                table.add_row(run.name, *state)
                continue
            delta = "" if base is None or run.variant.name == reference else f"{own - base:+.4f}"
            table.add_row(
                run.name,
                "finished",
                f"{own:.4f}",
                "",
                "",
                delta,
            )
        return table

    def _final(self, name: str) -> float | None:
        """The final loss of a finished run; its file is read once."""
        if name not in self._losses:
            run = next(run for run in self._planned.runs if run.name == name)
            result = run.result
            if result is None:
                return None
            self._losses[name] = final_loss(result["losses"])
        return self._losses[name]


@contextmanager
def _progress(planned: comparing.Comparison) -> Iterator[Board]:
    if not console.log.is_terminal:
        yield Board(planned, None)
        return
    with Live(console=console.log, auto_refresh=False) as live:
        board = Board(planned, live)
        board.refresh()
        yield board
