"""The ``kha`` architecture in vLLM: ``vllm serve FOLDER``, without remote code.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``), once
the package is installed beside it: ``pip install 'kha-megatron[vllm]'``. Nothing else of the
package imports this room.
"""

ARCHITECTURE = "KHAForCausalLM"


def register() -> None:
    """Make vLLM load converted folders, and refuse at its start those that it cannot serve.

    Two roads lead to a model: ``kha_megatron.serving.vllm_model``, which vLLM takes by itself, and
    ``--model-impl transformers``, which runs the classes of ``kha_megatron.hf``.
    """
    import transformers
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import kha_megatron.hf as hf
    from kha_megatron.serving.vllm_limits import Limits

    # the second road looks an architecture up as an attribute, not in the Auto classes
    transformers.KHAForCausalLM = hf.KHAForCausalLM
    MODELS_CONFIG_MAP[ARCHITECTURE] = Limits
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(
            ARCHITECTURE, f"kha_megatron.serving.vllm_model:{ARCHITECTURE}"
        )
