"""Gated attention travels: Megatron's own gate to stock classes of transformers, and back."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.verify import Pair
from tests.conversion.checkpoints import save_and_run, tokens
from tests.versions import needs_training_package

TP2 = {"tensor_model_parallel_size": 2}
GATED = {"attention_output_gate": True, "num_layers": 3}
MINUS_ONE = ("qwen3_next", "qwen3_5_text")


@pytest.fixture(scope="module")
def stock(ranks, tmp_path_factory):
    """Plain Megatron with ``--attention-output-gate`` on two ranks: its folder and its logits."""
    folder = tmp_path_factory.mktemp("stock") / "save"
    parts = ranks(save_and_run, 2, str(folder), None, TP2, GATED, {"rotary_base": 300})
    return folder, torch.from_numpy(parts[-1][1])


def load(folder):
    """transformers' own class, by name."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    assert not any(report.values()), report
    assert type(model).__module__.startswith("transformers.models.")
    return model.eval()


@torch.no_grad()
def in_two_steps(model, ids, first=7):
    """Logits with a cache: seven tokens, then the others."""
    begun = model(ids[:, :first], use_cache=True)
    rest = model(ids[:, first:], past_key_values=begun.past_key_values, use_cache=True)
    return torch.cat([begun.logits, rest.logits], dim=1)


@pytest.mark.parametrize("architecture", ["auto", "qwen3_5_text", "kha"])
def test_a_stock_class_computes_what_megatron_does(stock, tmp_path, architecture):
    needs_training_package()
    folder, expected = stock
    written = to_hf.plan(folder, architecture=architecture).write(tmp_path / "hf")
    assert written.architecture == {"auto": "qwen3_next"}.get(architecture, architecture)
    if architecture != "kha":
        model, ids = load(tmp_path / "hf"), tokens()
        assert written.tensors == len(load_file(tmp_path / "hf" / "model.safetensors"))
        assert expected.std(dim=(0, 1)).mean() > 0.3
        with torch.no_grad():
            at_once = model(ids).logits
        for found in (at_once, in_two_steps(model, ids)):
            theirs = expected[..., : found.shape[-1]]
            torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)
    verification = Pair.open(folder, tmp_path / "hf").verify(logits=architecture == "auto")
    assert verification.agrees
    if architecture == "auto":
        assert verification.logits.max_difference < 1e-5


def test_it_comes_back_as_plain_megatron(stock, tmp_path):
    """All tensors bit for bit, the gate in Megatron's own argument, and nothing of ours."""
    to_hf.plan(stock[0], architecture="qwen3_next").write(tmp_path / "hf")
    planned = to_megatron.plan(tmp_path / "hf", divisible_by=8)
    written = planned.write(tmp_path / "back")
    assert "--attention-output-gate" in written.arguments
    before, after = (MegatronCheckpoint.open(path) for path in (stock[0], tmp_path / "back"))
    assert after.args["attention_output_gate"] is True
    assert not [name for name in after.args if name.startswith("kha_")]
    for key, _ in before.keys().items():
        assert torch.equal(before.tensor(key), after.tensor(key)), key
