"""A fold with a tokenizer of ``data prepare`` in llama.cpp, by the commands of its model card.

Truth is transformers on the same folder. ``tools/test_serving.sh`` fetches converter and runtime.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kha_megatron
from kha_megatron.conversion import llama_cpp
from kha_megatron.hf import KHAForCausalLM, KHAModelConfig

PLACE = os.environ.get("KHA_LLAMA_CPP")
pytestmark = pytest.mark.skipif(
    PLACE is None, reason="llama.cpp is NOT tried: run `make test-serving`, which fetches it"
)
PROMPTS = ("def main(self):\n    return x", "it's  3333 naïve 🦙\n\n\timports")
TOKENS = 24


def kha(*words):
    command = [sys.executable, "-m", "kha_megatron", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a fold in it, and llama.cpp beside it as its card has it."""
    folder = tmp_path_factory.mktemp("llama")
    source = Path(kha_megatron.__file__).parent / "heads"
    words = ("--glob", "*.py", "--vocab-size", 300, "--out", folder / "data")
    kha("data", "prepare", "--from", source, *words)
    tokenizer = AutoTokenizer.from_pretrained(folder / "data" / "tokenizer")
    config = KHAModelConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        **{f"kha_{projection}": "linear" for projection in ("query", "key", "value")},
    )
    torch.manual_seed(3)
    model = KHAForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    for part in (model, tokenizer):
        part.save_pretrained(folder / "kha")
    told = kha("convert", "fold", folder / "kha", folder / "folded model", "--no-verify")
    assert "llama.cpp's converter does not know this tokenizer: README.md teaches it" in told
    shutil.copytree(PLACE, folder / "llama.cpp", ignore=shutil.ignore_patterns("packages"))
    return folder


def shell(folder, command):
    python = Path(sys.executable).parent
    path = {"PATH": f"{python}:{os.environ['PATH']}", "PYTHONPATH": f"{PLACE}/packages"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder / "folded model",
        env=os.environ | path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def commands(folder):
    """The lines of the card's block for llama.cpp."""
    card = (folder / "folded model" / "README.md").read_text()
    return card.split("llama.cpp:\n")[1].split("```bash\n")[1].split("\n```")[0].splitlines()


def test_its_converter_is_asked_by_the_text_that_we_know(made):
    source = (made / "llama.cpp/conversion/base.py").read_text()
    line = next(line for line in source.splitlines() if line.strip().startswith("chktxt = "))
    assert ast.literal_eval(line.partition(" = ")[2]) == llama_cpp.TEXT


def test_the_card_is_followed(made):
    """Refused before the first line of the card, converted after it; the same text, tokens and
    log-probabilities."""
    teach, convert = commands(made)
    refused = shell(made, convert)
    assert refused.returncode != 0
    assert "BPE pre-tokenizer was not recognized" in refused.stderr
    done = shell(made, f"{teach} && {convert} --outtype f32")
    assert done.returncode == 0, done.stderr[-3000:]

    folded = made / "folded model"
    tokenizer = AutoTokenizer.from_pretrained(folded)
    model = AutoModelForCausalLM.from_pretrained(folded, dtype=torch.float32).eval()
    asking = Path(__file__).with_name("ask_llama_cpp.py")
    for prompt in PROMPTS:
        gguf, rows = made / "model.gguf", model.config.vocab_size
        words = [sys.executable, asking, gguf, TOKENS, rows, prompt]
        asked = subprocess.run(
            list(map(str, words)),
            env=os.environ | {"PYTHONPATH": f"{PLACE}/packages"},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert asked.returncode == 0, asked.stderr[-3000:]
        answer = json.loads(asked.stdout.splitlines()[-1])
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert answer["prompt"] == ids.shape[1]
        with torch.no_grad():
            first = model(ids).logits[0, -1].log_softmax(-1)
            text = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        assert answer["greedy"] == text[0, ids.shape[1] :].tolist()
        off = (torch.tensor(answer["first"]) - first).abs().max().item()
        assert off < 1e-3, off  # all is float32, added up in another order
