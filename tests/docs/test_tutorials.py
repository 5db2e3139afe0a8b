"""Run all commands of the tutorials."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.docs.pages import ROOT, blocks

pytestmark = [pytest.mark.whole, pytest.mark.slow, pytest.mark.timeout(1800)]

AGREE = re.compile(r"same most likely token +100\.00% of")


@pytest.fixture
def walk(tmp_path):
    """Return a function that runs the blocks of a page and returns their outputs.

    Each block runs in a new shell.
    """
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {"NEMORUN_HOME": str(tmp_path / "nemo")}
    for name in ("HOME", "LANG", "PATH", "TMPDIR"):
        if name in os.environ:
            environment[name] = os.environ[name]

    def walk(page):
        first, *rest = [text for _, text in blocks(page, "bash")]
        assert first == "source .venv/bin/activate\n"
        printed = []
        for text in rest:
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


def test_a_pretrained_model_to_kha_and_back(walk):
    _, made, upcycled, trained, moved, folded, written = walk("docs/tutorials/pretrained.md")
    assert re.search(r"architecture +qwen3 ", made)
    assert "query heads (linear)" in moved
    assert AGREE.search(upcycled)
    assert AGREE.search(folded)
    base = losses_of_launch(made)
    run = losses_of_launch(trained)
    assert run[1] == pytest.approx(base[350], abs=0.5)  # one batch each
    assert run[1] < base[1] - 2
    assert '"model_type": "qwen3"' in (walk.place / "hf/folded/config.json").read_text()
    assert "def main(" in written
    _, chat, answered = walk("docs/tutorials/finetune.md")
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
