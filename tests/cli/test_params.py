"""``kha-megatron params`` and ``flops`` against the paper and the documents."""

import json
import re
from pathlib import Path

import pytest

from kha_megatron.recipes.paper import MODEL_SIZES
from kha_megatron.recipes.tables import TABLES

ROOT = Path(__file__).parents[2]


@pytest.mark.fast
@pytest.mark.parametrize("name", MODEL_SIZES)
def test_the_papers_digits_are_printed(run, name):
    lines = run("params", name)[1].splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.split()[:1]}
    for row, digits in MODEL_SIZES[name].parameters.items():
        assert rows[row][-2] == digits
        assert rows[row][-1] in ("(rounded)", "(cut)")
    assert max(map(len, lines[1:])) <= 80


def test_params_as_json(run):
    data = json.loads(run("params", "moe-a0.8b-6.6b", "--json")[1])
    assert data["total"] - data["without_kha"]["total"] == data["kha"] == 884736
    assert data["active"] == 881160192
    assert data["cache_bytes"] == 2 * 18 * 1024
    assert data["printed"]["active"] == {"paper": "880M", "ours": "880M", "how": "rounded"}


def test_flops_as_json(run):
    data = json.loads(run("flops", "moe-a0.8b-6.6b", "--json")[1])
    assert data["seq"] == 4096  # the recipe's
    parts = {k: v for k, v in data["forward"].items() if k != "total"}
    assert sum(parts.values()) == data["forward"]["total"]
    assert data["training"]["total"] == data["forward"]["total"] + data["backward"]["total"]


def shares(run, *endings):
    """Return the range of KHA's share of the work in percent, as ``params`` prints it."""
    names = [recipe.name for recipe in TABLES if recipe.name.endswith(endings)]
    assert len(names) >= len(endings)
    found = [
        re.search(r"KHA adds ([\d.]+)% to the layers", run("params", name)[1]) for name in names
    ]
    numbers = sorted((match[1] for match in found), key=float)
    return f"{numbers[0]} to {numbers[-1]} %"


@pytest.mark.fast
def test_the_documents_quote_the_shares_that_params_prints(run):
    mlp = shares(run, "mlp-kv4", "mlp-v", "gqa4-mlp", "table4/mlp", "b-mlp")
    linear = shares(run, "linear-kv4", "linear-qkv", "b-linear")
    other = shares(run, "mlp-kv32", "linear-kv32", "mha-mlp", "mla-linear", "gla-linear")
    readme, details = (
        " ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/mechanisms.md")
    )
    assert f"adds {mlp} to the FLOPs of the layers and KHA-Linear {linear}" in readme
    assert f"KHA-MLP on the values adds {mlp} to the layers" in details
    assert f"KHA-Linear adds {linear}" in details
    assert f"With MHA and MLA it is {other}" in details


def test_a_layer_pattern_counts_like_its_num_layers(run):
    pattern = ["--hybrid-layer-pattern", 12 * "*-"]
    for command in ("params", "flops", "plan"):
        words = [command, "dense-0.6b", "--json", *(["--gpus=4"] if command == "plan" else [])]
        named, given = (
            json.loads(run(*words, "--", *more)[1]) for more in (["--num-layers", "12"], pattern)
        )
        assert given == named
    stages = "|".join(4 * ["*-*-*-"])
    split = ["--pipeline-model-parallel-size", "2", "--hybrid-layer-pattern", stages]
    text = run("plan", "dense-0.6b", "--gpus=4", "--", *split)[1]
    assert "PP 2, VPP 2, DP 2" in text
    error = run("params", "dense-0.6b", "--", "--hybrid-layer-pattern", "M-*-")[2]
    assert "Cannot count a model with other layers" in error


def test_folding_and_the_note_of_a_recipe_are_printed(run):
    latent = run("params", "table3/mla-linear")[1]
    grouped = run("params", "table3/gqa4-mlp")[1]
    assert "(0 % after `convert fold`)" in latent
    assert "--norm-epsilon 1e-6 instead of 1e-5" in latent
    assert "convert fold" not in grouped
    assert "Note:" not in grouped
    for recipe in TABLES:  # exactly the recipes with a note differ
        own = "1e-06" if recipe.note else "1e-05"
        assert recipe.run.flags.get("--norm-epsilon", ("1e-05",)) == (own,), recipe.name
