"""Megatron-Bridge for Knocking-Heads models: its ``AutoBridge`` and its recipes know ``kha``.

::

    from kha_megatron import bridge

    bridge.register()  # before AutoBridge, and before Bridge reads a checkpoint with KHA
    AutoBridge.import_ckpt(hf_folder, megatron_folder)

A recipe takes ``kha_megatron.bridge.provider.KHAModelProvider`` where it takes a
``GPTModelProvider``. Nothing here is imported by the rest of the package, and Megatron-Bridge not
before :func:`register`.
"""

from kha_megatron.bridge.imports import bridge_imports

__all__ = ["register"]


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
