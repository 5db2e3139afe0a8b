"""``kha-megatron compare``: train several variants of a recipe and compare their losses."""

import json
import os
import sys
import threading
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated

import typer

from kha_megatron import recipes
from kha_megatron.checkpoint.ownership import owned
from kha_megatron.checkpoint.staging import staged_file, write_json
from kha_megatron.cli import console
from kha_megatron.cli.following import print_result, training_progress
from kha_megatron.cli.options import (
    AsJSON,
    DataFolder,
    HeadsFrom,
    MegatronArguments,
    TrainingDevice,
    preset_names,
    recipe_names,
)
from kha_megatron.compare import trials
from kha_megatron.compare.charts import require_matplotlib
from kha_megatron.compare.page import render_page, summarize
from kha_megatron.compare.pretrained import make_recipe
from kha_megatron.compare.report import build_report
from kha_megatron.compare.variants import parse_variants
from kha_megatron.errors import KHAError

REPORT = "report.html"
NUMBERS = "report.json"
_POLL_SECONDS = 1.0
"""Timeout of each wait for a run, so that the main thread can handle signals in between."""


Variants = Annotated[
    str,
    typer.Option(
        help="Comma-separated variants to train. The first one is the reference. Each variant is a "
        "preset, several presets joined with + (e.g. kha_mlp+gate_output), random-init (kha_mlp "
        "with random initialization), or NAME=ARGUMENTS with --kha-* arguments.",
        autocompletion=preset_names,
    ),
]


