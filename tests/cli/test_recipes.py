"""Output of ``kha-megatron recipes``."""

import json

from kha_megatron.recipes import RECIPES


def test_list_has_every_recipe_with_its_loss(run):
    lines = run("recipes", "list")[1].splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    (line,) = run("recipes", "list", "table2/mlp-v")[1].splitlines()
    assert line.split()[:2] == ["table2/mlp-v", "1.832"]
    table = json.loads(run("recipes", "list", "table5/*", "--json")[1])
    assert len(table) == 18
    assert table[0]["paper"] == {"total": "2.3B", "active": "0.44B", "loss": 1.896}


def test_show_is_the_whole_command_line(run):
    recipe = RECIPES["table2/mlp-k"]
    text = run("recipes", "show", recipe.name)[1]
    assert "head mechanisms: key=mlp" in text
    assert "loss in the paper: 1.848" in text
    words = [word for line in text.splitlines() if line.startswith("--") for word in line.split()]
    assert words == recipe.run.words()
    data = json.loads(run("recipes", "show", recipe.name, "--json")[1])
    assert data["arguments"]["--kha-key"] == ["mlp"]
    assert data["arguments"]["--qk-layernorm"] == []
