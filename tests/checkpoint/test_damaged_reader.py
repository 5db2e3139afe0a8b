"""Test that damaged and hostile Megatron checkpoints are refused and never executed."""

import argparse
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.errors import CheckpointError
from kha_megatron.model.recorded import read_kha_config
from tests.conversion.checkpoints import ITERATION
from tests.conversion.fixtures import KHA
from tests.faults import fuzz

PROJ = "self_attention.linear_proj.weight"
ITER = f"iter_{ITERATION:07d}"


def _truncate(file, by):
    os.truncate(file, file.stat().st_size - by)


DAMAGE = {
    "no mark": (lambda d: (d / ITER / "metadata.json").unlink(), r"metadata\.json is missing"),
    "torn mark": (lambda d: _truncate(d / ITER / "metadata.json", 9), r"metadata\.json is missing"),
    "short shard": (
        lambda d: _truncate(d / ITER / "__1_0.distcp", 1),
        "__1_0.distcp is missing or truncated",
    ),
    "lost shard": (lambda d: (d / ITER / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "nothing": (lambda d: (shutil.rmtree(d), d.mkdir()), "no complete checkpoint in"),
    "not renamed": (
        lambda d: (d / ITER).rename(d / f".{ITER}.partial-0123abcd"),
        "no complete checkpoint in",
    ),
    "a file": (lambda d: (shutil.rmtree(d), d.write_text("")), "is not a directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_open_refuses_damaged_directories(copy, damage):
    spoil, message = DAMAGE[damage]
    spoil(copy)
    with pytest.raises(CheckpointError, match=message) as caught:
        MegatronCheckpoint.open(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.fast
def test_read_refuses_a_damaged_chunk(copy):
    key = f"decoder.layers.{PROJ}"
    name = "decoder.final_layernorm.weight"
    folder = MegatronCheckpoint.open(copy)._folder
    tensor = folder.tensors[key]
    other = folder.tensors[name].chunks[0]
    chunk = tensor.chunks[0]
    swapped = replace(
        chunk,
        file=other.file,
        start=other.start,
        length=other.length,
    )
    folder.tensors[key] = replace(tensor, chunks=(swapped, *tensor.chunks[1:]))
    with pytest.raises(CheckpointError, match=rf"{key} at .*expected torch\.float32"):
        folder.read(key)
    with (copy / ITER / chunk.file).open("r+b") as file:
        file.seek(chunk.start)
        file.write(bytes(chunk.length))
    with pytest.raises(CheckpointError, match=rf"{key} at byte {chunk.start} of .*{chunk.file}"):
        MegatronCheckpoint.open(copy).tensor(key)


def _set_path(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../../outside.distcp"


def _change_chunks(change):
    key = f"decoder.layers.{PROJ}"
    return lambda metadata: change(metadata.state_dict_metadata[key].chunks)


def _shift_a_chunk(metadata):
    """Move a chunk by one row, so that it overlaps with its neighbour and misses its last row."""
    key = f"decoder.layers.{PROJ}"
    chunks = metadata.state_dict_metadata[key].chunks
    last = max(chunks, key=lambda chunk: tuple(chunk.offsets))
    before = MetadataIndex(key, last.offsets)
    offsets = list(last.offsets)
    axis = max(axis for axis, offset in enumerate(offsets) if offset)
    offsets[axis] -= 1
    last.offsets = torch.Size(offsets)
    (index,) = [index for index in metadata.storage_data if index == before]
    metadata.storage_data[MetadataIndex(key, last.offsets)] = metadata.storage_data[index]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set_path, "not a file name"),
        (_change_chunks(lambda chunks: chunks.pop()), "elements, but"),
        (_change_chunks(lambda chunks: chunks.__setitem__(0, chunks[1])), "elements, but"),
        (_shift_a_chunk, r"chunks of .*linear_proj\.weight overlap"),
        (
            _change_chunks(lambda chunks: setattr(chunks[0], "sizes", torch.Size((9, 1, 1)))),
            "lies outside",
        ),
        (
            lambda metadata: setattr(next(iter(metadata.storage_data.values())), "offset", -8),
            "a size is not",
        ),
    ],
)
def test_open_refuses_an_inconsistent_index(copy, edit, message):
    fuzz.edit_index(copy / ITER, edit)
    with pytest.raises(CheckpointError, match=rf"Could not read .*\.metadata .*{message}"):
        MegatronCheckpoint.open(copy)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("module", "name"),
    [("builtins", "eval"), ("torch.distributed.checkpoint.metadata", "os.system")],
)
def test_the_index_may_contain_only_allowed_names(copy, module, name):
    pickled = b"\x80\x04"
    for word in (module, name):
        pickled += b"\x8c" + bytes([len(word)]) + word.encode()
    pickled += b"\x93."
    (copy / ITER / ".metadata").write_bytes(pickled)
    with pytest.raises(CheckpointError, match=rf"contains {module}\.{name}"):
        MegatronCheckpoint.open(copy)


def test_common_pt_of_older_versions(copy, tmp_path):
    args = argparse.Namespace(kha_query="linear", kha_key="gate", kha_value="mlp")
    common = copy / ITER / "common.pt"
    torch.save({"args": args, "iteration": 3}, common)
    checkpoint = MegatronCheckpoint.open(copy)
    assert checkpoint.iteration == 3
    assert read_kha_config(checkpoint) == KHA

    file = tmp_path / "pwned"
    torch.save({"args": args, "iteration": 3, "more": fuzz.Bomb(file)}, common)
    with pytest.raises(CheckpointError, match=r"contains (posix|nt)\.system"):
        read_kha_config(MegatronCheckpoint.open(copy))
    common.write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(CheckpointError, match="Could not read the training state"):
        MegatronCheckpoint.open(copy).iteration  # noqa: B018
    assert not file.exists()
    pickle.loads(pickle.dumps(fuzz.Bomb(file)))
    assert file.exists()
