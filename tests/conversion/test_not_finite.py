"""Count NaN and infinities, and refuse overflow."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.verify import Pair
from kha_megatron.errors import CheckpointError
from tests.conversion.models import CONFIGS, make

UP = "model.layers.1.mlp.up_proj.weight"  # 44 x 36
KEY = "model.layers.0.self_attn.k_proj.weight"  # 12 x 36, in one tensor with q and v in Megatron
SIDES = {"hf": to_hf.plan_export, "megatron": to_megatron.plan_import}
LARGEST = 65504.0  # of float16; from 65520 on numbers are rounded to infinity


def _make(folder, **tensors):
    """Save a float32 qwen3 with given first elements of some tensors."""
    model = make(CONFIGS["qwen3"])
    for name, values in tensors.items():
        model.state_dict()[name].view(-1)[: len(values)] = torch.tensor(values)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def large(tmp_path):
    """Return a model with three numbers that overflow float16, and two that do not."""
    return _make(tmp_path / "large", **{UP: [65520.0, -1e38], KEY: [1e5, LARGEST, 65519.0]})


@pytest.mark.parametrize("side", SIDES)
def test_an_overflow_is_counted_and_refused(large, side):
    plan = SIDES[side](large, dtype="float16")
    with pytest.raises(CheckpointError) as caught:
        plan.write(large.parent / "out")
    message = str(caught.value)
    counts = (f"2 of 1,584 values in {UP}", f"1 of 432 values in {KEY}")
    assert message.startswith(counts)
    assert "65504" in message
    assert "--allow-overflow" in message
    assert "\n" not in message
    assert [path.name for path in large.parent.iterdir()] == ["large"]
    SIDES[side](large, dtype="bfloat16").write(large.parent / "out")  # holds them


def test_verify_compares_infinities_before_rounding(large):
    rounded = make(CONFIGS["qwen3"]).half()
    rounded.load_state_dict(load_file(large / "model.safetensors"))
    rounded.save_pretrained(large.parent / "half")
    tensors = Pair.open(large, large.parent / "half").compare(logits=False).tensors
    assert tensors.different == sorted([UP, KEY])


@pytest.mark.parametrize("side", SIDES)
def test_every_conversion_reports_nan_and_infinities(tmp_path, side):
    source = _make(tmp_path / "nan", **{UP: [math.nan, math.inf, -math.inf], KEY: [math.nan]})
    written = SIDES[side](source, dtype="bfloat16").write(tmp_path / "out")
    assert written.not_finite == {UP: 3, KEY: 1}
    tensors = Pair.open(source, tmp_path / "out").compare(logits=False).tensors
    assert tensors.agrees  # the same numbers are wrong in both
    assert tensors.not_finite == {UP: 6, KEY: 2}


def test_the_command_refuses_and_reports(run, large):
    words = ("convert", "to-hf", large, large.parent / "out", "--dtype", "float16", "--no-verify")
    assert run(*words)[0] == 2
    code, stdout, _ = run(*words, "--allow-overflow", "--json")
    assert (code, json.loads(stdout)["not_finite"]) == (0, {UP: 2, KEY: 1})
