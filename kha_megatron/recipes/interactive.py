"""Table 6 of the paper on KHA: the attentions whose heads interact, side by side.

The table is qualitative, and prints no sizes of the other three: collaborative heads here are as
wide as fused kernels allow, and half of the mixture's active heads are shared. Each is a model of
Table 3, of ``table3/mha`` or ``table3/gqa4``, and trained as those are; ``kha-megatron compare``
gives the table's columns as numbers.
"""

from collections.abc import Iterator, Mapping

from kha_megatron.recipes.paper import EXPLORATION, SHAPES, grouped_query, recipe_of
from kha_megatron.recipes.recipe import Recipe

_ATTENTIONS = {
    "mha": ("MHA, 16 heads", grouped_query(16, 16)),
    "gqa4": ("GQA, 32 query and 4 KV heads", grouped_query(32, 4)),
}

_INTERACTIONS: Mapping[str, tuple[str, str]] = {
    "talking": ("talking", "talking heads"),
    "collaborative": ("collaborative", "queries and keys of 256 features that all heads share"),
    "moh": ("moh_75", "75 % of the heads for each token"),
    "kha_mlp": ("kha_mlp", "KHA-MLP on v"),
    "kha_linear": ("kha_linear", "KHA-Linear on q, k and v"),
}
"""Preset and words."""

_LONGER = f"talking.max_tokens={EXPLORATION.length}"
"""Talking heads hold logits of every pair of tokens, and refuse so many unless they are told."""


def _table_6() -> Iterator[Recipe]:
    for name, (preset, what) in _INTERACTIONS.items():
        for attention, (words, arguments) in _ATTENTIONS.items():
            yield recipe_of(
                f"interactive/{name}-{attention}",
                f"A0.8B-6.6B MoE with {words}, {what}",
                SHAPES["moe-a0.8b-6.6b"],
                EXPLORATION,
                preset=preset,
                attention=arguments,
                heads={"kha_heads": (_LONGER,)} if name == "talking" else None,
            )


INTERACTIVE = tuple(_table_6())
