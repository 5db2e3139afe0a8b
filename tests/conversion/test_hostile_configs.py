"""Refuse hostile ``config.json`` files in one line."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.verify import Pair
from kha_megatron.errors import KHAError
from tests.conversion.models import CONFIGS, make

FAMILIES = ("kha", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "mistral")
FAMILIES += ("qwen3_next", "qwen3_5_text")
DEEP = '{"a":' * 99_999
VALUES = (0, -1, 1, 3, 2**31, 2**63, 10**30, -(2**63), 0.5, float("nan"), float("inf"), 1e308)
VALUES += (True, False, None, "", "x", "silu", "\0", [], [0], ["dense"], {}, {"rope_type": "yarn"})
FUZZED = 12
"""Configurations of each family."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a directory and its ``config.json`` for each family."""
    root = tmp_path_factory.mktemp("hostile")
    for name in FAMILIES:
        make(CONFIGS[name]).save_pretrained(root / name)
    return {name: (root / name, (root / name / "config.json").read_text()) for name in FAMILIES}


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
def test_impossible_sizes_are_refused(folders, size, value):
    folder, text = folders["qwen3"]
    (folder / "config.json").write_text(json.dumps(json.loads(text) | {size: value}))
    try:
        for plan in (to_hf.plan, to_megatron.plan):
            message = refusal(plan, folder)
            assert f"{size}={value}" in message
            assert "Expected a number from 1 to" in message
        assert refusal(Pair.open, folder, folder) == message
    finally:
        (folder / "config.json").write_text(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_fuzzed_configurations(folders, family, faults_table):
    folder, text = folders[family]
    random_numbers = random.Random(f"{family} 14")
    plain, refused = json.loads(text), 0
    try:
        for _ in range(FUZZED):
            config = dict(plain)
            for name in random_numbers.sample(sorted(plain), random_numbers.choice((1, 1, 2, 5))):
                config[name] = random_numbers.choice(VALUES)
            (folder / "config.json").write_text(json.dumps(config))
            refused += sum(refusal(p, folder) is not None for p in (to_megatron.plan, to_hf.plan))
    finally:
        (folder / "config.json").write_text(text)
    assert refused > FUZZED // 2  # else it tries nothing
    faults_table("Fuzz", f"`config.json` of {family}", 2 * FUZZED, refused, 2 * FUZZED - refused)
    assert refusal(to_megatron.plan, folder) is None


def test_experts_of_several_dtypes_need_a_cast(folders, tmp_path):
    folder, _ = folders["qwen3_moe"]
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].to(torch.bfloat16)
    (tmp_path / "mixed").mkdir()
    save_file(tensors, tmp_path / "mixed" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "mixed" / "config.json").write_text(folders["qwen3_moe"][1])
    message = refusal(to_megatron.plan(tmp_path / "mixed").write, tmp_path / "save")
    assert all(part in message for part in ("mlp.experts.", "bfloat16", "float32", "--dtype"))
    assert not (tmp_path / "save").exists()
    to_megatron.plan(tmp_path / "mixed", dtype="bfloat16").write(tmp_path / "save")
    to_hf.plan(tmp_path / "mixed").write(tmp_path / "hf")  # where they may differ


@pytest.mark.parametrize("command", ["convert", "verify", "inspect"])
@pytest.mark.parametrize("case", ["deeply nested config", "NUL in the name of a shard"])
def test_commands_exit_with_2_and_one_line(run, folders, tmp_path, command, case):
    plain, text = folders["kha"]
    folder = tmp_path / "model"
    folder.mkdir()
    if case == "deeply nested config":
        shutil.copy(plain / "model.safetensors", folder)
        text = DEEP
    else:
        index = {"weight_map": {"model.norm.weight": "a\0b"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(text)
    words = {
        "convert": ("convert", "to-megatron", folder, tmp_path / "out"),
        "verify": ("verify", folder, folder),
        "inspect": ("inspect", folder, tmp_path / "out"),
    }
    code, stdout, stderr = run(*words[command])
    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert not (tmp_path / "out").exists()
