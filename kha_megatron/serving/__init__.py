"""vLLM plugin for ``kha`` models, which does not require ``--trust-remote-code``."""

_ARCHITECTURE = "KHAForCausalLM"


def register() -> None:
    """Register the architecture with vLLM, including ``--model-impl transformers``.

    vLLM calls this function in each process (entry point ``vllm.general_plugins``).
    """
    import transformers
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import kha_megatron.hf as hf
    from kha_megatron.serving.vllm_limits import KHAVerifyConfig

    # With --model-impl transformers, vLLM looks up the class in the transformers package.
    transformers.KHAForCausalLM = hf.KHAForCausalLM
    MODELS_CONFIG_MAP[_ARCHITECTURE] = KHAVerifyConfig
    ModelRegistry.register_model(_ARCHITECTURE, f"kha_megatron.serving.vllm_model:{_ARCHITECTURE}")
