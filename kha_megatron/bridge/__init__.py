"""Support for ``kha`` models in Megatron-Bridge's ``AutoBridge`` and recipes.

::

    from kha_megatron import bridge

    bridge.register()  # before AutoBridge, and before Bridge reads a checkpoint with KHA
    AutoBridge.import_ckpt(hf_directory, megatron_directory)

Use ``kha_megatron.bridge.provider.KHAModelProvider`` wherever a recipe takes a
``GPTModelProvider``. Only :func:`register` imports Megatron-Bridge.
"""

from kha_megatron.bridge.imports import bridge_imports

__all__ = ["register"]


def register() -> None:
    """Make ``AutoBridge`` read and write ``KHAForCausalLM`` directories.

    Also registers ``kha`` with transformers, and allows Megatron-Bridge to build
    ``KHAModelProvider`` from the ``run_config.yaml`` of a checkpoint.

    Raises:
        MissingDependencyError: Megatron-Bridge or Transformer Engine is not installed.
        VersionError: This version of Megatron-Bridge is not supported.
    """
    with bridge_imports():
        import megatron.bridge  # noqa: F401
    import kha_megatron.bridge.model_bridge  # noqa: F401 (registers itself)
