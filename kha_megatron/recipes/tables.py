"""Recipes for Tables 1 to 5 of the KHA paper.

There is one recipe per row, e.g. ``table1/mlp-kv4`` or ``table5/dense-1.7b-linear``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kha_megatron.recipes.paper import (
    MODEL_SIZES,
    SCHEDULE_1T,
    SCHEDULE_75B,
    SCHEDULE_100B,
    VARIANTS,
    Baseline,
    HeadVariant,
    grouped_query,
)
from kha_megatron.recipes.recipe import Recipe

_MAIN_SIZE = MODEL_SIZES["moe-a0.8b-6.6b"]
"""Model of Tables 1, 2 and 3."""
_MAIN_DESCRIPTION = "A0.8B-6.6B MoE"

_TABLE_1: Mapping[str, Mapping[int, float]] = {
    "baseline": {1: 1.864, 2: 1.855, 4: 1.856, 8: 1.851, 16: 1.849, 32: 1.846},
    "mlp": {1: 1.846, 2: 1.835, 4: 1.832, 8: 1.832, 16: 1.833, 32: 1.83},
    "linear": {1: 1.857, 2: 1.845, 4: 1.838, 8: 1.841, 16: 1.832, 32: 1.834},
}
"""Loss by variant and number of KV heads."""

_PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "q": ("query",),
    "k": ("key",),
    "v": ("value",),
    "qkv": ("query", "key", "value"),
}
"""Projections by the letters in the name of a recipe."""
_TABLE_2: Mapping[str, Mapping[str, float]] = {
    "linear": {"q": 1.849, "k": 1.848, "v": 1.839, "qkv": 1.838},
    "gate": {"v": 1.919},
    "mlp": {"q": 1.848, "k": 1.848, "v": 1.832, "qkv": 1.832},
}
"""Loss by variant and projections. Those that are not in the paper are left out."""

_MLA: dict[str, Any] = {
    # The paper says "8 query heads" and "4 KV heads" of dimension 128. We take these as the latent
    # dimensions and use 32 heads. This gives 971.7M active parameters (970M in the paper). All
    # other interpretations that we tried are further off.
    "num_attention_heads": 32,
    "multi_latent_attention": True,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "layernorm_epsilon": 1e-6,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
_MLA_NOTE = (
    "this recipe uses --norm-epsilon 1e-6 instead of 1e-5, because Hugging Face's DeepSeek-V3, to "
    "which it can be exported, supports no other value for the latents"
)


@dataclass(frozen=True, kw_only=True)
class _AttentionType:
    """An attention type in Table 3."""

    name: str
    description: str
    arguments: dict[str, Any]
    active: str
    """Active parameters."""
    losses: Mapping[str, float]
    """Loss by variant."""
    note: str = ""


_TABLE_3 = (
    _AttentionType(
        name="mla",
        description="MLA",
        arguments=_MLA,
        active="970M",
        losses={"baseline": 1.812, "linear": 1.801},
        note=_MLA_NOTE,
    ),
    _AttentionType(
        name="gta",
        description="GTA, 32 query and 4 KV heads",
        arguments=grouped_query(heads=32, kv_heads=4)
        | {"kha_attention": "gta", "rotary_percent": 0.5},
        active="868M",
        losses={"baseline": 1.819, "mlp": 1.802},
    ),
    _AttentionType(
        name="mqa",
        description="MQA, 32 query heads",
        arguments=grouped_query(heads=32, kv_heads=1),
        active="859M",
        losses={"baseline": 1.814, "mlp": 1.801},
    ),
    _AttentionType(
        name="gqa8",
        description="GQA, 16 query and 8 KV heads",
        arguments=grouped_query(heads=16, kv_heads=8),
        active="795M",
        losses={"baseline": 1.801, "mlp": 1.791},
    ),
    _AttentionType(
        name="gqa4",
        description="GQA, 32 query and 4 KV heads",
        arguments=grouped_query(heads=32, kv_heads=4),
        active="880M",
        losses={"baseline": 1.807, "mlp": 1.787},
    ),
    _AttentionType(
        name="mha",
        description="MHA, 16 heads",
        arguments=grouped_query(heads=16, kv_heads=16),
        active="852M",
        losses={"baseline": 1.795, "mlp": 1.785},
    ),
)

_TABLE_5: Mapping[str, Mapping[str, float]] = {
    "moe-a0.44b-2.3b": {"baseline": 1.896, "mlp": 1.881, "linear": 1.882},
    "moe-a0.8b-6.6b": {"baseline": 1.807, "mlp": 1.787, "linear": 1.791},
    "moe-a1.6b-14.6b": {"baseline": 1.762, "mlp": 1.737, "linear": 1.742},
    "dense-0.6b": {"baseline": 2.017, "mlp": 2.013, "linear": 2.007},
    "dense-1.7b": {"baseline": 1.892, "mlp": 1.884, "linear": 1.872},
    "dense-3.9b": {"baseline": 1.815, "mlp": 1.811, "linear": 1.807},
}
"""Loss by model size and variant."""


def _table_1() -> Iterator[Recipe]:
    """Different numbers of KV heads."""
    for variant_name, losses in _TABLE_1.items():
        for kv_heads, loss in losses.items():
            size = _MAIN_SIZE
            if kv_heads == 32:
                size = replace(size, micro_batch=2)  # KHA-MLP on 32 values needs more memory
            baseline = Baseline(
                description=f"{_MAIN_DESCRIPTION}, 32 query and {kv_heads} KV heads",
                size=size,
                schedule=SCHEDULE_75B,
                overrides=grouped_query(heads=32, kv_heads=kv_heads),
            )
            name = f"table1/{variant_name}-kv{kv_heads}"
            yield baseline.make_recipe(name, VARIANTS[variant_name], loss=loss)


def _table_2() -> Iterator[Recipe]:
    """Each variant on each projection. The baseline is the one of Table 1 with 4 KV heads."""
    baseline = Baseline(description=_MAIN_DESCRIPTION, size=_MAIN_SIZE, schedule=SCHEDULE_75B)
    yield baseline.make_recipe(
        "table2/baseline",
        VARIANTS["baseline"],
        **_MAIN_SIZE.parameters,
        loss=_TABLE_1["baseline"][4],
    )
    for variant_name, losses in _TABLE_2.items():
        for letters, projections in _PROJECTIONS.items():
            heads = {f"kha_{projection}": variant_name for projection in projections}
            description = f"{variant_name} on {', '.join(letters)}"
            published = {**_MAIN_SIZE.parameters}
            if letters in losses:
                published["loss"] = losses[letters]
            yield baseline.make_recipe(
                f"table2/{variant_name}-{letters}",
                HeadVariant(description, heads=heads),
                **published,
            )


def _table_3() -> Iterator[Recipe]:
    """Different attention types."""
    for attention in _TABLE_3:
        baseline = Baseline(
            description=f"{_MAIN_DESCRIPTION} with {attention.description}",
            size=_MAIN_SIZE,
            schedule=SCHEDULE_100B,
            overrides=attention.arguments,
            note=attention.note,
        )
        for variant_name, loss in attention.losses.items():
            yield baseline.make_recipe(
                f"table3/{attention.name}-{variant_name}",
                VARIANTS[variant_name],
                active=attention.active,
                loss=loss,
            )


def _table_4() -> Iterator[Recipe]:
    """Training on 1T tokens."""
    size = MODEL_SIZES["moe-a1b-6.1b"]
    baseline = Baseline(description="A1.01B-6.1B MoE", size=size, schedule=SCHEDULE_1T)
    for variant_name in ("baseline", "mlp"):
        name = f"table4/{variant_name}"
        yield baseline.make_recipe(name, VARIANTS[variant_name], **size.parameters)


def _table_5() -> Iterator[Recipe]:
    """Different model sizes."""
    for size_name, losses in _TABLE_5.items():
        size = MODEL_SIZES[size_name]
        architecture, _, parameters = size_name.partition("-")  # e.g. "moe" and "a0.44b-2.3b"
        if architecture == "moe":
            architecture = "MoE"
        description = f"{parameters.upper()} {architecture}"
        baseline = Baseline(description=description, size=size, schedule=SCHEDULE_100B)
        for variant_name, loss in losses.items():
            yield baseline.make_recipe(
                f"table5/{size_name}-{variant_name}",
                VARIANTS[variant_name],
                **size.parameters,
                loss=loss,
            )


def _gla() -> Iterator[Recipe]:
    """GLA from section 4.1, with the same KV cache size as MLA."""
    baseline = Baseline(
        description=f"{_MAIN_DESCRIPTION} with GLA, 2 latent heads",
        size=_MAIN_SIZE,
        schedule=SCHEDULE_100B,
        overrides=_MLA | {"kha_attention": "gla", "kha_latent_heads": 2},
        note=_MLA_NOTE,
    )
    for variant_name in ("baseline", "linear"):
        yield baseline.make_recipe(f"attention/gla-{variant_name}", VARIANTS[variant_name])


def _ablation() -> Iterator[Recipe]:
    """Random initial matrices (section 3.3). The paper does not say which model it used."""
    baseline = Baseline(description=_MAIN_DESCRIPTION, size=_MAIN_SIZE, schedule=SCHEDULE_75B)
    for variant_name in ("mlp", "linear"):
        variant = VARIANTS[variant_name]
        random_variant = replace(
            variant,
            description=f"{variant.description} with random initial matrices",
            heads={"kha_init": "random"},
        )
        name = f"ablation/random-{variant_name}"
        yield baseline.make_recipe(name, random_variant, **_MAIN_SIZE.parameters)


ABLATION = tuple(_ablation())
TABLES = (*_table_1(), *_table_2(), *_table_3(), *_table_4(), *_table_5(), *_gla())
