"""``kha-megatron inspect`` as a user meets it: arguments in, streams, exit code and files out."""

import json
import math
import sys

import pytest
import torch
from safetensors.torch import save_file

from kha_megatron import cli
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.cli import plots
from kha_megatron.config import KHAConfig
from kha_megatron.heads.knock import MATRICES
from kha_megatron.model.recorded import knock_weights
from tests.conversion.checkpoints import ITERATION, save_gpt

D, LAYERS = 7, 5
PNGS = ["query_proj.png", "value_down.png", "value_gate.png", "value_up.png"]


@pytest.fixture
def matrices():
    generator = torch.Generator().manual_seed(2)
    return {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.randn(D, D, generator=generator)
        for layer in range(LAYERS)
        for name in ("q_knock.proj", "v_knock.up_proj", "v_knock.gate_proj", "v_knock.down_proj")
    }


def _write(folder, matrices, **config):
    folder.mkdir()
    kha = {"kha_query": "linear", "kha_value": "mlp"}
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS} | kha | config))
    save_file(matrices, folder / "model.safetensors")
    return folder


@pytest.fixture
def model(tmp_path, matrices):
    return _write(tmp_path / "model", matrices)


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kha-megatron", "inspect", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        streams = capsys.readouterr()
        return exit_.value.code, streams.out, streams.err

    return run


def test_json_holds_every_matrix_and_names_the_pictures(run, model, matrices, tmp_path):
    out = tmp_path / "new" / "pictures"
    code, stdout, _ = run(model, out, "--json")
    assert code == 0
    result = json.loads(stdout)
    assert result["kha"]["value"] == "mlp"
    assert result["iteration"] is None
    assert [*map(str, sorted(out.iterdir()))] == result["files"] == [str(out / p) for p in PNGS]
    entries = {(e["layer"], e["projection"], e["matrix"]): e for e in result["matrices"]}
    assert len(entries) == len(result["matrices"]) == len(matrices)
    gate = matrices["model.layers.3.self_attn.v_knock.gate_proj.weight"]
    entry = entries[3, "value", "gate"]
    assert entry["diagonal_mean"] == pytest.approx(gate.trace().item() / D, rel=1e-5)
    assert entry["distance"] == pytest.approx(gate.norm().item() / math.sqrt(D), rel=1e-5)
    share = 1 - gate.diagonal().square().sum() / gate.square().sum()
    assert entry["off_diagonal_share"] == pytest.approx(share.item(), rel=1e-5)


def test_tables_have_a_row_for_each_layer(run, model, matrices, tmp_path):
    code, stdout, stderr = run(model, tmp_path / "out")
    assert code == 0
    assert "query heads (linear)" in stdout
    rows = [line.split() for line in stdout.splitlines() if line.split()[:1] == ["4"]]
    assert [len(row) for row in rows] == [1 + 3, 1 + 9]
    mean = matrices["model.layers.4.self_attn.q_knock.proj.weight"].trace() / D
    assert rows[0][1] == f"{mean.item():.3f}"
    assert "4 pictures" in stderr


def test_both_sides_of_a_conversion_look_alike(run, ranks, tmp_path):
    save, kha = tmp_path / "save", KHAConfig(query="linear", value="mlp")
    args = {"tensor_model_parallel_size": 2}, {"num_layers": LAYERS}, {}
    ranks(save_gpt, 2, str(save), kha, *args)
    names = {"query": ["q_knock.proj"], "value": [f"v_knock.{m}_proj" for m in MATRICES["mlp"]]}
    matrices = {
        f"model.layers.{layer}.self_attn.{name}.weight": matrix.T.contiguous()
        for (layer, projection), weight in knock_weights(MegatronCheckpoint.open(save)).items()
        for name, matrix in zip(names[projection], weight, strict=True)
    }
    model = _write(tmp_path / "hf", matrices)
    seen = [
        json.loads(run(side, tmp_path / f"{side.name}.out", "--json")[1]) for side in (save, model)
    ]
    assert seen[0]["iteration"] == ITERATION
    assert seen[0]["matrices"] == seen[1]["matrices"]


def test_a_diverged_model_can_still_be_looked_at(run, matrices, tmp_path):
    matrices["model.layers.2.self_attn.q_knock.proj.weight"][0, 0] = math.nan
    model = _write(tmp_path / "model", matrices)
    code, stdout, _ = run(model, tmp_path / "out", "--json")
    assert code == 0
    bad = [e for e in json.loads(stdout)["matrices"] if e["diagonal_mean"] is None]
    assert [(e["layer"], e["matrix"], e["distance"]) for e in bad] == [(2, "proj", None)]
    assert " nan " in run(model, tmp_path / "out", "--overwrite")[1]


def test_a_folder_in_use_is_left_alone(run, model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert run(model, out)[0] == 0, "an empty folder is welcome"
    old = out / "old.png"
    old.write_text("mine")
    code, stdout, stderr = run(model, out)
    assert (code, stdout) == (2, "")
    assert "not empty (5 entries)" in stderr
    assert "--overwrite" in stderr
    assert old.read_text() == "mine"
    assert run(model, out, "--overwrite")[0] == 0
    assert sorted(file.name for file in out.iterdir()) == PNGS
    (out / "notes.txt").write_text("mine")
    code, _, stderr = run(model, out, "--overwrite")
    assert code == 2
    assert "notes.txt" in stderr
    assert (out / "notes.txt").read_text() == "mine"
    assert "is a file" in run(model, out / "notes.txt")[2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_what_was_there(run, model, tmp_path, monkeypatch, error):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.png").write_text("mine")
    draw, calls = plots.matrix_grid, []

    def stop_at_the_second(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise error
        draw(*args, **kwargs)

    monkeypatch.setattr(plots, "matrix_grid", stop_at_the_second)
    try:
        code, *_ = run(model, out, "--overwrite")
    except OSError:
        code = 1
    assert code != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert (out / "old.png").read_text() == "mine"


def test_a_model_without_kha_is_refused(run, tmp_path, matrices):
    model = _write(tmp_path / "model", matrices, kha_query=None, kha_value=None)
    code, _, stderr = run(model, tmp_path / "out")
    assert code == 2
    assert "records no knocking heads" in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "is not a folder"), ("empty", "holds no")]
)
def test_what_is_no_checkpoint_is_refused(run, tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    code, _, stderr = run(tmp_path / name, tmp_path / "out")
    assert code == 2
    assert message in stderr
    assert str(tmp_path / name) in stderr
    assert len(stderr.splitlines()) == 1


def test_without_matplotlib_the_extra_is_named_first(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, stderr = run(tmp_path / "nowhere", tmp_path / "out")
    assert code == 2
    assert "kha-megatron[plots]" in stderr


def test_help_shows_an_example(run):
    code, stdout, _ = run("--help")
    assert code == 0
    assert "kha-megatron inspect quickstart/run/checkpoints" in stdout
