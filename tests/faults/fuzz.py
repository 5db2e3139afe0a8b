"""Damage files at random, and count how often their readers accept and refuse them."""

import os
import pickle
import random
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist_writer import TorchDistWriter
from kha_megatron.checkpoint.tracker import TRACKER, select_iteration
from kha_megatron.errors import KHAError

TOKENS = [
    *(b"[" * 2000, b'{"a":' * 2000, b"9" * 5000, b"-1", b"1e999", b"NaN", b"null", b"true"),
    *(b"\0", b"\xff\xff\xff\xff", b"\xff" * 8, b'"', b"\\", b"../", b"release", b"7"),
    *(b"r\xff\xff\xff\x7f", b"cos\nsystem\n", b"\x93", b"R", b"b", b"0", b"2", b"t", b"\x85"),
]
"""Bytes to insert: tokens of JSON and pickle, and extreme numbers."""


def torch_dist(folder: Path) -> None:
    """Write a checkpoint with a tensor in one chunk, a tensor in two, and a training state."""
    folder.mkdir(parents=True)
    with TorchDistWriter(folder) as writer:
        for row in range(2):
            writer.write(
                "decoder.layers.w",
                torch.full((1, 3), float(row)),
                shape=(2, 3),
                offsets=(row, 0),
            )
        writer.write("a", torch.arange(5.0), shape=(5,), offsets=(0,))
        common = {
            "args": Namespace(num_layers=2),
            "iteration": 7,
            "checkpoint_version": 3.0,
        }
        writer.close(common, {"format": "none"})


def hugging_face(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 2}')
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4).half()}, folder / "model.safetensors")


def read_torch_dist(folder: Path) -> None:
    """Read a checkpoint as a conversion does, but without checking its hashes."""
    checkpoint = MegatronCheckpoint.open(folder, verify=False)
    for key in checkpoint.keys():  # noqa: SIM118
        checkpoint.tensor(key)
    _ = checkpoint.iteration, checkpoint.args


def read_hugging_face(folder: Path) -> None:
    checkpoint = HFCheckpoint.open(folder)
    for key in checkpoint.keys():  # noqa: SIM118
        checkpoint.tensor(key)


def follow_tracker(folder: Path) -> None:
    selection = select_iteration(folder)
    assert selection.newest == folder / "iter_0000007", selection
    assert "\n" not in (selection.describe("taking") or "")


def _saves(folder: Path) -> None:
    torch_dist(folder / "iter_0000007")
    (folder / TRACKER).write_text("7")


def _shard(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)


KINDS = {
    "safetensors header": (hugging_face, lambda f: f / "model.safetensors", read_hugging_face),
    "config.json": (hugging_face, lambda f: f / "config.json", read_hugging_face),
    "torch_dist .metadata": (torch_dist, lambda f: f / ".metadata", read_torch_dist),
    "torch_dist shard": (torch_dist, _shard, read_torch_dist),
    "torch_dist commit mark": (torch_dist, lambda f: f / "metadata.json", read_torch_dist),
    "tracker": (_saves, lambda f: f / TRACKER, follow_tracker),
}
"""Functions that write a directory, choose the file to damage, and read the directory."""


def flip(file: Path, place: float) -> None:
    """Flip one bit at a fraction of the file."""
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1 << 3
    file.write_bytes(content)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.system, (f"touch '{self.file}'",)


def edit_index(iteration: Path, edit: Callable[[Any], object]) -> None:
    """Apply ``edit`` to the metadata of an iteration."""
    file = iteration / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def replace_value(iteration: Path, name: str, value: Any) -> None:
    """Replace all tensors and objects whose names begin with ``name``."""

    def edit(metadata: Any) -> None:
        replaced = False
        for index, place in metadata.storage_data.items():
            if not index.fqn.startswith(name):
                continue
            with (iteration / place.relative_path).open("ab") as shard:
                place.offset = shard.tell()
                torch.save(value, shard)
                place.length = shard.tell() - place.offset
            replaced = True
        assert replaced

    edit_index(iteration, edit)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return ``data`` with one to three random changes."""
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(data) + 1)
        stop = min(len(data), start + chance.choice((1, 1, 2, 4, 8, 64)))
        old = data[start:stop]
        flipped = bytes(byte ^ 1 << chance.randrange(8) for byte in old)
        token = chance.choice(TOKENS)
        new = chance.choice((flipped, b"", 2 * old, token, token, token))
        rest = new + data[stop:] if chance.random() < 0.95 else b""
        data = data[:start] + rest
    return data


def fuzz(kind: str, times: int, folder: Path, seed: int = 0) -> Counter[str]:
    """Damage a file repeatedly. Count how often it was ``read`` or ``refused`` in one line."""
    make, file_of, read = KINDS[kind]
    make(folder)
    file = file_of(folder)
    chance = random.Random(f"{kind} {seed}")
    original = file.read_bytes()
    counts = Counter[str]()
    read(folder)
    for _ in range(times):
        data = damaged(original, chance)
        file.write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(folder)
        except KHAError as error:
            counts["refused"] += len(str(error).splitlines()) == 1
        except BaseException as error:
            error.add_note(f"{kind} as {data!r}")
            raise
        else:
            counts["read"] += 1
    return counts
