"""Errors that a user can cause.

Each message is one line that names the value, the limit and the remedy. The command line prints it
without a traceback and exits with code 2, or with the error's own.
"""


class KHAError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 2
    """What a command ends with."""


class ConfigError(KHAError, ValueError):
    """A setting, or a combination of settings, that cannot be honoured."""


class CheckpointError(KHAError):
    """A checkpoint or model folder that is damaged, incomplete, or of another configuration."""


class DataError(KHAError):
    """Input text, a tokenizer or a dataset that is missing or cannot be used."""


class OutputError(KHAError):
    """A place to write that is taken, or that the disk refuses."""


class VersionError(KHAError):
    """A Megatron-Core, Megatron-Bridge or Transformer Engine that this package cannot work with.

    No ImportError: Megatron-Core answers that one by training without the layer spec.
    """


class NonFiniteError(KHAError):
    """Training met NaN or infinity and stopped before an optimizer step could spread it."""

    exit_code = 17  # Megatron's, for a run that failed on result validation


class MissingDependencyError(KHAError, ImportError):
    """An optional package that the requested feature needs is not installed."""

    def __init__(self, package: str, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs {package}, which is not installed: "
            f"run `pip install 'kha-megatron[{extra}]'`"
        )


def in_one_line(error: BaseException) -> str:
    """What another library's error says, on one line; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
