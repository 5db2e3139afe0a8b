"""``kha-megatron quickstart``: the whole workflow with a small model on the CPU."""

import argparse
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
_LAST_ITERATIONS = 10
"""The final loss is averaged over this many iterations, since single batches vary by 0.2."""
PROMPT = "def main("
_NEW_TOKENS = 96


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
    data = output / "data"
    run_folder = output / "run"
    checkpoints = run_folder / CHECKPOINTS
    model = output / "hf"
    pictures = output / "pictures"
    # marks a directory that this command may overwrite
    write_json(output / SUMMARY_FILE, {"finished": False})

    _heading(1, f"text: {data}")
    _prepare(data, recipe.run.vocab_size)

    _heading(2, f"training under NeMo-Run: {run_folder}")
    result = _train(recipe, data, run_folder, overrides)
    history = read_history(run_folder / TENSORBOARD)

    _heading(3, f"to Hugging Face: {model}")
    conversion, verification = convert(checkpoints, model, overwrite=True)

    _heading(4, f"pictures: {pictures}")
    has_only_kha_matrices = bool(run.kha.variants) and len(run.kha.mechanisms) == 1
    if has_only_kha_matrices:
        inspect(checkpoints, pictures, overwrite=True)
    else:  # other mechanisms have no matrices, so inspect them on a file of the training text
        inspect(model, pictures, text=Path(argparse.__file__), overwrite=True)
    plot_loss_curve(history, pictures / "loss.png")

    steps = recipes.read_steps(result.log)
    logits = verification.logits
    summary = {
        "finished": True,
        **_summarize_losses(history),
        "training_seconds": result.seconds,
        "tokens_per_second": compute_tokens_per_second(steps, run.arguments["seq_length"]),
        "parameters": conversion.parameters,
        "largest_logit_difference": None if logits is None else logits.max_difference,
        "argmax_agreement": None if logits is None else logits.argmax,
        "files": {
            "checkpoint": str(checkpoints),
            "hugging_face": str(model),
            "pictures": sorted(str(picture) for picture in pictures.glob("*.png")),
            "log": str(result.log),
        },
    }
    write_json(output / SUMMARY_FILE, summary)
    console.print_facts(_facts(summary), title="quickstart")
    max_length = run.arguments["max_position_embeddings"]
    prompt = PROMPT[: max_length - 1]  # a character is at most one token
    new_tokens = min(_NEW_TOKENS, max_length - len(prompt))
    console.out.print(f"\n[bold]the model continues {escape(prompt)!r}:[/]")
    generate(model, prompt, max_new_tokens=new_tokens, temperature=0.6, seed=1)
    console.out.print(_next_steps(output), markup=False)


def _summarize_losses(history: History) -> dict[str, float]:
    last_iteration, _ = history[LOSS][-1]
    losses = [loss for _, loss in history[LOSS]]
    return {
        "iterations": last_iteration,
        "first_loss": losses[0],
        "last_loss": fmean(losses[-_LAST_ITERATIONS:]),
    }


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
    number = 1
    backup = run.with_name(f"run-{number}")
    while backup.exists():
        number += 1
        backup = run.with_name(f"run-{number}")
    run.rename(backup)
    console.log.print(f"Moved the earlier training to {backup}.", markup=False)


def _train(
    recipe: recipes.Recipe,
    data: Path,
    output: Path,
    overrides: list[str],
) -> recipes.LaunchResult:
    move_earlier_run(output)
    job = recipes.prepare_job(recipe, data=data, output=output, overrides=overrides)
    with training_progress(job) as on_step:
        result = recipes.launch_job(job, on_step=on_step)
    print_result(result)
    if not result.succeeded:
        raise typer.Exit(1)
    return result


def plot_loss_curve(history: History, out_png: Path) -> None:
    """Plot the training and validation loss."""
    figure_class = require_matplotlib()
    figure = figure_class(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    labels = {LOSS: "training", VALIDATION_LOSS: "validation"}
    for name, label in labels.items():
        points = history.get(name)
        if points:
            iterations, losses = zip(*points, strict=True)
            style = "o-" if len(losses) < 50 else "-"
            axis.plot(iterations, losses, style, label=label)
    axis.set(xlabel="iteration", ylabel="loss (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(out_png, format="png", dpi=120)


def _facts(summary: dict[str, Any]) -> dict[str, str]:
    """Format the summary as rows of a table."""
    losses = f"{summary['first_loss']:.3f} to {summary['last_loss']:.3f}"
    speed = f"{summary['training_seconds']:.0f} s from start to end"
    if summary["tokens_per_second"] is not None:
        speed = f"{summary['tokens_per_second']:,.0f} tokens/s, {speed}"
    logits = "not verified"
    if summary["largest_logit_difference"] is not None:
        logits = f"differ by at most {summary['largest_logit_difference']:.1e}"
    files = summary["files"]
    return {
        "parameters": f"{summary['parameters']:,}",
        "loss": f"{losses} in {summary['iterations']} iterations",
        "speed": speed,
        "logits, Hugging Face against Megatron": logits,
        "checkpoint": files["checkpoint"],
        "Hugging Face model": files["hugging_face"],
        "pictures": "\n".join(files["pictures"]),
    }


def _next_steps(output: Path) -> str:
    script = Path(sys.executable).with_name("kha-megatron")
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    model = shlex.quote(str(output / "hf"))
    data = shlex.quote(str(output / "data"))
    return f"""
What to try next:
  {script} generate {model} "import "
  {script} quickstart --output gated --variant kha_mlp+gate_output
  {script} launch quickstart --data {data} --dry-run
  {script} data prepare --from my-text --out data/mine
  {script} doctor"""


def _heading(number: int, text: str) -> None:
    console.log.print(f"\n[bold]{number}/4[/] {escape(text)}")
