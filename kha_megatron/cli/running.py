"""Run a command and turn exceptions into one error line and an exit code.

Exit codes: a :class:`KHAError`'s own; 2 for invalid options and unreadable files; 129, 130 and 143
for SIGHUP, SIGINT and SIGTERM; 1 for any other exception, whose traceback is written to a file.
"""

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from kha_megatron import __version__
from kha_megatron.cli import console
from kha_megatron.errors import KHAError, in_one_line
from kha_megatron.recipes.processes import interruptible


class Commands(typer.Typer):
    """A command group whose ``--help`` prints the examples of the docstring unchanged."""

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        """Register a command."""
        return super().command(*args, cls=_Command, **settings)


class _Command(TyperCommand):
    """A command whose help is wrapped to the terminal, except for its examples."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        text, _, self.examples = (self.help or "").partition("\n\nExamples:\n")
        self.help = re.sub(r"(?<!\n)\n(?=\S)", " ", text)  # typer keeps line ends in a paragraph

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if self.examples:
            formatter.write(f"Examples:\n{self.examples}\n")


def run_app(app: typer.Typer) -> int:
    """Run the command line of this process and return its exit code."""
    try:
        with interruptible() as received:
            code = app(standalone_mode=False) or 0
        return 128 + received[0] if received else code
    except KHAError as error:
        console.error(str(error))
        return error.exit_code
    except TyperException as error:
        if message := error.format_message():  # empty after the help of a group
            context = getattr(error, "ctx", None)
            more = f"; see `{context.command_path} --help`" if context else ""
            console.error(message.rstrip(".") + more)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            return _report(error)
        console.error(f"{error.filename}: {error.strerror}")
        return 2
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Write the traceback to a file and ask the user to report it."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="kha-megatron-", suffix=".txt", errors="backslashreplace", delete=False
    ) as file:
        file.write(f"{sys.argv}\nkha-megatron {__version__}, Python {sys.version}\n\n")
        traceback.print_exception(error, file=file)
    console.error(
        f"{type(error).__name__}: {in_one_line(error)[:200]}. This is a bug in kha-megatron. "
        f"Please report it with {file.name}"
    )
    return 1
