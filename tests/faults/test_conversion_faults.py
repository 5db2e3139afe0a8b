"""Test that conversions of damaged files, and onto full disks, fail and leave the old output."""

import io
import json
import multiprocessing
import os
import pickle
import shutil
import zipfile

import pytest
import torch

from kha_megatron.checkpoint import hf_writer
from kha_megatron.checkpoint.integrity import write_hashes
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion import to_megatron
from kha_megatron.errors import CheckpointError, KHAError, OutputError
from tests.conversion.models import CONFIGS, make
from tests.faults.conversions import convert, kill_at_every_step, tree
from tests.faults.jobs import small_disk

KINDS = ["to-hf", "to-megatron"]
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A model of each side: the inputs of ``to-hf`` and ``to-megatron``."""
    folder = tmp_path_factory.mktemp("sources")
    make(CONFIGS["kha"]).save_pretrained(folder / "plain")
    convert("to-megatron", folder / "plain", folder / "megatron")
    convert("to-hf", folder / "megatron", folder / "hf")
    return {"to-hf": folder / "megatron", "to-megatron": folder / "hf"}


@pytest.fixture
def source(sources, tmp_path):
    """Return a copy of the source of a kind, to be damaged."""
    return lambda kind: shutil.copytree(sources[kind], tmp_path / "source")


@pytest.fixture
def old(tmp_path):
    """An output of an earlier conversion."""
    target = tmp_path / "room" / "model"
    (target / "release").mkdir(parents=True)
    (target / "config.json").write_text('{"old": true}')
    (target / "release" / "weights").write_bytes(bytes(range(99)))
    return target


def refused(kind, source, target, match, error=KHAError):
    """Check that the conversion fails with one line and that only the old output is left."""
    before = tree(target.parent)
    with pytest.raises(error, match=match) as caught:
        convert(kind, source, target)
    assert "\n" not in str(caught.value)
    assert tree(target.parent) == before


def flip(file, at):
    with file.open("r+b") as stream:
        stream.seek(at)
        value = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([value ^ 8]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk(sources, tmp_path, monkeypatch, kind):
    with small_disk(tmp_path, "200k") as disk:
        old = disk / "model"
        old.mkdir()
        (old / "config.json").write_text("{}")
        (disk / "ballast").write_bytes(bytes(120_000))
        message = r"Cannot write .* Expected .* bytes of free disk space"
        refused(kind, sources[kind], old, message, OutputError)
        for module in (hf_writer, to_megatron):
            monkeypatch.setattr(module, "check_room", lambda folder, needed: None)
        refused(kind, sources[kind], old, "Cannot write .*: No space left on device", OutputError)


@pytest.mark.parametrize("kind", ["to-hf", pytest.param("to-megatron", marks=pytest.mark.whole)])
def test_a_kill_at_any_step_loses_nothing(sources, old, kind, whole):
    most = 32 if whole else 4
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        case = pool.apply_async(kill_at_every_step, (kind, sources[kind], old, most))
        killed, wrong = case.get(timeout=580)
    assert wrong == []
    assert killed >= most


def shards(folder, kind):
    return sorted(folder.rglob("*.distcp" if kind == "to-hf" else "*.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_detected(source, old, kind):
    folder = source(kind)
    for file in shards(folder, kind):
        at = int(0.99 * (file.stat().st_size - 1))
        flip(file, at)
        refused(kind, folder, old, "is damaged", CheckpointError)
        flip(file, at)
    convert(kind, folder, old)


def test_a_changed_model_converts_without_its_manifest(source, old):
    folder = source("to-megatron")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][NORM]
    flip(file, file.stat().st_size - 1)
    words = r"is damaged or was changed.*delete manifest\.json if you changed the model"
    refused("to-megatron", folder, old, words, CheckpointError)
    (folder / "manifest.json").unlink()
    convert("to-megatron", folder, old)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch '{self.file}'",)


def _hostile_chunk(folder, bomb):
    """Replace an archive by one of the same length with the bomb."""
    checkpoint = MegatronCheckpoint.open(folder)
    chunk = checkpoint._folder.tensors["embedding.word_embeddings.weight"].chunks[0]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bomb, protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", bytes(chunk.length - 600))
    data = buffer.getvalue()
    assert len(data) < chunk.length
    with (checkpoint.path / chunk.file).open("r+b") as stream:
        stream.seek(chunk.start)
        stream.write(bytes(chunk.length - len(data)) + data)


def _hostile_state(folder, bomb):
    """Append a training state with the bomb to its shard."""
    file = next(folder.rglob(".metadata"))
    metadata = pickle.loads(file.read_bytes())
    (place,) = (p for i, p in metadata.storage_data.items() if i.fqn.startswith("common_state/"))
    with (file.parent / place.relative_path).open("ab") as stream:
        place.offset = stream.tell()
        torch.save([{"args": bomb}], stream)
        place.length = stream.tell() - place.offset
    file.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("hide", [_hostile_chunk, _hostile_state])
def test_a_hostile_pickle_with_correct_hashes_is_not_run(source, old, tmp_path, hide):
    created, folder = tmp_path / "created", source("to-hf")
    hide(folder, Bomb(created))
    write_hashes(next(folder.rglob(".metadata")).parent)
    refused("to-hf", folder, old, r"damaged or hostile", KHAError)
    assert not created.exists()
    pickle.loads(pickle.dumps(Bomb(created)))
    assert created.exists()
