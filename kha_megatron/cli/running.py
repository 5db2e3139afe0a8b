"""Running a command: what it is given, and how it ends whatever happens.

Exit codes: a :class:`KHAError`'s own, 2 for other bad input, 130, 143 and 129 for a command that
was interrupted, terminated or lost its terminal, 1 for the rest, whose traceback goes to a file.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from kha_megatron import __version__
from kha_megatron.cli import console
from kha_megatron.errors import ConfigError, KHAError, in_one_line
from kha_megatron.recipes.processes import interruptible

LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes, on Linux."""

LARGEST = 2**31 - 1
"""Of a number whose option names no limit of its own: Megatron's sizes and counts have 32 bits."""

_UsageError: Any = typer.BadParameter.__mro__[2]  # click's, or typer's own copy of it


class Commands(typer.Typer):
    """A group of commands that refuse impossible numbers and paths before they start."""

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        """As typer's."""
        return super().command(*args, cls=_Command, **settings)


class _Command(TyperCommand):
    """Its help ends with the examples of its docstring, as they are typed: rich would break their
    lines, and fill them with blanks behind a backslash."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.help, _, self.examples = (self.help or "").partition("\n\nExamples:\n")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if self.examples:
            formatter.write(f"Examples:\n{self.examples}\n")

    def invoke(self, ctx: Any) -> Any:
        for parameter in self.params:
            given = ctx.params.get(parameter.name)
            for value in given if isinstance(given, list | tuple) else (given,):
                flag = parameter.opts[0] if parameter.opts[0] != parameter.name else "path"
                limit = getattr(parameter, "max", None) or LARGEST
                if type(value) is int and abs(value) > limit:
                    raise ConfigError(f"{flag} {value} is out of range: use at most {limit}")
                if isinstance(value, Path):
                    check_path(flag, value)
        return super().invoke(ctx)


def check_path(flag: str, path: Path) -> None:
    """Refuse what no file can be called.

    Raises:
        ConfigError: a NUL byte, a name of more than 255 bytes, or more than 4,095 in all.
    """
    shown = f"{flag} {str(path)[:40]}..."
    if "\0" in str(path):
        raise ConfigError(f"{flag} {str(path)!r} holds a NUL byte: no path can")
    if (length := max(map(len, map(os.fsencode, path.parts)), default=0)) > LONGEST_NAME:
        raise ConfigError(f"{shown} has a name of {length} bytes: use at most {LONGEST_NAME}")
    if (length := len(os.fsencode(path.absolute()))) > LONGEST_PATH:
        raise ConfigError(f"{shown} has {length} bytes as a whole: use at most {LONGEST_PATH}")


def run(app: typer.Typer) -> int:
    """Run the command line of this process, print at most one line about an error, and give the
    exit code."""
    try:
        with interruptible() as received:
            code = app(standalone_mode=False) or 0
        return 128 + received[0] if received else code
    except KHAError as error:
        console.error(str(error))
        return error.exit_code
    except _UsageError as error:
        _print_usage_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            return _report(error)
        console.error(f"{error.filename}: {error.strerror}")
        return 2
    except Exception as error:
        return _report(error)


def _print_usage_error(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        console.log.print(error.format_message(), markup=False, end="")  # or typer has printed it
        return
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    flags = () if parameter is None else parameter.opts
    given = [value[:40] for flag, value in pairwise(sys.argv) if flag in flags]
    value = f" (given: {', '.join(given)})" if given else ""
    about = f"; see `{context.command_path} --help`" if context else ""
    console.error(error.format_message().rstrip(".") + value + about)


def _report(error: Exception) -> int:
    """Say that the fault is ours, and where everything about it is written down."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="kha-megatron-", suffix=".txt", errors="backslashreplace", delete=False
    ) as file:
        file.write(f"{sys.argv}\nkha-megatron {__version__}, Python {sys.version}\n\n")
        traceback.print_exception(error, file=file)
    what = in_one_line(error)[:200]
    console.error(
        f"{type(error).__name__}: {what}: this is a fault of kha-megatron; please report it with "
        f"{file.name}"
    )
    return 1
