"""Full disks, kills, damage and malice meet the converter: one line, nothing run, nothing lost.

Both directions are converted by the engine itself, over an old folder that must stay as it was.
"""

import errno
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.integrity import write_hashes
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.safetensors_file import read_header
from kha_megatron.checkpoint.staging import staged_folder
from kha_megatron.errors import CheckpointError, KHAError, OutputError
from tests.conversion.models import CONFIGS, make
from tests.faults.conversions import convert, kill_at_every_step, tree

KINDS = ["to-hf", "to-megatron"]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A model of each side: what ``to-hf`` and ``to-megatron`` read."""
    folder = tmp_path_factory.mktemp("sources")
    make(CONFIGS["kha"]).save_pretrained(folder / "plain")
    convert("to-megatron", folder / "plain", folder / "megatron")
    convert("to-hf", folder / "megatron", folder / "hf")
    return {"to-hf": folder / "megatron", "to-megatron": folder / "hf"}


@pytest.fixture
def source(sources, tmp_path):
    """``kind`` to a copy of its source, to be damaged."""
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
    """The conversion is refused in one line; the old output is all that is there."""
    before = tree(target.parent)
    with pytest.raises(error, match=match) as caught:
        convert(kind, source, target)
    assert "\n" not in str(caught.value)
    assert tree(target.parent) == before
    return str(caught.value)


def flip(file, at, bit=3):
    with file.open("r+b") as stream:
        stream.seek(at)
        value = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([value ^ 1 << bit]))


# --- the disk


def big(folder):
    """A model whose embedding takes a while to write: 302 MB of zeros."""
    make(CONFIGS["qwen3, tied"]).save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    tensors["model.embed_tokens.weight"] = torch.zeros(2**21, 36)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 2**21}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_is_terminated_while_it_writes(tmp_path, old, kind):
    """The command that a user types, in a process of its own; a folder beside it stays as it is."""
    command = [Path(sys.executable).with_name("kha-megatron"), "convert", kind, "--no-verify"]
    source, before, new = big(tmp_path / "big"), tree(old.parent), old.parent / "new"
    process = subprocess.Popen(
        [*command, source, new], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def written():
        with suppress(FileNotFoundError):  # renamed since it was found
            return any(
                path.stat().st_size
                for path in old.parent.glob(".new.partial-*/**/*")
                if path.is_file()
            )

    while process.poll() is None and not written():
        time.sleep(0.001)
    assert process.poll() is None, process.communicate()
    assert [path.name for path in old.parent.glob(".new.lock")]
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 143, stderr
    assert "Traceback" not in stderr
    assert tree(old.parent) == before
    assert [path.name for path in old.parent.iterdir()] == [old.name]
    convert(kind, source, new)
    assert sorted(path.name for path in old.parent.iterdir()) == sorted([old.name, new.name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "mkdir"])
def test_a_disk_that_refuses_any_write(sources, old, monkeypatch, kind, call):
    plain, calls, refuse = getattr(os, call), [], []

    def counted(*args, **kwargs):
        calls.append(args)
        if len(calls) in refuse:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(*args, **kwargs)

    monkeypatch.setattr(os, call, counted)
    convert(kind, sources[kind], old.with_name("counted"))
    shutil.rmtree(old.with_name("counted"))
    total = len(calls)
    places = {
        "pwrite": {1, 2, total // 2, total},
        "fsync": {1, 2, total // 2, total - 1},  # at the last one all is in place
        "mkdir": {2},  # the first is of the parent, which exists
    }
    for at in sorted(places[call]):
        calls.clear()
        refuse[:] = [at]
        message = r"cannot write .*: No space left on device$"
        refused(kind, sources[kind], old, message, OutputError)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, 200 kB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(mounted)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a full disk needs a mount, which this machine does not allow")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_really_full(sources, small_disk, kind):
    old = small_disk / "model"
    old.mkdir()
    (old / "config.json").write_text("{}")
    (small_disk / "ballast").write_bytes(bytes(120_000))
    message = r"cannot write .* bytes are needed and its disk has .* free: make room"
    refused(kind, sources[kind], old, message, OutputError)


# --- kill -9


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_step_loses_nothing(sources, old, kind):
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        case = pool.apply_async(kill_at_every_step, (kind, sources[kind], old, 32))
        killed, wrong = case.get(timeout=580)
    assert wrong == []
    assert killed >= 32


# --- a second writer


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_conversion_is_refused_and_the_first_one_ends_well(sources, old, kind):
    with staged_folder(old) as staged:
        (staged / "mine").write_text("first")
        before = tree(old)
        with pytest.raises(OutputError, match=rf"being written by process {os.getpid()}: wait"):
            convert(kind, sources[kind], old)
        assert tree(old) == before
    assert tree(old) == {"mine": b"first"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stale_lock_and_what_a_dead_process_left_are_in_nobodys_way(sources, old, kind):
    (old.parent / ".model.lock").write_text("4194305\n")  # more than any process has
    (old.parent / ".model.partial-4194305").mkdir()
    (old.parent / ".model.partial-4194305" / "half").write_text("half")
    convert(kind, sources[kind], old)
    assert [path.name for path in old.parent.iterdir()] == ["model"]


# --- damage


def shards(folder, kind):
    return sorted(folder.rglob("*.distcp" if kind == "to-hf" else "*.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_shard(source, old, kind, keep):
    folder = source(kind)
    shard = shards(folder, kind)[-1]
    os.truncate(shard, int(keep * shard.stat().st_size))
    refused(kind, folder, old, rf"{shard.name} is (cut short|damaged)", CheckpointError)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_shard(source, old, kind):
    folder = source(kind)
    shard = shards(folder, kind)[0]
    shard.unlink()
    refused(kind, folder, old, rf"{shard.name} is missing", CheckpointError)


@pytest.mark.parametrize("place", [0.0, 0.02, 0.1, 0.3, 0.6, 0.99])
def test_a_flipped_bit_of_a_megatron_file(source, old, place):
    folder = source("to-hf")
    names = ["*.distcp", ".metadata", "metadata.json"]
    for file in [file for name in names for file in folder.rglob(name)]:
        at = int(place * (file.stat().st_size - 1))
        flip(file, at)
        refused("to-hf", folder, old, rf"{file.name} is damaged: its SHA-256", CheckpointError)
        flip(file, at)


@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.6, 0.99])
def test_a_flipped_bit_of_a_hugging_face_file(source, old, place):
    folder = source("to-megatron")
    for file in shards(folder, "to-megatron"):
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        data = file.stat().st_size - header
        first = 8 + len('{"__metadata__":{"format":"pt"},')  # which may say anything
        in_header = first + int(place * (header - 1 - first))
        for at in (in_header, header + int(place * (data - 1))):
            flip(file, at)
            refused("to-megatron", folder, old, _DAMAGED, CheckpointError)
            flip(file, at)
    convert("to-megatron", folder, old)  # as it was


_DAMAGED = r"is damaged|was changed|manifest\.json|does not hold"


def test_hashes_beside_the_reading_are_as_good_as_before_it(source):
    folder = source("to-hf")
    shard = shards(folder, "to-hf")[0]
    flip(shard, shard.stat().st_size // 2)
    checkpoint = MegatronCheckpoint.open(folder)
    with pytest.raises(CheckpointError, match=rf"{shard.name} is damaged: its SHA-256"):
        _read_all(checkpoint)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is damaged: its SHA-256"):
        checkpoint.tensor("decoder.final_layernorm.weight")


def _read_all(checkpoint):
    with checkpoint.verifying():
        for key in checkpoint.keys():  # noqa: SIM118
            checkpoint.tensor(key)


# --- the manifest


def _change(file, name, change):
    place = read_header(file)[name]
    flip(file, place.start + change)


def test_a_model_that_was_changed_by_hand(source, old):
    folder = source("to-megatron")
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][NORM]
    _change(file, NORM, 5)
    words = rf"{NORM} is damaged or was changed.*delete manifest\.json if you changed the model"
    refused("to-megatron", folder, old, words, CheckpointError)
    (folder / "manifest.json").unlink()
    convert("to-megatron", folder, old)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(NORM), rf"{NORM} is F32 \[36\], manifest.json says None"),
        (lambda t: t.update(extra={"sha256": ""}), "lacks extra, which manifest.json lists"),
        (lambda t: t[NORM].update(shape=[35]), rf"{NORM} is F32 \[36\], .* says F32 \[35\]"),
        (lambda t: t[NORM].update(dtype="BF16"), rf"{NORM} is F32 .* says BF16"),
        (lambda t: t[NORM].update(sha256="00"), rf"{NORM} is damaged or was changed"),
        (lambda t: t[NORM].update(sha256=None), "manifest.json is damaged, or not written by"),
        (lambda t: t.update({NORM: 3}), "manifest.json is damaged, or not written by"),
    ],
)
def test_a_manifest_of_another_model(source, old, edit, message):
    folder = source("to-megatron")
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest["tensors"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused("to-megatron", folder, old, message, CheckpointError)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2, "tensors": {}}', "[" * 99_999])
def test_a_manifest_that_is_none(source, old, text):
    folder = source("to-megatron")
    (folder / "manifest.json").write_text(text)
    words = "manifest.json is damaged, or not written by a conversion: copy it again, or delete it"
    refused("to-megatron", folder, old, words, CheckpointError)


# --- headers that lie


def _entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}


LIES = {
    "no JSON": (b"{" * 16, 24),
    "not UTF-8": (b'{"\xff\xfe": 3}', 24),
    "deeply nested": (b'{"a":' * 99_999, 24),
    "a list": (b"[]", 24),
    "a number of 5,000 digits": (b'{"a": ' + b"7" * 5000 + b"}", 24),
    "a name twice": (b'{"a": 1, "a": 2}', 24),
    "a dtype that does not exist": (_entry(dtype="F31"), 24),
    "a dtype that torch has not": (_entry(dtype="F4", shape=[48]), 24),
    "a dtype that is no text": (_entry(dtype=[]), 24),
    "another dtype": (_entry(dtype="F16"), 24),
    "another shape": (_entry(shape=[2, 4]), 24),
    "a negative shape": (_entry(shape=[-2, -3]), 24),
    "a shape of texts": (_entry(shape=["2", "3"]), 24),
    "a shape of booleans": (_entry(shape=[True, True]), 24),
    "an enormous shape": (_entry(shape=[2**62, 2**62]), 24),
    "an overflowing shape": (_entry(shape=[2**64]), 24),
    "negative offsets": (_entry(data_offsets=[-24, 0]), 24),
    "offsets in reverse": (_entry(data_offsets=[24, 0]), 24),
    "one offset": (_entry(data_offsets=[24]), 24),
    "offsets beyond the end": (_entry(data_offsets=[24, 48]), 24),
    "no offsets": ({"a": {"dtype": "F32", "shape": [6]}}, 24),
    "no entry": ({"a": None}, 24),
    "too little data": (_entry(), 23),
    "more data": (_entry(), 25),
    "an overlap": (_entry() | {"b": {"dtype": "F32", "shape": [6], "data_offsets": [12, 36]}}, 36),
    "a gap": (_entry() | {"b": {"dtype": "F32", "shape": [1], "data_offsets": [28, 32]}}, 32),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(source, old, lie):
    content, size = LIES[lie]
    header = content if isinstance(content, bytes) else json.dumps(content).encode()
    folder = source("to-megatron")
    file = shards(folder, "to-megatron")[0]
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    whole = 8 + len(header) + size
    words = f"{file} is damaged or hostile \\(.*; it has {whole} bytes\\)"
    text = refused("to-megatron", folder, old, words, CheckpointError)
    assert len(text) < 600


def test_the_honest_header_of_these_lies_is_read(tmp_path):
    header = json.dumps(_entry()).encode()
    file = tmp_path / WEIGHTS
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    assert read_header(file)["a"].entry.shape == (2, 3)


@pytest.mark.parametrize("length", [2**63, 10**8 + 1])
def test_a_huge_header_is_not_read(source, old, length):
    folder = source("to-megatron")
    file = shards(folder, "to-megatron")[0]
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", length))
        stream.truncate(2 * 10**8)  # holes: it takes no room
    refused("to-megatron", folder, old, "header too large", CheckpointError)


# --- an index that leads elsewhere


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/hostname", "..", "sub/x", "", 7, "a\0b"]
)
def test_an_index_that_leaves_the_folder(source, old, name):
    folder = source("to-megatron")
    save_file({NORM: torch.zeros(36)}, folder.parent / "outside.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = name
    (folder / INDEX).write_text(json.dumps(index))
    words = "shards must lie in the folder itself"
    refused("to-megatron", folder, old, words, CheckpointError)


def test_an_index_that_is_nested_without_end(source, old):
    folder = source("to-megatron")
    (folder / INDEX).write_text("[" * 99_999)
    refused("to-megatron", folder, old, r"index\.json is no readable JSON", CheckpointError)


def test_a_link_that_leaves_the_folder(source, old):
    folder = source("to-megatron")
    shard = shards(folder, "to-megatron")[0]
    shard.rename(folder.parent / "outside.safetensors")
    shard.symlink_to("../outside.safetensors")
    words = rf"{shard.name} is a link to .*outside\.safetensors: .* must lie in its folder"
    refused("to-megatron", folder, old, words, CheckpointError)


def test_the_links_of_the_hubs_own_cache_are_followed(source, tmp_path):
    folder = source("to-megatron")
    blobs = tmp_path / "models--me--mine" / "blobs"
    snapshot = tmp_path / "models--me--mine" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    checkpoint = HFCheckpoint.open(snapshot)
    assert checkpoint.tensor(NORM).shape == (36,)


# --- pickles


class Bomb:
    """Unpickling it with pickle.load makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch '{self.file}'",)


