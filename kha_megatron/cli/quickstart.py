"""``kha-megatron quickstart``: the whole workflow with a small model on the CPU."""

import argparse
import itertools
import shlex
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.markup import escape

from kha_megatron import recipes
from kha_megatron.checkpoint.ownership import owned
from kha_megatron.checkpoint.staging import check_output_folder, write_json
from kha_megatron.checkpoint.tracker import newest
from kha_megatron.cli import console
from kha_megatron.cli.convert import convert
from kha_megatron.cli.data import progress
from kha_megatron.cli.following import print_result, training_progress
from kha_megatron.cli.generate import generate
from kha_megatron.cli.inspect import inspect
from kha_megatron.cli.options import HeadsFrom, MegatronArguments, preset_names
from kha_megatron.compare.charts import require_matplotlib
from kha_megatron.errors import DataError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.run import Run
from kha_megatron.recipes.log_lines import (
    LOSS,
    VALIDATION_LOSS,
    History,
    compute_tokens_per_second,
    read_history,
)
from kha_megatron.recipes.recipe import CHECKPOINTS, TENSORBOARD

SUMMARY_FILE = "quickstart.json"
LAST = 10
"""The final loss is averaged over this many iterations, since single batches vary by 0.2."""
PROMPT = "def main("


def quickstart(
    megatron: MegatronArguments = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="Preset, or several joined with + (default: kha_mlp).", autocompletion=preset_names
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Output directory.")] = Path("quickstart"),
    heads_from: HeadsFrom = None,
) -> None:
    """Train, convert and inspect a small model on this machine's CPU.

    Runs the whole workflow once: tokenize the source code of Python's standard
    library, train a small MoE model with KHA-MLP on Megatron-Core (two
    tensor-parallel ranks, launched with NeMo-Run), convert it to Hugging Face
    and verify the logits, plot the loss and the learned matrices, and generate
    some text.

    If you run it again in the same output directory, it reuses the data and
    moves the earlier checkpoints to run-1.

    Examples:
      kha-megatron quickstart
      kha-megatron quickstart --variant kha_mlp+gate_output --output gated
      kha-megatron quickstart --variant kha_linear --output linear -- --lr 1e-3
    """
    recipe = recipes.get_recipe("quickstart")
    if variant is not None:
        presets = variant.replace(",", "+")  # commas were the separator at first
        recipe = recipe.with_heads(HeadsConfig.from_preset(presets))
    run = recipe.run_for(megatron or [])
    check_output_folder(output, overwrite=True, mark=SUMMARY_FILE, inside=True)
    require_matplotlib()
    with owned(output):
        _run(recipe, run, output, megatron or [])


