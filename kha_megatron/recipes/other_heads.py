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
    Experts,
    HeadVariant,
    ModelSize,
    Schedule,
    grouped_query,
)
from kha_megatron.recipes.recipe import Recipe

_UNTIED: dict[str, Any] = {"untie_embeddings_and_output_weights": True}
_NO_QK_NORM: dict[str, Any] = {"qk_layernorm": False}

_QWEN3_VOCAB_SIZE = 151936
_MOH_VOCAB_SIZE = 65536
"""Vocabulary size of the LLMs in the MoH paper, derived from its Tables 4 and A."""
_LLAMA3_VOCAB_SIZE = 160896
"""Vocabulary size of LLaMA3-8B in the MoH paper, with added tokens."""

_TOKENS_PER_CONTEXT_RANK = 16384
"""Tokens of a sequence on each rank of context parallelism."""


def _gated_baseline(description: str, size: ModelSize, overrides: dict[str, Any]) -> Baseline:
    return Baseline(
        description=f"{description} trained as in Table 3 of KHA",
        size=size,
        schedule=SCHEDULE_100B,
        overrides=overrides,
        vocab_size=_QWEN3_VOCAB_SIZE,
    )


_GATED_MOE = _gated_baseline(
    "15B MoE (named A2.4B; 1.99B are active)",
    ModelSize(layers=24, hidden=2048, ffn=768, experts=Experts(total=128, per_token=8)),
    grouped_query(heads=32, kv_heads=4) | _UNTIED,
)
_GATED_BASELINES: Mapping[str, Baseline] = {
    "1.7b-28": _gated_baseline(
        "1.7B of 28 layers",
        ModelSize(layers=28, hidden=2048, ffn=6144, micro_batch=4),
        grouped_query(heads=16, kv_heads=8),
    ),
    "1.7b-48": _gated_baseline(
        "1.7B of 48 layers",
        ModelSize(layers=48, hidden=1536, ffn=4608, micro_batch=2),
        grouped_query(heads=16, kv_heads=8),
    ),
    "15b": _GATED_MOE,
}
_GATES: Mapping[str, HeadVariant] = {
    "baseline": HeadVariant("no gate"),
    "output-element": HeadVariant(
        "a gate on each element of a head's output", preset="gate_output"
    ),
    "output-head": HeadVariant("a gate on each head's output", preset="gate_output_head"),
    "value-element": HeadVariant("a gate on each element of a value", preset="gate_value"),
    "value-head": HeadVariant("a gate on each value head", preset="gate_value_head"),
    "query": HeadVariant("a gate on each element of a query", preset="gate_query"),
    "key": HeadVariant("a gate on each element of a key", preset="gate_key"),
    "dense": HeadVariant("a gate on the result of the output projection", preset="gate_dense"),
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


def _gated_recipes() -> Iterator[Recipe]:
    for model, baseline in _GATED_BASELINES.items():
        for gate_name, gate in _GATES.items():
            name = f"gated/{model}-{gate_name}"
            published = _PUBLISHED.get(name, {})
            yield baseline.make_recipe(name, gate, **published)
    for gate_name, gate in _MORE_GATES.items():
        yield _GATED_MOE.make_recipe(f"gated/15b-{gate_name}", gate)


_LONG_CONTEXT_NOTE = (
    "the source only has the number of tokens and the lengths. We continue the 28-layer model at "
    "the final learning rate of its first training, with the same tokens per step. Pass "
    "--rotary-base to change the base of RoPE"
)
_LONG_CONTEXT_GATES = ("baseline", "output-element")
_TRAINED_LENGTH = 32768
"""Sequence length that models are trained with."""
_YARN_LENGTH = 131072
"""Sequence length that YaRN extends the trained models to."""
_YARN_FLAGS = (
    *("--position-embedding-type", "yarn"),
    *("--rotary-scaling-factor", str(_YARN_LENGTH // _TRAINED_LENGTH)),
    *("--yarn-original-max-position-embeddings", str(_TRAINED_LENGTH)),
    "--skip-train",
)


def _long_context_recipes() -> Iterator[Recipe]:
    for gate_name in _LONG_CONTEXT_GATES:
        yield _extend_by_training(gate_name)
        yield _extend_by_yarn(gate_name)


def _extend_by_training(gate_name: str) -> Recipe:
    """Continue a gated 28-layer model with longer sequences."""
    gate = _GATES[gate_name]
    baseline = _long_context_baseline(_TRAINED_LENGTH)
    return baseline.make_recipe(f"gated/1.7b-28-{gate_name}-32k", gate)


def _extend_by_yarn(gate_name: str) -> Recipe:
    """Evaluate a gated 28-layer model, which was extended by training, on even longer sequences."""
    gate = _GATES[gate_name]
    baseline = _long_context_baseline(_YARN_LENGTH)
    recipe = baseline.make_recipe(f"gated/1.7b-28-{gate_name}-128k", gate)
    return replace(
        recipe.updated(_YARN_FLAGS),
        description=f"{baseline.description} by YaRN, without training",
        note="evaluates the loss, from --pretrained-checkpoint of the recipe for 32k tokens",
    )


def _long_context_baseline(length: int) -> Baseline:
    first_schedule = SCHEDULE_100B
    tokens_per_step = first_schedule.global_batch * first_schedule.sequence_length
    schedule = Schedule(
        tokens="80B",
        sequence_length=length,
        peak_rate=first_schedule.final_rate,
        final_fraction=1.0,  # constant
        global_batch=tokens_per_step // length,
        warm_up={},
    )
    layout = {"context_parallel_size": length // _TOKENS_PER_CONTEXT_RANK}
    return Baseline(
        description=f"1.7B of 28 layers extended to {length // 1024}k tokens",
        size=ModelSize(layers=28, hidden=2048, ffn=6144),
        schedule=schedule,
        overrides=grouped_query(heads=16, kv_heads=8) | layout,
        vocab_size=_QWEN3_VOCAB_SIZE,
        note=_LONG_CONTEXT_NOTE,
    )


def _moh_baseline(
    description: str,
    size: ModelSize,
    *,
    heads: int,
    peak_rate: float,
    warm_up_steps: int,
    tokens: str = "100B",
) -> Baseline:
    """Return a model without grouped queries that is trained on 4M tokens per step (Table C)."""
    schedule = Schedule(
        tokens=tokens,
        sequence_length=2048,
        peak_rate=peak_rate,
        global_batch=2048,
        warm_up={"lr_warmup_iters": warm_up_steps, "lr_warmup_init": 1e-7},
    )
    attention = {"num_attention_heads": heads, "kv_channels": size.hidden // heads}
    return Baseline(
        description=description,
        size=size,
        schedule=schedule,
        overrides=attention | _NO_QK_NORM | _UNTIED,
        vocab_size=_MOH_VOCAB_SIZE,
    )


_LLM_B_SIZE = ModelSize(layers=24, hidden=1536, ffn=4096, micro_batch=8)
_MOH_BASELINES: Mapping[str, Baseline] = {
    "table4-s": _moh_baseline(
        "LLM-S",
        ModelSize(layers=12, hidden=768, ffn=2048, micro_batch=8),
        heads=12,
        peak_rate=3e-4,
        warm_up_steps=2000,
    ),
    "table4-b": _moh_baseline(
        "LLM-B",
        _LLM_B_SIZE,
        heads=16,
        peak_rate=5e-4,
        warm_up_steps=500,
    ),
    "table4-b-200b": _moh_baseline(
        "LLM-B",
        _LLM_B_SIZE,
        heads=16,
        peak_rate=5e-4,
        warm_up_steps=500,
        tokens="200B",
    ),
}
_MOH_VARIANTS: Mapping[str, HeadVariant] = {
    "baseline": HeadVariant("all heads"),
    "75": HeadVariant("75 % of the heads, half shared", preset="moh_75"),
    "50": HeadVariant("50 % of the heads, half shared", preset="moh_50"),
}


def _moh_recipes() -> Iterator[Recipe]:
    for model, baseline in _MOH_BASELINES.items():
        for variant_name, variant in _MOH_VARIANTS.items():
            name = f"moh/{model}-{variant_name}"
            published = _PUBLISHED.get(name, {})
            yield baseline.make_recipe(name, variant, **published)
    yield _llama_stage_1()
    yield _llama_stage_2()


def _llama_stage_1() -> Recipe:
    baseline = _llama_baseline(
        "adapted to other data",
        _llama_schedule(tokens="300B", peak_rate=6e-5),
        layout={"tensor_model_parallel_size": 2, "sequence_parallel": True},
    )
    variant = HeadVariant("all heads, from --pretrained-checkpoint of LLaMA3-8B with added tokens")
    accuracy = 64.7  # Table E, over 14 tasks
    return baseline.make_recipe("moh/llama3-8b-stage1", variant, accuracy=accuracy)


def _llama_stage_2() -> Recipe:
    """Continue stage 1 with MoH. Section 4.4 only changes the configuration of the router."""
    baseline = _llama_baseline(
        "continued as MoH",
        _llama_schedule(tokens="100B", peak_rate=2e-5, final_fraction=0.05),
        layout={"pipeline_model_parallel_size": 8},
    )
    router = (
        "moh.shared=16",
        "moh.active=8",
        "moh.router=query_norm",
        "moh.quantized=true",
    )
    variant = HeadVariant(
        "16 shared and 8 of 16 routed heads, from --pretrained-checkpoint of stage 1",
        heads={"kha_heads": router},
    )
    accuracy = 64.0  # Table 5
    return baseline.make_recipe("moh/llama3-8b-stage2", variant, accuracy=accuracy)


def _llama_baseline(
    description: str,
    schedule: Schedule,
    *,
    layout: dict[str, Any],
) -> Baseline:
    attention = grouped_query(heads=32, kv_heads=8) | _NO_QK_NORM
    overrides = attention | _UNTIED | {"rotary_base": 500000} | layout
    return Baseline(
        description=f"LLaMA3-8B of 160,896 tokens {description}",
        size=ModelSize(layers=32, hidden=4096, ffn=14336),
        schedule=schedule,
        overrides=overrides,
        vocab_size=_LLAMA3_VOCAB_SIZE,
    )


def _llama_schedule(*, tokens: str, peak_rate: float, final_fraction: float = 0.1) -> Schedule:
    """Return a schedule with 16M tokens per step (Table D)."""
    return Schedule(
        tokens=tokens,
        sequence_length=8192,
        peak_rate=peak_rate,
        final_fraction=final_fraction,
        global_batch=2048,
        warm_up={"lr_warmup_iters": 50},
    )


def _interactive_baseline(description: str, *, heads: int, kv_heads: int) -> Baseline:
    return Baseline(
        description=f"A0.8B-6.6B MoE with {description}",
        size=MODEL_SIZES["moe-a0.8b-6.6b"],
        schedule=SCHEDULE_100B,
        overrides=grouped_query(heads=heads, kv_heads=kv_heads),
    )


_INTERACTIVE_BASELINES: Mapping[str, Baseline] = {
    "mha": _interactive_baseline("MHA, 16 heads", heads=16, kv_heads=16),
    "gqa4": _interactive_baseline("GQA, 32 query and 4 KV heads", heads=32, kv_heads=4),
}
_INTERACTIVE_VARIANTS: Mapping[str, HeadVariant] = {
    "talking": HeadVariant(
        "talking heads",
        preset="talking",
        # without recomputation, the attention weights of all layers need 48 or 97 GB per sequence
        heads={"recompute_granularity": "selective", "micro_batch_size": 2},
    ),
    "collaborative": HeadVariant(
        "queries and keys of 256 features that all heads share",
        preset="collaborative",
    ),
    "moh": HeadVariant("75 % of the heads for each token", preset="moh_75"),
    "kha_mlp": VARIANTS["mlp"],
    "kha_linear": VARIANTS["linear"],
}


def _interactive_recipes() -> Iterator[Recipe]:
    for model, baseline in _INTERACTIVE_BASELINES.items():
        for variant_name, variant in _INTERACTIVE_VARIANTS.items():
            yield baseline.make_recipe(f"interactive/{variant_name}-{model}", variant)


_PUBLISHED: Mapping[str, Mapping[str, str | float]] = {
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
"""Results by recipe, see :attr:`Recipe.paper`. Accuracies are means over six tasks."""

GATED = tuple(_gated_recipes())
LONG_CONTEXT = tuple(_long_context_recipes())
MOH = tuple(_moh_recipes())
INTERACTIVE = tuple(_interactive_recipes())
