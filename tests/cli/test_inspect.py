"""``kha-megatron inspect``: statistics of matrices and attention, pictures and bad input."""

import json
import math
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.heads.knock import MATRICES
from kha_megatron.hf import KHAModelConfig
from kha_megatron.hf.instruments import measure_layers
from kha_megatron.model.recorded import read_knock_weights
from tests.cli.small_models import MODEL, train_tokenizer
from tests.conversion.checkpoints import ITERATION, save_gpt

D = 7
LAYERS = 3
PNGS = ["query_proj.png", "value_down.png", "value_gate.png", "value_up.png"]
TEXT = "def main(x):\n\treturn x + 1\n" * 20
SIZES = MODEL | {"vocab_size": 300}


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
def run(run):
    return lambda *words: run("inspect", *words)


def test_json_lists_every_matrix_and_picture(run, model, matrices, tmp_path):
    out = tmp_path / "new" / "pictures"
    code, stdout, _ = run(model, out, "--json")
    assert code == 0
    result = json.loads(stdout)
    assert result["kha"]["value"] == "mlp"
    assert result["iteration"] is None
    assert [*map(str, sorted(out.iterdir()))] == result["files"] == [str(out / p) for p in PNGS]
    entries = {(e["layer"], e["projection"], e["matrix"]): e for e in result["matrices"]}
    assert len(entries) == len(result["matrices"]) == len(matrices)
    gate = matrices["model.layers.2.self_attn.v_knock.gate_proj.weight"]
    entry = entries[2, "value", "gate"]
    assert entry["diagonal_mean"] == pytest.approx(gate.trace().item() / D, rel=1e-5)
    assert entry["distance"] == pytest.approx(gate.norm().item() / math.sqrt(D), rel=1e-5)
    share = 1 - gate.diagonal().square().sum() / gate.square().sum()
    assert entry["off_diagonal_share"] == pytest.approx(share.item(), rel=1e-5)


@pytest.mark.whole
def test_both_checkpoint_formats_give_the_same_statistics(run, ranks, tmp_path):
    save, kha = tmp_path / "save", KHAConfig(query="linear", value="mlp")
    args = {"tensor_model_parallel_size": 2}, {"num_layers": LAYERS}, {}
    ranks(save_gpt, 2, str(save), kha, *args)
    names = {"query": ["q_knock.proj"], "value": [f"v_knock.{m}_proj" for m in MATRICES["mlp"]]}
    matrices = {
        f"model.layers.{layer}.self_attn.{name}.weight": matrix.T.contiguous()
        for (layer, projection), weight in read_knock_weights(MegatronCheckpoint.open(save)).items()
        for name, matrix in zip(names[projection], weight, strict=True)
    }
    model = _write(tmp_path / "hf", matrices)
    seen = [
        json.loads(run(side, tmp_path / f"{side.name}.out", "--json")[1]) for side in (save, model)
    ]
    assert seen[0]["iteration"] == ITERATION
    assert seen[0]["matrices"] == seen[1]["matrices"]


def test_matrices_with_nan_are_reported(run, matrices, tmp_path):
    matrices["model.layers.2.self_attn.q_knock.proj.weight"][0, 0] = math.nan
    model = _write(tmp_path / "model", matrices)
    code, stdout, _ = run(model, tmp_path / "out", "--json")
    assert code == 0
    bad = [e for e in json.loads(stdout)["matrices"] if e["diagonal_mean"] is None]
    assert [(e["layer"], e["matrix"], e["distance"]) for e in bad] == [(2, "proj", None)]


