"""Update the code in the directory of an exported model."""

import json

import pytest

from kha_megatron.checkpoint import staging
from kha_megatron.conversion import to_hf
from kha_megatron.conversion.code_files import update_code
from kha_megatron.errors import OutputError
from kha_megatron.hf.modelling_files import AUTO_MAP
from tests.conversion.models import CONFIGS, edit_config, make

OLD_CODE = "# kha_megatron.hf.modeling_kha of kha-megatron 0.0.1 (Apache-2.0)\nraise SystemExit\n"


@pytest.fixture
def exported(tmp_path):
    """Return an export with old code, and the files that it had before."""
    make(CONFIGS["kha, output gate"]).save_pretrained(tmp_path / "source")
    folder = tmp_path / "out"
    to_hf.plan_export(tmp_path / "source").write(folder)
    new = files_of(folder)
    (folder / "modeling_kha.py").write_text(OLD_CODE)
    (folder / "heads_gate_kha.py").unlink()
    return folder, new


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_only_code_changes(run, exported):
    folder, new = exported
    code, stdout, _ = run("convert", "update-code", folder, "--json")
    report = json.loads(stdout)
    assert code == 0
    assert (report["added"], report["replaced"]) == (["heads_gate_kha.py"], ["modeling_kha.py"])
    assert "configuration_kha.py" in report["unchanged"]
    assert files_of(folder) == new
    code, stdout, _ = run("convert", "update-code", folder)
    assert code == 0
    assert "none" in stdout
    assert files_of(folder) == new


def test_auto_map_keeps_entries_of_the_user(exported):
    folder, _ = exported
    own = {"AutoTokenizer": ["mine.Tokenizer", None]}
    before = json.loads((folder / "config.json").read_text())
    edit_config(folder, auto_map={"AutoConfig": AUTO_MAP["AutoConfig"]} | own, note=[1e-5])
    assert "config.json" in update_code(folder).replaced
    after = json.loads((folder / "config.json").read_text())
    assert after == before | {"auto_map": AUTO_MAP | own, "note": [1e-5]}


def test_nothing_changes_if_a_file_cannot_be_written(exported, monkeypatch):
    folder, _ = exported
    before, flushed = files_of(folder), []

    def fail(path):
        flushed.append(path)
        if len(flushed) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("kha_megatron.conversion.code_files.flush", fail)
    with pytest.raises(OutputError, match="No space left"):
        update_code(folder)
    assert files_of(folder) == before
    assert staging.flush is not fail


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json not found"),
        (lambda f: edit_config(f, model_type="qwen3"), "Only kha models contain modeling code"),
        (lambda f: edit_config(f, kha_strange={"x": 1}), "Unknown fields kha_strange"),
        (lambda f: edit_config(f, num_hidden_layers=-1), "not a valid config of a kha model"),
        (lambda f: edit_config(f, auto_map=[1]), "invalid auto_map"),
        (
            lambda f: (f / "modeling_kha.py").write_text("import mine\n"),
            "modeling_kha.py was not written by kha-megatron",
        ),
    ],
)
def test_other_directories_are_refused(run, exported, change, message):
    folder, _ = exported
    change(folder)
    before = files_of(folder)
    code, stdout, stderr = run("convert", "update-code", folder)
    assert (code, stdout) == (2, "")
    assert message in " ".join(stderr.split())
    assert files_of(folder) == before
