"""Test that hostile files cause no hang, no traceback, and no use of memory beyond their size."""

import json
import os
import tracemalloc

import pytest
import torch

from kha_megatron.checkpoint.integrity import write_hashes
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.errors import CheckpointError
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
