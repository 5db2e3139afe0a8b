"""Files that were made to harm: no hang, no memory of another size than theirs, no traceback."""

import os
import pickle
import socket
import tracemalloc
from functools import partial

import pytest

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.staging import check_output_folder
from kha_megatron.checkpoint.tensor_archive import InertUnpickler
from kha_megatron.checkpoint.tracker import TRACKER, judge
from kha_megatron.errors import CheckpointError, KHAError
from tests.faults import fuzz


def _socket(file):
    here = os.getcwd()
    os.chdir(file.parent)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(here)


SPECIAL = {
    "a FIFO": os.mkfifo,
    "a socket": _socket,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a folder": lambda file: file.mkdir(),
}
FILES = {
    "torch_dist": (".metadata", "metadata.json", "integrity.json", "__0_0.distcp", "__0_1.distcp"),
    "hugging face": ("config.json", "model.safetensors", "manifest.json"),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(("side", "name"), [(s, n) for s, names in FILES.items() for n in names])
def test_what_is_no_regular_file_is_refused(tmp_path, faults_table, side, name, kind):
    folder = tmp_path / "folder"
    make, open_ = {
        "torch_dist": (fuzz.torch_dist, MegatronCheckpoint.open),
        "hugging face": (fuzz.hugging_face, HFCheckpoint.open),
    }[side]
    make(folder)
    (folder / name).unlink(missing_ok=True)
    SPECIAL[kind](folder / name)
    with pytest.raises(CheckpointError) as caught:
        open_(folder)
    (line,) = str(caught.value).splitlines()
    assert str(folder) in line
    danger = "an endless read, or a traceback"
    faults_table("Hostile inputs", f"{kind} as a {side} file", danger, "one line")


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_tracker_that_is_no_file_is_refused_by_name(tmp_path, kind):
    fuzz.torch_dist(tmp_path / "iter_0000007")
    SPECIAL[kind](tmp_path / TRACKER)
    with pytest.raises(CheckpointError, match=rf"{TRACKER} cannot be read \(it is {kind}, no reg"):
        judge(tmp_path)


@pytest.mark.parametrize(
    "use",
    [HFCheckpoint.open, MegatronCheckpoint.open, partial(check_output_folder, overwrite=True)],
)
def test_a_path_that_is_too_long_is_refused(tmp_path, use):
    with pytest.raises(KHAError) as caught:
        use(tmp_path / ("x" * 300))
    assert len(str(caught.value).splitlines()) == 1


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
def test_memory_of_an_index_is_bounded_by_its_size(tmp_path, faults_table, bomb):
    fuzz.torch_dist(tmp_path / "folder")
    (tmp_path / "folder" / ".metadata").write_bytes(BOMBS[bomb])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged or hostile"):
        MegatronCheckpoint.open(tmp_path / "folder", verify=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22, f"{peak} bytes for a file of {len(BOMBS[bomb])}"
    size = f"`.metadata` of {len(BOMBS[bomb])} bytes, {bomb}"
    faults_table("Hostile inputs", size, "gigabytes of memory", f"one line, {peak / 2**10:.0f} KiB")


def test_an_index_that_takes_gigabytes_to_print_is_refused(tmp_path):
    """Forty pairs, each of the one before it twice: a terabyte of text."""
    fuzz.torch_dist(tmp_path / "folder")
    file = tmp_path / "folder" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    laughs = ()
    for _ in range(40):
        laughs = (laughs, laughs)
    metadata.state_dict_metadata["a"].size = laughs
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged.*no size") as caught:
        MegatronCheckpoint.open(tmp_path / "folder", verify=False)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_honest_pickles_of_every_protocol_are_read(protocol):
    value = {"numbers": list(range(3000)), "text": "a" * 70_000, "one": (1, 2.5, None, b"b")}
    value["twice"] = value["numbers"]
    known = {"_codecs.encode": lambda text, how: text.encode(how)}
    assert InertUnpickler(pickle.dumps(value, protocol), known).load() == value


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_damage_is_read_or_refused_in_one_line(tmp_path, kind, whole, faults_table):
    times = 10_000 if whole else 250
    found = fuzz.fuzz(kind, times, tmp_path / "folder")
    assert found.total() == times
    faults_table("Fuzz", kind, times, found["refused"], found["read"])
