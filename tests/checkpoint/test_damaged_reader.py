"""Damaged and hostile Megatron checkpoints: named in one line, and never executed."""

import argparse
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch

from kha_megatron.checkpoint import torch_dist
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.errors import CheckpointError
from kha_megatron.model.recorded import kha_of
from tests.conversion.checkpoints import ITERATION
from tests.conversion.fixtures import KHA

PROJ = "self_attention.linear_proj.weight"
ITER = f"iter_{ITERATION:07d}"


def _truncate(file, by):
    os.truncate(file, file.stat().st_size - by)


DAMAGE = {
    "save killed": (lambda d: (d / ITER / "metadata.json").unlink(), "metadata.json.*never compl"),
    "torn mark": (
        lambda d: (d / ITER / "metadata.json").write_text('{"sh'),
        "metadata.json is dam",
    ),
    "no index": (lambda d: (d / ITER / ".metadata").unlink(), r"has no \.metadata"),
    "garbage index": (
        lambda d: (d / ITER / ".metadata").write_bytes(b"\x80\x04junk"),
        "metadata is",
    ),
    "empty index": (lambda d: (d / ITER / ".metadata").write_bytes(b""), "metadata is"),
    "short index": (lambda d: _truncate(d / ITER / ".metadata", 99), r"\.metadata is damaged"),
    "short shard": (lambda d: _truncate(d / ITER / "__1_0.distcp", 1), "__1_0.distcp is cut short"),
    "lost shard": (lambda d: (d / ITER / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "nothing": (lambda d: (shutil.rmtree(d), d.mkdir()), "no complete checkpoint is in it"),
    "a file": (lambda d: (shutil.rmtree(d), d.write_text("")), "is not a folder"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_before_any_tensor_is_read(copy, damage, monkeypatch):
    spoil, message = DAMAGE[damage]
    spoil(copy)
    monkeypatch.setattr(torch_dist.TorchDistFolder, "_load", None)
    with pytest.raises(CheckpointError, match=message) as caught:
        MegatronCheckpoint.open(copy)
    assert "\n" not in str(caught.value)


def test_a_damaged_payload_names_shard_and_tensor(copy):
    key = f"decoder.layers.{PROJ}"
    chunk = MegatronCheckpoint.open(copy)._folder.tensors[key].chunks[0]
    with (copy / ITER / chunk.file).open("r+b") as file:
        file.seek(chunk.start)
        file.write(bytes(chunk.length))
    with pytest.raises(CheckpointError, match=rf"{chunk.file}: {key} at byte {chunk.start}"):
        MegatronCheckpoint.open(copy).tensor(key)


def test_a_chunk_of_another_shape_is_refused(copy):
    folder = MegatronCheckpoint.open(copy)._folder
    key = f"decoder.layers.{PROJ}"
    tensor = folder.tensors[key]
    other = folder.tensors["decoder.final_layernorm.weight"].chunks[0]
    swapped = replace(tensor.chunks[0], file=other.file, start=other.start, length=other.length)
    folder.tensors[key] = replace(tensor, chunks=(swapped, *tensor.chunks[1:]))
    with pytest.raises(CheckpointError, match=r"does not hold a torch\.float32"):
        folder.read(key)


def _edit_index(save, edit):
    file = save / ITER / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def _escape(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../../outside.distcp"


def _lose_chunk(metadata):
    metadata.state_dict_metadata[f"decoder.layers.{PROJ}"].chunks.pop()


def _double_chunk(metadata):
    chunks = metadata.state_dict_metadata[f"decoder.layers.{PROJ}"].chunks
    chunks[0] = chunks[1]


def _grow_chunk(metadata):
    chunk = metadata.state_dict_metadata[f"decoder.layers.{PROJ}"].chunks[0]
    chunk.sizes = torch.Size((9, *chunk.sizes[1:]))


def _negative_offset(metadata):
    next(iter(metadata.storage_data.values())).offset = -8


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_escape, "not a plain file name"),
        (_lose_chunk, "elements of decoder"),
        (_double_chunk, "elements of decoder"),
        (_grow_chunk, "lies outside"),
        (_negative_offset, "a size is not"),
        (lambda metadata: metadata.storage_data.clear(), "KeyError"),
    ],
)
def test_an_index_that_does_not_add_up_is_refused(copy, edit, message):
    _edit_index(copy, lambda metadata: None)
    MegatronCheckpoint.open(copy).tensor(f"decoder.layers.{PROJ}")  # editing as such is harmless
    _edit_index(copy, edit)
    with pytest.raises(CheckpointError, match=rf"\.metadata is damaged.*{message}"):
        MegatronCheckpoint.open(copy)


class _Bomb:
    """Unpickling it with pickle.load writes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch '{self.file}'",)


def test_a_hostile_index_runs_nothing(copy, tmp_path):
    file = tmp_path / "pwned"
    pickle.loads(pickle.dumps(_Bomb(file)))
    assert file.exists(), "the bomb works"
    file.unlink()
    _edit_index(copy, lambda metadata: setattr(metadata, "planner_data", _Bomb(file)))
    with pytest.raises(CheckpointError, match=r"\.metadata.*names (posix|nt)\.system"):
        MegatronCheckpoint.open(copy)
    assert not file.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("kha_megatron.errors", "KHAError"),
    ],
)
def test_only_the_listed_names_can_be_in_an_index(copy, module, name):
    words = [part.encode() for part in (module, name)]
    code = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(word)]) + word for word in words) + b"\x93."
    (copy / ITER / ".metadata").write_bytes(code)
    with pytest.raises(CheckpointError, match=rf"names {module}\.{name}"):
        MegatronCheckpoint.open(copy)


def test_common_pt_of_older_versions_is_read_and_not_run(copy, tmp_path):
    args = argparse.Namespace(kha_query="linear", kha_key="gate", kha_value="mlp")
    torch.save({"args": args, "iteration": 3}, copy / ITER / "common.pt")
    checkpoint = MegatronCheckpoint.open(copy)
    assert (checkpoint.iteration, kha_of(checkpoint)) == (3, KHA)

    file = tmp_path / "pwned"
    torch.save({"args": args, "iteration": 3, "more": _Bomb(file)}, copy / ITER / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt.*names (posix|nt)\.system"):
        kha_of(MegatronCheckpoint.open(copy))
    (copy / ITER / "common.pt").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(CheckpointError, match=r"common\.pt holds no readable training state"):
        MegatronCheckpoint.open(copy).iteration  # noqa: B018
    assert not file.exists()
