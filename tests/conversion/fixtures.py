"""Checkpoints written by two ranks."""

import shutil
import sys

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kha_megatron import cli
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from tests.conversion.checkpoints import VOCAB, save_gpt

KHA = HeadsConfig(Knock(query="linear", key="gate", value="mlp"))


@pytest.fixture(scope="session")
def dense(ranks, tmp_path_factory):
    """Return the save directory of three layers on TP=2, and the parameters of each rank."""
    folder = tmp_path_factory.mktemp("dense") / "save"
    layout = {"tensor_model_parallel_size": 2}
    args = {"rotary_base": 10000, "spec": None}
    return folder, ranks(save_gpt, 2, str(folder), KHA, layout, {"num_layers": 3}, args)


@pytest.fixture
def copy(dense, tmp_path):
    """Return a copy of the dense save directory."""
    return shutil.copytree(dense[0], tmp_path / "save")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Return a tokenizer directory with fewer entries than the embedding has rows."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)


@pytest.fixture(scope="session")
def sparse(ranks, tmp_path_factory, tokenizer):
    """Return the save directory of a sparse model on TP=2 x EP=2, and each rank's parameters."""
    folder = tmp_path_factory.mktemp("sparse") / "save"
    layout = {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    config = {
        "num_layers": 3,
        "num_moe_experts": 6,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 20,
        "moe_layer_freq": [0, 1, 1],
        "moe_shared_expert_intermediate_size": 28,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
    }
    args = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer)}
    return folder, ranks(save_gpt, 2, str(folder), KHA, layout, config, args)


def write_tokenizer(folder, entries):
    """Save a word-level tokenizer. The last two entries are special tokens."""
    words = {f"w{i}": i for i in range(entries - 2)}
    words |= {"<end>": entries - 2, "<pad>": entries - 1}
    model = Tokenizer(WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = WhitespaceSplit()
    special = {"eos_token": "<end>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """``run("verify", a, b)``: exit code, stdout and stderr of a ``kha-megatron`` command."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kha-megatron", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return run
