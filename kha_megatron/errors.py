"""Exceptions for errors that a user can cause.

The command line prints the message, which is a single line, without a traceback and exits with
``exit_code``.
"""

from collections.abc import Mapping


class KHAError(Exception):
    """Base class for all exceptions of this package."""

    exit_code = 2
    """Exit code of the command line."""


class ConfigError(KHAError, ValueError):
    """Raised for invalid settings or unsupported combinations of settings."""


class CheckpointError(KHAError):
    """Raised if a checkpoint is corrupted, incomplete or has a different configuration."""


class DataError(KHAError):
    """Raised for missing or invalid input text, tokenizers or datasets."""


class OutputError(KHAError):
    """Raised if an output path is in use, not empty or not writable."""


class VersionError(KHAError):
    """Raised for unsupported versions of Megatron-Core, Megatron-Bridge or Transformer Engine. This
    is not an ImportError, because Megatron-Core would then train without the layer spec."""


class NonFiniteError(KHAError):
    """Raised if training produces NaN or infinity, before the optimizer step."""

    exit_code = 17  # Megatron's code for failed result validation


class MissingDependencyError(KHAError, ImportError):
    """Raised if a feature requires an optional package that is not installed."""

    def __init__(self, package: str, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} requires {package}, which is not installed. Run {install_command(extra)}."
        )


def install_command(extra: str, options: str = "") -> str:
    """Return the command that installs an extra, for error messages.

    The package is not on PyPI yet, so it has to be installed from a clone of its repository.
    """
    return f"`pip install {options}'.[{extra}]'` in a clone of kha_megatron"


def in_one_line(error: BaseException) -> str:
    """Return an error message on a single line, or the class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def raise_first(mistakes: Mapping[str, object]) -> None:
    """Raise ConfigError with the first message whose condition is true."""
    for message, applies in mistakes.items():
        if applies:
            raise ConfigError(message)
