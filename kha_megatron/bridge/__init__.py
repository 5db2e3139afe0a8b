"""Support for ``kha`` models in Megatron-Bridge."""

from kha_megatron.bridge.imports import bridge_imports

__all__ = ["register_bridge"]


def register_bridge() -> None:
    """Register the ``kha`` architecture with ``AutoBridge`` and with transformers.

    Call this function before using ``AutoBridge`` or loading a Megatron-Bridge checkpoint with KHA,
    so that ``KHAModelProvider`` can be instantiated from its ``run_config.yaml``.

    Raises:
        MissingDependencyError: If Megatron-Bridge or Transformer Engine is not installed.
        VersionError: If the version of Megatron-Bridge is not supported.
    """
    with bridge_imports():
        import megatron.bridge  # noqa: F401
    import kha_megatron.bridge.model_bridge  # noqa: F401 (registers itself)