def _zip(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


PICKLES = {
    "torch.save": _zip,
    "old torch.save": lambda value: pickle.dumps(value, protocol=2),
    **{f"protocol {n}": lambda value, n=n: pickle.dumps(value, protocol=n) for n in range(6)},
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_in_disguise(source, old, tmp_path, kind):
    pwned, folder = tmp_path / "pwned", source("to-megatron")
    file = shards(folder, "to-megatron")[0]
    file.write_bytes(PICKLES[kind](Bomb(pwned)))
    refused(
        "to-megatron",
        folder,
        old,
        rf"{file.name} is damaged or hostile",
        CheckpointError,
    )
    assert not pwned.exists()


def test_a_pickle_is_called_one(source, old):
    folder = source("to-megatron")
    torch.save({NORM: torch.zeros(36)}, shards(folder, "to-megatron")[0])
    words = "it is a pickle, which can execute code and was not read"
    refused("to-megatron", folder, old, words, CheckpointError)


def _hostile_metadata(folder, bomb):
    file = next(folder.rglob(".metadata"))
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = bomb
    file.write_bytes(pickle.dumps(metadata))


def _hostile_chunk(folder, bomb):
    """An archive as long as the one that it replaces, with the bomb in its ``data.pkl``."""
    checkpoint = MegatronCheckpoint.open(folder)
    chunk = checkpoint._folder.tensors["embedding.word_embeddings.weight"].chunks[0]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bomb))
        rest = chunk.length - 400
        archive.writestr("archive/data/0", bytes(rest))
    data = buffer.getvalue()
    assert len(data) < chunk.length
    with (checkpoint.path / chunk.file).open("r+b") as stream:
        stream.seek(chunk.start)
        stream.write(bytes(chunk.length - len(data)) + data)


def _hostile_state(folder, bomb):
    """The training state, in an archive that is longer than the old one: appended."""
    file = next(folder.rglob(".metadata"))
    metadata = pickle.loads(file.read_bytes())
    (place,) = (p for i, p in metadata.storage_data.items() if i.fqn.startswith("common_state/"))
    shard = file.parent / place.relative_path
    data = _zip([{"args": bomb}])
    place.offset, place.length = shard.stat().st_size, len(data)
    with shard.open("ab") as stream:
        stream.write(data)
    file.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("hide", [_hostile_metadata, _hostile_chunk, _hostile_state])
def test_a_pickle_with_right_hashes_in_a_megatron_checkpoint(source, old, tmp_path, hide):
    pwned, folder = tmp_path / "pwned", source("to-hf")
    hide(folder, Bomb(pwned))
    write_hashes(next(folder.rglob(".metadata")).parent)  # the hashes are the attacker's
    assert not pwned.exists()
    refused("to-hf", folder, old, r"names (posix|nt)\.system, which no checkpoint needs", KHAError)
    assert not pwned.exists()
    pickle.loads(pickle.dumps(Bomb(pwned)))
    assert pwned.exists(), "the bomb works"
