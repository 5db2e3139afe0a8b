"""Examples in ``--help`` parse, shells complete names, and light commands import nothing heavy."""

import json
import shlex
import subprocess
import sys
from itertools import takewhile

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kha_megatron import recipes
from kha_megatron.cli import app
from kha_megatron.compare.variants import parse_variants
from kha_megatron.heads.config import HeadsConfig
from tests.cli.commands import leaves, parse

COMMANDS = dict(leaves(get_command(app)))


def examples(text):
    """Split the examples of a help text into words, as a shell does; a pipe ends a command."""
    lines = text.partition("\nExamples:\n")[2].replace("\\\n", " ").splitlines()
    return [[*takewhile(lambda word: word != "|", shlex.split(line))] for line in lines if line]


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse_and_fit_80_columns(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(app, [*name.split(), "--help"]).stdout
    assert max(map(len, text.splitlines())) <= 80
    lines = examples(text)
    assert any(words[1 : 1 + len(name.split())] == name.split() for words in lines)
    for words in lines:
        given = parse(words)
        if recipe := given.get("recipe"):
            find = recipes.find_recipes if "*" in recipe else recipes.get_recipe
            find(recipe)
        if variants := given.get("variants"):
            parse_variants(variants)
        if variant := given.get("variant"):
            HeadsConfig.from_preset(variant)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("plan table5/", [name for name in recipes.RECIPES if name.startswith("table5/")]),
        ("convert upcycle a b --kha-preset kha_mlp_q", ["kha_mlp_qkv"]),
        ("quickstart --variant kha_mlp+gate_output_h", ["kha_mlp+gate_output_head"]),
        ("launch quickstart -- --kha-pre", ["--kha-preset"]),
    ],
)
def test_bash_completes_names(line, offered, monkeypatch):
    monkeypatch.setenv("_KHA_MEGATRON_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"kha-megatron {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(f"{line}.".split())))
    completed = CliRunner().invoke(app, [], prog_name="kha-megatron").stdout.split()
    assert sorted(completed) == sorted(offered)


HEAVY = ("torch", "transformers", "tokenizers", "megatron.core", "numpy", "matplotlib", "nemo_run")


@pytest.mark.fast
@pytest.mark.parametrize("words", [["params", "moe-a0.8b-6.6b"], ["doctor"]], ids=" ".join)
def test_light_commands_import_nothing_heavy(words):
    code = f"""
import json, sys
from kha_megatron.cli.running import run_app
from kha_megatron.cli import app
sys.argv = ["kha-megatron", *{words}]
run_app(app)
print(json.dumps([name for name in {HEAVY} if name in sys.modules]), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stderr.splitlines()[-1]) == []
