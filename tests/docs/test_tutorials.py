"""Run all commands of the tutorials."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from tests.docs.pages import ROOT, blocks

pytestmark = [pytest.mark.whole, pytest.mark.slow, pytest.mark.timeout(1800)]

ACTIVATE = "source .venv/bin/activate"
SERVED = re.compile("vllm|localhost")
UNREACHABLE = re.compile("No matching distribution|connection broken")
AGREE = re.compile(r"same most likely token +100\.00% of")


@pytest.fixture
def walk(tmp_path):
    """Return a function that runs the blocks of a page and returns their outputs.

    Each block runs in a new shell. Blocks with vLLM run in tests/serving.
    """
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {"NEMORUN_HOME": str(tmp_path / "nemo")}
    for name, value in os.environ.items():
        if name in ("HOME", "LANG", "PATH", "TMPDIR") or name.startswith("PIP_"):
            environment[name] = value

    def walk(page):
        first, *rest = [text for _, text in blocks(page, "bash")]
        assert first == f"{ACTIVATE}\n"
        printed = []
        for text in rest:
            if SERVED.search(text):
                continue
            done = subprocess.run(
                ["bash", "-e"],
                input=first + text,
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            output = done.stdout + done.stderr
            if "pip download" in text and UNREACHABLE.search(output):
                pytest.skip("NOT TESTED: needs a package index")
            assert done.returncode == 0, f"{page}\n{text}\n{output[-4000:]}"
            printed.append(output)
        return printed

    walk.place = Path(tmp_path)
    return walk


def losses(text):
    """Return the losses in a training log by iteration."""
    matches = re.findall(r"iteration +(\d+)/ +\d+ \|.*?lm loss: (\S+)", text)
    return {int(iteration): float(loss) for iteration, loss in matches}


def losses_of_launch(output):
    """Return the losses in the log that ``kha-megatron launch`` names."""
    log = re.search(r"Log of all ranks: (\S+)", output)[1]
    return losses(Path(log).read_text())


def test_a_stock_gpt_model_to_kha_and_back(walk):
    _, gpt, upcycled, trained, folded = walk("docs/tutorials/stock_script.md")
    line = "kha_megatron: using layer spec kha_linear (query=linear key=linear value=linear)\n"
    assert gpt.count(line) == 0
    assert trained.count(line) == 1
    assert "GPTModel IS DEPRECATED" in gpt
    assert "GPTModel IS DEPRECATED" not in trained
    plain = losses(gpt)
    ours = losses(trained)
    assert ours[1] == pytest.approx(plain[40], abs=0.1)  # one batch and a mean over ten
    assert ours[40] < ours[1] - 0.3
    assert AGREE.search(upcycled)
    assert AGREE.search(folded)
    model = AutoModelForCausalLM.from_pretrained(walk.place / "hf/folded")
    assert model.config.model_type == "qwen3"
    tokenizer = AutoTokenizer.from_pretrained(walk.place / "hf/folded")
    other_text = Path(json.__file__).read_text()
    ids = tokenizer(other_text, return_tensors="pt").input_ids
    ids = ids[:, :1024].reshape(8, 128)
    loss = model(ids, labels=ids).loss.item()
    assert loss == pytest.approx(ours[40], abs=0.5)


def held_out_loss(output):
    """Return the validation loss that Megatron prints."""
    return float(re.findall(r"on validation set \| lm loss value: (\S+)", output)[-1])


def loss_of_last_documents(model, corpus, share, sequences, length):
    """Return the loss of a transformers model on the documents that Megatron holds out."""
    dataset = IndexedDataset(str(corpus))
    first = round((1 - share) * len(dataset))
    ids = torch.cat([torch.from_numpy(dataset[i]).long() for i in range(first, len(dataset))])
    ids = ids[: sequences * length].reshape(sequences, length)
    with torch.no_grad():
        return model(ids, labels=ids).loss.item()


@pytest.mark.timeout(5400)
def test_a_pretrained_model_to_kha_and_back(walk):
    printed = walk("docs/tutorials/pretrained.md")
    _, upcycled, _, before, trained, inspected, folded, written, compared = printed
    assert AGREE.search(upcycled)
    assert AGREE.search(folded)
    config = json.loads((walk.place / "hf/folded/config.json").read_text())
    assert config["model_type"] == "llama"
    assert "query heads (linear)" in inspected
    base = AutoModelForCausalLM.from_pretrained(walk.place / "hf/smollm2")
    assert base.num_parameters() == 134_515_008
    corpus = walk.place / "data/python/corpus"
    expected = loss_of_last_documents(base, corpus, share=0.05, sequences=64, length=128)
    assert held_out_loss(before) == pytest.approx(expected, abs=0.3)  # other sequences
    assert held_out_loss(trained) < held_out_loss(before) - 0.05
    base_text, folded_text = written.split("def read_json(")[1:]
    assert base_text.strip() != folded_text.strip()
    report = json.loads((walk.place / "compare/smollm2/report.json").read_text())
    runs = {run["variant"]: run for run in report["runs"]}
    assert list(runs) == ["baseline", "null", "kha_linear", "kha_mlp"]
    first = runs["baseline"]["first_loss"]
    assert runs["kha_linear"]["first_loss"] == runs["kha_mlp"]["first_loss"] == first
    assert runs["null"]["first_loss"] == pytest.approx(first, abs=1e-4)
    assert abs(runs["null"]["delta"]) < abs(runs["kha_linear"]["delta"])
    assert "kha_mlp: held-out loss" in compared


FAMILIES = {
    "Qwen3-0.6B": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ),
    "Llama-3.2-1B": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
    ),
    "Mistral-7B-v0.3": MistralConfig(
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        sliding_window=None,
    ),
}
"""Published shapes with one layer."""


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_take_the_same_steps(name, walk):
    """Upcycle and fold in bfloat16. Untrained matrices leave all weights as they were."""
    torch.manual_seed(0)
    config = FAMILIES[name]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(walk.place / "hf/base")
    page = walk.place / "steps.md"
    upcycle = "kha-megatron convert upcycle hf/base ckpt/kha --kha-preset kha_linear"
    # a Mistral model without sliding windows would become a llama model, which computes the same
    fold = f"kha-megatron convert fold ckpt/kha hf/folded --architecture {config.model_type}"
    page.write_text("".join(f"```bash\n{text}\n```\n" for text in (ACTIVATE, upcycle, fold)))
    upcycled, folded = walk(page)
    assert AGREE.search(upcycled)
    assert AGREE.search(folded)
    before = load_file(walk.place / "hf/base/model.safetensors")
    after = load_file(walk.place / "hf/folded/model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    folded_config = json.loads((walk.place / "hf/folded/config.json").read_text())
    assert folded_config["model_type"] == config.model_type


def test_fine_tuning_on_conversations(walk):
    made, _, chat, answered = walk("docs/tutorials/finetune.md")
    assert re.search(r"architecture +qwen3 ", made)
    assert AGREE.search(made)
    base = losses_of_launch(made)
    assert base[350] < base[1] - 2
    model = AutoModelForCausalLM.from_pretrained(walk.place / "hf/base")
    tokenizer = AutoTokenizer.from_pretrained(walk.place / "ckpt/base/tokenizer")
    texts = [f"user: {i} + 1\nassistant: {i + 1}\n" for i in range(1, 9)]
    batch = tokenizer(
        texts,
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    loss = model(**batch, labels=labels).loss.item()
    chat_losses = losses(chat)
    assert chat_losses[1] == pytest.approx(loss, rel=1e-5)
    assert chat_losses[100] < 1
    assert AGREE.search(answered)


def test_two_mechanisms_compared(walk):
    walk("docs/tutorials/compare.md")
    page = (walk.place / "compare/first/report.html").read_text()
    numbers = json.loads((walk.place / "compare/first/report.json").read_text())
    (linear,) = (v for v in numbers["variants"] if v["name"] == "kha_linear")
    assert linear["delta"]["verdict"] == "lower"
    for words in ("reference", "the floor", "kha_linear", "kha_mlp"):
        assert words in page
