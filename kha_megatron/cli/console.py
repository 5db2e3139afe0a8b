"""Console output: results go to stdout, progress and errors to stderr."""

from collections.abc import Mapping
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kha_megatron.checkpoint.staging import as_json

# paths may contain codes of emojis such as :b:
out = Console(highlight=False, soft_wrap=True, emoji=False)
log = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

_CONTROL_CODES = {*range(32), *range(127, 160)} - {ord("\t"), ord("\n")}
_REPLACEMENTS = dict.fromkeys(_CONTROL_CODES, "\N{REPLACEMENT CHARACTER}")


def replace_control_characters(text: str) -> str:
    """Replace control characters, so that a terminal does not follow ANSI escape sequences."""
    return text.translate(_REPLACEMENTS)


def error(message: str) -> None:
    """Print an error message to stderr, on a single line."""
    line = replace_control_characters(" ".join(message.splitlines()))
    log.print(f"[bold red]error:[/] {escape(line)}")


def print_json(content: Any) -> None:
    """Print a result as JSON (NaN and infinity become null)."""
    typer.echo(as_json(content))


def number_table(*columns: str, title: str | None = None, left_aligned: int = 1) -> Table:
    """Create a table for numbers: right-aligned, except for the first ``left_aligned`` columns."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for column in columns[:left_aligned]:
        table.add_column(column, justify="left", no_wrap=True)
    for column in columns[left_aligned:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_facts(facts: Mapping[str, str], title: str | None = None) -> None:
    escaped_title = title and escape(title)
    table = Table(
        title=escaped_title,
        title_justify="left",
        show_header=False,
        box=None,
    )
    table.add_column()
    table.add_column(overflow="fold")  # do not truncate paths
    for name, value in facts.items():
        table.add_row(name, escape(value))
    out.print(table)
