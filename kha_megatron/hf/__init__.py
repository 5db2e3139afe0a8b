"""The ``kha`` architecture for transformers.

``import kha_megatron.hf`` registers it, after which ``AutoConfig``, ``AutoModel`` and
``AutoModelForCausalLM`` load a converted folder without any remote code.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kha_megatron.hf.configuration_kha import KHAModelConfig
from kha_megatron.hf.modeling_kha import KHAForCausalLM, KHAModel, KHAPreTrainedModel
from kha_megatron.hf.modelling_files import write_modelling_files

AutoConfig.register(KHAModelConfig.model_type, KHAModelConfig, exist_ok=True)
AutoModel.register(KHAModelConfig, KHAModel, exist_ok=True)
AutoModelForCausalLM.register(KHAModelConfig, KHAForCausalLM, exist_ok=True)
KHAModelConfig.write_code = staticmethod(write_modelling_files)

__all__ = [
    "KHAForCausalLM",
    "KHAModel",
    "KHAModelConfig",
    "KHAPreTrainedModel",
    "write_modelling_files",
]
