"""KHA models for transformers.

Importing this package registers the `kha` model type with the Auto classes, so you do not need
`trust_remote_code` to load a converted model:

```python
>>> import kha_megatron.hf
>>> model = AutoModelForCausalLM.from_pretrained("path/to/model")
```
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import attention_kha  # noqa: F401 (registers further attention classes)
from kha_megatron.hf.configuration_kha import KHAModelConfig
from kha_megatron.hf.modeling_kha import (
    KHAForCausalLM,
    KHAForQuestionAnswering,
    KHAForSequenceClassification,
    KHAForTokenClassification,
    KHAModel,
    KHAPreTrainedModel,
)
from kha_megatron.hf.modelling_files import write_modelling_files

AutoConfig.register(
    KHAModelConfig.model_type,
    KHAModelConfig,
    exist_ok=True,
)
for auto_class, model_class in (
    (AutoModel, KHAModel),
    (AutoModelForCausalLM, KHAForCausalLM),
    (AutoModelForQuestionAnswering, KHAForQuestionAnswering),
    (AutoModelForSequenceClassification, KHAForSequenceClassification),
    (AutoModelForTokenClassification, KHAForTokenClassification),
):
    auto_class.register(KHAModelConfig, model_class, exist_ok=True)
KHAModelConfig.write_code = staticmethod(write_modelling_files)


def read_kha(config: KHAModelConfig) -> HeadsConfig:
    """Collect the `kha_*` fields of a model config."""
    return HeadsConfig.from_entries_or_empty(vars(config))


__all__ = [
    "KHAForCausalLM",
    "KHAForQuestionAnswering",
    "KHAForSequenceClassification",
    "KHAForTokenClassification",
    "KHAModel",
    "KHAModelConfig",
    "KHAPreTrainedModel",
    "read_kha",
    "write_modelling_files",
]
