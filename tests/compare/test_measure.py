"""Costs of a variant against hand-computed values."""

from kha_megatron.compare.measure import compute_cost
from kha_megatron.compare.variants import parse_variants
from kha_megatron.heads.config import PRESETS
from kha_megatron.recipes import get_recipe


def costs_of(variants):
    """Return the costs of the quickstart's model by variant."""
    recipe = get_recipe("quickstart")
    costs = {}
    for variant in parse_variants(variants):
        costs[variant.name] = compute_cost(recipe.with_heads(variant.kha).run, 512)
    return costs


def test_costs_differ_by_the_matrices_and_follow_the_overrides():
    """4 layers of D = 32 with 4 query and 2 key/value heads."""
    costs = costs_of(",".join(PRESETS))
    base = costs["baseline"]
    assert base["kha"] == 0
    assert base["kha_flops"] == 0
    for name, matrices, heads in (
        ("kha_mlp", 3, 2),
        ("kha_gate_v", 1, 2),
        ("kha_linear_v", 1, 2),
        ("kha_linear", 3, (4 + 2 + 2) / 3),
        ("kha_mlp_qkv", 9, (4 + 2 + 2) / 3),
    ):
        cost = costs[name]
        assert cost["kha"] == 4 * matrices * 32**2, name
        assert cost["total"] - base["total"] == cost["kha"]
        assert cost["active"] - base["active"] == cost["kha"]
        assert cost["kha_flops"] == 3 * 4 * matrices * heads * 2 * 32**2, name
        assert cost["flops"] - base["flops"] == cost["kha_flops"]
    _, variant = parse_variants("baseline,kha_mlp")
    recipe = get_recipe("quickstart").with_heads(variant.kha)
    run = recipe.run_for(["--num-layers", "2"])
    assert compute_cost(run, 512)["kha"] == 2 * 3 * 32**2


def test_costs_list_unfused_variants_and_the_savings_of_skipped_heads():
    costs = costs_of("baseline,gate_output,moh_75,talking,collaborative,kha_mlp+talking")
    unfused = [name for name, cost in costs.items() if cost["unfused"]]
    assert unfused == ["talking", "kha_mlp+talking"]
    with_savings = [name for name, cost in costs.items() if cost["spared_flops"]]
    assert with_savings == ["moh_75"]
    # by hand: 1 of 4 heads of 32 is off in 4 layers; 256 tokens, hidden 128
    assert costs["moh_75"]["spared_flops"] == 3 * 4 * (2 * 2 * 32 * 128 + 256 * 4 * 32)
    # two mixings of 4 heads for each of 256 keys
    assert costs["talking"]["kha_flops"] == 3 * 4 * 256 * 2 * 2 * 4**2
