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
    _, stdout, _ = run("params", name)
    lines = stdout.splitlines()
    rows = {}
    for line in lines:
        words = line.split()
        if words:
            rows[words[0]] = words
    for label, digits in MODEL_SIZES[name].parameters.items():
        *_, printed, how = rows[label]
        assert printed == digits
        assert how in ("(rounded)", "(cut)")
    assert max(map(len, lines[1:])) <= 80


def test_params_as_json(run):
    _, stdout, _ = run("params", "moe-a0.8b-6.6b", "--json")
    data = json.loads(stdout)
    assert data["total"] - data["without_kha"]["total"] == data["kha"] == 884736
    assert data["active"] == 881160192
    assert data["cache_bytes"] == 2 * 18 * 1024
    assert data["printed"]["active"] == {"paper": "880M", "ours": "880M", "how": "rounded"}


def test_flops_as_json(run):
    _, stdout, _ = run("flops", "moe-a0.8b-6.6b", "--json")
    data = json.loads(stdout)
    assert data["seq"] == 4096  # the recipe's
    parts = data["forward"]
    forward = parts.pop("total")
    assert sum(parts.values()) == forward
    assert data["training"]["total"] == forward + data["backward"]["total"]


def shares(run, *endings):
    """Return the range of KHA's share of the work in percent, as ``params`` prints it."""
    names = [recipe.name for recipe in TABLES if recipe.name.endswith(endings)]
    assert len(names) >= len(endings)
    percentages = []
    for name in names:
        _, stdout, _ = run("params", name)
        match = re.search(r"KHA adds ([\d.]+)% to the layers", stdout)
        percentages.append(match[1])
    return f"{min(percentages, key=float)} to {max(percentages, key=float)} %"


def read_page(name):
    """Return the text of a page with its line breaks replaced by spaces."""
    return " ".join((ROOT / name).read_text().split())


@pytest.mark.fast
def test_the_documents_quote_the_shares_that_params_prints(run):
    mlp = shares(run, "mlp-kv4", "mlp-v", "gqa4-mlp", "table4/mlp", "b-mlp")
    linear = shares(run, "linear-kv4", "linear-qkv", "b-linear")
    other = shares(run, "mlp-kv32", "linear-kv32", "mha-mlp", "mla-linear", "gla-linear")
    readme = read_page("README.md")
    details = read_page("docs/mechanisms.md")
    assert f"adds {mlp} to the FLOPs of the layers and KHA-Linear {linear}" in readme
    assert f"KHA-MLP on the values adds {mlp} to the layers" in details
    assert f"KHA-Linear adds {linear}" in details
    assert f"With MHA and MLA it is {other}" in details


def test_a_layer_pattern_counts_like_its_num_layers(run):
    for words in (
        ["params", "dense-0.6b", "--json"],
        ["flops", "dense-0.6b", "--json"],
        ["plan", "dense-0.6b", "--json", "--gpus=4"],
    ):
        _, with_layers, _ = run(*words, "--", "--num-layers", "12")
        _, with_pattern, _ = run(*words, "--", "--hybrid-layer-pattern", 12 * "*-")
        assert json.loads(with_pattern) == json.loads(with_layers)
    words = ["plan", "dense-0.6b", "--gpus=4", "--", "--pipeline-model-parallel-size", "2"]
    words += ["--hybrid-layer-pattern", "*-*-*-|*-*-*-|*-*-*-|*-*-*-"]
    _, stdout, _ = run(*words)
    assert "PP 2, VPP 2, DP 2" in stdout
    _, _, stderr = run("params", "dense-0.6b", "--", "--hybrid-layer-pattern", "M-*-")
    assert "Cannot count a model with other layers" in stderr


def test_folding_and_the_note_of_a_recipe_are_printed(run):
    latent = run("params", "table3/mla-linear")[1]
    grouped = run("params", "table3/gqa4-mlp")[1]
    assert "(0 % after `convert fold`)" in latent
    assert "--norm-epsilon 1e-6 instead of 1e-5" in latent
    assert "convert fold" not in grouped
    assert "Note:" not in grouped
    for recipe in TABLES:  # exactly the recipes with a note differ
        epsilon = recipe.run.flags.get("--norm-epsilon", ("1e-05",))
        expected = "1e-06" if recipe.note else "1e-05"
        assert epsilon == (expected,), recipe.name


def test_misspelled_and_impossible_arguments_are_reported(run):
    unknown = ["--num-layers-x", "3", "--recompute-activations", "--softmax-type", "vanilla"]
    for command, unused in (
        ("params", "--num-layers-x, --recompute-activations"),
        ("flops", "--num-layers-x, --recompute-activations"),
        ("plan", "--num-layers-x"),
    ):
        code, _, stderr = run(command, "laptop/moe", "--", *unknown)
        assert code == 0
        assert f"WARNING: No effect on this command: {unused}. To check" in stderr
        for words, message in (
            ("--num-query-groups 3", "--num-attention-heads (8) must be divisible by 3"),
            ("--moe-router-topk 99", "--moe-router-topk 99 selects more experts than --num-exp"),
        ):
            code, stdout, stderr = run(command, "laptop/moe", "--", *words.split())
            assert code == 2
            assert stdout == ""
            assert f"error: {message}" in stderr


def test_known_arguments_cause_no_warning(run):
    words = ["--lr", "1", "--recompute-activations", "--grad-reduce-in-bf16", "--bf16"]
    assert "WARNING" not in run("plan", "laptop/dense", "--", *words)[2]
