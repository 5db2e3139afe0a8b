"""KHA models for transformers.

Importing this package registers the `kha` model type with the Auto classes, so you don't need
`trust_remote_code` to load a converted model:

```python
>>> import kha_megatron.hf
>>> model = AutoModelForCausalLM.from_pretrained("path/to/model")
```
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kha_megatron.config import KHAConfig
from kha_megatron.hf import attention_kha  # noqa: F401 (registers further attention classes)
from kha_megatron.hf.configuration_kha import KHAModelConfig
from kha_megatron.hf.modeling_kha import KHAForCausalLM, KHAModel, KHAPreTrainedModel
from kha_megatron.hf.modelling_files import write_modelling_files

AutoConfig.register(KHAModelConfig.model_type, KHAModelConfig, exist_ok=True)
AutoModel.register(KHAModelConfig, KHAModel, exist_ok=True)
AutoModelForCausalLM.register(KHAModelConfig, KHAForCausalLM, exist_ok=True)
KHAModelConfig.write_code = staticmethod(write_modelling_files)


def read_kha(config: KHAModelConfig) -> KHAConfig:
    """Collect the `kha_*` fields of a model config."""
    return KHAConfig.from_entries(vars(config)) or KHAConfig()


__all__ = [
    "KHAForCausalLM",
    "KHAModel",
    "KHAModelConfig",
    "KHAPreTrainedModel",
    "read_kha",
    "write_modelling_files",
]
