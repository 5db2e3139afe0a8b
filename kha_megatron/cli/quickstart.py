"""``kha-megatron quickstart``: the whole product once, on this machine's CPU."""

import argparse
import itertools
import json
import shlex
import shutil
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kha_megatron import recipes
from kha_megatron.checkpoint.staging import check_output_folder, write_json
from kha_megatron.checkpoint.tracker import newest
from kha_megatron.cli import console, plots
from kha_megatron.cli.convert import convert
from kha_megatron.cli.data import progress
from kha_megatron.cli.following import report, training_progress
from kha_megatron.cli.generate import generate
from kha_megatron.cli.inspect import inspect
from kha_megatron.cli.options import MegatronArguments, preset_names
from kha_megatron.config import KHAConfig
from kha_megatron.errors import DataError, MissingDependencyError
from kha_megatron.recipes.log_lines import LOSS, History, read_history
from kha_megatron.recipes.recipe import CHECKPOINTS, TENSORBOARD

if TYPE_CHECKING:
    from kha_megatron.conversion.engine import Conversion
    from kha_megatron.conversion.verify import Verification
    from kha_megatron.recipes import LaunchResult

MARK = "quickstart.json"
LAST = 10
"""Iterations over which the last loss is a mean: one batch more or less moves it by 0.2."""

PROMPT = "def main("


def quickstart(
    megatron: MegatronArguments = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="Presets, with commas between those to join; the recipe's if not given.",
            autocompletion=preset_names,
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for everything.")] = Path("quickstart"),
) -> None:
    """Text, training, conversion, pictures, sample: the whole way on this machine's CPU.

    Prepares the source of Python's standard library as training text, pre-trains a small mixture
    of experts with KHA-MLP on Megatron-Core (two ranks, tensor parallel, started by NeMo-Run),
    converts it to Hugging Face and proves that the logits agree, draws the learnt matrices and the
    loss, and lets the model write. A second run reuses the text, keeps the first one's training as
    run-1, and trains anew.

    Examples:
      kha-megatron quickstart
      kha-megatron quickstart --variant kha_mlp,gate_output --output gated
      kha-megatron quickstart --variant kha_linear --output linear -- --lr 1e-3
    """
    recipe = recipes.get_recipe("quickstart")
    if variant is not None:
        names = [name.strip() for name in variant.split(",") if name.strip()]
        recipe = recipe.having(KHAConfig.combined(names))
    check_output_folder(output, overwrite=True, mark=MARK, inside=True)
    plots.require_matplotlib()
    if find_spec("nemo_run") is None:
        raise MissingDependencyError("nemo-run", "launching a recipe", "launch")
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / MARK, {"finished": False})

    _heading(1, f"text: {output / 'data'}")
    _prepare(output / "data", recipe.run.vocab_size)

    _heading(2, f"training under NeMo-Run: {output / 'run'}")
    trained = _train(recipe, output, megatron or [])
    history = read_history(output / "run" / TENSORBOARD)

    _heading(3, f"to Hugging Face: {output / 'hf'}")
    written, verification = convert(output / "run" / CHECKPOINTS, output / "hf", overwrite=True)

    _heading(4, f"pictures: {output / 'pictures'}")
    kha = recipe.run_for(megatron or []).kha
    if kha.variants and not kha.others:
        inspect(output / "run" / CHECKPOINTS, output / "pictures", overwrite=True)
    else:  # what other mechanisms do shows on a text: a file of those that it was trained on
        text = Path(argparse.__file__)
        inspect(output / "hf", output / "pictures", text=text, overwrite=True)
    plots.loss_curve(history, output / "pictures" / "loss.png")

    summary = _summary(output, history, trained, written, verification)
    write_json(output / MARK, summary)
    console.print_facts(_facts(summary), title="quickstart")
    console.out.print(f"\n[bold]the model continues {escape(PROMPT)!r}:[/]")
    generate(output / "hf", PROMPT, max_new_tokens=96, temperature=0.6, seed=1)
    console.out.print(_next_steps(output), markup=False)


def _prepare(folder: Path, vocab_size: int | None) -> None:
    """Make the corpus, unless an earlier run made it and it is still whole."""
    from kha_megatron.data import prepare, report

    try:
        if report.verify(folder).vocab_size_asked == vocab_size:
            console.log.print("reusing what an earlier run prepared")
            return
    except DataError:
        pass  # there is none, or it is damaged: make it
    shutil.rmtree(folder, ignore_errors=True)
    with progress() as on_progress:
        made = prepare.prepare(None, folder, vocab_size=vocab_size, on_progress=on_progress)
    console.log.print(
        f"{made.bytes / 1e6:.1f} MB of Python source in {made.files} files: "
        f"{made.tokens:,} tokens, vocabulary {made.vocab_size}"
    )


