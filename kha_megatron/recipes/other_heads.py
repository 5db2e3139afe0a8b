"""Recipes for other head mechanisms: gated attention, mixture-of-head attention, and Table 6.

``GATED`` are the models of the paper on gated attention (arXiv 2505.06708), with a gate at each
position. Sizes are the paper's, with Qwen3's tokenizer. Length, learning rate, batch and routing
are those of Table 3 of the KHA paper. The 15B model has 1.99B active parameters, not 2.4B as in its
name.

``MOH`` are the language models of the paper on mixture-of-head attention (arXiv 2410.11842), with
the sizes, rates and lengths of its Tables A, C and D. The paper does not print how many active
heads are shared (half of them here; section 4.4 has 16 of 32 for LLaMA3-8B), the shape of the decay
(a cosine here), Adam's betas or LLaMA3's own sizes.

``INTERACTIVE`` is Table 6 of the KHA paper: attentions whose heads interact, on models of Table 3.
The table prints no sizes of the other mechanisms. Collaborative heads are as wide here as fused
kernels allow, and half of the active heads of the mixture are shared.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kha_megatron.recipes.paper import (
    EXPLORATION,
    SHAPES,
    Schedule,
    Shape,
    grouped_query,
    recipe_of,
)
from kha_megatron.recipes.recipe import Recipe

_UNTIED: dict[str, Any] = {"untie_embeddings_and_output_weights": True}

_GATED_MODELS: Mapping[str, tuple[str, Shape, dict[str, Any], dict[str, str | float]]] = {
    # description, sizes, attention, the paper's parameter counts
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
        grouped_query(32, 4) | _UNTIED,
        {"total": "15B", "active": "2.4B"},
    ),
}
_GATES: Mapping[str, tuple[str, str]] = {
    # preset, description
    "baseline": ("baseline", "no gate"),
    "output-element": ("gate_output", "a gate on each element of a head's output"),
    "output-head": ("gate_output_head", "a gate on each head's output"),
    "value-element": ("gate_value", "a gate on each element of a value"),
    "value-head": ("gate_value_head", "a gate on each value head"),
    "query": ("gate_query", "a gate on each element of a query"),
    "key": ("gate_key", "a gate on each element of a key"),
    "dense": ("gate_dense", "a gate on what the output projection gives"),
}


def _gated() -> Iterator[Recipe]:
    for name, (words, shape, attention, printed) in _GATED_MODELS.items():
        for gate, (preset, what) in _GATES.items():
            yield recipe_of(
                f"gated/{name}-{gate}",
                f"{words}, {what}; trained as Table 3 of KHA",
                shape,
                EXPLORATION,
                preset=preset,
                attention=attention,
                vocab_size=151936,
                paper=printed if gate == "baseline" else {},
            )


_MOH_BATCH = 2048
"""Sequences of a step: 4M tokens of 2,048 (Table C), 16M of 8,192 (Table D)."""


def _moh_schedule(rate: float, warm_up: int) -> Schedule:
    start = {"lr_warmup_iters": warm_up, "lr_warmup_init": 1e-7}
    return Schedule("100B", 2048, rate, batch=_MOH_BATCH, warm_up=start)


_MOH_MODELS: Mapping[
    str, tuple[str, Shape, int, int, Schedule, Mapping[str, tuple[str, float]]]
] = {
    # description, sizes, heads, head size, training; parameters and mean accuracy over six tasks
    # in percent without routers and with 75 or 50 % of the heads active
    "s": (
        "LLM-S",
        Shape(12, 768, 2048),
        12,
        64,
        _moh_schedule(3e-4, 2000),
        {"baseline": ("186M", 43.9), "75": ("186M", 44.6), "50": ("186M", 45.4)},
    ),
    "b": (
        "LLM-B",
        Shape(24, 1536, 4096),
        16,
        96,
        _moh_schedule(5e-4, 500),
        {"baseline": ("881M", 47.4), "75": ("882M", 47.8), "50": ("882M", 47.2)},
    ),
}


def _moh() -> Iterator[Recipe]:
    for name, (words, shape, heads, head_dim, training, rows) in _MOH_MODELS.items():
        for active, (size, accuracy) in rows.items():
            plain = active == "baseline"
            yield recipe_of(
                f"moh/table4-{name}-{active}",
                f"{words}, " + ("all heads" if plain else f"{active} % of the heads, half shared"),
                shape,
                training,
                preset="baseline" if plain else f"moh_{active}",
                attention={"num_attention_heads": heads, "kv_channels": head_dim}
                | {"qk_layernorm": False}
                | _UNTIED,
                vocab_size=65536,  # reproduces the counts of Tables 4 and A
                paper={"total": size, "active": size, "accuracy": accuracy},
            )
    # the second stage of section 4.4 has no new tensor, only another configuration
    attention = grouped_query(32, 8) | {"qk_layernorm": False, "rotary_base": 500000} | _UNTIED
    routing = ("moh.shared=16", "moh.active=8", "moh.router=query_norm", "moh.quantized=true")
    yield recipe_of(
        "moh/llama3-8b-stage2",
        "LLaMA3-8B of 160,896 tokens continued as MoH, 16 shared and 8 of 16 routed heads, from "
        "--pretrained-checkpoint of stage 1",
        Shape(32, 4096, 14336),
        Schedule("100B", 8192, 2e-5, last=0.05, batch=_MOH_BATCH, warm_up={"lr_warmup_iters": 50}),
        preset="baseline",
        attention=attention | {"pipeline_model_parallel_size": 8},  # Table D
        heads={"kha_heads": routing},
        vocab_size=160896,
        paper={"accuracy": 64.0},  # Table 5; Table E, with other tasks, has 64.8
    )


_ATTENTIONS = {
    "mha": ("MHA, 16 heads", grouped_query(16, 16)),
    "gqa4": ("GQA, 32 query and 4 KV heads", grouped_query(32, 4)),
}
_INTERACTIONS: Mapping[str, tuple[str, str]] = {
    # preset, description
    "talking": ("talking", "talking heads"),
    "collaborative": ("collaborative", "queries and keys of 256 features that all heads share"),
    "moh": ("moh_75", "75 % of the heads for each token"),
    "kha_mlp": ("kha_mlp", "KHA-MLP on v"),
    "kha_linear": ("kha_linear", "KHA-Linear on q, k and v"),
}


def _interactive() -> Iterator[Recipe]:
    # talking heads keep the logits of all pairs of tokens, so long sequences must be asked for
    longer = {"kha_heads": (f"talking.max_tokens={EXPLORATION.length}",)}
    for name, (preset, what) in _INTERACTIONS.items():
        for attention, (words, arguments) in _ATTENTIONS.items():
            yield recipe_of(
                f"interactive/{name}-{attention}",
                f"A0.8B-6.6B MoE with {words}, {what}",
                SHAPES["moe-a0.8b-6.6b"],
                EXPLORATION,
                preset=preset,
                attention=arguments,
                heads=longer if name == "talking" else None,
            )


GATED, MOH, INTERACTIVE = tuple(_gated()), tuple(_moh()), tuple(_interactive())
