"""The language models of the paper on mixture-of-head attention (arXiv 2410.11842).

``moh/table4-b-75`` is LLM-B with 75 % of its heads active, ``moh/llama3-8b-stage2`` LLaMA3-8B after
its first stage, continued as MoH. Sizes, rates and lengths are the paper's Tables A, C and D. It
prints neither how many of the active heads are shared (half of them here; section 4.4 has 16 of 32
for LLaMA3-8B) nor the shape of the decay (a cosine here), Adam's betas or LLaMA3's own sizes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kha_megatron.recipes.paper import Schedule, Shape, grouped_query, recipe_of
from kha_megatron.recipes.recipe import Recipe

VOCAB_SIZE = 65536
"""Of Tables 4 and A, whose counts hold with it and an output layer of its own."""

_PLAIN: dict[str, Any] = {"qk_layernorm": False, "untie_embeddings_and_output_weights": True}

_BATCH = 2048
"""Sequences of a step: 4M tokens of 2,048 (Table C), 16M of 8,192 (Table D)."""


def _attention(heads: int, head_dim: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "kv_channels": head_dim, **_PLAIN}


def _schedule(rate: float, warm_up: int) -> Schedule:
    start = {"lr_warmup_iters": warm_up, "lr_warmup_init": 1e-7}
    return Schedule("100B", 2048, rate, batch=_BATCH, warm_up=start)


_MODELS: Mapping[str, tuple[str, Shape, dict[str, Any], Schedule, str, str]] = {
    # words, sizes, attention, training, parameters printed without and with routers
    "s": (
        "LLM-S",
        Shape(12, 768, 2048),
        _attention(12, 64),
        _schedule(3e-4, 2000),
        "186M",
        "186M",
    ),
    "b": (
        "LLM-B",
        Shape(24, 1536, 4096),
        _attention(16, 96),
        _schedule(5e-4, 500),
        "881M",
        "882M",
    ),
}

_TABLE_4: Mapping[str, Mapping[str, float]] = {  # mean accuracy over six tasks, in percent
    "s": {"baseline": 43.9, "75": 44.6, "50": 45.4},
    "b": {"baseline": 47.4, "75": 47.8, "50": 47.2},
}


def _table_4() -> Iterator[Recipe]:
    for name, accuracies in _TABLE_4.items():
        words, shape, attention, training, plain, routed = _MODELS[name]
        for active, accuracy in accuracies.items():
            alone = active == "baseline"
            size = plain if alone else routed
            yield recipe_of(
                f"moh/table4-{name}-{active}",
                f"{words}, " + ("all heads" if alone else f"{active} % of the heads, half shared"),
                shape,
                training,
                preset="baseline" if alone else f"moh_{active}",
                attention=attention,
                vocab_size=VOCAB_SIZE,
                paper={"total": size, "active": size, "accuracy": accuracy},
            )


def _llama() -> Recipe:
    """The second stage of section 4.4: no tensor is new, only the configuration."""
    attention = grouped_query(32, 8) | _PLAIN | {"rotary_base": 500000}
    attention |= {"pipeline_model_parallel_size": 8}  # Table D
    return recipe_of(
        "moh/llama3-8b-stage2",
        "LLaMA3-8B of 160,896 tokens continued as MoH, 16 shared and 8 of 16 routed heads, from "
        "--pretrained-checkpoint of stage 1",
        Shape(32, 4096, 14336),
        Schedule("100B", 8192, 2e-5, last=0.05, batch=_BATCH, warm_up={"lr_warmup_iters": 50}),
        preset="baseline",
        attention=attention,
        heads={
            "kha_heads": (
                "moh.shared=16",
                "moh.active=8",
                "moh.router=query_norm",
                "moh.quantized=true",
            )
        },
        vocab_size=160896,
        paper={"accuracy": 64.0},  # Table 5; Table E, with other tasks, has 64.8
    )


MOH = (*_table_4(), _llama())
