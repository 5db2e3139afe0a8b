"""The ``kha-megatron`` command: thin commands over the other rooms.

Exit codes: 0 success, 1 the work failed, 2 bad input (one line on stderr, nothing half-written).
"""

import sys

import typer

from kha_megatron.cli import console
from kha_megatron.errors import KHAError

app = typer.Typer(
    name="kha-megatron",
    help="Knocking-Heads Attention for Megatron-Core: prepare, launch, convert, look.",
    no_args_is_help=True,
    add_completion=False,
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


def main() -> None:
    """Run the command line and turn a :class:`KHAError` into one line and exit code 2."""
    try:
        app()
    except KHAError as error:
        console.error(str(error))
        sys.exit(2)
