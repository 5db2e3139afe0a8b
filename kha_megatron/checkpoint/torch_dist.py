"""Reading PyTorch's distributed checkpoint format without running anything that it holds.

A folder holds ``.metadata``, a pickle that says which bytes of which shard file make which tensor,
and the shards (``__0_0.distcp``), which are ``torch.save`` archives end to end. PyTorch loads both
as trusted input: a hostile ``.metadata`` runs code. Here no name found in a file is ever imported
or called. Names on an explicit list become inert :class:`Record` objects, every other name is
refused, and the bytes of tensors go from the file to where they are wanted.
"""

import io
import math
import os
import reprlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from kha_megatron.checkpoint.buffers import allocate, from_file
from kha_megatron.checkpoint.integrity import FileChecks
from kha_megatron.checkpoint.reading import is_file_name, opened, read_at, read_bytes
from kha_megatron.checkpoint.tensor_archive import (
    InertUnpickler,
    RefusedNameError,
    find_tensor,
)
from kha_megatron.errors import CheckpointError

METADATA = ".metadata"

_OBJECT_PACKAGES = ("argparse", "io", "megatron", "numpy", "pathlib", "signal", "types")
"""Packages whose classes Megatron puts into its non-tensor state (its own list of safe globals)."""


class Record:
    """Stands for an object of a class that a file names: it keeps the data and does nothing.

    ``name`` is the class, ``arguments`` what it was called with (an enum's value, for one) and
    ``state`` its attributes.
    """

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.name}{self.arguments}"


def _record_class(name: str) -> type[Record]:
    return type(name.rsplit(".", 1)[-1], (Record,), {"name": name})


_METADATA_NAMES = {
    name: _record_class(name)
    for module, names in {
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "pathlib": ("PosixPath", "WindowsPath"),
        "pathlib._local": ("PosixPath", "WindowsPath"),  # their home in Python 3.13
    }.items()
    for name in (f"{module}.{word}" for word in names)
}
"""Everything that PyTorch and Megatron name in ``.metadata``, besides sizes and dtypes."""


