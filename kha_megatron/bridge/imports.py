"""Helpers for importing Megatron-Bridge (optional dependency)."""

from collections.abc import Iterator
from contextlib import contextmanager

from kha_megatron.errors import MissingDependencyError, VersionError, install_command
from kha_megatron.mcore.compat import version_of

_SUPPORTED_VERSION = "0.6"


@contextmanager
def bridge_imports() -> Iterator[None]:
    """Context manager for imports of ``megatron.bridge``. Checks the version first."""
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
    # Transformer Engine raises FileNotFoundError if its torch extension is not installed.
    except (ImportError, FileNotFoundError) as error:
        raise MissingDependencyError(
            f"Transformer Engine with its torch extension (import error: {error})",
            "Megatron-Bridge",
            "bridge,te",
        ) from error
