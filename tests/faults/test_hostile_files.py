"""Test that hostile files cause no hang, no traceback, and no use of memory beyond their size."""

import functools
import json
import os
import tracemalloc
from dataclasses import fields

import pytest
import torch

from kha_megatron.checkpoint.integrity import write_hashes
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.data import DataReport
from kha_megatron.errors import CheckpointError, ConfigError, DataError
from kha_megatron.model.megatron import model_from_arguments
from kha_megatron.model.recorded import read_kha_config
from tests.checkpoint.saved import save
from tests.faults import fuzz

BOMBS = {
    "nine bytes": b"\x80\x02Nr\xff\xff\xff\x03.",
    "a place in text": b"\x80\x02Np99999999\n.",
    "a frame": b"\x80\x04\x95" + (2**40).to_bytes(8, "little") + b"N.",
    "bytes": b"\x80\x05\x8e" + (2**36).to_bytes(8, "little") + b".",
    "a byte array": b"\x80\x05\x96" + (2**32).to_bytes(8, "little") + b".",
    "a text": b"\x80\x05\x8d" + (2**36).to_bytes(8, "little") + b".",
    "a long number": b"\x80\x05\x8b" + (2**31 - 1).to_bytes(4, "little") + b".",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_memory_to_read_an_index_is_bounded_by_its_size(tmp_path, faults_table, bomb):
    fuzz.torch_dist(tmp_path / "folder")
    (tmp_path / "folder" / ".metadata").write_bytes(BOMBS[bomb])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"Could not read .*\.metadata .* malicious"):
        MegatronCheckpoint.open(tmp_path / "folder", verify=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22, f"{peak} bytes for a file of {len(BOMBS[bomb])}"
    size = f"`.metadata` of {len(BOMBS[bomb])} bytes, {bomb}"
    faults_table("Hostile inputs", size, "gigabytes of memory", f"one line, {peak / 2**10:.0f} KiB")


def test_an_index_that_takes_gigabytes_to_print_is_refused(tmp_path):
    """Forty pairs, each of the previous one twice, print as a terabyte of text."""
    fuzz.torch_dist(tmp_path / "folder")
    laughs = ()
    for _ in range(40):
        laughs = (laughs, laughs)
    edit = lambda index: setattr(index.state_dict_metadata["a"], "size", laughs)  # noqa: E731
    fuzz.edit_index(tmp_path / "folder", edit)
    with pytest.raises(CheckpointError, match="a size is not") as caught:
        MegatronCheckpoint.open(tmp_path / "folder", verify=False)
    assert len(str(caught.value)) < 1000


LAUGHS = functools.reduce(lambda pair, _: (pair, pair), range(40), ())
"""A value that prints as a terabyte of text."""

HOSTILE_SIZES = [
    ({"num_layers": 2**40}, "--num-layers must be an integer between 1 and 4096"),
    ({"num_layers": 10**9}, "--num-layers must be an integer between 1 and 4096"),
    ({"num_layers": 2.5}, "--num-layers must be an integer, got 2.5"),
    ({"num_layers": [2]}, "--num-layers must be an integer, got a tuple"),
    ({"hidden_size": 2**40}, "--hidden-size must be an integer between"),
    ({"hidden_size": -8}, "--hidden-size must be an integer between"),
    ({"num_attention_heads": "many"}, "--num-attention-heads must be an integer"),
    ({"num_experts": 10**9}, "--num-experts must be an integer between 1 and 100000"),
    ({"mtp_num_layers": 10**9}, "--mtp-num-layers must be an integer between 0 and 4096"),
    ({"rotary_base": "x" * 10**6}, "--rotary-base must be a number"),
    ({"normalization": 7}, "--normalization must be a string"),
    ({"moe_layer_freq": 2.5}, "--moe-layer-freq must be a positive integer or a list"),
    ({"moe_layer_freq": ["E", 1]}, "--moe-layer-freq must be a positive integer or a list"),
    ({"num_experts": 4, "moe_layer_freq": [1] * 9}, "has 9 values, but the model has 2 layers"),
    ({"hybrid_layer_pattern": "*-" * 10**6}, "has 2,000,000 layers"),
    ({"hybrid_layer_pattern": "*-" + "/*-" * 10**6}, "has 1,000,000 predicted tokens"),
    ({"hybrid_layer_pattern": 7}, "--hybrid-layer-pattern must be a string"),
]


@pytest.mark.parametrize(("changes", "message"), HOSTILE_SIZES)
def test_impossible_sizes_in_recorded_arguments_are_refused(tmp_path, changes, message):
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    save(tmp_path, 7, {"a": torch.arange(5.0)}, **sizes | changes)
    arguments = MegatronCheckpoint.open(tmp_path).args
    with pytest.raises(ConfigError, match=message) as caught:
        model_from_arguments(arguments)
    assert len(str(caught.value)) < 300


@pytest.mark.timeout(60)  # instead of printing, comparing or hashing forever
@pytest.mark.parametrize(
    ("name", "value"),
    [("num_layers", LAUGHS), ("kha_value", LAUGHS), ("kha_moh", {"shared": [LAUGHS]})],
)
def test_an_argument_that_prints_as_a_terabyte_is_refused(tmp_path, name, value):
    save(tmp_path, 7, {"a": torch.arange(5.0)}, **{name: value})
    with pytest.raises(CheckpointError, match=f"argument {name} in .* has more than 65,536"):
        read_kha_config(MegatronCheckpoint.open(tmp_path))


@pytest.mark.timeout(60)
def test_a_shard_name_that_prints_as_a_terabyte_is_refused(tmp_path):
    def edit(index):
        for place in index.storage_data.values():
            place.relative_path = LAUGHS

    fuzz.torch_dist(tmp_path / "folder")
    fuzz.edit_index(tmp_path / "folder", edit)
    with pytest.raises(CheckpointError, match="shard a tuple is not a file name"):
        MegatronCheckpoint.open(tmp_path / "folder", verify=False)


def test_the_report_of_a_data_directory_is_read_with_a_limit(tmp_path):
    with (tmp_path / "data.json").open("wb") as file:
        file.truncate(2**31)  # sparse
    tracemalloc.start()
    with pytest.raises(DataError, match="larger than 134,217,728 bytes"):
        DataReport.read(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**29
    (tmp_path / "data.json").unlink()
    os.mkfifo(tmp_path / "data.json")
    with pytest.raises(DataError, match="not a regular file"):
        DataReport.read(tmp_path)


def test_numbers_in_the_report_of_a_data_directory_are_numbers(tmp_path):
    """We print some of them in a command."""
    report = {"format": 1} | {item.name: 1 for item in fields(DataReport)}
    texts = {item.name: "" for item in fields(DataReport) if item.type is str}
    content = report | texts | {"vocab_size": "7; curl x"}
    (tmp_path / "data.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="vocab_size is missing or has the wrong type"):
        DataReport.read(tmp_path)


def test_hashes_of_ranks_are_regular_files(tmp_path):
    os.mkfifo(tmp_path / "hashes-0.json")
    with pytest.raises(OSError, match="not a regular file"):
        write_hashes(tmp_path)


def _megatron(folder):
    save(folder, 7, {"a": torch.arange(5.0)}, num_layers=2)
    write_hashes(folder / ITERATION)
    (folder / ITERATION / "commit.json").write_text("{}")


def _hugging_face(folder):
    fuzz.hugging_face(folder)
    index = {"weight_map": dict.fromkeys("ab", "model-1.safetensors")}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _read_megatron(folder):
    checkpoint = MegatronCheckpoint.open(folder)
    assert checkpoint.tensor("a").tolist() == [0, 1, 2, 3, 4]
    assert checkpoint.args == {"num_layers": 2}


ITERATION = "iter_0000007"
FILES = {
    "latest_checkpointed_iteration.txt": (_megatron, _read_megatron),
    **dict.fromkeys(
        (
            f"{ITERATION}/integrity.json",
            f"{ITERATION}/metadata.json",
            f"{ITERATION}/commit.json",
            f"{ITERATION}/.metadata",
            f"{ITERATION}/*.distcp",
            f"{ITERATION}/common.pt",
        ),
        (_megatron, _read_megatron),
    ),
    **dict.fromkeys(
        ("config.json", "*.index.json", "model-1.safetensors", "manifest.json"),
        (_hugging_face, fuzz.read_hugging_face),
    ),
}
OPTIONAL = ("commit.json", "common.pt", "latest_checkpointed_iteration.txt")
"""Megatron checkpoints are read without these files."""


@pytest.mark.timeout(20)  # instead of waiting forever
@pytest.mark.parametrize("device", ["a FIFO", "/dev/zero"])
@pytest.mark.parametrize("name", FILES)
def test_readers_do_not_wait_for_files_that_never_end(tmp_path, name, device):
    write, read = FILES[name]
    folder = tmp_path / "folder"
    write(folder)
    read(folder)
    file = next(folder.glob(name), folder / name)
    file.unlink(missing_ok=True)
    if device == "a FIFO":
        os.mkfifo(file)
    else:
        file.symlink_to(device)
    if file.name in OPTIONAL:
        read(folder)
        return
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path, kind, whole, faults_table):
    times = 10_000 if whole else 100
    found = fuzz.fuzz(kind, times, tmp_path / "folder")
    assert found.total() == times
    faults_table("Fuzz", kind, times, found["refused"], found["read"])
