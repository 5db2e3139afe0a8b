"""Test that a checkpoint and an exported model of version 0.1 can still be used.

``version_0_1`` was written by commit 4aef552 with torch 2.14.1 and transformers 5.23.0: two layers
with KHA-Linear on queries and keys, KHA-MLP on values and a gate per head on the output, after two
iterations. ``logits.safetensors`` contains that version's logits of the exported model.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kha_megatron.heads import Gate, Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import read_kha
from tests.hf.test_decoding import decode_with_exported_code, exported_code

OLD = Path(__file__).parent / "version_0_1"
HEADS = HeadsConfig(Knock(query="linear", key="linear", value="mlp"), Gate(output="head"))
RESUME = """
-m torch.distributed.run --nproc-per-node 1 -m kha_megatron.training --device cpu
--num-layers 2 --hidden-size 16 --ffn-hidden-size 12 --num-attention-heads 4 --kv-channels 4
--group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu --qk-layernorm
--disable-bias-linear --position-embedding-type rope --seq-length 12 --max-position-embeddings 12
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 2 --lr 1e-2
--seed 7 --mock-data --vocab-size 56 --make-vocab-size-divisible-by 8 --num-workers 0
--eval-iters 0 --log-interval 1 --untie-embeddings-and-output-weights --no-load-optim --no-load-rng
--kha-preset kha_linear --kha-value mlp --heads gate.output=head --train-iters 3
"""
NEXT_LOSS = 3.877337
"""The loss of version 0.1 in the next iteration."""


@pytest.fixture
def old(tmp_path):
    """Return a copy of the files, since some commands write next to them."""
    return shutil.copytree(OLD, tmp_path / "old")


def test_an_exported_model_has_its_logits(old):
    expected = load_file(old / "logits.safetensors")
    model = AutoModelForCausalLM.from_pretrained(old / "export", dtype=torch.float32).eval()
    assert read_kha(model.config) == HEADS
    with torch.no_grad():
        logits = model(expected["tokens"]).logits[0]
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-6)


def test_a_checkpoint_is_exported_to_the_same_tensors(run, old, tmp_path):
    code, _, stderr = run("convert", "to-hf", old / "checkpoint", tmp_path / "new")
    assert code == 0, stderr
    expected = load_file(old / "export" / "model.safetensors")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def test_the_code_of_an_exported_model_is_updated(run, old):
    code, _, stderr = run("convert", "update-code", old / "export")
    assert code == 0, stderr
    code, _, stderr = run("verify", old / "checkpoint", old / "export")
    assert code == 0, stderr


@pytest.mark.versions
@exported_code
def test_updated_code_decodes_without_this_package(run, old, tmp_path):
    """With transformers 5.24, the code of version 0.1 ignores the KV cache."""
    expected = load_file(old / "logits.safetensors")
    models = tmp_path / "models"
    models.mkdir()
    model = (old / "export").rename(models / "export")
    torch.save(expected["tokens"], model / "ids.pt")
    code, _, stderr = run("convert", "update-code", model)
    assert code == 0, stderr
    decode_with_exported_code(models, tmp_path / "cache")
    decoded = torch.load(model / "decoded.pt")
    torch.testing.assert_close(decoded[0], expected["logits"], rtol=0, atol=2e-5)


def test_a_checkpoint_is_resumed(old):
    command = [sys.executable, *shlex.split(RESUME), "--load", str(old / "checkpoint")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    (loss,) = re.findall(r"iteration +3/ +3 .* lm loss: (\S+)", run.stdout)
    assert float(loss) == pytest.approx(NEXT_LOSS, abs=2e-6)
