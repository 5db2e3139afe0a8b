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
        # typer keeps newlines in paragraphs
        self.help = re.sub(r"(?<!\n)\n(?=\S)", " ", text)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if self.examples:
            formatter.write(f"Examples:\n{self.examples}\n")


def run_app(app: typer.Typer) -> int:
    """Run the app with ``sys.argv`` and return its exit code."""
    try:
        with interruptible() as received:
            code = app(standalone_mode=False) or 0
        sys.stdout.flush()  # so that an error is handled here, and not ignored at exit
        return 128 + received[0] if received else code
    except KHAError as error:
        console.error(str(error))
        return error.exit_code
    except TyperException as error:
        message = error.format_message()
        if message:  # empty if the help of a group was printed
            hint = _hint(app, message, error)
            if not message.endswith((".", "?")):
                message += "."
            console.error(f"{message} {hint}".rstrip())
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # e.g. output piped to head
        _discard_output()
        return 1
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            return _report(error)
        if error.filename is None:
            _discard_output()  # it cannot be flushed at exit either
        console.error(f"{error.filename or 'Could not write the output'}: {error.strerror}")
        return 2
    except Exception as error:
        return _report(error)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by libraries written in Rust
            raise
        console.error(f"The tokenizers library failed: {in_one_line(error)[:200]}.")
        return 2


def _discard_output() -> None:
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, sys.stdout.fileno())


def _hint(app: typer.Typer, message: str, error: TyperException) -> str:
    """Return advice for an invalid command line."""
    context = getattr(error, "ctx", None)
    if context is None:
        return ""
    parameters = [parameter.name for parameter in context.command.params]
    if message.startswith("No such option") and "megatron" in parameters:
        return "Pass Megatron and --kha-* arguments after --, e.g. -- --kha-preset kha_mlp."
    groups: Any = get_command(app)
    for name, group in groups.commands.items():  # e.g. `upcycle` instead of `convert upcycle`
        for command in getattr(group, "commands", ()):
            if message == f"No such command '{command}'.":
                return f"Did you mean `kha-megatron {name} {command}`?"
    return f"Try `{context.command_path} --help` for help."


def _report(error: Exception) -> int:
    """Save the traceback to a file."""
    text = f"{sys.argv}\nkha-megatron {__version__}, Python {sys.version}\n\n"
    text += "".join(traceback.format_exception(error))
    with tempfile.NamedTemporaryFile(
        "w",
        prefix="kha-megatron-",
        suffix=".txt",
        errors="backslashreplace",
        delete=False,
    ) as file:
        file.write(text)
    console.error(
        f"{type(error).__name__}: {in_one_line(error)[:200]}. This is a bug in kha-megatron. "
        f"Please open an issue and attach {file.name}"
    )
    return 1
