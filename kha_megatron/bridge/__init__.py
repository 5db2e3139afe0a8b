"""Megatron-Bridge integration."""

from typing import Any

from kha_megatron.mcore.compat import bridge_imports

__all__ = ["register_bridge"]


def register_bridge(_arguments: Any = None) -> None:
    """Register KHA models with Megatron-Bridge and transformers.

    You need to call this once before using ``AutoBridge``, and also before loading a
    Megatron-Bridge checkpoint, since its ``run_config.yaml`` refers to our providers. The argument
    is ignored. Some frameworks pass one to the functions that they call at the start.

    Example::

        register_bridge()
        bridge = AutoBridge.from_hf_pretrained("path/to/kha-model")

    Raises:
        MissingDependencyError: If Megatron-Bridge or Transformer Engine is not installed.
        VersionError: If this version of Megatron-Bridge is not supported.
    """
    with bridge_imports():
        import megatron.bridge  # noqa: F401
    # these modules register themselves
    import kha_megatron.bridge.lora
    import kha_megatron.bridge.model_bridge  # noqa: F401
