"""Import from Megatron-Bridge, or explain what to install."""

from collections.abc import Iterator
from contextlib import contextmanager

from kha_megatron.errors import MissingDependencyError, VersionError
from kha_megatron.mcore.compat import version_of

_SUPPORTED = "0.6"


@contextmanager
def bridge_imports() -> Iterator[None]:
    """Check the version of Megatron-Bridge and explain a failed import in the block.

    Raises:
        MissingDependencyError, VersionError: See :func:`kha_megatron.bridge.register`.
    """
    found = version_of("megatron-bridge")
    if found is None:
        raise MissingDependencyError("megatron-bridge", "kha_megatron.bridge", "bridge")
    if not f"{found}.".startswith(f"{_SUPPORTED}."):
        raise VersionError(
            f"megatron-bridge {found} is not supported ({_SUPPORTED} is): "
            "run `pip install 'kha-megatron[bridge]'`"
        )
    try:
        yield
    except MissingDependencyError:
        raise
    # Transformer Engine without its torch extension raises FileNotFoundError
    except (ImportError, FileNotFoundError) as error:
        raise MissingDependencyError(
            f"Transformer Engine with its torch extension (import error: {error})",
            "Megatron-Bridge",
            "bridge,te",
        ) from error
