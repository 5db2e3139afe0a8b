"""Write safetensors shards tensor by tensor, in any order, from several threads.

Names, dtypes and shapes are known before a conversion starts, so all headers are written first and
each tensor goes straight to its place. The files are those of ``safetensors.torch.save_file``, byte
for byte.
"""

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from kha_megatron.checkpoint.buffers import bytes_of
from kha_megatron.checkpoint.hf_reader import INDEX, WEIGHTS
from kha_megatron.checkpoint.manifest import write_manifest
from kha_megatron.checkpoint.safetensors_file import NAMES, Stored, TensorEntry, header
from kha_megatron.checkpoint.staging import check_room, write_at
from kha_megatron.errors import CheckpointError

_COPIED = 8 * 2**20
"""Bytes of a tensor with gaps that are copied at a time."""


class HFWriter:
    """The safetensors shards, index and manifest of a folder, which must exist.

    All shards get their headers and their sizes at once; :meth:`write` may then be called for each
    tensor in any order and from several threads, each of which needs no memory for a contiguous
    tensor and 8 MiB for any other. A file is open only while a tensor is put into it, so that there
    may be more shards than a process may open. Nothing is flushed to disk:
    ``staging.staged_folder`` does that.

    Args:
        folder: an empty folder.
        tensors: what will be written, in the order of the model.
        max_shard_bytes: as in ``save_pretrained``; a larger tensor gets a shard of its own.

    Raises:
        OutputError: the disk has not enough room, or refuses.
        CheckpointError: a name twice, or a dtype that safetensors has not.
    """

    def __init__(
        self, folder: Path, tensors: Sequence[TensorEntry], *, max_shard_bytes: int
    ) -> None:
        self.folder = folder
        self._places: dict[str, tuple[str, Stored]] = {}
        self._digests: dict[str, str] = {}
        self._lock = threading.Lock()
        self._started: set[str] = set()
        self._alone: dict[str, threading.Lock] = {}
        entries = _by_name(tensors)
        check_room(folder, sum(entry.nbytes for entry in tensors))
        self._shards = split_state_dict_into_shards_factory(
            entries,
            get_storage_size=lambda entry: entry.nbytes,
            filename_pattern=WEIGHTS.replace(".safetensors", "{suffix}.safetensors"),
            max_shard_size=max_shard_bytes,
        ).filename_to_tensors
        for file, names in self._shards.items():
            self._begin(file, [entries[name] for name in names])

    def write(self, name: str, tensor: Tensor) -> None:
        """Put one tensor, of any strides, into its place. Safe to call from several threads.

        Raises:
            KeyError, ValueError: it was not announced so, or was written before.
            OSError: the disk refuses.
        """
        shard, place = self._places[name]
        if place.entry != (name, tensor.dtype, tensor.shape):
            raise ValueError(
                f"{place.entry} was announced, and it is {tensor.dtype} {tensor.shape}"
            )
        with self._lock:
            if name in self._started:
                raise ValueError(f"{name} is written twice")
            self._started.add(name)
        digest, start = hashlib.sha256(), place.start
        with self._opened(shard) as descriptor:
            for part in _contiguous(tensor.detach()):
                write_at(descriptor, bytes_of(part), start, digest.update, self._alone[shard])
                start += part.nbytes
        self._digests[name] = digest.hexdigest()

    def close(self, source: Mapping[str, Any]) -> int:
        """Write the index, if there are several shards, and ``manifest.json``; returns how many.

        Args:
            source: identity of what was converted (``identity()`` of its reader).

        Raises:
            CheckpointError: a tensor was never written.
        """
        if missing := sorted(self._places.keys() - self._digests.keys()):
            raise CheckpointError(
                f"{self.folder} is incomplete: {len(missing)} tensors were not written, "
                f"{missing[0]} for one"
            )
        if len(self._shards) > 1:
            entries = [place.entry for _, place in self._places.values()]
            size = sum(entry.nbytes for entry in entries)
            parameters = sum(math.prod(entry.shape) for entry in entries)
            index = {
                "metadata": {"total_parameters": parameters, "total_size": size},
                "weight_map": {name: shard for name, (shard, _) in self._places.items()},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.folder / INDEX).write_text(text, encoding="utf-8")
        tensors = {
            name: {
                "file": shard,
                "dtype": NAMES[place.entry.dtype],
                "shape": list(place.entry.shape),
                "sha256": self._digests[name],
            }
            for name, (shard, place) in sorted(self._places.items())
        }
        write_manifest(self.folder, source, tensors)
        return len(self._shards)

    def _begin(self, file: str, entries: list[TensorEntry]) -> None:
        """Write the header of a shard, and give the file its final length."""
        first, places = header(entries)
        self._places |= {place.entry.name: (file, place) for place in places}
        self._alone[file] = threading.Lock()
        with self._opened(file, os.O_CREAT | os.O_EXCL) as descriptor:
            write_at(descriptor, first, 0)
            os.ftruncate(descriptor, len(first) + sum(entry.nbytes for entry in entries))

    @contextmanager
    def _opened(self, file: str, flags: int = 0) -> Iterator[int]:
        descriptor = os.open(self.folder / file, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _by_name(tensors: Sequence[TensorEntry]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for entry in tensors:
        if entry.dtype not in NAMES:
            raise CheckpointError(f"{entry.name} is {entry.dtype}, which safetensors cannot hold")
        if entry.name in entries:
            raise CheckpointError(f"two tensors are named {entry.name}")
        entries[entry.name] = entry
    return entries


def _contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor in row-major order; copies at most about 8 MiB at a time."""
    if tensor.is_contiguous():
        yield tensor
    elif tensor.nbytes <= _COPIED:
        yield tensor.contiguous()
    else:
        rows = max(1, _COPIED * len(tensor) // tensor.nbytes)
        for part in tensor.split(rows) if rows > 1 else tensor:
            yield from _contiguous(part)
