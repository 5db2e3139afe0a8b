"""Import Megatron-Bridge, which is an optional dependency."""

from collections.abc import Iterator
from contextlib import contextmanager

from kha_megatron.errors import MissingDependencyError, VersionError, install_command
from kha_megatron.mcore.compat import version_of

_SUPPORTED_VERSION = "0.6"


@contextmanager
def bridge_imports() -> Iterator[None]:
    """Check the Megatron-Bridge version and handle import errors in the ``with`` block."""
    found = version_of("megatron-bridge")
    if found is None:
        raise MissingDependencyError("megatron-bridge", "kha_megatron.bridge", "bridge")
    if not f"{found}.".startswith(f"{_SUPPORTED_VERSION}."):
        raise VersionError(
            f"megatron-bridge {found} is not supported. Run {install_command('bridge')} to install "
            f"version {_SUPPORTED_VERSION}."
        )
    try:
        yield
    # FileNotFoundError is raised by Transformer Engine if its torch extension is not installed.
    except (ImportError, FileNotFoundError) as error:
        raise MissingDependencyError(
            f"Transformer Engine with its torch extension (import error: {error})",
            "Megatron-Bridge",
            "bridge,te",
        ) from error
