"""Megatron-Bridge integration."""

from typing import Any

from kha_megatron.mcore.compat import bridge_imports

__all__ = ["register_bridge"]


def register_bridge(_arguments: Any = None, *, hybrid: bool = False) -> None:
    """Register KHA models with Megatron-Bridge and transformers.

    You need to call this once before using ``AutoBridge``, and also before loading a
    Megatron-Bridge checkpoint, since its ``run_config.yaml`` refers to our providers. A positional
    argument is ignored. Some frameworks pass one to the functions that they call at the start.

    Args:
        hybrid (bool): ``AutoBridge`` builds a ``HybridModel`` from each Hugging Face model instead
            of a ``GPTModel``. Use this in frameworks that do not call ``to_hybrid()``.

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
    import kha_megatron.bridge.lora  # noqa: F401
    from kha_megatron.bridge.model_bridge import KHABridge

    if hybrid:
        KHABridge.builds_hybrid = True
