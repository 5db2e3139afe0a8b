"""Costs of a variant against hand-computed values."""

from kha_megatron.compare.measure import compute_cost
from kha_megatron.compare.variants import parse_variants
from kha_megatron.heads.config import PRESETS
from kha_megatron.recipes import get_recipe


def test_costs_differ_by_the_matrices_and_follow_the_overrides():
    """4 layers of D = 32 with 4 query and 2 key/value heads."""
    recipe = get_recipe("quickstart")
    variants = {v.name: v for v in parse_variants(",".join(PRESETS))}
    found = {name: compute_cost(recipe.with_heads(v.kha).run, 512) for name, v in variants.items()}
    base = found["baseline"]
    assert (base["kha"], base["kha_flops"]) == (0, 0)
    for name, matrices, heads in (
        ("kha_mlp", 3, 2),
        ("kha_gate_v", 1, 2),
        ("kha_linear_v", 1, 2),
        ("kha_linear", 3, (4 + 2 + 2) / 3),
        ("kha_mlp_qkv", 9, (4 + 2 + 2) / 3),
    ):
        own = found[name]
        assert own["kha"] == 4 * matrices * 32**2, name
        assert own["total"] - base["total"] == own["active"] - base["active"] == own["kha"]
        assert own["kha_flops"] == 3 * 4 * matrices * heads * 2 * 32**2, name
        assert own["flops"] - base["flops"] == own["kha_flops"]
    run = recipe.with_heads(variants["kha_mlp"].kha).run_for(["--num-layers", "2"])
    assert compute_cost(run, 512)["kha"] == 2 * 3 * 32**2


def test_costs_list_unfused_variants_and_the_savings_of_skipped_heads():
    recipe = get_recipe("quickstart")
    text = "baseline,gate_output,moh_75,talking,collaborative,kha_mlp+talking"
    found = {v.name: compute_cost(recipe.with_heads(v.kha).run, 512) for v in parse_variants(text)}
    assert [name for name, own in found.items() if own["unfused"]] == ["talking", "kha_mlp+talking"]
    assert [name for name, own in found.items() if own["spared_flops"]] == ["moh_75"]
    # by hand: 1 of 4 heads of 32 is off in 4 layers; 256 tokens, hidden 128
    assert found["moh_75"]["spared_flops"] == 3 * 4 * (2 * 2 * 32 * 128 + 256 * 4 * 32)
    # two mixings of 4 heads for each of 256 keys
    assert found["talking"]["kha_flops"] == 3 * 4 * 256 * 2 * 2 * 4**2
