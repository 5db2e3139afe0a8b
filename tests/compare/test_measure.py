"""Pictures pixel by pixel, and counts against models that Megatron built."""

from io import BytesIO

import pytest
import torch
from matplotlib.image import imread

from kha_megatron.compare import parse_variants
from kha_megatron.compare.measure import cost, mosaic
from kha_megatron.config import PRESETS
from kha_megatron.recipes import get_recipe


def pixels(png: bytes) -> list[list[tuple[int, ...]]]:
    """Red, green, blue and opacity, row by row."""
    return [[tuple(p) for p in row] for row in (imread(BytesIO(png)) * 255).round().astype(int)]


DARK, LIGHT, GAP = (0, 0, 3, 255), (251, 252, 191, 255), (0, 0, 0, 0)
BLUE, WHITE, RED = (5, 48, 97, 255), (247, 247, 247, 255), (103, 0, 31, 255)


def test_weights_are_clipped_and_bad_ones_are_gaps():
    first = torch.tensor([[0.0, 1.0], [0.5, -3.0]])
    second = torch.tensor([[7.0, float("nan")], [float("inf"), 0.25]])
    above, below = pixels(mosaic([first, second], diverging=False))
    assert above == [DARK, LIGHT, GAP, GAP, LIGHT, GAP]
    assert below[1:5] == [DARK, GAP, GAP, GAP]
    assert sum(DARK) < sum(below[5]) < sum(below[0]) < sum(LIGHT)  # 0, 0.25, 0.5, 1


def test_gates_are_symmetric_about_zero():
    ((left, right), (zero, _)) = pixels(
        mosaic([torch.tensor([[-2.0, 2.0], [0.0, 1.0]])], diverging=True)
    )
    assert (left, right) == (BLUE, RED)
    for middle in (zero, *pixels(mosaic([torch.zeros(1, 1)], diverging=True))[0]):
        assert middle == pytest.approx(WHITE, abs=3)


def test_layers_go_six_a_row():
    rows = pixels(mosaic([torch.eye(3)] * 7, diverging=False))
    assert (len(rows), len(rows[0])) == (3 + 2 + 3, 6 * 5 - 2)
    assert rows[5][:6] == [LIGHT, DARK, DARK, GAP, GAP, GAP]


def test_costs_differ_by_what_is_knocked_and_follow_the_overrides():
    """Hand values: 4 layers of D = 32 with 4 query and 2 key/value heads."""
    recipe = get_recipe("quickstart")
    variants = {v.name: v for v in parse_variants(",".join(PRESETS))}
    found = {}
    for name, variant in variants.items():
        found[name] = cost(recipe.having(variant.kha).run, 512)
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
    run = recipe.having(variants["kha_mlp"].kha).run_for(["--num-layers", "2"])
    assert cost(run, 512)["kha"] == 2 * 3 * 32**2


def test_table_6_says_what_kernels_compute_and_what_skipped_heads_would_save():
    recipe = get_recipe("quickstart")
    text = "baseline,gate_output,moh_75,talking,collaborative,kha_mlp+talking"
    found = {v.name: cost(recipe.having(v.kha).run, 512) for v in parse_variants(text)}
    assert [name for name, own in found.items() if own["unfused"]] == ["talking", "kha_mlp+talking"]
    assert [name for name, own in found.items() if own["spared_flops"]] == ["moh_75"]
    # by hand: 1 of 4 heads of 32 is off in 4 layers; 256 tokens, hidden 128
    assert found["moh_75"]["spared_flops"] == 3 * 4 * (2 * 2 * 32 * 128 + 256 * 4 * 32)
    # two mixings of 4 heads for each of 256 keys
    assert found["talking"]["kha_flops"] == 3 * 4 * 256 * 2 * 2 * 4**2


def test_what_cannot_be_counted_says_why():
    recipe = get_recipe("quickstart")
    biased = recipe.run.updated(add_bias_linear=True)
    assert "linear layers with biases" in cost(biased, 512)["uncounted"]
