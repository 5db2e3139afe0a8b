"""The ``README.md`` of an exported folder: what it is, what it was made from, how to load it."""

import os
from collections.abc import Mapping
from typing import Any

from kha_megatron import __version__
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.engine import Conversion
from kha_megatron.model.model import Model

CARD = "README.md"

_HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- knocking-heads-attention
# license: say under which licence you publish this model; kha_megatron does not know
---
"""


def model_card(
    written: Conversion,
    model: Model,
    *,
    origin: Mapping[str, Any],
    folded: KHAConfig | None,
    unserved: str | None,
) -> str:
    """The text.

    Args:
        written: the folder.
        model: what is in it.
        origin: what it was made from, as in its manifest.
        folded: what was folded into its projections; None if nothing was.
        unserved: why vLLM refuses it; None if it does not.
    """
    kha, is_kha = model.kha, written.architecture == "kha"
    iteration = origin.get("iteration")
    name = os.path.basename(os.path.abspath(origin["path"]))  # of "." too
    made_from = f"`{name}`, a {_FORMATS[origin['format']]}" + (
        f" at iteration {iteration:,}" if iteration is not None else ""
    )
    own = {m.name: model.layers * m.parameters(model.head_sizes) for m in kha.mechanisms}
    counts = [f"- parameters: {written.parameters:,}"]
    counts += [f"- of these {what}'s: {number:,}" for what, number in own.items()]
    return "\n".join(
        [
            _HEAD,
            f"# {written.architecture}, {written.parameters:,} parameters\n",
            f"A `{written.architecture}` of {model.layers} layers, written by kha_megatron "
            f"{__version__} from {made_from}.\n",
            _heads(kha, folded) + "\n",
            *counts,
            f"- numbers: {written.dtype}; `manifest.json` has a SHA-256 for every tensor\n",
            "## Load it\n",
            "From within this folder:\n",
            *_transformers(is_kha),
            *_vllm(is_kha, unserved),
            "## Licence\n",
            "Not said: it is for whoever trained this model to say. Name it in the first lines of "
            "this file.\n",
        ]
    )


_FORMATS = {"torch_dist": "Megatron checkpoint", "huggingface": "Hugging Face model"}


def _heads(kha: KHAConfig, folded: KHAConfig | None) -> str:
    if kha.mechanisms:
        return f"Its heads: {kha} (Knocking-Heads Attention, arXiv 2510.23052, and others)."
    if folded is not None and folded.mechanisms:
        return (
            f"It was trained with {folded} (Knocking-Heads Attention, arXiv 2510.23052), which is "
            "folded into its projections: nothing of it is left to compute."
        )
    return "Its heads are those of the stock architecture."


def _transformers(is_kha: bool) -> list[str]:
    registers = ["import kha_megatron.hf  # registers the architecture"] if is_kha else []
    return [
        "transformers, 5 or newer (4 does not see RoPE's base, and would take another):\n",
        "```python",
        *registers,
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(".")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        "```\n",
    ]


def _vllm(is_kha: bool, unserved: str | None) -> list[str]:
    if unserved is not None:
        return [f"vLLM: not this one. {unserved}\n"]
    beside = ", with kha_megatron beside it (`pip install 'kha-megatron[vllm]'`)" if is_kha else ""
    return [f"vLLM{beside}:\n", "```bash", "vllm serve .", "```\n"]
