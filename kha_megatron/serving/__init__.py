"""vLLM plugin for `kha` models. You don't need `--trust-remote-code` if it is installed."""

_ARCHITECTURE = "KHAForCausalLM"


def register() -> None:
    """Entry point for `vllm.general_plugins`. vLLM calls this in every process."""
    import transformers
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import kha_megatron.hf as hf
    from kha_megatron.serving.vllm_limits import KHAVerifyConfig

    # vLLM looks for the class in the transformers package if --model-impl is transformers.
    transformers.KHAForCausalLM = hf.KHAForCausalLM
    MODELS_CONFIG_MAP[_ARCHITECTURE] = KHAVerifyConfig
    ModelRegistry.register_model(_ARCHITECTURE, f"kha_megatron.serving.vllm_model:{_ARCHITECTURE}")
