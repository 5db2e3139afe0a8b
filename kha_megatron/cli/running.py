"""Run commands and turn exceptions into exit codes and one-line error messages.

- 0: success
- 1: failure. For unexpected exceptions, the traceback is saved to a file.
- 2: invalid arguments or unreadable files
- 129, 130, 143: killed by SIGHUP, SIGINT (Ctrl-C) or SIGTERM

Each :class:`KHAError` defines its own exit code.
"""

import errno
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
from typer.main import get_command

from kha_megatron import __version__
from kha_megatron.cli import console
from kha_megatron.errors import KHAError, in_one_line
from kha_megatron.recipes.processes import interruptible


class Commands(typer.Typer):
    """Typer app whose commands can have an ``Examples:`` section in their docstrings."""

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        return super().command(*args, cls=_Command, **settings)


class _Command(TyperCommand):
    """Wraps the help text, but prints the examples as they are."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        text, _, self.examples = (self.help or "").partition("\n\nExamples:\n")
        # typer keeps newlines in paragraphs, so join the lines of each paragraph
        self.help = re.sub(r"(?<!\n)\n(?=\S)", " ", text)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if self.examples:
            formatter.write(f"Examples:\n{self.examples}\n")


def run_app(app: typer.Typer) -> int:
    """Run the app with ``sys.argv`` and return its exit code."""
    try:
        with interruptible() as received_signals:
            exit_code = app(standalone_mode=False) or 0
        sys.stdout.flush()  # so that an error is handled here, and not ignored at exit
        if received_signals:
            return 128 + received_signals[0]
        return exit_code
    except KHAError as error:
        console.error(str(error))
        return error.exit_code
    except TyperException as error:
        _print_usage_error(app, error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # e.g. output piped to head
        _discard_output()
        return 1
    except OSError as error:
        if isinstance(error, FileNotFoundError) and _has_deleted_directory():
            console.error("The current directory has been deleted. Change to another directory.")
            return 2
        if error.filename is not None:
            console.error(f"{error.filename}: {error.strerror}")
            return 2
        if error.errno == errno.ENOSPC:
            _discard_output()  # it cannot be flushed at exit either
            console.error(f"Could not write the output: {error.strerror}")
            return 2
        return _report_bug(error)
    except Exception as error:
        return _report_bug(error)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by libraries written in Rust
            raise
        console.error(f"The tokenizers library failed: {in_one_line(error)[:200]}.")
        return 2


def _has_deleted_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _discard_output() -> None:
    """Redirect stdout to the null device, so that Python does not fail to flush it at exit."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, sys.stdout.fileno())


def _print_usage_error(app: typer.Typer, error: TyperException) -> None:
    """Print what is wrong with the command line, and advice."""
    message = error.format_message()
    if not message:  # the help of a group was printed
        return
    advice = _find_advice(app, message, error)
    if not message.endswith((".", "?")):
        message += "."
    console.error(f"{message} {advice}".rstrip())


def _find_advice(app: typer.Typer, message: str, error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    if context is None:
        return ""
    parameters = [parameter.name for parameter in context.command.params]
    if message.startswith("No such option") and "megatron" in parameters:
        return "Pass Megatron and --kha-* arguments after --, e.g. -- --kha-preset kha_mlp."
    root: Any = get_command(app)
    # the name of the group is missing, e.g. `upcycle` instead of `convert upcycle`
    for group_name, group in root.commands.items():
        for command_name in getattr(group, "commands", ()):
            if message == f"No such command '{command_name}'.":
                return f"Did you mean `kha-megatron {group_name} {command_name}`?"
    return f"Try `{context.command_path} --help` for help."


def _report_bug(error: Exception) -> int:
    """Save the traceback to a file, and return the exit code."""
    report = f"{sys.argv}\nkha-megatron {__version__}, Python {sys.version}\n\n"
    report += "".join(traceback.format_exception(error))
    with tempfile.NamedTemporaryFile(
        "w",
        prefix="kha-megatron-",
        suffix=".txt",
        errors="backslashreplace",
        delete=False,
    ) as file:
        file.write(report)
    console.error(
        f"{type(error).__name__}: {in_one_line(error)[:200]}. This is a bug in kha-megatron. "
        f"Please open an issue and attach {file.name}"
    )
    return 1
