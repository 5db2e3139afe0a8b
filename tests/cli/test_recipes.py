"""Output of ``kha-megatron recipes``."""

import json

from kha_megatron.recipes import RECIPES


def test_list_has_every_recipe_with_its_loss(run):
    _, stdout, _ = run("recipes", "list")
    names = [line.split()[0] for line in stdout.splitlines()]
    assert names == list(RECIPES)
    _, stdout, _ = run("recipes", "list", "table2/mlp-v")
    (line,) = stdout.splitlines()
    assert line.split()[:2] == ["table2/mlp-v", "1.832"]
    _, stdout, _ = run("recipes", "list", "table5/*", "--json")
    table = json.loads(stdout)
    assert len(table) == 18
    assert table[0]["paper"] == {"total": "2.3B", "active": "0.44B", "loss": 1.896}


def test_show_is_the_whole_command_line(run):
    recipe = RECIPES["table2/mlp-k"]
    _, stdout, _ = run("recipes", "show", recipe.name)
    assert "head mechanisms: key=mlp" in stdout
    assert "loss in the paper: 1.848" in stdout
    words = []
    for line in stdout.splitlines():
        if line.startswith("--"):
            words += line.split()
    assert words == recipe.run.words()
    _, stdout, _ = run("recipes", "show", recipe.name, "--json")
    arguments = json.loads(stdout)["arguments"]
    assert arguments["--kha-key"] == ["mlp"]
    assert arguments["--qk-layernorm"] == []
