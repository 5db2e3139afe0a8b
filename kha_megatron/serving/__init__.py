"""Serve ``kha`` models with vLLM and without remote code: ``vllm serve DIRECTORY``.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``). Install
``kha-megatron[vllm]``.
"""

ARCHITECTURE = "KHAForCausalLM"


def register() -> None:
    """Register the architecture with vLLM and with its ``--model-impl transformers``."""
    import transformers
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import kha_megatron.hf as hf
    from kha_megatron.serving.vllm_limits import Limits

    # --model-impl transformers looks up the architecture as an attribute of transformers.
    transformers.KHAForCausalLM = hf.KHAForCausalLM
    MODELS_CONFIG_MAP[ARCHITECTURE] = Limits
    ModelRegistry.register_model(ARCHITECTURE, f"kha_megatron.serving.vllm_model:{ARCHITECTURE}")
