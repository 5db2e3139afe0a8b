"""Output of ``kha-megatron recipes``."""

import json

from typer.testing import CliRunner

from kha_megatron.cli import app
from kha_megatron.recipes import RECIPES


def run(*words):
    result = CliRunner().invoke(app, ["recipes", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list_has_every_recipe_with_its_loss():
    lines = run("list").splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    (line,) = run("list", "table2/mlp-v").splitlines()
    assert line.split()[:2] == ["table2/mlp-v", "1.832"]


def test_list_as_json():
    table = json.loads(run("list", "table5/*", "--json"))
    assert len(table) == 18
    assert table[0]["paper"] == {"total": "2.3B", "active": "0.44B", "loss": 1.896}


def test_show_is_the_whole_command_line():
    recipe = RECIPES["table2/mlp-k"]
    text = run("show", recipe.name)
    assert "head mechanisms: key=mlp" in text
    assert "loss in the paper: 1.848" in text
    words = [word for line in text.splitlines() if line.startswith("--") for word in line.split()]
    assert words == recipe.run.words()
    data = json.loads(run("show", recipe.name, "--json"))
    assert data["arguments"]["--kha-key"] == ["mlp"]
    assert data["arguments"]["--qk-layernorm"] == []