def test_overwrite_replaces_pictures_and_nothing_else(run, model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.png").write_text("mine")
    code, stdout, stderr = run(model, out)
    assert (code, stdout) == (2, "")
    assert "--overwrite" in stderr
    assert run(model, out, "--overwrite")[0] == 0
    assert sorted(file.name for file in out.iterdir()) == PNGS
    (out / "notes.txt").write_text("mine")
    assert "notes.txt" in run(model, out, "--overwrite")[2]
    assert (out / "notes.txt").read_text() == "mine"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, 30)  # the checkpoints of these tests have 56 rows


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def save_model(folder, config, tokenizer):
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_stock_model_is_measured(run, tokenizer, text, tmp_path):
    folder = save_model(tmp_path / "model", Qwen3Config(**SIZES), tokenizer)
    code, stdout, _ = run(folder, tmp_path / "out", "--text", text, "--tokens", 50, "--json")
    assert code == 0
    result = json.loads(stdout)
    assert result["files"] == [str(tmp_path / "out" / "attention.png")]
    assert result["text"] == {"file": str(text), "tokens": 50}
    assert result["matrices"] == []
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = measure_layers(model, tokenizer(TEXT, return_tensors="pt").input_ids[:, :50])
    for of_layer, figures in zip(result["layers"], found, strict=True):
        assert of_layer["sinks"] == pytest.approx(figures.sinks, rel=1e-5)
        assert of_layer["peak"] == pytest.approx(figures.peak, rel=1e-5)
        assert of_layer["figures"] == {}


def test_tables_and_pictures_of_everything(run, tokenizer, text, tmp_path):
    config = KHAModelConfig(
        **SIZES,
        kha_value="mlp",
        kha_gate={"output": "head"},
        kha_moh={"share": 0.5},
    )
    folder = save_model(tmp_path / "model", config, tokenizer)
    code, stdout, stderr = run(folder, tmp_path / "out", "--text", text)
    assert code == 0
    for title in ("value heads (mlp)", "attention over", "head mechanisms"):
        assert title in stdout
    assert "Saved 4 plots" in stderr
    assert (tmp_path / "out" / "attention.png").stat().st_size > 10_000


def test_a_megatron_checkpoint_is_converted(run, ranks, tokenizer, text, tmp_path):
    checkpoint = tmp_path / "save"
    ranks(save_gpt, 1, str(checkpoint), KHAConfig(value="mlp"), {}, {"num_layers": 2}, {})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = (checkpoint, tmp_path / "out", "--text", text, "--tokens", 12)
    code, _, stderr = run(*given)
    assert code == 2
    assert "--tokenizer DIRECTORY" in stderr
    code, stdout, stderr = run(*given, "--tokenizer", tmp_path / "tokenizer", "--json")
    assert code == 0, stderr
    result = json.loads(stdout)
    assert len(result["layers"]) == 2
    assert len(result["matrices"]) == 2 * 3


def test_bad_input_is_refused_before_anything_is_written(
    run,
    matrices,
    tokenizer,
    text,
    tmp_path,
    capsys,
    monkeypatch,
):
    plain = _write(tmp_path / "plain", matrices, kha_query=None, kha_value=None)
    stock = save_model(tmp_path / "stock", Qwen3Config(**SIZES), tokenizer)
    float8 = {name: matrix.to(torch.float8_e4m3fn) for name, matrix in matrices.items()}
    quantized = _write(tmp_path / "float8", float8)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").write_text(" \n")
    capsys.readouterr()  # progress of saving the model
    for given, message in (
        ([plain], f"No KHA matrices found in {plain}"),
        ([tmp_path / "nowhere"], f"{tmp_path / 'nowhere'} is not a directory"),
        (["Some/Model-1"], "hf download Some/Model-1 --local-dir Model-1"),
        ([tmp_path / "empty"], f"{tmp_path / 'empty'} has no"),
        ([quantized], "heads in layer 0, got torch.float8_e4m3fn. Inspect the model before"),
        ([stock, "--text", tmp_path / "nowhere"], "Cannot read"),
        ([stock, "--text", tmp_path / "blank"], "contains no text"),
        ([stock, "--text", text, "--tokens", 200], "1 to 128 tokens in total"),
        ([stock, "--text", text, "--device", "gpu"], "--device 'gpu' is not available"),
    ):
        code, stdout, stderr = run(given[0], tmp_path / "out", *given[1:])
        assert (code, stdout, len(stderr.splitlines())) == (2, "", 1), given
        assert message in stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install '.[plots]'" in run(plain, tmp_path / "out")[2]
    assert not (tmp_path / "out").exists()
