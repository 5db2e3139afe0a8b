"""Write model cards and tokenizers."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from kha_megatron.conversion import to_hf
from kha_megatron.conversion.tokenizer_files import TokenizerFiles
from kha_megatron.hf import KHAForCausalLM, KHAModelConfig


@pytest.fixture(scope="module")
def tokenizer():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=263, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["the other heads and the other knocks"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


@pytest.fixture
def knocked(tokenizer, tmp_path):
    config = KHAModelConfig(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        kha_value="linear",
    )
    torch.manual_seed(0)
    for part in (KHAForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_the_card_of_a_fold(knocked, tokenizer, tmp_path):
    written = to_hf.plan(knocked, fold=True).write(tmp_path / "my model")
    card = (tmp_path / "my model" / "README.md").read_text()
    assert card.startswith("---\n")
    assert "\n# license:" in card  # left to the user
    assert "\nlicense:" not in card
    assert "from `base`, a Hugging Face model" in card
    assert str(tmp_path) not in card  # nobody else's business
    assert "trained with value=linear" in card
    assert f"- parameters: {written.parameters:,}" in card
    assert "import kha_megatron" not in card
    assert "vllm serve ." in card
    config = json.loads((tmp_path / "my model" / "config.json").read_text())
    assert config["rope_parameters"]["partial_rotary_factor"] == 1.0


def test_the_card_of_a_kha_model(knocked, tmp_path):
    to_hf.plan(knocked).write(tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert "Its heads have value=linear" in card
    assert "- of these in knock: 128" in card  # one 8x8 matrix in each of two layers
    assert "import kha_megatron.hf" in card
    assert "kha-megatron[vllm]" in card.split("\nvLLM")[1].split("vllm serve .")[0]


def test_the_card_says_what_vllm_refuses(knocked, tmp_path):
    config = json.loads((knocked / "config.json").read_text())
    (knocked / "config.json").write_text(json.dumps(config | {"kha_talking": {}}))
    model = KHAForCausalLM(KHAModelConfig.from_pretrained(knocked))
    model.save_pretrained(knocked)
    to_hf.plan(knocked).write(tmp_path / "talking")
    card = (tmp_path / "talking" / "README.md").read_text()
    assert "talking" in card.split("vLLM does not serve this model.")[1]
    assert "vllm serve" not in card


def test_a_padding_token_is_added(tokenizer, tmp_path):
    files = TokenizerFiles({"eos_token_id": 0, "pad_token_id": None}, "run", tokenizer)
    files.write(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == "<end>"
    assert GenerationConfig.from_pretrained(tmp_path).pad_token_id == tokenizer.eos_token_id
    assert files.token_ids["pad_token_id"] is None
