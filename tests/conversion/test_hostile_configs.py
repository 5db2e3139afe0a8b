"""Refuse hostile ``config.json`` files in one line."""

import json
import random
from functools import cache

import pytest
import torch

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.verify import Pair
from kha_megatron.errors import KHAError
from tests.conversion.models import CONFIGS, edit_config, edit_tensors, make

FAMILIES = ("kha", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "mistral")
FAMILIES += ("qwen3_next", "qwen3_5_text")
VALUES = (0, -1, 1, 3, 2**31, 2**63, 10**30, -(2**63), 0.5, float("nan"), float("inf"), 1e308)
VALUES += (True, False, None, "", "x", "silu", "\0", [], [0], ["dense"], {}, {"rope_type": "yarn"})
FUZZED = 12
"""Configurations of each family."""


@pytest.fixture
def folder(tmp_path):
    """Return a function from a family to the directory of its model."""

    @cache
    def get(family):
        make(CONFIGS[family]).save_pretrained(tmp_path / family)
        return tmp_path / family

    return get


def refusal(call, *words):
    """Return the message of a KHAError, or None."""
    try:
        call(*words)
    except KHAError as error:
        message = str(error)
        assert 0 < len(message) < 2000
        assert "\n" not in message
        return message
    return None


@pytest.mark.parametrize("value", [0, -1, 2**63])
@pytest.mark.parametrize("size", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_impossible_sizes_are_refused(folder, size, value):
    edit_config(folder("qwen3"), **{size: value})
    for plan in (to_hf.plan_export, to_megatron.plan_import):
        message = refusal(plan, folder("qwen3"))
        assert f"{size}={value}" in message
        assert "must be between 1 and" in message
    assert refusal(Pair.open, folder("qwen3"), folder("qwen3")) == message


@pytest.mark.parametrize("family", FAMILIES)
def test_fuzzed_configurations_are_refused_in_one_line(folder, family, faults_table):
    file = folder(family) / "config.json"
    random_numbers = random.Random(f"{family} 14")
    plain, refused = json.loads(file.read_text()), 0
    for _ in range(FUZZED):
        names = random_numbers.sample(sorted(plain), random_numbers.choice((1, 1, 2, 5)))
        changes = {name: random_numbers.choice(VALUES) for name in names}
        file.write_text(json.dumps(plain | changes))
        plans = (to_megatron.plan_import, to_hf.plan_export)
        refused += sum(refusal(plan, folder(family)) is not None for plan in plans)
    assert refused > FUZZED // 2  # else it tries nothing
    faults_table("Fuzz", f"`config.json` of {family}", 2 * FUZZED, refused, 2 * FUZZED - refused)
    file.write_text(json.dumps(plain))
    assert refusal(to_megatron.plan_import, folder(family)) is None


ATTENTION = "model.layers.0.self_attn."
MIXED_DTYPES = {
    "one expert": ["model.layers.1.mlp.experts.3.up_proj.weight"],
    "the first of three": [f"{ATTENTION}q_proj.weight"],
    "the last of three": [f"{ATTENTION}v_proj.weight"],
    "one of two": ["model.layers.1.mlp.experts.3.gate_proj.weight"],
}
"""bfloat16 tensors in a float32 model, which Megatron stores together with others."""


@pytest.mark.parametrize("usual", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MIXED_DTYPES)
def test_tensors_of_several_dtypes_need_a_cast(folder, tmp_path, case, usual):
    mixed, save, (name,) = folder("qwen3_moe"), tmp_path / "save", MIXED_DTYPES[case]
    rare = torch.bfloat16 if usual == torch.float32 else torch.float32

    def edit(tensors):
        for key, tensor in tensors.items():
            tensors[key] = tensor.to(rare if key == name else usual)

    edit_tensors(mixed, edit)
    message = refusal(to_megatron.plan_import(mixed).write, save)
    assert f"{name} in {mixed} has dtype {rare}, but" in message
    assert f"have {usual}. Use --dtype" in message
    assert not save.exists()
    to_megatron.plan_import(mixed, dtype="bfloat16").write(save)
    to_hf.plan_export(mixed).write(tmp_path / "hf")  # where they may differ
