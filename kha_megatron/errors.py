"""Exceptions for expected failures, e.g. invalid arguments or a corrupted checkpoint.

The CLI catches :class:`KHAError`, prints the message (always a single line) without a traceback and
exits with ``exit_code``.
"""

from pathlib import Path

_MAX_SHOWN = 200


class KHAError(Exception):
    """Base class of all our exceptions."""

    exit_code = 2
    """Exit code of the CLI if this error is raised."""


class ConfigError(KHAError, ValueError):
    """Invalid settings, or a combination of settings that we do not support."""


class CheckpointError(KHAError):
    """Raised if a checkpoint is corrupted, incomplete or does not match the current config."""


class DataError(KHAError):
    """Problem with the training data (text files, tokenizer or dataset)."""


class OutputError(KHAError):
    """The output path is in use, not writable, or already contains files."""


class VersionError(KHAError):
    """Unsupported version of Megatron-Core, Megatron-Bridge or Transformer Engine.

    Note: This must not be an ImportError. Megatron-Core catches those while importing a layer spec,
    and would then train without the spec.
    """


class NonFiniteError(KHAError):
    """NaN or Inf during training. Raised before the optimizer step."""

    exit_code = 17  # Megatron's code for failed result validation


class MissingDependencyError(KHAError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} requires {package}, which is not installed. Run {install_command(extra)}."
        )


def install_command(extra: str, options: str = "") -> str:
    """Return the command that installs an extra, for error messages.

    The package is not on PyPI yet, so it has to be installed from a clone of its repository.
    """
    return f"`pip install {options}'.[{extra}]'` in a clone of kha_megatron"


def download_hint(path: Path) -> str:
    """Return the command that downloads ``path``, or "" unless it looks like a Hub model ID."""
    if path.is_absolute() or len(path.parts) != 2 or path.parent.exists():
        return ""
    return f" To download a model from the Hub: hf download {path} --local-dir {path.name}"


def in_one_line(error: BaseException) -> str:
    """Format an exception as a single line, e.g. for the CLI."""
    return " ".join(str(error).split()) or type(error).__name__


def show_value(value: object) -> str:
    """Format a value for an error message, e.g. a setting in a file of someone else.

    The result is short, and stays in its line and outside of commands.
    """
    if not isinstance(value, bool | int | float | str | None):
        return f"a {type(value).__name__}"
    text = str(value)
    is_simple = text.isprintable() and len(text) <= _MAX_SHOWN and "`" not in text
    return text if is_simple else repr(text[:_MAX_SHOWN])