def make_room(run: Path) -> None:
    """Rename an earlier run that has a complete checkpoint; remove what has none."""
    if newest(run / CHECKPOINTS) is None:
        shutil.rmtree(run, ignore_errors=True)
        return
    kept = next(p for n in itertools.count(1) if not (p := run.with_name(f"run-{n}")).exists())
    run.rename(kept)
    console.log.print(f"the earlier training is kept in {kept}", markup=False)


def _train(recipe: recipes.Recipe, output: Path, overrides: list[str]) -> "LaunchResult":
    run = output / "run"
    make_room(run)
    job = recipes.prepare(recipe, data=output / "data", output=run, overrides=overrides)
    with training_progress(job.title) as on_step:
        result = recipes.launch(job, on_step=on_step)
    report(result)
    if not result.succeeded:
        raise typer.Exit(1)
    return result


def _summary(
    output: Path,
    history: History,
    trained: "LaunchResult",
    written: "Conversion",
    verification: "Verification",
) -> dict[str, Any]:
    losses = history[LOSS]
    agreement = verification.logits
    config = json.loads((output / "hf" / "config.json").read_text())
    return {
        "finished": True,
        "iterations": losses[-1][0],
        "first_loss": losses[0][1],
        "last_loss": fmean(loss for _, loss in losses[-LAST:]),
        "training_seconds": trained.seconds,
        "tokens_per_second": _tokens_per_second(
            recipes.read_steps(trained.log), config["max_position_embeddings"]
        ),
        "parameters": written.parameters,
        "largest_logit_difference": agreement and agreement.max_difference,
        "argmax_agreement": agreement and agreement.argmax,
        "files": {
            "checkpoint": str(output / "run" / CHECKPOINTS),
            "hugging_face": str(output / "hf"),
            "pictures": sorted(str(p) for p in (output / "pictures").glob("*.png")),
            "log": str(trained.log),
        },
    }


def _tokens_per_second(steps: list[recipes.Step], sequence: int) -> float | None:
    """The rate from the first line of the log to the last; None if there are not two lines."""
    # the first line holds the start-up of the kernels: leave it out of the rate
    samples, seconds = 0, 0.0
    for before, step in pairwise(steps):
        if before.samples is not None and step.samples is not None and step.seconds:
            samples += step.samples - before.samples
            seconds += (step.iteration - before.iteration) * step.seconds
    return samples * sequence / seconds if seconds else None


def _facts(summary: dict[str, Any]) -> dict[str, str]:
    first, last, rate = (summary[k] for k in ("first_loss", "last_loss", "tokens_per_second"))
    speed = "too few iterations to measure" if rate is None else f"{rate:,.0f} tokens/s"
    agreement, difference = "not verified", summary["largest_logit_difference"]
    if difference is not None:
        agreement = (
            f"logits differ by at most {difference:.1e}, same most likely token at "
            f"{summary['argmax_agreement']:.0%} of positions"
        )
    files = summary["files"]
    return {
        "parameters": f"{summary['parameters']:,}",
        "loss": f"{first:.3f} to {last:.3f} in {summary['iterations']} iterations "
        f"({last / first:.0%})",
        "speed": f"{speed}, {summary['training_seconds']:.0f} s from start to end",
        "Hugging Face against Megatron": agreement,
        "checkpoint": files["checkpoint"],
        "Hugging Face model": files["hugging_face"],
        "pictures": "\n".join(files["pictures"]),
    }


def _next_steps(output: Path) -> str:
    """Commands to paste into the shell that started this one, each under what it is for."""
    kha = _this_command()
    model, data = (shlex.quote(str(output / name)) for name in ("hf", "data"))
    return f"""
What to try next:
  # let it write
  {kha} generate {model} "import "
  # another variant on the same text
  {kha} quickstart --output gated --variant kha_mlp,gate_output
  # the exact torchrun command, to make your own
  {kha} launch quickstart --data {data} --dry-run
  # your own text, if it lies in my-text
  {kha} data prepare --from my-text --out data/mine
  # what this machine can run
  {kha} doctor"""


def _this_command() -> str:
    """How a shell finds this command: by its name only if that finds this one."""
    here = Path(sys.executable).with_name("kha-megatron")
    named = shutil.which(here.name)
    if named and here.exists() and Path(named).samefile(here):
        return here.name
    below = here.is_relative_to(Path.cwd())
    return shlex.quote(str(here.relative_to(Path.cwd()) if below else here))


def _heading(number: int, text: str) -> None:
    console.log.print(f"\n[bold]{number}/4[/] {escape(text)}")
