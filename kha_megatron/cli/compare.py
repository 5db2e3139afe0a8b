"""``kha-megatron compare``: variants of a recipe trained on the same data, and a report."""

import json
import os
import sys
import threading
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from kha_megatron import compare as comparing
from kha_megatron import recipes
from kha_megatron.checkpoint.staging import staged_file, write_json
from kha_megatron.cli import console
from kha_megatron.cli.following import loss_words, report
from kha_megatron.cli.options import (
    AsJSON,
    DataFolder,
    MegatronArguments,
    TrainingDevice,
    preset_names,
    recipe_names,
)
from kha_megatron.compare import runs
from kha_megatron.compare.charts import require_matplotlib
from kha_megatron.compare.statistics import final_loss
from kha_megatron.errors import ConfigError, KHAError

REPORT, NUMBERS = "report.html", "report.json"
_HEARS_SECONDS = 1.0
"""How long the main thread sleeps at most: only it acts on a signal, and one that the system gave
to another thread does not wake it."""


def compare(
    megatron: MegatronArguments = None,
    recipe: Annotated[
        str, typer.Option(help="What to train.", autocompletion=recipe_names)
    ] = "quickstart",
    variants: Annotated[
        str,
        typer.Option(
            help="Presets, some joined with +, random-init, or NAME=--kha-key linear ..., with "
            "commas between them; the first is what the others are compared with.",
            autocompletion=preset_names,
        ),
    ] = "baseline,kha_mlp",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs per variant.")] = 3,
    null: Annotated[
        bool,
        typer.Option(
            "--null",
            help="Also train the first variant from a start that differs by rounding alone, seed "
            "by seed: how far its loss moves is the floor of the report.",
        ),
    ] = False,
    held_out: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Also judge each run at its end by N sequences of the validation split.",
        ),
    ] = 0,
    data: DataFolder = None,
    output: Annotated[Path | None, typer.Option(help="Folder; default compare/RECIPE.")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks on this machine; the recipe's number if not given.")
    ] = None,
    device: TrainingDevice = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs at a time; by default as many as have a CPU core for each rank, or 1 on "
            "GPUs.",
        ),
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Train variants of a recipe on the same data in the same order, and write a report.

    report.html and report.json are written anew after each run. Interrupted, the same command goes
    on where it was: finished runs are kept, an unfinished one continues from its last checkpoint.
    More seeds, variants and the null runs can be added later.

    Exit codes: 0 all trained, 1 a run failed, 2 refused as bad input, 130 interrupted.

    Examples:
      kha-megatron data prepare --vocab-size 512 --out data/python
      kha-megatron compare --recipe laptop/moe --data data/python --seeds 6 \\
        --variants baseline,kha_mlp,kha_linear,random-init --null --held-out 320
      kha-megatron compare --recipe laptop/dense --data data/python --json \\
        --variants baseline,gate_output,moh_75,kha_mlp+gate_output
      kha-megatron compare --recipe laptop/dense --data data/python \\
        --variants "baseline,kv=--kha-key linear --kha-value mlp"
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
        null=null,
        held_out=held_out,
    )
    at_once = _at_once(planned.runs[0], jobs)
    try:
        with runs.locked(planned.folder):
            failures = _train_all(planned, at_once)
    except KeyboardInterrupt:
        console.log.print("stopped; the same command goes on from here", markup=False)
        raise
    if as_json:
        console.print_json({"succeeded": not failures} | _outcome(planned, failures))
    elif _finished(planned):
        console.out.print(f"{planned.folder / REPORT}", markup=False)
    if failures:
        raise typer.Exit(1)


def _at_once(run: comparing.Trial, jobs: int | None) -> int:
    """How many runs are trained side by side.

    Raises:
        ConfigError: several on GPUs, where each would take the first ones.
    """
    on_gpus = run.asked.training.device != "cpu"
    if on_gpus and jobs not in (None, 1):
        raise ConfigError(
            f"--jobs {jobs}: runs on GPUs are trained one at a time, because each takes the first "
            "ones of this machine: remove --jobs, or add --device cpu"
        )
    cores = len(os.sched_getaffinity(0))
    return jobs or (1 if on_gpus else max(1, cores // (run.ranks or run.recipe.ranks)))


def _train_all(planned: comparing.Comparison, at_once: int) -> dict[str, str]:
    """Train what has not finished yet; the report is written after each run.

    Returns:
        Why runs failed, by their names. A failure before any run has finished ends the command: it
        would most likely be everyone's.
    """
    failures: dict[str, str] = {}
    _write(planned, failures)
    waiting = deque(run for run in planned.runs if run.result is None)
    running: dict[Future[str | None], comparing.Trial] = {}
    board, stop = Board(planned), threading.Event()
    with board.display, ThreadPoolExecutor(at_once) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    run = waiting.popleft()
                    running[pool.submit(_train, run, board, stop)] = run
                for ended in wait(running, _HEARS_SECONDS, FIRST_COMPLETED).done:
                    run = running.pop(ended)
                    if failure := ended.result():
                        failures[run.name] = failure
                        board.failed(run)
                    if not _write(planned, failures):
                        waiting.clear()
                    board.compare()
        except BaseException:
            stop.set()  # the threads end their ranks, and the pool waits for them
            raise
    return failures


def _train(run: comparing.Trial, board: "Board", stop: threading.Event) -> str | None:
    """One run to its end; in words why it failed, None if it did not."""
    job, start = runs.begin(run)
    board.started(run, start)
    result = recipes.launch(job, on_step=lambda step: board.step(run, step), stop=stop)
    if not result.succeeded:
        report(result)
        return f"{result.status}: {result.failure}"
    try:
        runs.finish(run)
    except KHAError as error:
        console.error(str(error))
        return str(error)
    return None


def _finished(planned: comparing.Comparison) -> list[tuple[comparing.Trial, dict[str, Any]]]:
    return [(run, result) for run in planned.runs if (result := run.result) is not None]


def _outcome(planned: comparing.Comparison, failures: dict[str, str]) -> dict[str, Any]:
    """The page, and what report.json holds; why runs failed where none has finished."""
    if not _finished(planned):
        return {"page": None, "failures": failures}
    page = str(planned.folder / REPORT)
    return {"page": page} | json.loads((planned.folder / NUMBERS).read_text())


def _write(planned: comparing.Comparison, failures: dict[str, str]) -> bool:
    """Write the report of what has finished; whether there was anything to write."""
    if not (finished := _finished(planned)):
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
        row = self._rows[run.name]
        self.display.update(row, completed=step.iteration, total=step.total)
        aloud = time.monotonic() - self._last >= 10 or step.iteration == step.total
        self._say(run, state, loss_words(step), aloud=aloud)

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