def compare(
    megatron: MegatronArguments = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Name of the recipe to train (default: quickstart).", autocompletion=recipe_names
        ),
    ] = None,
    pretrained_checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="CKPT_OR_HF",
            help="Start every run from this model, which must not have KHA. It replaces the model "
            "of the recipe.",
        ),
    ] = None,
    variants: Variants = "baseline,kha_mlp",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Number of runs per variant.")] = 3,
    null: Annotated[bool, typer.Option("--null", help="Also train perturbed references.")] = False,
    held_out: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of validation sequences.")
    ] = 0,
    data: DataFolder = None,
    output: Annotated[
        Path | None, typer.Option(help="Path to the output directory (default: compare/RECIPE).")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks per run (default: set by recipe).")
    ] = None,
    device: TrainingDevice = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Number of runs to train in parallel.")
    ] = None,
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Train variants of a recipe on the same data and write a report.

    The report (report.html and report.json) is updated after each run. If you interrupt the
    command, just run it again: unfinished runs resume from their last checkpoints. You can also
    add more seeds and variants later.

    To find out which differences are only noise, use --null. For each seed, it trains the reference
    a second time from initial weights that differ by rounding errors. On CPUs, --jobs defaults to
    the number of cores divided by the ranks per run. On GPUs, it defaults to 1, and parallel runs
    share the same GPUs. The exit code is 1 if any run fails.

    With --pretrained-checkpoint, each variant is added to the model without changing its outputs
    (see `kha-megatron convert upcycle`), so all variants start with the same loss. Unless you pass
    a recipe, the peak learning rate is 1e-4 and a batch has 16 sequences of 1024 tokens.

    Examples:
      kha-megatron data prepare --vocab-size 512 --out data/python
      kha-megatron compare --recipe laptop/moe --data data/python --seeds 6 \\
        --variants baseline,kha_mlp,kha_linear,random-init --null --held-out 320
      kha-megatron compare --recipe laptop/dense --data data/python --json \\
        --variants baseline,gate_output,moh_75,kha_mlp+gate_output
      kha-megatron compare --recipe laptop/dense --data data/python \\
        --variants "baseline,kv=--kha-key linear --kha-value mlp"
      kha-megatron compare --pretrained-checkpoint Qwen3-0.6B-Base \\
        --data data/mine --variants baseline,kha_linear,kha_mlp --null -- \\
        --train-iters 500
    """
    require_matplotlib()
    chosen_recipe = _choose_recipe(recipe, pretrained_checkpoint)
    default_output = Path("compare", chosen_recipe.name.replace("/", "-"))
    planned = trials.plan_comparison(
        chosen_recipe,
        parse_variants(variants),
        seeds,
        output=output or default_output,
        data=data,
        overrides=megatron or [],
        ranks=nproc,
        device=device,
        null=null,
        held_out_sequences=held_out,
        pretrained=pretrained_checkpoint,
    )
    if jobs is None:
        jobs = _default_jobs(planned, nproc or chosen_recipe.ranks)
    runs_folder = planned.folder / trials.RUNS
    try:
        with owned(planned.folder):
            runs_folder.mkdir(exist_ok=True)
            failures = _train_all(planned, parallel=jobs)
    except KeyboardInterrupt:
        console.log.print("Stopped. Run the same command again to continue.")
        raise
    _print_report(planned, failures, as_json)
    if failures:
        raise typer.Exit(1)


def _choose_recipe(name: str | None, pretrained: Path | None) -> recipes.Recipe:
    """Return the recipe to compare, with the sizes of the pretrained model if there is one."""
    if pretrained is not None:
        base = None if name is None else recipes.get_recipe(name)
        return make_recipe(pretrained, base)
    return recipes.get_recipe("quickstart" if name is None else name)


def _default_jobs(planned: trials.Comparison, ranks_per_run: int) -> int:
    """Return how many runs to train in parallel: as many as the cores allow, but one on GPUs."""
    if planned.trials[0].config.training.device != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // ranks_per_run)


def _print_report(
    planned: trials.Comparison,
    failures: dict[str, str],
    as_json: bool,
) -> None:
    succeeded = not failures
    has_results = any(trial.result for trial in planned.trials)
    if not has_results:
        if as_json:
            console.print_json({"succeeded": succeeded, "page": None, "failures": failures})
        return
    page = planned.folder / REPORT
    report = json.loads((planned.folder / NUMBERS).read_text())
    if as_json:
        console.print_json({"succeeded": succeeded, "page": str(page)} | report)
        return
    for line in summarize(report):
        console.log.print(line, markup=False)
    console.out.print(str(page), markup=False)


def _train_all(planned: trials.Comparison, *, parallel: int) -> dict[str, str]:
    """Train all unfinished trials and return the error messages of failed trials by name.

    The report is rewritten after each trial. We give up early if a trial fails before any other has
    finished, and do not start the remaining ones.
    """
    failures: dict[str, str] = {}
    _write_reports(planned, failures)
    waiting = deque(trial for trial in planned.trials if trial.result is None)
    running: dict[Future[str | None], trials.Trial] = {}
    stop = threading.Event()
    with ThreadPoolExecutor(parallel) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    trial = waiting.popleft()
                    future = pool.submit(_train, trial, stop)
                    running[future] = trial
                ended, _ = wait(running, _POLL_SECONDS, FIRST_COMPLETED)
                for future in ended:
                    trial = running.pop(future)
                    failure = future.result()
                    if failure is not None:
                        failures[trial.name] = failure
                    has_results = _write_reports(planned, failures)
                    if not has_results:
                        waiting.clear()
        except BaseException:
            stop.set()  # terminate all ranks before the pool waits for its threads
            raise
    return failures


def _train(trial: trials.Trial, stop: threading.Event) -> str | None:
    """Train one trial. Returns the error message if it fails."""
    job = trials.start_trial(trial)
    with training_progress(job, trial.name) as on_step:
        result = recipes.launch_job(job, on_step=on_step, stop=stop)
    if not result.succeeded:
        print_result(result)
        return f"{result.status}: {result.failure}"
    try:
        trials.finish_trial(trial)
    except KHAError as error:
        console.error(str(error))
        return str(error)
    return None


def _write_reports(planned: trials.Comparison, failures: dict[str, str]) -> bool:
    """Write the HTML and JSON reports. Returns False if no trial has finished yet."""
    results = {}
    pictures = {}
    for trial in planned.trials:
        result = trial.result
        if result is None:
            continue
        results[trial.variant.name, trial.seed] = result
        for file in trial.folder.glob("*.png"):
            pictures[f"{trial.name}/{file.name}"] = file.read_bytes()
    if not results:
        return False
    command = ["kha-megatron", *sys.argv[1:]]
    report = build_report(planned, results, failures=failures, command=command)
    write_json(planned.folder / NUMBERS, report)
    page = render_page(report, pictures)
    with staged_file(planned.folder / REPORT) as staged:
        staged.write_text(page, encoding="utf-8")
    return True
