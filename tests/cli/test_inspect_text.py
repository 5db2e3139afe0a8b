"""``kha-megatron inspect --text``: attention statistics of any model, and bad input."""

import json

import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from kha_megatron.config import KHAConfig
from kha_megatron.hf import KHAModelConfig
from kha_megatron.hf.instruments import measure
from tests.cli.small_models import MODEL, train_tokenizer
from tests.conversion.checkpoints import save_gpt

TEXT = "def main(x):\n\treturn x + 1\n" * 20
SIZES = MODEL | {"vocab_size": 300}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, 30)  # the checkpoints of these tests have 56 rows


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def run(run):
    return lambda *words: run("inspect", *words)


def save(folder, config, tokenizer):
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_stock_model_is_measured(run, tokenizer, text, tmp_path):
    folder = save(tmp_path / "model", Qwen3Config(**SIZES), tokenizer)
    code, stdout, _ = run(folder, tmp_path / "out", "--text", text, "--tokens", 50, "--json")
    assert code == 0
    result = json.loads(stdout)
    assert result["files"] == [str(tmp_path / "out" / "attention.png")]
    assert result["text"] == {"file": str(text), "tokens": 50}
    assert result["matrices"] == []
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = measure(model, tokenizer(TEXT, return_tensors="pt").input_ids[:, :50])
    for of_layer, figures in zip(result["layers"], found, strict=True):
        assert of_layer["sinks"] == pytest.approx(figures.sinks, rel=1e-5)
        assert of_layer["peak"] == pytest.approx(figures.peak, rel=1e-5)
        assert of_layer["figures"] == {}


def test_tables_and_pictures_of_everything(run, tokenizer, text, tmp_path):
    config = KHAModelConfig(
        **SIZES, kha_value="mlp", kha_gate={"output": "head"}, kha_moh={"share": 0.5}
    )
    folder = save(tmp_path / "model", config, tokenizer)
    code, stdout, stderr = run(folder, tmp_path / "out", "--text", text)
    assert code == 0
    for title in ("value heads (mlp)", "attention over", "gates and heads"):
        assert title in stdout
    assert "4 pictures" in stderr
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


def test_bad_input_is_refused_before_anything_is_written(run, tokenizer, text, tmp_path, capsys):
    folder = save(tmp_path / "model", Qwen3Config(**SIZES), tokenizer)
    out, blank = tmp_path / "out", tmp_path / "blank"
    blank.write_text(" \n")
    capsys.readouterr()  # progress of saving the model
    for given, message in (
        (["--text", tmp_path / "nowhere"], "Cannot read"),
        (["--text", blank], "contains no text"),
        (["--text", text, "--tokens", 200], "Expected 1 to 128 tokens, got 200"),
        (["--text", text, "--device", "gpu"], "Expected --device to be auto, cpu"),
    ):
        code, stdout, stderr = run(folder, out, *given)
        assert (code, stdout) == (2, ""), given
        assert message in stderr
        assert len(stderr.splitlines()) == 1
        assert not out.exists()
