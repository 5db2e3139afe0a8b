"""Errors that a user can cause.

Each message is one line: what was expected, what was found and what to do. The command line prints
it without a traceback and exits with ``exit_code``.
"""

from collections.abc import Mapping


class KHAError(Exception):
    """Base class of the errors of this package."""

    exit_code = 2
    """Exit code of a command that raises it."""


class ConfigError(KHAError, ValueError):
    """An invalid setting or an unsupported combination of settings."""


class CheckpointError(KHAError):
    """A checkpoint or model directory that is damaged, incomplete or has another configuration."""


class DataError(KHAError):
    """Missing or invalid input text, tokenizer or dataset."""


class OutputError(KHAError):
    """An output path that is in use, not empty or not writable."""


class VersionError(KHAError):
    """An unsupported version of Megatron-Core, Megatron-Bridge or Transformer Engine.

    Not an ImportError, after which Megatron-Core would train without the layer spec.
    """


class NonFiniteError(KHAError):
    """A NaN or infinity in training, found before the optimizer step."""

    exit_code = 17  # Megatron's code for failed result validation


class MissingDependencyError(KHAError, ImportError):
    """A missing optional package that a feature needs."""

    def __init__(self, package: str, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs {package}, which is not installed. "
            f"Run `pip install 'kha-megatron[{extra}]'`."
        )


def in_one_line(error: BaseException) -> str:
    """Return the message of an error on one line, or its class if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def raise_first(mistakes: Mapping[str, object]) -> None:
    """Raise ConfigError with the first message whose condition is true."""
    for message, applies in mistakes.items():
        if applies:
            raise ConfigError(message)
