"""Importing from Megatron-Bridge, with a remedy where it cannot be."""

from collections.abc import Iterator
from contextlib import contextmanager

from kha_megatron.errors import MissingDependencyError, VersionError
from kha_megatron.mcore.compat import version_of

_SUPPORTED = "0.6"


@contextmanager
def bridge_imports() -> Iterator[None]:
    """Around imports from Megatron-Bridge: what is not there is an error with a remedy.

    Raises:
        MissingDependencyError, VersionError: see :func:`kha_megatron.bridge.register`.
    """
    _check_version()
    try:
        yield
    except MissingDependencyError:
        raise
    # Transformer Engine without its torch extension raises FileNotFoundError
    except (ImportError, FileNotFoundError) as error:
        raise _cannot_import(error) from error


def _check_version() -> None:
    found = version_of("megatron-bridge")
    if found is None:
        raise MissingDependencyError("megatron-bridge", "kha_megatron.bridge", "bridge")
    if not f"{found}.".startswith(f"{_SUPPORTED}."):
        raise VersionError(
            f"megatron-bridge {found} is not supported ({_SUPPORTED} is): "
            "run `pip install 'kha-megatron[bridge]'`"
        )


def _cannot_import(error: Exception) -> Exception:
    try:
        import torch  # noqa: F401 (its CUDA libraries first, else those of the next are not found)
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, FileNotFoundError):
        return MissingDependencyError(
            "Transformer Engine with its torch extension", "Megatron-Bridge", "bridge,te"
        )
    return MissingDependencyError(
        f"what Megatron-Bridge imports ({error})", "kha_megatron.bridge", "bridge"
    )
