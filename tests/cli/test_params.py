"""``kha-megatron params`` and ``flops`` as a user types them."""

import json

import pytest
from typer.testing import CliRunner

from kha_megatron.cli import app
from kha_megatron.errors import ConfigError
from kha_megatron.recipes.paper import PRINTED


def run(*words):
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", PRINTED)
def test_the_papers_digits_are_printed(name):
    """All seven models of the paper, total and active."""
    lines = run("params", name).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.split()[:1]}
    for row, digits in zip(("total", "active"), PRINTED[name], strict=True):
        assert rows[row][-2] == digits
        assert rows[row][-1] in ("(rounded)", "(cut)")
    assert max(map(len, lines[1:])) <= 80


def test_params_as_json():
    data = json.loads(run("params", "moe-a0.8b-6.6b", "--json"))
    assert data["total"] - data["without_kha"]["total"] == data["kha"] == 884736
    assert data["active"] == 881160192
    assert data["cache_bytes"] == 2 * 18 * 1024
    assert data["printed"]["active"] == {"paper": "880M", "ours": "880M", "how": "rounded"}


def test_the_reading_of_latent_attention_says_how_far_off_it_is():
    assert "970M (972M: +0.18% of the paper's)" in run("params", "table3/mla-linear")


def test_flops_of_the_worked_example():
    text = run("flops", "equation12", "--seq", "2048")
    assert "KHA adds 0.55% to the layers and 1.17% to attention" in text


def test_flops_as_json():
    data = json.loads(run("flops", "moe-a0.8b-6.6b", "--json"))
    assert data["seq"] == 4096  # the recipe's
    parts = {k: v for k, v in data["forward"].items() if k != "total"}
    assert sum(parts.values()) == data["forward"]["total"]
    assert data["training"]["total"] == data["forward"]["total"] + data["backward"]["total"]
    longer = json.loads(run("flops", "moe-a0.8b-6.6b", "--seq", "8192", "--json"))
    assert longer["forward"]["kha"] == 2 * data["forward"]["kha"]
    assert longer["forward"]["scores"] == 4 * data["forward"]["scores"]
    assert longer["kha_share_of"]["layers"] < data["kha_share_of"]["layers"]


@pytest.mark.parametrize("command", ["params", "flops"])
def test_unknown_names_are_answered_with_near_ones(command):
    result = CliRunner().invoke(app, [command, "table2/mlp-vq"])
    assert isinstance(result.exception, ConfigError)
    assert "did you mean table2/mlp-v" in str(result.exception)
