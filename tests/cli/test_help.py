"""Every ``--help`` prints commands that can be typed; shells complete them; looking is quick."""

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from kha_megatron import recipes
from kha_megatron.cli import app
from kha_megatron.compare import parse_variants
from kha_megatron.config import KHAConfig

ROOT = get_command(app)


def leaves(command, words=()):
    """Every command by the words that name it, groups left out."""
    children = getattr(command, "commands", {})
    if not children:
        yield " ".join(words)
    for name, child in children.items():
        yield from leaves(child, (*words, name))


def parse(words):
    """What the command line makes of words, without running anything."""
    command, context = ROOT, ROOT.make_context("kha-megatron", list(words))
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return context.params


def typed(text):
    """The examples of a help text as a shell reads them; pipes end a command."""
    lines = text.partition("\nExamples:\n")[2].replace("\\\n", " ").splitlines()
    return [[*takewhile(lambda word: word != "|", shlex.split(line))] for line in lines if line]


@pytest.mark.parametrize("command", [*leaves(ROOT)])
def test_examples_are_commands_and_fit_80_columns(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("my-tasks").mkdir()  # an example's; typer looks for it
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(app, [*command.split(), "--help"]).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"[ \t]+\n", text.partition("\nExamples:\n")[2])  # behind a backslash
    commands = typed(text)
    assert any(words[1:][: len(command.split())] == command.split() for words in commands)
    for program, *words in commands:
        assert program == "kha-megatron"
        given = parse(words)
        if recipe := given.get("recipe"):
            recipes.check_words(recipes.get_recipe(recipe), given.get("megatron") or [])
        if variants := given.get("variants"):
            parse_variants(variants)
        if variant := given.get("variant"):
            KHAConfig.combined(variant.split(","))


def test_the_judge_of_examples_refuses_what_cannot_be_typed():
    assert parse(["launch", "quickstart", "--", "--lr", "1"])["megatron"] == ["--lr", "1"]
    for words in (["launch", "quickstart", "--lr", "1"], ["params"], ["convert", "nothing"]):
        with pytest.raises(typer.BadParameter.__mro__[2]):
            parse(words)


def completed(line, monkeypatch):
    """What bash is offered behind a line, by the process that its completion starts."""
    monkeypatch.setenv("_KHA_MEGATRON_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"kha-megatron {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(f"{line}.".split())))
    return CliRunner().invoke(app, [], prog_name="kha-megatron").stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("convert up", ["upcycle"]),
        ("plan table5/", [name for name in recipes.RECIPES if name.startswith("table5/")]),
        ("compare --recipe laptop/", ["laptop/moe", "laptop/dense"]),
        ("convert upcycle a b --kha-preset kha_mlp_q", ["kha_mlp_qkv"]),
        ("quickstart --variant kha_mlp,gate_output_h", ["kha_mlp,gate_output_head"]),
        ("compare --variants baseline,kha_mlp+moh_7", ["baseline,kha_mlp+moh_75"]),
        ("launch quickstart -- --kha-pre", ["--kha-preset"]),
        ("launch quickstart --lay", ["--layout"]),
    ],
)
def test_shells_complete_names(line, offered, monkeypatch):
    assert sorted(completed(line, monkeypatch)) == sorted(offered)


def test_bash_completes_once_installed(tmp_path):
    """``--install-completion`` in a fresh home, and a Tab in a bash that has read its file."""
    script = """
kha-megatron --install-completion
source "$HOME/.bashrc"
complete -p kha-megatron
COMP_WORDS=(kha-megatron params moe-a0.8) COMP_CWORD=2
_kha_megatron_completion kha-megatron
echo "${COMPREPLY[*]}"
"""
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env=os.environ | {"HOME": str(tmp_path), "PATH": commands},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-2:] == [
        "complete -o default -F _kha_megatron_completion kha-megatron",
        "moe-a0.8b-6.6b",
    ]
    assert done.stderr == ""


HEAVY = ("torch", "transformers", "tokenizers", "megatron", "numpy", "matplotlib", "nemo_run")


@pytest.mark.parametrize("words", [["params", "moe-a0.8b-6.6b"], ["doctor"]], ids=" ".join)
def test_what_is_only_looked_at_imports_nothing_heavy(words):
    """Seconds depend on the machine; these modules are what they went into."""
    code = f"""
import json, sys
from kha_megatron.cli.running import run
from kha_megatron.cli import app
sys.argv = ["kha-megatron", *{words}]
run(app)
print(json.dumps([name for name in {HEAVY} if name in sys.modules]), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr.splitlines()[-1]) == []
