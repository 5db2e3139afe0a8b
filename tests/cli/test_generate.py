"""``kha-megatron generate``: what it prints, and what it refuses before any work."""

import io
import json
import re
import shutil
import sys

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config
from typer.testing import CliRunner

from kha_megatron import cli
from kha_megatron.cli.generate import _write
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.hf import KHAForCausalLM, KHAModelConfig
from tests.cli.words import MODEL, save_with_pictures, trained

PROMPT = "def main(x):\n\treturn"
SIZES = MODEL | {"hidden_size": 22}


@pytest.fixture(scope="module")
def tokenizer():
    return trained(PROMPT, 300, whole=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory, tokenizer):
    """A knocked MoE model folder; tests that change it work on a copy."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hf") / "model"
    config = KHAModelConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        kha_value="mlp",
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=14,
        scoring_func="sigmoid",
    )
    KHAForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def run(*arguments):
    return CliRunner().invoke(cli.app, ["generate", *map(str, arguments)])


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_greedy_prints_the_prompt_and_what_the_model_says(original, tokenizer):
    result = run(original, PROMPT, "--greedy", "--max-new-tokens", 9)
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(original)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0]
    new = ids[inputs["input_ids"].shape[1] :]
    assert result.stdout == PROMPT + tokenizer.decode(new, skip_special_tokens=True) + "\n"
    assert f"{len(new)} tokens in" in result.stderr


def test_as_json(original):
    words = (PROMPT, "--greedy", "--max-new-tokens", 9)
    result = run(original, *words, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["prompt"] + told["text"] + "\n" == run(original, *words).stdout
    assert (told["prompt"], told["tokens"], told["device"]) == (PROMPT, 9, "cpu")
    assert told["seconds"] > 0


def test_a_seed_makes_sampling_repeatable_and_another_one_changes_it(original):
    first, again, other = (
        run(original, PROMPT, "--seed", seed, "--temperature", 2.0, "--max-new-tokens", 20)
        for seed in (1, 1, 2)
    )
    assert first.exit_code == 0, first.output
    assert first.stdout == again.stdout != other.stdout


def test_a_narrow_top_p_is_greedy(original):
    narrow = run(original, PROMPT, "--top-p", 1e-6, "--max-new-tokens", 9)
    assert narrow.stdout == run(original, PROMPT, "--greedy", "--max-new-tokens", 9).stdout


def test_sampling_reaches_beyond_the_fifty_likeliest_tokens(original, monkeypatch):
    """transformers keeps only 50 unless told otherwise, and a folder may say anything."""
    seen = {}

    def spy(_self, **kwargs):
        seen.update(kwargs["generation_config"].to_dict())
        return kwargs["input_ids"]

    monkeypatch.setattr(KHAForCausalLM, "generate", spy)
    run(original, PROMPT)
    assert (seen["top_k"], seen["top_p"], seen["temperature"]) == (0, 1.0, 0.8)
    assert (seen["do_sample"], seen["max_new_tokens"]) == (True, 64)


def test_stock_architectures_work_too(tokenizer, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, vocab_size=len(tokenizer)))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = run(tmp_path, PROMPT, "--max-new-tokens", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(PROMPT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", 0], "--temperature 0.0 must be above 0"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--top-p", 1.5], "--top-p 1.5"),
        (["--greedy", "--seed", 1, "--top-p", 0.5], "leave out --top-p, --seed"),
        (["--device", "gpu"], "'gpu' is no device"),
        (["--device", "meta"], "'meta' is not supported"),
        (["--device", "cuda:99"], "this machine has"),
        (["--max-new-tokens", 125], "exceed the 128 positions"),
    ],
)
def test_bad_settings_are_refused(original, options, message):
    result = run(original, PROMPT, *options)
    assert isinstance(result.exception, ConfigError), result.output
    assert message in str(result.exception)
    assert result.stdout == ""


def test_a_model_that_sees_pictures_continues_text(tokenizer, tmp_path):
    save_with_pictures(tmp_path, tokenizer)
    result = run(tmp_path, PROMPT, "--greedy", "--max-new-tokens", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(PROMPT)
    result = run(tmp_path, PROMPT, "--max-new-tokens", 125)
    assert "exceed the 128 positions" in str(result.exception)


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def only_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is no folder"),
        (remove("config.json"), "no config.json"),
        (remove("tokenizer.json"), "has no tokenizer"),
        (remove("model.safetensors"), "model.safetensors"),
        (only_a_pickle, "pytorch_model.bin"),
        (truncate, "damaged"),
        (lambda f: (f / "config.json").write_text("{"), "JSON"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "cannot be loaded"),
        (lambda f: edit_config(f, model_type="khan"), "model_type 'khan'"),
        (lambda f: edit_config(f, kha_value="wide"), "unknown KHA variant 'wide'"),
        (lambda f: edit_config(f, num_hidden_layers="2"), "num_hidden_layers"),
        (
            lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}),
            "cannot be loaded",
        ),
        (lambda f: edit_config(f, attn_implementation="flash_attention_2"), "(ImportError)"),
        (lambda f: edit_config(f, num_attention_heads=0), "(ZeroDivisionError)"),
        (lambda f: edit_config(f, dtype="floaty"), "(AttributeError)"),
        # transformers would draw the third layer at random, or drop the second, in silence.
        (lambda f: edit_config(f, num_hidden_layers=3, mlp_layer_types=None), "missing weights"),
        (lambda f: edit_config(f, num_hidden_layers=1, mlp_layer_types=None), "unexpected weights"),
        (
            lambda f: edit_config(f, moe_intermediate_size=7),
            "mismatched weights, such as model.lay",
        ),
    ],
)
def test_a_folder_that_cannot_be_generated_from_is_refused(folder, damage, message):
    damage(folder)
    result = run(folder, PROMPT)
    assert isinstance(result.exception, CheckpointError | ConfigError), repr(result.exception)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.stdout == ""


def test_a_tokenizer_of_another_model_is_refused(folder, tokenizer):
    smaller = KHAModelConfig(**SIZES, vocab_size=50)
    KHAForCausalLM(smaller).save_pretrained(folder)
    result = run(folder, PROMPT)
    assert isinstance(result.exception, CheckpointError)
    assert "the tokenizer is of another model" in str(result.exception)


def test_code_in_the_folder_never_runs(folder, tmp_path):
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": "evil.T"}
    edit_config(folder, auto_map=names)
    run(folder, PROMPT, "--max-new-tokens", 2)
    edit_config(folder, model_type="evil")
    assert isinstance(run(folder, PROMPT).exception, CheckpointError)
    assert not marker.exists()


def test_the_command_exits_with_2_and_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kha-megatron", "generate", str(tmp_path / "none"), "x"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert re.fullmatch(r"error: .* is no folder: .*\n", capsys.readouterr().err)


def test_a_terminal_is_not_given_escape_sequences(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    text = "a\tb\n\x1b[2J\x9bé"
    for stream, expected in ((Terminal(), "a\tb\n\ufffd[2J\ufffdé"), (io.StringIO(), text)):
        monkeypatch.setattr(cli.console, "out", Console(file=stream))
        _write(text)
        assert stream.getvalue() == expected
