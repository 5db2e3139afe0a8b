"""``kha-megatron inspect --text``: any model, its figures, and what is refused before any work."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from kha_megatron import cli
from kha_megatron.config import KHAConfig
from kha_megatron.hf import KHAModelConfig
from kha_megatron.hf.instruments import measure
from tests.cli.words import MODEL, save_with_pictures, trained
from tests.conversion.checkpoints import save_gpt

TEXT = "def main(x):\n\treturn x + 1\n" * 20
SIZES = MODEL | {"vocab_size": 300}


@pytest.fixture(scope="module")
def words():
    return trained(TEXT, 30)  # the checkpoints of these tests have 56 rows


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*given):
        monkeypatch.setattr(sys, "argv", ["kha-megatron", "inspect", *map(str, given)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        streams = capsys.readouterr()
        return exit_.value.code, streams.out, streams.err

    return run


def saved(folder, config, words=None):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if words is not None:
        words.save_pretrained(folder)
    return folder


def test_a_stock_model_is_measured(run, words, text, tmp_path):
    folder = saved(tmp_path / "model", Qwen3Config(**SIZES), words)
    code, stdout, _ = run(folder, tmp_path / "out", "--text", text, "--tokens", 50, "--json")
    assert code == 0
    result = json.loads(stdout)
    assert result["files"] == [str(tmp_path / "out" / "attention.png")]
    assert result["text"] == {"file": str(text), "tokens": 50}
    assert result["matrices"] == []
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = measure(model, words(TEXT, return_tensors="pt").input_ids[:, :50])
    for of_layer, figures in zip(result["layers"], found, strict=True):
        assert of_layer["sinks"] == pytest.approx(figures.sinks, rel=1e-5)
        assert of_layer["peak"] == pytest.approx(figures.peak, rel=1e-5)
        assert of_layer["figures"] == {}


def test_the_text_model_of_one_that_sees_pictures_is_measured(run, words, text, tmp_path):
    """Those that transformers has no other class for."""
    save_with_pictures(tmp_path / "model", words)
    given = (tmp_path / "model", tmp_path / "out", "--text", text)
    code, stdout, stderr = run(*given, "--tokens", 20, "--json")
    assert code == 0, stderr
    for figures in json.loads(stdout)["layers"]:
        assert 0.3 < figures["figures"]["gate-score/output"] < 0.7
        assert len(figures["sinks"]) == 6
    code, _, stderr = run(*given, "--tokens", 200, "--overwrite")
    assert code == 2
    assert "exceed the 128 positions" in stderr


def test_tables_and_pictures_of_everything(run, words, text, tmp_path):
    config = KHAModelConfig(
        **SIZES, kha_value="mlp", kha_gate={"output": "head"}, kha_moh={"share": 0.5}
    )
    folder = saved(tmp_path / "model", config, words)
    code, stdout, stderr = run(folder, tmp_path / "out", "--text", text)
    assert code == 0
    for title in ("value heads (mlp)", "attention over", "gates and heads", "gate-shut"):
        assert title in stdout
    assert "4 pictures" in stderr
    assert (tmp_path / "out" / "attention.png").stat().st_size > 10_000


def test_talking_heads_are_passed_through_eagerly(run, words, text, tmp_path):
    folder = saved(tmp_path / "model", KHAModelConfig(**SIZES, kha_talking={}), words)
    code, stdout, _ = run(folder, tmp_path / "out", "--text", text, "--json")
    assert code == 0
    assert [figures["sinks"] for figures in json.loads(stdout)["layers"]] == [[], []]


def test_a_megatron_checkpoint_is_converted_first(run, ranks, words, text, tmp_path):
    save = tmp_path / "save"
    ranks(save_gpt, 1, str(save), KHAConfig(value="mlp"), {}, {"num_layers": 2}, {})
    words.save_pretrained(tmp_path / "words")
    given = (save, tmp_path / "out", "--text", text, "--tokens", 12)
    code, _, stderr = run(*given)
    assert code == 2
    assert "--tokenizer FOLDER" in stderr
    code, stdout, stderr = run(*given, "--tokenizer", tmp_path / "words", "--json")
    assert code == 0, stderr
    result = json.loads(stdout)
    assert len(result["layers"]) == 2
    assert len(result["matrices"]) == 2 * 3


def test_bad_input_is_one_line_with_the_remedy(run, words, text, tmp_path):
    folder = saved(tmp_path / "model", Qwen3Config(**SIZES), words)
    out = tmp_path / "out"
    binary, blank = tmp_path / "binary", tmp_path / "blank"
    binary.write_bytes(b"\xff\xfe" * 9)
    blank.write_text(" \n")
    for given, message in (
        (["--text", tmp_path / "nowhere"], "is no file"),
        (["--text", binary], "is not UTF-8 at byte 0"),
        (["--text", blank], "holds no text"),
        (["--text", text, "--tokens", 200], "--tokens 200 exceed the 128 positions"),
        (["--text", text, "--tokenizer", folder], "which has its own: leave it out"),
        ([], "records no knocking heads"),
    ):
        code, stdout, stderr = run(folder, out, *given)
        assert (code, stdout) == (2, ""), given
        assert message in stderr
        assert len(stderr.splitlines()) == 1
        assert not out.exists()