def reason(error: BaseException) -> str:
    """The first line of what a reader said about damaged data."""
    first = (str(error).splitlines() or [""])[0][:200]
    return first if isinstance(error, RefusedNameError) else f"{type(error).__name__}: {first}"


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the whole model, as the ranks that wrote it cut it into chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class TorchDistFolder:
    """The tensors and objects of one folder. :meth:`open` checks that all their bytes exist."""

    def __init__(
        self,
        path: Path,
        tensors: dict[str, StoredTensor],
        objects: dict[str, Chunk],
        checks: FileChecks,
    ) -> None:
        self.path = path
        self.tensors = tensors
        self.objects = objects
        self.checks = checks
        self._by_index: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}

    @classmethod
    def open(cls, path: Path, checks: FileChecks | None = None) -> Self:
        """Read the index of a folder and compare it with the shards, without loading them.

        Args:
            path: the folder.
            checks: of the folder: a shard is compared before it is first read from.

        Raises:
            CheckpointError: ``.metadata`` is missing, damaged or hostile, or a shard is missing or
                shorter than the index says.
        """
        file = path / METADATA
        try:
            metadata = InertUnpickler(read_bytes(file), _METADATA_NAMES).load()
            folder = cls(path, *_index(metadata), checks or FileChecks(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path} has no {METADATA}: the save never completed") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
        except Exception as error:  # a torn pickle can raise anything
            raise CheckpointError(
                f"{file} is damaged or hostile ({reason(error)}): take another checkpoint"
            ) from error
        folder._check_shards()
        return folder

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """One whole tensor on the CPU, assembled from its chunks. Several threads may call it.

        A large one that lies in one chunk is mapped, not copied (see ``buffers.from_file``).

        Args:
            key: a key of ``tensors``.
            index: take only this index of the first dimensions (a layer, an expert of it), and read
                only the chunks that hold it.

        Returns:
            The stored dtype; the stored shape, without its first ``len(index)`` dimensions.

        Raises:
            CheckpointError: a chunk cannot be read or is not what the index says.
        """
        stored = self.tensors[key]
        depth = len(index)
        shape, whole = stored.shape[depth:], None
        for chunk in self._chunks_at(key, index):
            ranges = [slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
            if all(held.start <= i < held.stop for i, held in zip(index, ranges, strict=False)):
                rows = [i - held.start for i, held in zip(index, ranges, strict=False)]
                part = self._load(key, chunk, stored.dtype, rows)
                if part.shape == shape:
                    return part
                whole = allocate(shape, stored.dtype) if whole is None else whole
                whole[tuple(ranges[depth:])] = part
        return allocate(shape, stored.dtype) if whole is None else whole

    def _chunks_at(self, key: str, index: tuple[int, ...]) -> Sequence[Chunk]:
        """The chunks that may hold an index, without walking over all layers and experts."""
        depth, chunks = len(index), self.tensors[key].chunks
        if not depth:
            return chunks
        if (key, depth) not in self._by_index:
            groups: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in chunks:
                alone = set(chunk.sizes[:depth]) == {1}
                groups.setdefault(chunk.offsets[:depth] if alone else (), []).append(chunk)
            self._by_index[key, depth] = groups
        groups = self._by_index[key, depth]
        return [*groups.get(index, ()), *groups.get((), ())]

    def read_object(self, key: str) -> Any:
        """A non-tensor entry of ``objects``, with :class:`Record` for everything but plain values.

        Raises:
            CheckpointError: it cannot be read, or names what no checkpoint needs.
        """
        chunk = self.objects[key]
        self.checks.check(chunk.file)
        try:
            with opened(self.path / chunk.file) as descriptor:
                data = bytearray(chunk.length)
                read_at(descriptor, data, chunk.start)
            return load_plain(bytes(data))
        except Exception as error:
            raise self._damaged(key, chunk, f"cannot be read ({reason(error)})") from error

    def _load(
        self, key: str, chunk: Chunk, dtype: torch.dtype, index: Sequence[int] = ()
    ) -> Tensor:
        """The tensor of a chunk, or one index of it."""
        self.checks.check(chunk.file)
        try:
            with opened(self.path / chunk.file) as descriptor:
                found = find_tensor(descriptor, chunk.start, chunk.length)
                if (found.shape, found.dtype) == (chunk.sizes, dtype):
                    for row in index:
                        found = found.row(row)
                    flat = from_file(descriptor, found.start, found.extent, dtype)
                    return flat.as_strided(found.shape, found.stride)
        except Exception as error:
            raise self._damaged(key, chunk, f"cannot be read ({reason(error)})") from error
        raise self._damaged(key, chunk, f"does not hold a {dtype} {chunk.sizes} tensor")

    def _damaged(self, key: str, chunk: Chunk, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path / chunk.file}: {key} at byte {chunk.start} {why}: the shard is damaged or "
            "hostile, take another checkpoint"
        )

    def _check_shards(self) -> None:
        needed: dict[str, int] = {}
        chunks = [chunk for tensor in self.tensors.values() for chunk in tensor.chunks]
        for chunk in (*chunks, *self.objects.values()):
            needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.start + chunk.length)
        for name, length in sorted(needed.items()):
            file = self.path / name
            if not os.path.isfile(file):
                raise CheckpointError(
                    f"{file} is missing ({len(needed)} shards belong to this checkpoint): copy it "
                    "again, or take another checkpoint"
                )
            if (size := file.stat().st_size) < length:
                raise CheckpointError(
                    f"{file} is cut short: {size} bytes of at least {length}: copy it again, or "
                    "take another checkpoint"
                )


_TRUST = threading.Lock()
"""Torch keeps what it may build for the process, not for the thread."""


def load_plain(source: bytes) -> Any:
    """``torch.load`` of tensors and plain values; any class is a :class:`Record`.

    Raises:
        RefusedNameError: the data names what is not among Megatron's own kinds of state.
        Exception: anything, for damaged data.
    """

    with _TRUST, _nothing_trusted():
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(source))
        for name in names:
            if name.split(".", 1)[0] not in _OBJECT_PACKAGES:
                raise RefusedNameError(name)
        torch.serialization.add_safe_globals([(_record_class(name), name) for name in names])
        return torch.load(io.BytesIO(source), map_location="cpu", weights_only=True)


