"""Import models whose experts are stored as 3-D tensors, as transformers 5 holds them in memory."""

import re

import pytest
import torch
from safetensors.torch import load_file

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.errors import CheckpointError
from tests.conversion.megatron import load_and_run
from tests.conversion.models import CONFIGS, assert_same_tensors, edit_tensors, make, tokens

MODELS = ("qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next, sparse", "kha, sparse")


@pytest.fixture
def fused(tmp_path):
    """Return a function that saves a model with fused experts, and its logits in transformers."""

    def save(name):
        model = make(CONFIGS[name])
        model.save_pretrained(tmp_path / "fused", save_original_format=False)
        model.save_pretrained(tmp_path / "published")
        names = load_file(tmp_path / "fused" / "model.safetensors")
        assert any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
        assert not any(re.search(r"experts\.\d", name) for name in names)
        with torch.no_grad():
            return tmp_path / "fused", model(tokens()).logits

    return save


@pytest.mark.parametrize("name", MODELS)
def test_megatron_computes_the_same(ranks, fused, tmp_path, name):
    folder, expected = fused(name)
    to_megatron.plan_import(folder, divisible_by=1).write(tmp_path / "save")
    (logits,) = ranks(load_and_run, 1, str(tmp_path / "save"), tokens().tolist(), {})
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=3e-5, rtol=1e-5)
    to_hf.plan_export(folder, architecture=CONFIGS[name].model_type).write(tmp_path / "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "published")


def test_wrong_and_repeated_experts_are_named(fused):
    folder, _ = fused("qwen3_moe")
    down = "model.layers.1.mlp.experts.down_proj"
    edit_tensors(folder, lambda tensors: tensors.update({down: tensors[down].mT.contiguous()}))
    for plan in (to_megatron.plan_import, to_hf.plan_export):
        with pytest.raises(
            CheckpointError,
            match=r"\(6 tensors\): \S+layers\.1\.mlp\.experts\.0\.down_proj\.weight has shape "
            r"\(20, 36\) instead of \(36, 20\), .* and 3 more",
        ):
            plan(folder)
    single = "model.layers.1.mlp.experts.0.down_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({single: tensors[down][0].clone()}))
    with pytest.raises(CheckpointError, match=rf"contains {single} twice"):
        to_megatron.plan_import(folder)
