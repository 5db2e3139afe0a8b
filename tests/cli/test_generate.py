"""``kha-megatron generate``: output, sampling and bad input."""

import io
import json
import shutil

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from kha_megatron import cli
from kha_megatron.cli.generate import _write
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.hf import KHAForCausalLM, KHAModelConfig
from tests.cli.small_models import MODEL, train_tokenizer

PROMPT = "def main(x):\n\treturn"
SIZES = MODEL | {"hidden_size": 22}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(PROMPT, 300, every_byte=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory, tokenizer):
    """A MoE model with KHA-MLP; tests that change it use ``folder``."""
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


def test_greedy_output_matches_transformers(original, tokenizer):
    result = run(original, PROMPT, "--greedy", "--max-new-tokens", 9)
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(original)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0]
    new = ids[inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    assert result.stdout == PROMPT + text + "\n"
    words = (PROMPT, "--greedy", "--max-new-tokens", 9, "--json")
    printed = json.loads(run(original, *words).stdout)
    assert printed == {"prompt": PROMPT, "text": text, "tokens": 9}


def test_a_seed_makes_sampling_repeatable(original):
    first, again, other = (
        run(original, PROMPT, "--seed", seed, "--temperature", 2.0, "--max-new-tokens", 20).stdout
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_sampling_uses_the_whole_vocabulary(original, monkeypatch):
    """transformers samples from 50 tokens by default."""
    seen = {}

    def spy(_self, **kwargs):
        seen.update(kwargs["generation_config"].to_dict())
        return kwargs["input_ids"]

    monkeypatch.setattr(KHAForCausalLM, "generate", spy)
    run(original, PROMPT)
    assert (seen["top_k"], seen["temperature"], seen["do_sample"]) == (0, 0.8, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "gpu"], "'gpu'"),
        (["--device", "cuda:99"], "'cuda:99'"),
        (["--max-new-tokens", 125], "has 128 positions"),
    ],
)
def test_bad_settings_are_refused(original, options, message):
    result = run(original, PROMPT, *options)
    assert isinstance(result.exception, ConfigError), result.output
    assert message in str(result.exception)
    assert result.stdout == ""


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "has no config.json"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "transformers cannot load"),
        (truncate, "damaged"),
        (lambda f: edit_config(f, model_type="khan"), "transformers cannot load"),
        # transformers would initialise the third layer at random, or drop the second, silently
        (lambda f: edit_config(f, num_hidden_layers=3, mlp_layer_types=None), "missing weights"),
        (lambda f: edit_config(f, num_hidden_layers=1, mlp_layer_types=None), "unexpected weights"),
        (lambda f: edit_config(f, moe_intermediate_size=7), "mismatched weights"),
    ],
)
def test_a_damaged_model_is_refused(folder, damage, message):
    damage(folder)
    result = run(folder, PROMPT)
    assert isinstance(result.exception, CheckpointError), repr(result.exception)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.stdout == ""


def test_a_tokenizer_of_another_model_is_refused(folder):
    KHAForCausalLM(KHAModelConfig(**SIZES, vocab_size=50)).save_pretrained(folder)
    assert "Use the tokenizer of this model" in str(run(folder, PROMPT).exception)


def test_code_in_the_directory_never_runs(folder, tmp_path):
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": "evil.T"}
    edit_config(folder, auto_map=names)
    run(folder, PROMPT, "--max-new-tokens", 2)
    edit_config(folder, model_type="evil")
    assert isinstance(run(folder, PROMPT).exception, CheckpointError)
    assert not marker.exists()


def test_a_terminal_receives_no_escape_sequences(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    text = "a\tb\n\x1b[2J\x9bé"
    for stream, expected in ((Terminal(), "a\tb\n\ufffd[2J\ufffdé"), (io.StringIO(), text)):
        monkeypatch.setattr(cli.console, "out", Console(file=stream))
        _write(text)
        assert stream.getvalue() == expected
