"""Test that all commands load the newest complete iteration, whatever the tracker file contains."""

import json
import shutil
import sys

import pytest

from kha_megatron import cli
from kha_megatron.checkpoint.tracker import TRACKER
from kha_megatron.compare import parse_variants, plan
from kha_megatron.compare.runs import begin
from kha_megatron.recipes import get_recipe
from tests.faults.jobs import arguments, resumed, until
from tests.recipes.conftest import nemorun_home  # noqa: F401

TRACKERS = {"missing": None, "garbage": "2\0\0\0", "5,000 digits": "2" * 5000, "set back": "1"}
CASES = [
    "",
    *(pytest.param(word, id=name, marks=pytest.mark.whole) for name, word in TRACKERS.items()),
]
LAUNCH = ["launch", "quickstart", "--resume", "--dry-run", "--json"]

HEADS = ["--kv-channels", "6"]
"""The head dimension of :mod:`tests.faults.jobs`, which differs from that of the recipe."""


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
    return {str(f.relative_to(folder)): f.stat().st_mtime_ns for f in folder.rglob("*")}


def with_tracker(saved, folder, word):
    shutil.copytree(saved, folder)
    (folder / TRACKER).unlink()
    if word is not None:
        (folder / TRACKER).write_text(word)
    return state(folder)


@pytest.mark.usefixtures("nemorun_home")
@pytest.mark.parametrize("word", CASES)
def test_commands_load_the_newest_complete_iteration(saved, command, tmp_path, word):
    (run, *_) = plan(
        get_recipe("quickstart"),
        parse_variants("kha_mlp,baseline"),
        1,
        output=tmp_path / "compare",
        overrides=["--mock-data", "--train-iters", "40", *HEADS],
    ).runs
    folder = run.folder / "checkpoints"
    before = with_tracker(saved, folder, word)

    found, logged = command("inspect", folder, tmp_path / "pictures", "--json")
    assert found["iteration"] == 2
    (line,) = [line for line in logged if "loading" in line]
    assert line.startswith(f"kha_megatron: {folder}: loading iter_0000002: {TRACKER} ")
    command("convert", "to-hf", folder, tmp_path / "hf", "--no-verify", "--json")
    manifest = json.loads((tmp_path / "hf" / "manifest.json").read_text())
    assert manifest["source"]["iteration"] == 2
    words = command(*LAUNCH, "--output", run.folder, "--", "--mock-data", *HEADS)[0]["words"]
    assert words[words.index("--load") + 1] == words[words.index("--save") + 1] == str(folder)
    assert begin(run)[1] == 2
    assert state(folder) == before


@pytest.mark.whole
@pytest.mark.parametrize("word", CASES)
def test_training_resumes_from_the_newest_complete_iteration(saved, entry, tmp_path, word):
    folder = tmp_path / "checkpoints"
    before = with_tracker(saved, folder, word)
    run = entry(arguments(folder, *until(3)), 2)
    assert run.codes == [0, 0], run.output[-3000:]
    assert resumed(run.output) == 2
    (line,) = [line for line in run.remarks if "resuming" in line]
    assert line.startswith(f"kha_megatron: {folder}: resuming from iter_0000002: {TRACKER} ")
    assert (folder / TRACKER).read_text() == "3"
    after = state(folder)
    kept = before.keys() - {TRACKER}
    assert {name: after.get(name) for name in kept} == {name: before[name] for name in kept}


def test_overwrite_does_not_delete_a_training_run(saved, command, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    before = state(folder)
    with pytest.raises(AssertionError, match=r"holds iter_0000001, which this command"):
        command("convert", "to-megatron", saved, folder, "--overwrite", "--no-verify", "--json")
    assert state(folder) == before