def _run(recipe: recipes.Recipe, run: Run, output: Path, overrides: list[str]) -> None:
    write_json(output / SUMMARY_FILE, {"finished": False})

    _heading(1, f"text: {output / 'data'}")
    _prepare(output / "data", recipe.run.vocab_size)

    _heading(2, f"training under NeMo-Run: {output / 'run'}")
    trained = _train(recipe, output, overrides)
    history = read_history(output / "run" / TENSORBOARD)

    _heading(3, f"to Hugging Face: {output / 'hf'}")
    written, verification = convert(output / "run" / CHECKPOINTS, output / "hf", overwrite=True)

    _heading(4, f"pictures: {output / 'pictures'}")
    if run.kha.variants and len(run.kha.mechanisms) == 1:
        inspect(output / "run" / CHECKPOINTS, output / "pictures", overwrite=True)
    else:  # other mechanisms have no matrices, so inspect them on a file of the training text
        text = Path(argparse.__file__)
        inspect(output / "hf", output / "pictures", text=text, overwrite=True)
    plot_loss_curve(history, output / "pictures" / "loss.png")

    losses, agreement = history[LOSS], verification.logits
    steps = recipes.read_steps(trained.log)
    summary = {
        "finished": True,
        "iterations": losses[-1][0],
        "first_loss": losses[0][1],
        "last_loss": fmean(loss for _, loss in losses[-LAST:]),
        "training_seconds": trained.seconds,
        "tokens_per_second": compute_tokens_per_second(steps, run.arguments["seq_length"]),
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
    write_json(output / SUMMARY_FILE, summary)
    console.print_facts(_facts(summary), title="quickstart")
    positions = run.arguments["max_position_embeddings"]
    prompt = PROMPT[: positions - 1]  # a character is at most one token
    length = min(96, positions - len(prompt))
    console.out.print(f"\n[bold]the model continues {escape(prompt)!r}:[/]")
    generate(output / "hf", prompt, max_new_tokens=length, temperature=0.6, seed=1)
    console.out.print(_next_steps(output), markup=False)


def _prepare(folder: Path, vocab_size: int | None) -> None:
    """Prepare the dataset, or reuse the one of an earlier run."""
    from kha_megatron.data import prepare, verify

    try:
        if verify(folder).vocab_size_asked == vocab_size:
            console.log.print("Reusing the dataset of an earlier run.")
            return
    except DataError:
        pass  # missing or damaged
    shutil.rmtree(folder, ignore_errors=True)
    with progress() as on_progress:
        prepare(None, folder, vocab_size=vocab_size, on_progress=on_progress)


def move_earlier_run(run: Path) -> None:
    """Move an earlier run to ``run-<n>``. If it has no complete checkpoint, delete it instead."""
    if newest(run / CHECKPOINTS) is None:
        shutil.rmtree(run, ignore_errors=True)
        return
    backup = next(p for n in itertools.count(1) if not (p := run.with_name(f"run-{n}")).exists())
    run.rename(backup)
    console.log.print(f"Moved the earlier training to {backup}.", markup=False)


def _train(recipe: recipes.Recipe, output: Path, overrides: list[str]) -> recipes.LaunchResult:
    run = output / "run"
    move_earlier_run(run)
    job = recipes.prepare_job(recipe, data=output / "data", output=run, overrides=overrides)
    with training_progress(job) as on_step:
        result = recipes.launch_job(job, on_step=on_step)
    print_result(result)
    if not result.succeeded:
        raise typer.Exit(1)
    return result


def plot_loss_curve(history: History, out_png: Path) -> None:
    """Plot the training and validation loss."""
    figure = require_matplotlib()(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, label in ((LOSS, "training"), (VALIDATION_LOSS, "validation")):
        if points := history.get(name):
            axis.plot(*zip(*points, strict=True), "o-" if len(points) < 50 else "-", label=label)
    axis.set(xlabel="iteration", ylabel="loss (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(out_png, format="png", dpi=120)


def _facts(summary: dict[str, Any]) -> dict[str, str]:
    first, last, rate = (summary[k] for k in ("first_loss", "last_loss", "tokens_per_second"))
    files, difference = summary["files"], summary["largest_logit_difference"]
    speed = "" if rate is None else f"{rate:,.0f} tokens/s, "
    return {
        "parameters": f"{summary['parameters']:,}",
        "loss": f"{first:.3f} to {last:.3f} in {summary['iterations']} iterations",
        "speed": f"{speed}{summary['training_seconds']:.0f} s from start to end",
        "logits, Hugging Face against Megatron": "not verified"
        if difference is None
        else f"differ by at most {difference:.1e}",
        "checkpoint": files["checkpoint"],
        "Hugging Face model": files["hugging_face"],
        "pictures": "\n".join(files["pictures"]),
    }


def _next_steps(output: Path) -> str:
    kha = Path(sys.executable).with_name("kha-megatron")
    if kha.is_relative_to(Path.cwd()):
        kha = kha.relative_to(Path.cwd())
    model, data = (shlex.quote(str(output / name)) for name in ("hf", "data"))
    return f"""
What to try next:
  {kha} generate {model} "import "
  {kha} quickstart --output gated --variant kha_mlp+gate_output
  {kha} launch quickstart --data {data} --dry-run
  {kha} data prepare --from my-text --out data/mine
  {kha} doctor"""


def _heading(number: int, text: str) -> None:
    console.log.print(f"\n[bold]{number}/4[/] {escape(text)}")
