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

_TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- knocking-heads-attention
{base_model_line}# license: please add the license under which you publish this model
---

# {architecture} model with {parameters:,} parameters

This causal language model was converted from {source} with kha_megatron {version}.

## Model details

- **Architecture:** `{architecture}` with {layers} layers
- **Attention heads:** {heads}
- **Parameters:** {parameters:,}{head_parameters}
- **Precision:** {dtype}

The SHA-256 checksum of every tensor is stored in `manifest.json`.

## Usage

To generate text, run the following code in this directory. Note that transformers {min_version} or
newer is required, because version 4 ignores the RoPE base.

```python
{register_import}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
inputs = tokenizer("Once upon a time", return_tensors="pt")
outputs = model.generate(inputs.input_ids, max_new_tokens=32)
print(tokenizer.decode(outputs[0]))
```

{vllm_section}

{last_section}

## License

No license has been specified yet. If you trained this model, please add its license to the metadata
at the top of this file before you publish it.
"""
_REGISTER_IMPORT = """\
# Registers the architecture. If kha_megatron is not installed, review the Python files in this
# directory and pass trust_remote_code=True to from_pretrained (transformers 5.10 or newer).
import kha_megatron.hf
"""
_VLLM_SECTION = """\
To serve the model with vLLM,{installation} run:

```bash
vllm serve .
```"""
_PEFT_SECTION = """\
To train adapters with PEFT, pass the names of the attention projections, since PEFT has no defaults
for this architecture:

```python
LoraConfig(target_modules={projections})
```"""
_STOCK_SECTION = (
    "Any other software that supports `{architecture}` can run the model, e.g. llama.cpp."
)
_SOURCE_FORMATS = {"torch_dist": "Megatron checkpoint", "huggingface": "Hugging Face model"}
_PAPER = "[Knocking-Heads Attention](https://arxiv.org/abs/2510.23052)"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def model_card(
    conversion: Conversion,
    model: ModelConfig,
    config: PreTrainedConfig,
    *,
    source_identity: Mapping[str, Any],
    name_or_path: object,
    projections: Sequence[str],
    heads_before_folding: HeadsConfig | None,
) -> str:
    """Render the model card.

    Args:
        conversion: Summary of the conversion that wrote the model.
        model: The written model.
        config: Its ``config.json``.
        source_identity: ``identity()`` of the source checkpoint (also in ``manifest.json``).
        name_or_path: ``_name_or_path`` of the source model, in any form. Only used if it is a Hub
            model ID.
        projections: Names of the linear modules of attention, e.g. ``q_proj``.
        heads_before_folding: KHA config of the source model, if it was folded into the projections.
    """
    architecture = conversion.architecture
    if architecture == "kha":
        min_version = "5.8"
        register_import = _REGISTER_IMPORT
        last_section = _PEFT_SECTION.format(projections=list(projections))
    else:
        min_version = "5"
        register_import = ""
        last_section = _STOCK_SECTION.format(architecture=architecture)
    return _TEMPLATE.format(
        base_model_line=_base_model_line(name_or_path),
        architecture=architecture,
        parameters=conversion.parameters,
        source=_describe_source(source_identity),
        version=__version__,
        layers=model.layers,
        heads=_describe_heads(model, heads_before_folding),
        head_parameters=_list_head_parameters(model),
        dtype=conversion.dtype,
        min_version=min_version,
        register_import=register_import,
        vllm_section=_vllm_section(architecture, config),
        last_section=last_section,
    )


def _base_model_line(name_or_path: object) -> str:
    """Return the ``base_model`` line of the metadata, or "" if the source is not on the Hub."""
    if not _HUB_ID.fullmatch(str(name_or_path)):
        return ""
    return f'base_model: "{name_or_path}"\n'


def _describe_source(identity: Mapping[str, Any]) -> str:
    """Name the source checkpoint, e.g. "the Megatron checkpoint `run` at iteration 1,000"."""
    checkpoint_format = _SOURCE_FORMATS[identity["format"]]
    absolute_path = os.path.abspath(identity["path"])  # "." has no name
    source = f"the {checkpoint_format} {_inline_code(os.path.basename(absolute_path))}"
    iteration = identity.get("iteration")
    if iteration is not None:
        source += f" at iteration {iteration:,}"
    return source


def _describe_heads(model: ModelConfig, heads_before_folding: HeadsConfig | None) -> str:
    """Describe the head mechanisms of the model, and what was folded into its projections."""
    trained_heads = model.kha if heads_before_folding is None else heads_before_folding
    heads = f"`{model.kha}`" if model.kha.mechanisms else "standard attention"
    if model.kha_folded:
        heads += f" after folding `{trained_heads}` into the projections (inference only)"
    elif trained_heads.mechanisms and not model.kha.mechanisms:
        heads += f" after folding `{trained_heads}` into the projections"
    if trained_heads.variants:
        heads += f", see {_PAPER}"
    return heads


def _vllm_section(architecture: str, config: PreTrainedConfig) -> str:
    """Explain how to serve the model with vLLM, or why this is not possible."""
    if architecture != "kha":
        return _VLLM_SECTION.format(installation="")
    obstacle = vllm_obstacle(config, by_backend=False)
    if obstacle is not None:
        return obstacle
    installation = " install kha_megatron from source, with its `vllm` extra, and"
    return _VLLM_SECTION.format(installation=installation)


def _list_head_parameters(model: ModelConfig) -> str:
    """List the number of parameters of each head mechanism, e.g. ", including 128 in `knock`"."""
    listed = ""
    for mechanism in model.kha.mechanisms:
        per_layer = mechanism.parameters(model.head_sizes)
        if isinstance(mechanism, Knock) and model.kha_folded:
            per_layer = _count_folded_parameters(model)
        count = model.layers * per_layer
        listed += f", including {count:,} in `{mechanism.name}`"
    return listed


def _count_folded_parameters(model: ModelConfig) -> int:
    """Count the parameters of folded KHA in a layer.

    The value projection has twice as many rows as without KHA, and some matrices may remain.
    """
    additional_rows = model.num_query_groups * model.head_dim
    row_size = model.hidden_size
    if model.add_qkv_bias:
        row_size += 1
    count = additional_rows * row_size
    for parameter in model.head_tensors:
        if parameter.name.startswith(f"{Knock.name}_"):
            count += parameter.size
    return count


def _inline_code(text: str) -> str:
    """Format any text as inline code. Its fence is longer than any sequence of backticks in it."""
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    backticks = re.findall("`+", printable)
    if not backticks:
        return f"`{printable}`"
    fence = "`" + max(backticks, key=len)
    return f"{fence} {printable} {fence}"
