"""``kha-megatron compare``: variants of a recipe trained on the same data, and a report."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from kha_megatron import compare as comparing
from kha_megatron import recipes
from kha_megatron.checkpoint.staging import staged_file, write_json
from kha_megatron.cli import console
from kha_megatron.cli.following import report
from kha_megatron.cli.options import DataFolder, MegatronArguments, TrainingDevice
from kha_megatron.compare import runs
from kha_megatron.compare.charts import require_matplotlib
from kha_megatron.compare.statistics import final_loss
from kha_megatron.errors import KHAError

REPORT, NUMBERS = "report.html", "report.json"


def compare(
    megatron: MegatronArguments = None,
    recipe: Annotated[str, typer.Option(help="What to train.")] = "quickstart",
    variants: Annotated[
        str,
        typer.Option(
            help="Presets, some joined with +, random-init, or NAME=--kha-key linear ..., with "
            "commas between them; the first is what the others are compared with."
        ),
    ] = "baseline,kha_mlp",
    seeds: Annotated[int, typer.Option(min=1, help="How many times each is trained.")] = 3,
    data: DataFolder = None,
    output: Annotated[Path | None, typer.Option(help="Folder; default compare/RECIPE.")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks on this machine; the recipe's number if not given.")
    ] = None,
    device: TrainingDevice = None,
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
      kha-megatron compare --variants baseline,gate_output,moh_75,kha_mlp+gate_output ...
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
        raise
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
    board = Board(planned)
    with board.display:
        for run in planned.runs:
            if run.result is not None:
                continue
            failure = _train(run, board)
            if failure:
                failures[run.name] = failure
                board.failed(run)
            if not _write(planned, failures):
                break
            board.compare()
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
    write_json(planned.folder / NUMBERS, numbers)
    with staged_file(planned.folder / REPORT) as staged:
        staged.write_text(comparing.page(numbers, pictures), encoding="utf-8")
    return True


class Board:
    """The state of every run: a row each that changes, or lines where stderr is no terminal."""

    def __init__(self, planned: comparing.Comparison) -> None:
        self._planned = planned
        self._draws = console.log.is_terminal
        columns = (
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[state]}", markup=False),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[difference]}"),
        )
        self.display = Progress(*columns, console=console.log, disable=not self._draws)
        self._rows = {
            run.name: self.display.add_task(
                run.name, total=None, start=False, state="waiting", loss="", difference=""
            )
            for run in planned.runs
        }
        self._last = 0.0
        self.compare()

    def started(self, run: comparing.Trial, iteration: int) -> None:
        """A run's ranks are being started; ``iteration`` is what it goes on from."""
        self.display.start_task(self._rows[run.name])
        self._say(run, f"goes on from {iteration}" if iteration else "starting")

    def step(self, run: comparing.Trial, step: recipes.Step) -> None:
        """Progress of the run that is being trained."""
        state = f"iteration {step.iteration}/{step.total}"
        loss = "loss not finite" if step.loss is None else f"loss {step.loss:.4f}"
        row = self._rows[run.name]
        self.display.update(row, completed=step.iteration, total=step.total)
        now = time.monotonic()
        self._say(run, state, loss, aloud=now - self._last >= 10 or step.iteration == step.total)

    def failed(self, run: comparing.Trial) -> None:
        """The run ended badly; its log has been named."""
        self._say(run, "failed", aloud=False)

    def compare(self) -> None:
        """Show the final losses of what has finished, beside the first variant's of that seed."""
        final = {
            run.name: final_loss(result["losses"])
            for run in self._planned.runs
            if (result := run.result) is not None
        }
        reference = self._planned.variants[0].name
        for run in self._planned.runs:
            base = final.get(f"{reference}-seed{run.seed}")
            if run.name in final:
                self._say(run, "finished", f"loss {final[run.name]:.4f}", aloud=False)
                if base is not None and run.variant.name != reference:
                    difference = f"ΔL {final[run.name] - base:+.4f}"
                    self.display.update(self._rows[run.name], difference=difference)

    def _say(self, run: comparing.Trial, state: str, loss: str = "", *, aloud: bool = True) -> None:
        self.display.update(self._rows[run.name], state=state, loss=loss)
        if aloud and not self._draws:
            self._last = time.monotonic()
            console.log.print(f"{run.name}: {state} {loss}".rstrip(), markup=False)
