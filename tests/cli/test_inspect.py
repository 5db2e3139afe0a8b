"""``kha-megatron inspect``: statistics of matrices and attention, pictures and bad input."""

import functools
import json
import math
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import MATRICES
from kha_megatron.hf import KHAModelConfig
from kha_megatron.hf.instruments import measure_layers
from kha_megatron.model.recorded import read_knock_weights
from tests.cli.small_models import MODEL, train_tokenizer
from tests.conversion.checkpoints import ITERATION, save_gpt

D = 7
LAYERS = 3
PNGS = [
    *("distance.png", "query_proj.png"),
    *("value_down.png", "value_gate.png", "value_up.png"),
]
TEXT = "def main(x):\n\treturn x + 1\n" * 20
SIZES = MODEL | {"vocab_size": 300}


@pytest.fixture
def matrices():
    generator = torch.Generator().manual_seed(2)
    names = ("q_knock.proj", "v_knock.up_proj", "v_knock.gate_proj", "v_knock.down_proj")
    tensors = {}
    for layer in range(LAYERS):
        for name in names:
            matrix = torch.randn(D, D, generator=generator)
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = matrix
    return tensors


def _write(folder, matrices, **changes):
    folder.mkdir()
    config = {
        "num_hidden_layers": LAYERS,
        "kha_query": "linear",
        "kha_value": "mlp",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(matrices, folder / "model.safetensors")
    return folder


@pytest.fixture
def model(tmp_path, matrices):
    return _write(tmp_path / "model", matrices)


@pytest.fixture
def run(run):
    return functools.partial(run, "inspect")


def test_json_lists_every_matrix_and_picture(run, model, matrices, tmp_path):
    out = tmp_path / "new" / "pictures"
    code, stdout, _ = run(model, out, "--json")
    assert code == 0
    result = json.loads(stdout)
    assert result["kha"]["value"] == "mlp"
    assert result["iteration"] is None
    assert sorted(out.iterdir()) == [out / name for name in PNGS]
    assert result["files"] == [str(out / name) for name in PNGS]
    entries = {}
    for entry in result["matrices"]:
        entries[entry["layer"], entry["projection"], entry["matrix"]] = entry
    assert len(entries) == len(result["matrices"]) == len(matrices)
    gate = matrices["model.layers.2.self_attn.v_knock.gate_proj.weight"]
    entry = entries[2, "value", "gate"]
    mean = gate.trace().item() / D
    assert entry["diagonal_mean"] == pytest.approx(mean, rel=1e-5)
    distance = gate.norm().item() / math.sqrt(D)
    assert entry["distance"] == pytest.approx(distance, rel=1e-5)
    share = 1 - gate.diagonal().square().sum() / gate.square().sum()
    assert entry["off_diagonal_share"] == pytest.approx(share.item(), rel=1e-5)


@pytest.mark.whole
def test_both_checkpoint_formats_give_the_same_statistics(run, ranks, tmp_path):
    save = tmp_path / "save"
    kha = HeadsConfig(Knock(query="linear", value="mlp"))
    layout = {"tensor_model_parallel_size": 2}
    ranks(save_gpt, 2, str(save), kha, layout, {"num_layers": LAYERS}, {})
    names = {
        "query": ["q_knock.proj"],
        "value": [f"v_knock.{matrix}_proj" for matrix in MATRICES["mlp"]],
    }
    matrices = {}
    weights = read_knock_weights(MegatronCheckpoint.open(save))
    for (layer, projection), weight in weights.items():
        for name, matrix in zip(names[projection], weight, strict=True):
            matrices[f"model.layers.{layer}.self_attn.{name}.weight"] = matrix.T.contiguous()
    model = _write(tmp_path / "hf", matrices)
    _, stdout, _ = run(save, tmp_path / "save.out", "--json")
    of_checkpoint = json.loads(stdout)
    _, stdout, _ = run(model, tmp_path / "hf.out", "--json")
    of_model = json.loads(stdout)
    assert of_checkpoint["iteration"] == ITERATION
    assert of_checkpoint["matrices"] == of_model["matrices"]


def test_matrices_with_nan_are_reported(run, matrices, tmp_path):
    matrices["model.layers.2.self_attn.q_knock.proj.weight"][0, 0] = math.nan
    model = _write(tmp_path / "model", matrices)
    code, stdout, _ = run(model, tmp_path / "out", "--json")
    assert code == 0
    entries = json.loads(stdout)["matrices"]
    (entry,) = [entry for entry in entries if entry["diagonal_mean"] is None]
    assert entry["layer"] == 2
    assert entry["matrix"] == "proj"
    assert entry["distance"] is None


def test_overwrite_replaces_pictures_and_nothing_else(run, model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.png").write_text("mine")
    code, stdout, stderr = run(model, out)
    assert code == 2
    assert stdout == ""
    assert "--overwrite" in stderr
    code, _, _ = run(model, out, "--overwrite")
    assert code == 0
    assert sorted(file.name for file in out.iterdir()) == PNGS
    (out / "notes.txt").write_text("mine")
    _, _, stderr = run(model, out, "--overwrite")
    assert "notes.txt" in stderr
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
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :50]
    measured = measure_layers(model, ids)
    for layer, expected in zip(result["layers"], measured, strict=True):
        assert layer["sinks"] == pytest.approx(expected.sinks, rel=1e-5)
        assert layer["peak"] == pytest.approx(expected.peak, rel=1e-5)
        assert layer["figures"] == {}


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
    assert "Saved 5 plots" in stderr
    assert (tmp_path / "out" / "attention.png").stat().st_size > 10_000


def test_a_megatron_checkpoint_is_converted(run, ranks, tokenizer, text, tmp_path):
    checkpoint = tmp_path / "save"
    ranks(save_gpt, 1, str(checkpoint), HeadsConfig(Knock(value="mlp")), {}, {"num_layers": 2}, {})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = [checkpoint, tmp_path / "out", "--text", text, "--tokens", 12]
    code, _, stderr = run(*words)
    assert code == 2
    assert "--tokenizer DIRECTORY" in stderr
    words += ["--tokenizer", tmp_path / "tokenizer", "--json"]
    code, stdout, stderr = run(*words)
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
    nowhere = tmp_path / "nowhere"
    empty = tmp_path / "empty"
    for model, options, message in (
        (plain, [], f"No KHA matrices found in {plain}"),
        (nowhere, [], f"{nowhere} is not a directory"),
        ("Some/Model-1", [], "hf download Some/Model-1 --local-dir Model-1"),
        (empty, [], f"{empty} has no"),
        (quantized, [], "heads in layer 0, got torch.float8_e4m3fn. Inspect the model before"),
        (stock, ["--text", nowhere], "Cannot read"),
        (stock, ["--text", tmp_path / "blank"], "contains no text"),
        (stock, ["--text", text, "--tokens", 200], "1 to 128 tokens in total"),
        (stock, ["--text", text, "--device", "gpu"], "--device 'gpu' is not available"),
    ):
        code, stdout, stderr = run(model, tmp_path / "out", *options)
        assert code == 2, (model, options)
        assert stdout == ""
        assert len(stderr.splitlines()) == 1, stderr
        assert message in stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, _, stderr = run(plain, tmp_path / "out")
    assert "pip install '.[plots]'" in stderr
    assert not (tmp_path / "out").exists()
