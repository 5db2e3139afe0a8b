"""Test a pretrained model that is upcycled, trained with Megatron, folded and exported."""

import re
import shlex

import pytest
import torch
from transformers import AutoModelForCausalLM

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import KHAForCausalLM
from kha_megatron.model.recorded import read_knock_weights
from tests.conversion.models import CONFIGS, make, tokens
from tests.training.conftest import start
from tests.training.test_pretrain import moved

RUN = shlex.split("""
--device cpu --tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 4
--train-iters 3 --lr 1e-2 --seq-length 24 --mock-data --tokenizer-type NullTokenizer
--vocab-size 51 --split 99,1,0 --eval-iters 0 --eval-interval 100 --num-workers 0 --save-interval 3
--log-interval 1
""")


@pytest.mark.whole
@pytest.mark.parametrize("name", ["qwen3", "qwen2, tied, yarn", "llama, llama3 rope"])
def test_a_pretrained_model_is_trained_with_kha_and_served_without(tmp_path, name):
    base = make(CONFIGS[name])
    base.save_pretrained(tmp_path / "base")
    planned = to_megatron.plan_import(
        tmp_path / "base",
        upcycle=HeadsConfig(Knock(query="linear", key="linear", value="linear")),
    )
    arguments = planned.write(tmp_path / "start").arguments

    folder = tmp_path / "run"
    folder.mkdir()
    words = [*RUN, *arguments, "--load", str(folder), "--save", str(folder)]
    run = start([*words, "--exit-interval", "2"], 2)
    assert run.codes == [0, 0], run.output[-4000:]
    assert "knocks query=linear key=linear value=linear in 2 of 2 layers" in run.output
    assert re.search(r"iteration +1/ +3 ", run.output)
    again = start(words, 2)
    assert again.codes == [0, 0], again.output[-4000:]
    assert re.findall(r"iteration +(\d)/ +3 ", again.output) == ["3"]
    trained = MegatronCheckpoint.open(tmp_path / "run")
    assert trained.iteration == 3
    assert all(moved(read_knock_weights(trained)))

    to_hf.plan_export(tmp_path / "run").write(tmp_path / "knocked")
    to_hf.plan_export(tmp_path / "run", fold=True).write(tmp_path / "folded")
    knocked = KHAForCausalLM.from_pretrained(tmp_path / "knocked").eval()
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "folded").eval()
    assert type(folded) is type(base)
    assert base.config.rope_parameters.items() <= folded.config.rope_parameters.items()
    with torch.no_grad():
        expected = knocked(tokens()).logits
        torch.testing.assert_close(
            folded(tokens()).logits,
            expected,
            rtol=0,
            atol=1e-5,
        )
