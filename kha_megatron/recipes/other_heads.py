"""Recipes for other head mechanisms: gated attention, mixture-of-head attention and Table 6.

- ``GATED``: models of the gated attention paper (arXiv:2505.06708), with gates at different
  positions. We use that paper's model sizes and Qwen3's vocabulary, but the training schedule of
  Table 3 in the KHA paper. Note that the 15B model is called A2.4B, but only 1.99B parameters are
  active. Some gates exist for the 15B model only. The learning rates of that paper are not in our
  source, so there is no recipe for its run with a larger one.
- ``LONG_CONTEXT``: the same paper's extension from 4k to 32k tokens, and with YaRN to 128k.
- ``MOH``: language models of the mixture-of-head attention paper (arXiv:2410.11842), with the
  hyperparameters of its Tables A, C and D. Some are not specified. For these, we share half of the
  active heads (section 4.4 shares 16 of 32 heads for LLaMA3-8B) and use cosine decay.
- ``INTERACTIVE``: Table 6 of the KHA paper, with models from Table 3. The paper does not say how
  large the other mechanisms are, so we make collaborative heads as large as fused kernels allow,
  and share half of the active heads in MoH.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kha_megatron.recipes.paper import (
    MODEL_SIZES,
    SCHEDULE_100B,
    VARIANTS,
    Baseline,
    HeadVariant,
    ModelSize,
    Schedule,
    grouped_query,
)
from kha_megatron.recipes.recipe import Recipe

_UNTIED: dict[str, Any] = {"untie_embeddings_and_output_weights": True}
_NO_QK_NORM: dict[str, Any] = {"qk_layernorm": False}


def _gated(description: str, shape: ModelSize, attention: dict[str, Any]) -> Baseline:
    description += " trained as in Table 3 of KHA"
    return Baseline(description, shape, SCHEDULE_100B, attention, vocab_size=151936)


def _moh(
    description: str,
    shape: ModelSize,
    heads: int,
    rate: float,
    warm_up: int,
    tokens: str = "100B",
) -> Baseline:
    attention = {"num_attention_heads": heads, "kv_channels": shape.hidden // heads}
    # 4M tokens per step (Table C). The vocabulary size is derived from Tables 4 and A.
    start = {"lr_warmup_iters": warm_up, "lr_warmup_init": 1e-7}
    schedule = Schedule(tokens, 2048, rate, batch=2048, warm_up=start)
    return Baseline(
        description,
        shape,
        schedule,
        attention | _NO_QK_NORM | _UNTIED,
        65536,
    )


def _interactive(description: str, attention: dict[str, Any]) -> Baseline:
    shape = MODEL_SIZES["moe-a0.8b-6.6b"]
    return Baseline(
        f"A0.8B-6.6B MoE with {description}",
        shape,
        SCHEDULE_100B,
        attention,
    )


_LLM_B = ModelSize(24, 1536, 4096, micro_batch=8)

_BASELINES: Mapping[str, Mapping[str, Baseline]] = {
    "gated": {
        "1.7b-28": _gated(
            "1.7B of 28 layers", ModelSize(28, 2048, 6144, micro_batch=4), grouped_query(16, 8)
        ),
        "1.7b-48": _gated(
            "1.7B of 48 layers", ModelSize(48, 1536, 4608, micro_batch=2), grouped_query(16, 8)
        ),
        "15b": _gated(
            "15B MoE (named A2.4B; 1.99B are active)",
            ModelSize(24, 2048, 768, (128, 8)),
            grouped_query(32, 4) | _UNTIED,
        ),
    },
    "moh": {
        "table4-s": _moh("LLM-S", ModelSize(12, 768, 2048, micro_batch=8), 12, 3e-4, 2000),
        "table4-b": _moh("LLM-B", _LLM_B, 16, 5e-4, 500),
        "table4-b-200b": _moh("LLM-B", _LLM_B, 16, 5e-4, 500, tokens="200B"),
    },
    "interactive": {
        "mha": _interactive("MHA, 16 heads", grouped_query(16, 16)),
        "gqa4": _interactive("GQA, 32 query and 4 KV heads", grouped_query(32, 4)),
    },
}
_VARIANTS: Mapping[str, Mapping[str, HeadVariant]] = {
    "gated": {
        "baseline": HeadVariant("no gate"),
        "output-element": HeadVariant("a gate on each element of a head's output", "gate_output"),
        "output-head": HeadVariant("a gate on each head's output", "gate_output_head"),
        "value-element": HeadVariant("a gate on each element of a value", "gate_value"),
        "value-head": HeadVariant("a gate on each value head", "gate_value_head"),
        "query": HeadVariant("a gate on each element of a query", "gate_query"),
        "key": HeadVariant("a gate on each element of a key", "gate_key"),
        "dense": HeadVariant("a gate on the result of the output projection", "gate_dense"),
    },
    "moh": {
        "baseline": HeadVariant("all heads"),
        "75": HeadVariant("75 % of the heads, half shared", "moh_75"),
        "50": HeadVariant("50 % of the heads, half shared", "moh_50"),
    },
    "interactive": {
        # without recomputation, the attention weights of all layers need 48 or 97 GB per sequence
        "talking": HeadVariant(
            "talking heads",
            "talking",
            {"recompute_granularity": "selective", "micro_batch_size": 2},
        ),
        "collaborative": HeadVariant(
            "queries and keys of 256 features that all heads share", "collaborative"
        ),
        "moh": HeadVariant("75 % of the heads for each token", "moh_75"),
        "kha_mlp": VARIANTS["mlp"],
        "kha_linear": VARIANTS["linear"],
    },
}
_MORE_GATES: Mapping[str, HeadVariant] = {
    "output-shared": HeadVariant(
        "a gate on each element of an output, which all heads share",
        heads={"kha_heads": ("gate.output=shared",)},
    ),
    "output-silu": HeadVariant(
        "a gate with SiLU on each element of a head's output",
        heads={"kha_heads": ("gate.output=element", "gate.activation=silu")},
    ),
    "output-add": HeadVariant(
        "sigmoid scores added to each element of a head's output",
        heads={"kha_heads": ("gate.output=element", "gate.form=add")},
    ),
    "output-add-silu": HeadVariant(
        "SiLU scores added to each element of a head's output",
        heads={"kha_heads": ("gate.output=element", "gate.form=add", "gate.activation=silu")},
    ),
    "output-input-independent": HeadVariant(
        "a gate on each element of a head's output that does not depend on the input",
        heads={"kha_heads": ("gate.output=element", "gate.reads_input=false")},
    ),
    "output-non-sparse": HeadVariant(
        "a gate between 0.5 and 1 on each element of a head's output",
        heads={"kha_heads": ("gate.output=element", "gate.activation=half_sigmoid")},
    ),
}
"""Other forms of the gate, for the 15B model only."""
_PAPER: Mapping[str, Mapping[str, str | float]] = {
    # total and active parameters, mean accuracy over six tasks in percent
    "gated/1.7b-28-baseline": {"total": "1.7B", "active": "1.7B"},
    "gated/1.7b-48-baseline": {"total": "1.7B", "active": "1.7B"},
    "gated/15b-baseline": {"total": "15B", "active": "2.4B"},
    "moh/table4-s-baseline": {"total": "186M", "active": "186M", "accuracy": 43.9},
    "moh/table4-s-75": {"total": "186M", "active": "186M", "accuracy": 44.6},
    "moh/table4-s-50": {"total": "186M", "active": "186M", "accuracy": 45.4},
    "moh/table4-b-baseline": {"total": "881M", "active": "881M", "accuracy": 47.4},
    "moh/table4-b-75": {"total": "882M", "active": "882M", "accuracy": 47.8},
    "moh/table4-b-50": {"total": "882M", "active": "882M", "accuracy": 47.2},
    "moh/table4-b-200b-baseline": {"total": "881M", "active": "881M", "accuracy": 47.9},
    "moh/table4-b-200b-75": {"total": "882M", "active": "882M", "accuracy": 48.5},
    "moh/table4-b-200b-50": {"total": "882M", "active": "882M", "accuracy": 47.5},
}


def _recipes(family: str) -> Iterator[Recipe]:
    for model, baseline in _BASELINES[family].items():
        for variant_name, variant in _VARIANTS[family].items():
            name = f"{family}/{model}-{variant_name}"
            if family == "interactive":
                name = f"{family}/{variant_name}-{model}"
            yield baseline.recipe(name, variant, **_PAPER.get(name, {}))


def _more_gates() -> Iterator[Recipe]:
    for name, variant in _MORE_GATES.items():
        yield _BASELINES["gated"]["15b"].recipe(f"gated/15b-{name}", variant)


def _llama(description: str, schedule: Schedule, layout: dict[str, Any]) -> Baseline:
    attention = grouped_query(32, 8) | _NO_QK_NORM | _UNTIED | {"rotary_base": 500000}
    return Baseline(
        f"LLaMA3-8B of 160,896 tokens {description}",
        ModelSize(32, 4096, 14336),
        schedule,
        attention | layout,
        vocab_size=160896,
    )


# 16M tokens per step (Table D)
_LLAMA_STAGE_1 = _llama(
    "adapted to other data",
    Schedule("300B", 8192, 6e-5, batch=2048, warm_up={"lr_warmup_iters": 50}),
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
).recipe(
    "moh/llama3-8b-stage1",
    HeadVariant("all heads, from --pretrained-checkpoint of LLaMA3-8B with added tokens"),
    accuracy=64.7,  # Table E, over 14 tasks
)

_LLAMA_STAGE_2 = _llama(
    "continued as MoH",
    Schedule("100B", 8192, 2e-5, last=0.05, batch=2048, warm_up={"lr_warmup_iters": 50}),
    {"pipeline_model_parallel_size": 8},
).recipe(
    "moh/llama3-8b-stage2",
    # stage 2 (section 4.4) only changes the router configuration
    HeadVariant(
        "16 shared and 8 of 16 routed heads, from --pretrained-checkpoint of stage 1",
        heads={
            "kha_heads": (
                *("moh.shared=16", "moh.active=8"),
                *("moh.router=query_norm", "moh.quantized=true"),
            )
        },
    ),
    accuracy=64.0,  # Table 5
)

_LONG_CONTEXT = "1.7B of 28 layers extended to {}k tokens"
_LONG_CONTEXT_NOTE = (
    "the source only has the number of tokens and the lengths. We continue the 28-layer model at "
    "the final learning rate of its first training, with the same tokens per step. Pass "
    "--rotary-base to change the base of RoPE"
)
_YARN = (
    *("--position-embedding-type", "yarn", "--rotary-scaling-factor", "4"),
    *("--yarn-original-max-position-embeddings", "32768", "--skip-train"),
)


def _extend_context(variant_name: str, length: int) -> Recipe:
    """Continue a model at another sequence length, at the final rate of its first training."""
    first = SCHEDULE_100B
    schedule = Schedule(
        "80B",
        length,
        round(first.rate * first.last, 10),
        last=1.0,
        batch=first.batch * first.length // length,
        warm_up={},
    )
    base = Baseline(
        _LONG_CONTEXT.format(length // 1024),
        ModelSize(28, 2048, 6144),
        schedule,
        grouped_query(16, 8) | {"context_parallel_size": length // 16384},
        vocab_size=151936,
        note=_LONG_CONTEXT_NOTE,
    )
    name = f"gated/1.7b-28-{variant_name}-{length // 1024}k"
    return base.recipe(name, _VARIANTS["gated"][variant_name])


def _long_context() -> Iterator[Recipe]:
    for variant_name in ("baseline", "output-element"):
        yield _extend_context(variant_name, 32768)
        longest = _extend_context(variant_name, 131072)
        yield replace(
            longest.updated(_YARN),
            description=f"{longest.description.partition(',')[0]} by YaRN, without training",
            note="evaluates the loss, from --pretrained-checkpoint of the recipe for 32k tokens",
        )


GATED = (*_recipes("gated"), *_more_gates())
LONG_CONTEXT = tuple(_long_context())
MOH = (*_recipes("moh"), _LLAMA_STAGE_1, _LLAMA_STAGE_2)
INTERACTIVE = tuple(_recipes("interactive"))
