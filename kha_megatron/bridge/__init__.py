"""Megatron-Bridge for Knocking-Heads models: its ``AutoBridge`` and its recipes know ``kha``.

::

    from kha_megatron import bridge

    bridge.register()  # before AutoBridge, and before Bridge reads a checkpoint with KHA
    AutoBridge.import_ckpt(hf_folder, megatron_folder)

A recipe takes ``kha_megatron.bridge.provider.KHAModelProvider`` where it takes a
``GPTModelProvider``. Nothing here is imported by the rest of the package, and Megatron-Bridge not
before :func:`register`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from kha_megatron.errors import MissingDependencyError, VersionError

__all__ = ["register"]

_SUPPORTED = "0.6"


def register() -> None:
    """Make ``AutoBridge`` read and write ``KHAForCausalLM`` folders; more than once is no harm.

    Also registers the ``kha`` architecture with transformers, and allows Megatron-Bridge to build
    ``KHAModelProvider`` from the ``run_config.yaml`` of a checkpoint.

    Raises:
        MissingDependencyError: Megatron-Bridge, or Transformer Engine, which it imports, is not
            installed.
        VersionError: Megatron-Bridge is of a version that this package was not tested with.
    """
    with bridge_imports():
        import kha_megatron.bridge.model_bridge  # noqa: F401 (registers itself)


@contextmanager
def bridge_imports() -> Iterator[None]:
    """Around imports from Megatron-Bridge: what is not there is an error with a remedy.

    Raises:
        MissingDependencyError, VersionError: see :func:`register`.
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
    try:
        found = metadata.version("megatron-bridge")
    except metadata.PackageNotFoundError:
        raise MissingDependencyError("megatron-bridge", "kha_megatron.bridge", "bridge") from None
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
