"""A folder with a complete iteration 7: whatever its tracker says, all go on from there."""

import json
import shutil
import sys

import pytest

from kha_megatron import cli
from kha_megatron.checkpoint.tracker import TRACKER, folder_name
from kha_megatron.compare import parse_variants, plan
from kha_megatron.compare.runs import begin
from kha_megatron.recipes import get_recipe
from tests.faults.jobs import arguments, resumed, until
from tests.recipes.conftest import nemorun_home  # noqa: F401

TRACKERS = {
    "empty": "",
    "missing": None,
    "garbage": "7\0\0\0",
    "5,000 digits": "7" * 5000,
    "set back": "5",
}
LAUNCH = ["launch", "quickstart", "--resume", "--dry-run", "--json"]

HEADS = ["--kv-channels", "6"]
"""Those of :mod:`tests.faults.jobs`, where the recipe's differ: other heads are refused."""


@pytest.fixture(scope="module")
def seven(entry, tmp_path_factory):
    """What a training saved after iterations 1 to 7."""
    folder = tmp_path_factory.mktemp("seven") / "checkpoints"
    run = entry(arguments(folder, *until(7)))
    assert run.codes == [0], run.output[-3000:]
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """``command(*words)``: what ``kha-megatron`` prints, and the lines that it announces."""

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


@pytest.mark.usefixtures("nemorun_home")
@pytest.mark.parametrize(
    "word",
    [
        pytest.param(w, id=i, marks=pytest.mark.whole if w != "" else ())
        for i, w in TRACKERS.items()
    ],
)
def test_all_go_on_from_the_newest_complete_iteration(seven, entry, command, tmp_path, word):
    (run, *_) = plan(
        get_recipe("quickstart"),
        parse_variants("kha_mlp,baseline"),
        1,
        output=tmp_path / "compare",
        overrides=["--mock-data", "--train-iters", "40", *HEADS],
    ).runs
    folder = run.folder / "checkpoints"
    shutil.copytree(seven, folder)
    (folder / TRACKER).unlink()
    if word is not None:
        (folder / TRACKER).write_text(word)
    before = state(folder)

    found, said = command("inspect", folder, tmp_path / "pictures", "--json")
    assert found["iteration"] == 7
    (line,) = [x for x in said if "taking" in x]
    assert line.startswith(f"kha_megatron: {folder}: taking iter_0000007: {TRACKER} ")
    command("convert", "to-hf", folder, tmp_path / "hf", "--no-verify", "--json")
    manifest = json.loads((tmp_path / "hf" / "manifest.json").read_text())
    assert manifest["source"]["iteration"] == 7
    words = command(*LAUNCH, "--output", run.folder, "--", "--mock-data", *HEADS)[0]["words"]
    assert words[words.index("--load") + 1] == words[words.index("--save") + 1] == str(folder)
    assert begin(run)[1] == 7
    assert state(folder) == before

    went_on = entry(arguments(folder, *until(8)))
    assert went_on.codes == [0], went_on.output[-3000:]
    assert resumed(went_on.output) == 7
    (line,) = [x for x in went_on.remarks if "resuming" in x]
    assert line.startswith(f"kha_megatron: {folder}: resuming from iter_0000007: {TRACKER} ")
    assert (folder / TRACKER).read_text() == "8"
    after = state(folder)
    saved = before.keys() - {TRACKER}
    assert {name: after.get(name) for name in saved} == {name: before[name] for name in saved}
    assert (folder / folder_name(8)).is_dir()


def test_overwrite_does_not_delete_a_training(seven, command, tmp_path, capsys):
    """The folder has a tracker file, by which a converted model is known as well."""
    folder = shutil.copytree(seven, tmp_path / "checkpoints")
    before = state(folder)
    with pytest.raises(AssertionError, match=r"holds iter_0000001, which this command"):
        command("convert", "to-megatron", seven, folder, "--overwrite", "--no-verify", "--json")
    assert state(folder) == before
