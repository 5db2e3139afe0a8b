"""Test that all commands load the newest complete iteration, whatever the tracker file contains."""

import json
import os
import shutil
import sys

import pytest

from kha_megatron import cli
from kha_megatron.checkpoint.ownership import OWNER
from kha_megatron.checkpoint.tracker import TRACKER
from kha_megatron.compare.trials import plan_comparison, start_trial
from kha_megatron.compare.variants import parse_variants
from kha_megatron.recipes import get_recipe
from tests.recipes.conftest import nemorun_home  # noqa: F401

LAUNCH = ["launch", "quickstart", "--resume", "--dry-run", "--json"]

HEADS = ["--kv-channels", "6", "--use-checkpoint-args"]
"""The model of :mod:`tests.faults.jobs` differs from that of the recipe."""


@pytest.fixture
def command(monkeypatch, capsys):
    """Return a function that runs ``kha-megatron`` and returns its JSON and its log lines."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kha-megatron", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        assert not end.value.code, err
        return json.loads(out), [x for x in err.splitlines() if x.startswith("kha_megatron: ")]

    return run


def state(folder):
    files = (file for file in folder.rglob("*") if file.name != OWNER)
    return {str(file.relative_to(folder)): file.stat().st_mtime_ns for file in files}


@pytest.mark.usefixtures("nemorun_home")
@pytest.mark.parametrize("word", ["", pytest.param("1", marks=pytest.mark.whole)])
def test_commands_load_the_newest_complete_iteration(saved, command, tmp_path, word):
    (trial, *_) = plan_comparison(
        get_recipe("quickstart"),
        parse_variants("kha_mlp,baseline"),
        1,
        output=tmp_path / "compare",
        overrides=["--mock-data", "--train-iters", "40", *HEADS],
    ).trials
    folder = shutil.copytree(saved, trial.folder / "checkpoints")
    (folder / TRACKER).write_text(word)
    os.utime(folder / TRACKER, (1, 1))
    before = state(folder)

    found, logged = command("inspect", folder, tmp_path / "pictures", "--json")
    assert found["iteration"] == 2
    (line,) = [line for line in logged if "loading" in line]
    assert line.startswith(f"kha_megatron: {folder}: loading iter_0000002: {TRACKER} ")
    command("convert", "to-hf", folder, tmp_path / "hf", "--no-verify", "--json")
    manifest = json.loads((tmp_path / "hf" / "manifest.json").read_text())
    assert manifest["source"]["iteration"] == 2
    launched, _ = command(*LAUNCH, "--output", trial.folder, "--", "--mock-data", *HEADS)
    words = launched["words"]
    assert words[words.index("--load") + 1] == str(folder)
    assert words[words.index("--save") + 1] == str(folder)
    assert start_trial(trial).stopped_at == 2
    assert state(folder) == before


def test_overwrite_does_not_delete_a_training_run(saved, command, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    before = state(folder)
    with pytest.raises(AssertionError, match=r"contains iter_0000001, which was not written by"):
        command("convert", "to-megatron", saved, folder, "--overwrite", "--no-verify", "--json")
    assert state(folder) == before
