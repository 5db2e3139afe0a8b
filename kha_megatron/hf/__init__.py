"""The ``kha`` architecture for transformers.

``import kha_megatron.hf`` registers it, after which ``AutoConfig``, ``AutoModel`` and
``AutoModelForCausalLM`` load a converted folder without any remote code.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from kha_megatron.hf.configuration_kha import KHAModelConfig
from kha_megatron.hf.modeling_kha import KHAForCausalLM, KHAModel, KHAPreTrainedModel

AutoConfig.register(KHAModelConfig.model_type, KHAModelConfig, exist_ok=True)
AutoModel.register(KHAModelConfig, KHAModel, exist_ok=True)
AutoModelForCausalLM.register(KHAModelConfig, KHAForCausalLM, exist_ok=True)
# Experts are 3-D in memory and one tensor per expert and matrix on disk, as in qwen3_moe files.
register_checkpoint_conversion_mapping(
    KHAModelConfig.model_type, get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True
)

__all__ = ["KHAForCausalLM", "KHAModel", "KHAModelConfig", "KHAPreTrainedModel"]
