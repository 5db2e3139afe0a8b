"""Generate a model card (``README.md``) for exported models."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from kha_megatron import __version__
from kha_megatron.conversion.engine import Conversion
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf.modeling_kha import vllm_obstacle
from kha_megatron.model.config import ModelConfig

CARD = "README.md"

_TEXT = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- knocking-heads-attention
{base}# license: please add the license under which you publish this model
---

# {architecture} model with {parameters:,} parameters

This causal language model was converted from {origin} with kha_megatron {version}.

## Model details

- **ModelConfig:** `{architecture}` with {layers} layers
- **Attention heads:** {heads}
- **Parameters:** {parameters:,}{counts}
- **Precision:** {dtype}

The SHA-256 checksum of every tensor is stored in `manifest.json`.

## Usage

To generate text, run the following code in this directory. Note that transformers {transformers} or
newer is required, because version 4 ignores the RoPE base.

```python
{registers}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
inputs = tokenizer("Once upon a time", return_tensors="pt")
outputs = model.generate(inputs.input_ids, max_new_tokens=32)
print(tokenizer.decode(outputs[0]))
```

{vllm}

{software}

## License

No license has been specified yet. If you trained this model, please add its license to the metadata
at the top of this file before you publish it.
"""
_REGISTER = """\
# Registers the architecture. If kha_megatron is not installed, review the Python files in this
# directory and pass trust_remote_code=True to from_pretrained (transformers 5.10 or newer).
import kha_megatron.hf
"""
_PEFT = """\
To train adapters with PEFT, pass the names of the attention projections, since PEFT has no defaults
for this architecture:

```python
LoraConfig(target_modules={projections})
```"""
_STOCK = "Any other software that supports `{architecture}` can run the model, e.g. llama.cpp."
_FORMATS = {"torch_dist": "Megatron checkpoint", "huggingface": "Hugging Face model"}
_PAPER = "[Knocking-Heads Attention](https://arxiv.org/abs/2510.23052)"


def model_card(
    written: Conversion,
    model: ModelConfig,
    config: PreTrainedConfig,
    *,
    origin: Mapping[str, Any],
    base: object,
    projections: Sequence[str],
    folded: HeadsConfig | None,
) -> str:
    """Render the model card.

    Args:
        origin: ``identity()`` of the source checkpoint (this is also in ``manifest.json``).
        base: ``_name_or_path`` of the source model, in any form. Only used if it is a Hub model ID.
        projections: Names of the linear modules of attention, e.g. ``q_proj``.
        folded: KHA config of the source model, if it was folded into the projections.
    """
    kha, is_kha = model.kha, written.architecture == "kha"
    name = os.path.basename(os.path.abspath(origin["path"]))  # also for "."
    source = f"the {_FORMATS[origin['format']]} {_code(name)}"
    if (iteration := origin.get("iteration")) is not None:
        source += f" at iteration {iteration:,}"
    heads = "standard attention"
    if kha.mechanisms:
        heads = f"`{kha}`"
    if model.kha_folded:
        heads += f" after folding `{folded or kha}` into the projections (inference only)"
    elif not kha.mechanisms and folded is not None and folded.mechanisms:
        heads += f" after folding `{folded}` into the projections"
    if (folded or kha).variants:
        heads += f", see {_PAPER}"
    own = _count_head_parameters(model)
    vllm = vllm_obstacle(config, by_backend=False) if is_kha else None
    if vllm is None:
        plugin = " install kha_megatron from source, with its `vllm` extra, and" if is_kha else ""
        vllm = f"To serve the model with vLLM,{plugin} run:\n\n```bash\nvllm serve .\n```"
    is_hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(base), re.ASCII)
    return _TEXT.format(
        base=f'base_model: "{base}"\n' if is_hub_id else "",
        transformers="5.8" if is_kha else "5",
        architecture=written.architecture,
        parameters=written.parameters,
        layers=model.layers,
        version=__version__,
        origin=source,
        heads=heads,
        counts="".join(f", including {number:,} in `{what}`" for what, number in own.items()),
        dtype=written.dtype,
        registers=_REGISTER if is_kha else "",
        vllm=vllm,
        software=(_PEFT if is_kha else _STOCK).format(
            projections=list(projections), architecture=written.architecture
        ),
    )


def _count_head_parameters(model: ModelConfig) -> dict[str, int]:
    """Count the parameters of each head mechanism."""
    counts = {}
    for mechanism in model.kha.mechanisms:
        per_layer = mechanism.parameters(model.head_sizes)
        if isinstance(mechanism, Knock) and model.kha_folded:
            per_layer = _count_folded_parameters(model)
        counts[mechanism.name] = model.layers * per_layer
    return counts


def _count_folded_parameters(model: ModelConfig) -> int:
    """Count the parameters of folded KHA in a layer: additional rows and remaining matrices."""
    rows = model.num_query_groups * model.head_dim
    columns = model.hidden_size + 1 if model.add_qkv_bias else model.hidden_size
    count = rows * columns
    for parameter in model.head_tensors:
        if parameter.name.startswith(f"{Knock.name}_"):
            count += parameter.size
    return count


def _code(text: str) -> str:
    """Format any text as inline code. Its fence is longer than any sequence of backticks in it."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    if "`" not in text:
        return f"`{text}`"
    fence = "`" * (1 + max(map(len, re.findall("`+", text))))
    return f"{fence} {text} {fence}"
