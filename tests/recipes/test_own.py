"""Recipes in a file of the user."""

import json

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.plan.counts import count_model
from kha_megatron.recipes import Recipe, get_recipe
from tests.docs.pages import ROOT

FILE = """
from __future__ import annotations
from dataclasses import dataclass, replace
from kha_megatron.recipes import get_recipe

@dataclass
class Sizes:  # needs the module to be registered
    layers: int = 7

DEEP = replace(get_recipe("dense-0.6b"), name="own/deep").updated(num_layers=Sizes().layers)
BAD_NAME = replace(DEEP, name="../deep")
NUMBER = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my recipes.py"
    path.write_text(FILE)
    return path


def test_recipe_of_a_file(file):
    recipe = get_recipe(f"{file}:DEEP")
    assert isinstance(recipe, Recipe)
    assert recipe.name == "own/deep"
    assert recipe.run.arguments["num_layers"] == 7
    assert get_recipe("dense-0.6b").run.arguments["num_layers"] == 24


def test_every_command_takes_it(file, run, nemorun_home):
    name = f"{file}:DEEP"
    parameters = json.loads(run("params", name, "--json")[1])
    plan = json.loads(run("plan", name, "--json")[1])
    expected = count_model(get_recipe(name).run.model).total
    assert parameters["total"] == plan["parameters"]["total"] == expected
    assert "own/deep" in run("recipes", "show", name)[1]
    _, stdout, _ = run("launch", name, "--dry-run", "--", "--mock-data")
    assert "--hybrid-layer-pattern '*-*-*-*-*-*-*-'" in stdout
    _, stdout, _ = run("launch", name, "--dry-run", "--", "--mock-data", "--num-layers", "2")
    assert "--hybrid-layer-pattern '*-*-'" in stdout
    assert "/runs/own/deep/checkpoints" in stdout


@pytest.mark.parametrize(
    ("source", "variable", "message"),
    [
        (None, "DEEP", "There is no file .*my recipes.py. Pass the recipe as FILE.py:NAME"),
        (FILE, "SHALLOW", "does not contain SHALLOW. Recipes in this file: DEEP, BAD_NAME"),
        (FILE, "NUMBER", "NUMBER in .* is not a Recipe. Recipes in this file: DEEP, BAD_NAME"),
        (FILE, "BAD_NAME", "The name of BAD_NAME .* must consist of letters.* got '../deep'"),
        ("DEEP = 1", "DEEP", "does not contain any kha_megatron.recipes.Recipe"),
        ("DEEP = (", "DEEP", "Could not execute .*: SyntaxError: .* line 1"),
        ("import nosuch", "DEEP", "Could not execute .*: ModuleNotFoundError: .*nosuch"),
        ("import sys; sys.exit(3)", "DEEP", "Could not execute .*: SystemExit: 3"),
        (
            f"{FILE}DEEP.updated(nosuch=3)",
            "DEEP",
            r"Unknown argument nosuch=3\. .*'--nosuch'",
        ),
    ],
)
def test_errors_are_one_line(file, source, variable, message):
    if source is None:
        file.unlink()
    else:
        file.write_text(source)
    with pytest.raises(ConfigError, match=message) as refused:
        get_recipe(f"{file}:{variable}")
    assert "\n" not in str(refused.value)


INCOMPLETE = """
from kha_megatron.model.run import Run
from kha_megatron.recipes import Recipe

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "add_bias_linear": False}
SIZES |= {"position_embedding_type": "rope"}
NO_VOCABULARY = Recipe(
    name="own", description="", run=Run.from_values(seq_length=8, **SIZES), ranks=1
)
NO_LENGTH = Recipe(
    name="own", description="", run=Run.from_values(vocab_size=100, **SIZES), ranks=1
)
"""


@pytest.mark.parametrize("command", ["params", "flops"])
def test_missing_sizes_are_named(command, file, run):
    file.write_text(INCOMPLETE)
    for name, flag, remedy in (
        ("NO_VOCABULARY", "--vocab-size", "Cannot count a model without a vocabulary size. Add"),
        ("NO_LENGTH", "--seq-length", "Cannot count the FLOPs of a run without"),
    ):
        code, stdout, stderr = run(command, f"{file}:{name}")
        assert (code, stdout, stderr) == (2, "", f"error: {remedy} {flag}.\n")
        code, _, stderr = run(command, f"{file}:{name}", "--", flag, "16")
        assert code == 0, stderr


def test_file_without_a_name_is_refused(file):
    with pytest.raises(ConfigError, match=r"Expected FILE.py:NAME"):
        get_recipe(str(file))


def test_example_has_the_published_size():
    """Qwen3-235B-A22B: https://huggingface.co/Qwen/Qwen3-235B-A22B."""
    for name in ("BASELINE", "KHA_MLP"):
        recipe = get_recipe(f"{ROOT}/examples/qwen3_235b.py:{name}")
        counts = count_model(recipe.run.model)
        assert f"{counts.total / 1e9:.1f}" == "235.1"
        assert f"{counts.active / 1e9:.1f}" == "22.2"
