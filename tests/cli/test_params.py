"""``kha-megatron params`` and ``flops`` as a user types them."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kha_megatron.cli import app
from kha_megatron.recipes.paper import PRINTED
from kha_megatron.recipes.tables import TABLES

ROOT = Path(__file__).parents[2]


def run(*words):
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", PRINTED)
def test_the_papers_digits_are_printed(name):
    """All seven models of the paper, total and active."""
    lines = run("params", name).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.split()[:1]}
    for row, digits in PRINTED[name].items():
        assert rows[row][-2] == digits
        assert rows[row][-1] in ("(rounded)", "(cut)")
    assert max(map(len, lines[1:])) <= 80


def test_params_as_json():
    data = json.loads(run("params", "moe-a0.8b-6.6b", "--json"))
    assert data["total"] - data["without_kha"]["total"] == data["kha"] == 884736
    assert data["active"] == 881160192
    assert data["cache_bytes"] == 2 * 18 * 1024
    assert data["printed"]["active"] == {"paper": "880M", "ours": "880M", "how": "rounded"}


def test_flops_of_the_worked_example():
    text = run("flops", "equation12", "--seq", "2048")
    assert "KHA adds 0.55% to the layers and 1.17% to attention" in text


def test_flops_as_json():
    data = json.loads(run("flops", "moe-a0.8b-6.6b", "--json"))
    assert data["seq"] == 4096  # the recipe's
    parts = {k: v for k, v in data["forward"].items() if k != "total"}
    assert sum(parts.values()) == data["forward"]["total"]
    assert data["training"]["total"] == data["forward"]["total"] + data["backward"]["total"]


def shares(*endings):
    """KHA's share of the layers' work in percent, as ``params`` prints it, of the paper's rows."""
    names = [recipe.name for recipe in TABLES if recipe.name.endswith(endings)]
    texts = [run("params", name) for name in names]
    assert len(texts) >= len(endings)
    return [float(re.search(r"work: KHA adds ([\d.]+)% to the layers", t)[1]) for t in texts]


@pytest.mark.parametrize(
    ("sentence", "rows"),
    [
        (
            r"4 KV heads KHA-MLP on the values adds (\S+) to (\S+) % to the work of the layers",
            ("mlp-kv4", "mlp-v", "gqa4-mlp", "table4/mlp", "b-mlp"),
        ),
        (r"KHA-Linear adds (\S+) to (\S+) %", ("linear-kv4", "linear-qkv", "b-linear")),
        (
            r"with MHA and MLA it is (\S+) to (\S+) %",
            ("mlp-kv32", "linear-kv32", "mha-mlp", "mla-linear", "gla-linear"),
        ),
    ],
)
def test_the_documents_say_what_it_costs(sentence, rows):
    """Its numbers are the least and the most that ``params`` prints of the rows it speaks of."""
    words = re.sub(r"\s+", " ", (ROOT / "docs/mechanisms.md").read_text())
    told = re.search(sentence, words)
    assert told, f"docs/mechanisms.md no longer says: {sentence}"
    found = shares(*rows)
    assert [float(number) for number in told.groups()] == [min(found), max(found)]


def test_the_readme_says_the_same():
    readme, details = (
        re.sub(r"\s+", " ", (ROOT / page).read_text())
        for page in ("README.md", "docs/mechanisms.md")
    )
    mlp, linear = re.findall(r"adds ([\d.]+) to ([\d.]+) %", details)
    sentence = r"adds (\S+) to (\S+) % to the work of the layers and KHA-Linear (\S+) to (\S+) %"
    told = re.search(sentence, readme)
    assert told, f"README.md no longer says: {sentence}"
    assert told.groups() == (*mlp, *linear)


def test_what_folds_away_and_what_is_not_alike_is_said():
    latent, grouped = run("params", "table3/mla-linear"), run("params", "table3/gqa4-mlp")
    assert "none once `convert fold` has folded it away" in latent
    assert "--norm-epsilon 1e-6, in all other rows 1e-5" in latent
    assert "folded" not in grouped
    assert "note:" not in grouped
    assert "work:" not in run("params", "table2/baseline")
    for recipe in TABLES:  # the note is what the table holds
        own = "1e-06" if recipe.note else "1e-05"
        assert recipe.run.flags.get("--norm-epsilon", ("1e-05",)) == (own,), recipe.name
