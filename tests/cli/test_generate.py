"""``kha-megatron generate``: output, sampling and bad input."""

import io
import json
import shutil

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from kha_megatron import cli
from kha_megatron.cli.generate import _write
from kha_megatron.hf import KHAForCausalLM, KHAModelConfig
from tests.cli.small_models import MODEL, train_tokenizer

PROMPT = "def main(x):\n\treturn"
SIZES = MODEL | {"hidden_size": 22}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(PROMPT, 300, every_byte=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory, tokenizer):
    """Return a MoE model with KHA-MLP. Tests that change it use ``folder``."""
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


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.versions
def test_greedy_output_matches_transformers(run, original, tokenizer):
    code, printed, stderr = run("generate", original, PROMPT, "--greedy", "--max-new-tokens", 9)
    assert code == 0, stderr
    model = AutoModelForCausalLM.from_pretrained(original)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0]
    new = ids[inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    assert printed == PROMPT + text + "\n"
    words = (PROMPT, "--greedy", "--max-new-tokens", 9, "--json")
    _, stdout, _ = run("generate", original, *words)
    assert json.loads(stdout) == {"prompt": PROMPT, "text": text, "tokens": 9}


def test_a_seed_makes_sampling_repeatable(run, original):

    def generate(seed):
        words = ["--temperature", 2.0, "--max-new-tokens", 20, "--seed", seed]
        _, stdout, _ = run("generate", original, PROMPT, *words)
        return stdout

    first = generate(seed=1)
    assert generate(seed=1) == first
    assert generate(seed=2) != first


def test_sampling_uses_the_whole_vocabulary(run, original, monkeypatch):
    """transformers samples from 50 tokens by default."""
    seen = {}

    def spy(_self, **kwargs):
        seen.update(kwargs["generation_config"].to_dict())
        return kwargs["input_ids"]

    monkeypatch.setattr(KHAForCausalLM, "generate", spy)
    run("generate", original, PROMPT)
    assert seen["top_k"] == 0
    assert seen["temperature"] == 0.8
    assert seen["do_sample"]


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def replace_model(folder):
    KHAForCausalLM(KHAModelConfig(**SIZES, vocab_size=50)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "config.json not found"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "Could not load"),
        (truncate, "damaged"),
        (lambda f: edit_config(f, model_type="khan"), "Could not load"),
        # transformers would initialise the third layer at random, or drop the second, silently
        (lambda f: edit_config(f, num_hidden_layers=3, mlp_layer_types=None), "missing keys"),
        (lambda f: edit_config(f, num_hidden_layers=1, mlp_layer_types=None), "unexpected keys"),
        (lambda f: edit_config(f, moe_intermediate_size=7), "mismatched keys"),
        (replace_model, "Does the tokenizer belong to this model"),
    ],
)
def test_a_damaged_model_is_refused(run, folder, capsys, damage, message):
    damage(folder)
    capsys.readouterr()  # progress of saving a model
    code, stdout, stderr = run("generate", folder, PROMPT)
    assert code == 2
    assert stdout == ""
    assert stderr.splitlines()[-1].startswith("error: ")
    assert message in stderr.splitlines()[-1]


def test_code_in_the_directory_never_runs(run, folder, tmp_path):
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    names = {
        "AutoConfig": "evil.C",
        "AutoModelForCausalLM": "evil.M",
        "AutoTokenizer": "evil.T",
    }
    edit_config(folder, auto_map=names)
    run("generate", folder, PROMPT, "--max-new-tokens", 2)
    edit_config(folder, model_type="evil")
    assert run("generate", folder, PROMPT)[0] == 2
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
