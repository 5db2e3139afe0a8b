"""Run commands and convert exceptions into exit codes and single-line error messages.

The exit code is 0 for success, 1 for failures, 2 for invalid arguments or unreadable files, and
129, 130 or 143 after SIGHUP, SIGINT or SIGTERM. A :class:`KHAError` defines its own exit code. For
unexpected exceptions, the traceback is saved to a file, and the exit code is 1.
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
    """Command group that supports an ``Examples:`` section in the docstrings of commands."""

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        return super().command(*args, cls=_Command, **settings)


class _Command(TyperCommand):
    """Command whose help text is wrapped, except for the examples."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        text, _, self.examples = (self.help or "").partition("\n\nExamples:\n")
        self.help = re.sub(r"(?<!\n)\n(?=\S)", " ", text)  # typer keeps newlines in paragraphs

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if self.examples:
            formatter.write(f"Examples:\n{self.examples}\n")


def run_app(app: typer.Typer) -> int:
    """Run the app with ``sys.argv`` and return its exit code."""
    try:
        with interruptible() as received:
            code = app(standalone_mode=False) or 0
        return 128 + received[0] if received else code
    except KHAError as error:
        console.error(str(error))
        return error.exit_code
    except TyperException as error:
        if message := error.format_message():  # empty if the help of a group was printed
            context = getattr(error, "ctx", None)
            hint = f" Try `{context.command_path} --help` for help." if context else ""
            console.error(f"{message.rstrip('.')}.{hint}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # e.g. output piped to head
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
    """Save the traceback to a file."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="kha-megatron-", suffix=".txt", errors="backslashreplace", delete=False
    ) as file:
        file.write(f"{sys.argv}\nkha-megatron {__version__}, Python {sys.version}\n\n")
        traceback.print_exception(error, file=file)
    console.error(
        f"{type(error).__name__}: {in_one_line(error)[:200]}. This is a bug in kha-megatron. "
        f"Please open an issue and attach {file.name}"
    )
    return 1
