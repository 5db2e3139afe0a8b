"""Import Megatron-Bridge, or explain what to install."""

from collections.abc import Iterator
from contextlib import contextmanager

from kha_megatron.errors import MissingDependencyError, VersionError
from kha_megatron.mcore.compat import version_of

SUPPORTED = "0.6"


@contextmanager
def bridge_imports() -> Iterator[None]:
    """Check the version of Megatron-Bridge and explain a failed import in the block."""
    found = version_of("megatron-bridge")
    if found is None:
        raise MissingDependencyError("megatron-bridge", "kha_megatron.bridge", "bridge")
    if not f"{found}.".startswith(f"{SUPPORTED}."):
        raise VersionError(
            f"Expected megatron-bridge {SUPPORTED}, got {found}. "
            "Run `pip install 'kha-megatron[bridge]'`."
        )
    try:
        yield
    # Transformer Engine without its torch extension raises FileNotFoundError.
    except (ImportError, FileNotFoundError) as error:
        raise MissingDependencyError(
            f"Transformer Engine with its torch extension (import error: {error})",
            "Megatron-Bridge",
            "bridge,te",
        ) from error
