"""The models of the paper on gated attention (arXiv 2505.06708), with a gate at each position.

``gated/15b-output-element`` is the 15B mixture of experts with a gate for every element of what
each head gives. Sizes are the paper's, with the tokenizer of Qwen3. Its results are pictures, and
length, rate, batch and routing are not in our notes on it: they are those of Table 3 of the paper
on KHA. Active parameters of the 15B model come to 1.99B, not to the 2.4B of its name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kha_megatron.recipes.paper import EXPLORATION, Shape, grouped_query, recipe_of
from kha_megatron.recipes.recipe import Recipe

VOCAB_SIZE = 151936

_MODELS: Mapping[str, tuple[str, Shape, dict[str, Any], dict[str, str | float]]] = {
    # words, sizes, arguments, what the paper calls its size
    "1.7b-28": (
        "1.7B of 28 layers",
        Shape(28, 2048, 6144),
        grouped_query(16, 8),
        {"total": "1.7B", "active": "1.7B"},
    ),
    "1.7b-48": (
        "1.7B of 48 layers",
        Shape(48, 1536, 4608),
        grouped_query(16, 8),
        {"total": "1.7B", "active": "1.7B"},
    ),
    "15b": (
        "15B MoE (named A2.4B; 1.99B are active)",
        Shape(24, 2048, 768, (128, 8)),
        grouped_query(32, 4) | {"untie_embeddings_and_output_weights": True},
        {"total": "15B", "active": "2.4B"},
    ),
}

_GATES: Mapping[str, tuple[str, str]] = {
    "baseline": ("baseline", "no gate"),
    "output-element": ("gate_output", "a gate on each element of a head's output"),
    "output-head": ("gate_output_head", "a gate on each head's output"),
    "value-element": ("gate_value", "a gate on each element of a value"),
    "value-head": ("gate_value_head", "a gate on each value head"),
    "query": ("gate_query", "a gate on each element of a query"),
    "key": ("gate_key", "a gate on each element of a key"),
    "dense": ("gate_dense", "a gate on what the output projection gives"),
}
"""Preset and words."""


def _gated() -> Iterator[Recipe]:
    for name, (words, shape, arguments, printed) in _MODELS.items():
        for gate, (preset, what) in _GATES.items():
            yield recipe_of(
                f"gated/{name}-{gate}",
                f"{words}, {what}; trained as Table 3 of KHA",
                shape,
                EXPLORATION,
                preset=preset,
                attention=arguments,
                vocab_size=VOCAB_SIZE,
                paper=printed if gate == "baseline" else {},
            )


GATED = tuple(_gated())