@contextmanager
def _nothing_trusted() -> Iterator[None]:
    """Forget the classes that torch may build in this process: importing Megatron adds some."""
    trusted = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(trusted)


def _index(metadata: Any) -> tuple[dict[str, StoredTensor], dict[str, Chunk]]:
    """Our own typed view of an unpickled ``Metadata``; raises anything if it is malformed."""
    places = {}
    for index, info in metadata.state["storage_data"].items():
        offset = index.state.get("offset")
        place = info.state["relative_path"], info.state["offset"], info.state["length"]
        if info.state.get("transform_descriptors"):
            raise ValueError("compressed or encrypted shards are not supported")
        places[index.state["fqn"], None if offset is None else _sizes(offset)] = _place(*place)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Chunk] = {}
    for key, entry in metadata.state["state_dict_metadata"].items():
        if not isinstance(key, str):
            raise TypeError("a tensor has no name")
        if entry.name.endswith(".TensorStorageMetadata"):
            tensors[key] = _stored_tensor(key, entry.state, places)
        else:
            objects[key] = Chunk((), (), *places[key, None])
    return tensors, objects


def _stored_tensor(key: str, state: dict[str, Any], places: dict[Any, Any]) -> StoredTensor:
    dtype, shape = state["properties"].state[0], _sizes(state["size"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{key} has no dtype")
    chunks = tuple(_chunks(key, state["chunks"], places))
    covered = 0
    for chunk in chunks:
        ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"a chunk of {key} lies outside of {shape}")
        elements = math.prod(chunk.sizes)
        if elements * dtype.itemsize > chunk.length:
            raise ValueError(f"a chunk of {key} is larger than its {chunk.length} bytes")
        covered += elements
    if len({chunk.offsets for chunk in chunks}) != len(chunks):
        raise ValueError(f"two chunks of {key} start at the same place")
    if covered != math.prod(shape):
        raise ValueError(f"{covered} of {math.prod(shape)} elements of {key} are stored")
    if not lie_apart([(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise ValueError(f"chunks of {key} overlap, and leave a part of it unwritten")
    return StoredTensor(shape, dtype, chunks)


def lie_apart(boxes: Sequence[Box]) -> bool:
    """Whether no two boxes of a tensor overlap.

    Boxes are cut apart along one dimension or another until each is alone. A few patterns that no
    straight cut divides, a pinwheel of five for one, count as overlapping: no layout of ranks makes
    them.

    Args:
        boxes: offsets and sizes of each. Those without elements overlap nothing.
    """
    waiting = [[(o, n) for o, n in boxes if math.prod(n)]]
    while waiting:
        group = waiting.pop()
        if len(group) > 1:
            cuts = (_cut(group, dim) for dim in range(len(group[0][0])))
            parts = next((parts for parts in cuts if len(parts) > 1), None)
            if parts is None:
                return False
            waiting += parts
    return True


def _cut(boxes: list[Box], dim: int) -> list[list[Box]]:
    """The boxes, apart where no box reaches across along a dimension."""
    parts: list[list[Box]] = []
    end = 0
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][dim]):
        if not parts or offsets[dim] >= end:
            parts.append([])
        parts[-1].append((offsets, sizes))
        end = max(end, offsets[dim] + sizes[dim])
    return parts


def _chunks(key: str, entries: list[Any], places: dict[Any, Any]) -> Iterator[Chunk]:
    for entry in entries:
        offsets, sizes = _sizes(entry.state["offsets"]), _sizes(entry.state["sizes"])
        yield Chunk(offsets, sizes, *places[key, offsets])


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        # a pickle of a few bytes can describe what takes gigabytes to print
        raise TypeError(f"no size: {reprlib.repr(value)}")
    return value


def _place(file: Any, start: Any, length: Any) -> tuple[str, int, int]:
    if not is_file_name(file):
        raise ValueError(f"shard {file!r} is not a plain file name")
    start, length = _sizes((start, length))
    return file, start, length
