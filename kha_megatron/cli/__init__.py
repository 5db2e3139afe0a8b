"""The ``kha-megatron`` command line."""

import os
import sys

import typer

from kha_megatron.cli import console, convert, data, doctor, recipes
from kha_megatron.cli.compare import compare
from kha_megatron.cli.generate import generate
from kha_megatron.cli.inspect import inspect
from kha_megatron.cli.launch import launch
from kha_megatron.cli.params import count_flops, params
from kha_megatron.cli.plan import plan
from kha_megatron.cli.quickstart import quickstart
from kha_megatron.cli.running import Commands, run_app
from kha_megatron.cli.spikes import spikes
from kha_megatron.cli.verify import compare_models

app = Commands(
    name="kha-megatron",
    help="Train, convert and inspect models with Knocking-Heads Attention (KHA).",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from kha_megatron import __version__

        console.out.print(__version__)
        raise typer.Exit


app.command()(quickstart)
app.add_typer(data.data_app)
app.add_typer(convert.convert_app)
app.command("verify")(compare_models)
app.command()(launch)
app.add_typer(recipes.recipes_app)
app.command()(compare)
app.command()(plan)
app.command()(params)
app.command("flops")(count_flops)
app.command()(doctor.doctor)
app.command()(inspect)
app.command()(spikes)
app.command()(generate)


_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables of another job, if a command is started by one of its ranks."""


def main() -> None:
    """Entry point of the ``kha-megatron`` script."""
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    sys.exit(run_app(app))
