"""Write the ``README.md`` of an exported directory."""

import os
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from kha_megatron import __version__
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.engine import Conversion
from kha_megatron.hf.modeling_kha import vllm_obstacle
from kha_megatron.model.model_config import ModelConfig

CARD = "README.md"

_TEXT = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- knocking-heads-attention
# license: add the licence under which you publish this model
---

# {architecture}, {parameters:,} parameters

A `{architecture}` of {layers} layers, written by kha_megatron {version} from {origin}.

{heads}

- parameters: {parameters:,}{counts}
- dtype: {dtype}; `manifest.json` has a SHA-256 for every tensor

## Load it

Run this in this directory, with transformers 5 or newer (version 4 ignores the RoPE base):

```python
{registers}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```

{vllm}

## Licence

Not specified. Whoever trained this model adds it to the first lines of this file.
"""
_FORMATS = {"torch_dist": "Megatron checkpoint", "huggingface": "Hugging Face model"}
_PAPER = "Knocking-Heads Attention, arXiv 2510.23052"


def model_card(
    written: Conversion,
    model: ModelConfig,
    config: PreTrainedConfig,
    *,
    origin: Mapping[str, Any],
    folded: KHAConfig | None,
) -> str:
    """Return the text of the model card.

    Args:
        written: The written directory.
        model: The model in it.
        config: The model's configuration.
        origin: What the model was made from, as in its manifest.
        folded: What was folded into its projections; None if nothing was.
    """
    kha, is_kha = model.kha, written.architecture == "kha"
    name = os.path.basename(os.path.abspath(origin["path"]))  # also for "."
    made_from = f"`{name}`, a {_FORMATS[origin['format']]}"
    if (iteration := origin.get("iteration")) is not None:
        made_from += f" at iteration {iteration:,}"
    if kha.mechanisms:
        heads = f"Its heads have {kha} ({_PAPER}, and others)."
    elif folded is not None and folded.mechanisms:
        heads = f"It was trained with {folded} ({_PAPER}), which is folded into its projections."
    else:
        heads = "Its heads are those of the stock architecture."
    own = {m.name: model.layers * m.parameters(model.head_sizes) for m in kha.mechanisms}
    why = vllm_obstacle(config, by_backend=False) if is_kha else None
    install = ", with kha_megatron installed (`pip install 'kha-megatron[vllm]'`)" if is_kha else ""
    vllm = f"vLLM{install}:\n\n```bash\nvllm serve .\n```"
    return _TEXT.format(
        architecture=written.architecture,
        parameters=written.parameters,
        layers=model.layers,
        version=__version__,
        origin=made_from,
        heads=heads,
        counts="".join(f"\n- of these in {what}: {number:,}" for what, number in own.items()),
        dtype=written.dtype,
        registers="import kha_megatron.hf  # registers the architecture\n" if is_kha else "",
        vllm=vllm if why is None else f"vLLM does not serve this model. {why}",
    )
