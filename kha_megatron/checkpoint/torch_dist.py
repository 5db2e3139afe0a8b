"""Reader for distributed checkpoints (DCP) that doesn't execute code from pickles.

A checkpoint directory contains

- shards (``__0_0.distcp`` etc.), i.e. concatenated ``torch.save`` archives
- ``.metadata``, a pickle that maps each tensor to byte ranges in the shards

PyTorch trusts ``.metadata`` and just unpickles it. We only accept names from an allow-list, and
load everything else with ``weights_only=True``. Non-tensor objects become a :class:`Record`.
"""

import io
import itertools
import math
import pathlib
import pickle
import pickletools
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.utils import _create_file_view

from kha_megatron.checkpoint.integrity import FileChecks, is_file_name
from kha_megatron.checkpoint.reading import open_regular, read_regular
from kha_megatron.errors import CheckpointError
from kha_megatron.lfs import refuse_lfs_pointer

METADATA = ".metadata"

_OBJECT_PACKAGES = ("argparse", "io", "megatron", "numpy", "pathlib", "signal", "types")
"""Megatron's state may contain objects from these packages. We don't import their classes."""

_ALLOWED: dict[str, Any] = {
    **{
        f"{module.__name__}.{name}": getattr(module, name)
        for module, names in (
            (metadata, ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata")),
            (metadata, ("MetadataIndex", "StorageMeta", "TensorProperties")),
            (metadata, ("TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
            (filesystem, ("_StorageInfo",)),
            # with torch 2.14, each rank's plan, which Megatron adds as an attribute
            (planner, ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
        )
        for name in names
    },
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.Size": torch.Size,
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib._local.PosixPath": pathlib.PurePosixPath,  # Python 3.13
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}
"""Allow-list for ``.metadata``. This is everything that PyTorch and Megatron write."""

_SAFE_GLOBALS_LOCK = threading.Lock()  # `compare` reads checkpoints in several threads

_MEMO = {"PUT", "BINPUT", "LONG_BINPUT"}


class RefusedNameError(Exception):
    """Raised if a pickle contains a class or function that isn't on the allow-list."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it contains {name}, which is not on the allow-list")


class Record:
    """Placeholder for an object from a pickle, since we don't import its class."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.name}{self.arguments}"


def reason(error: BaseException) -> str:
    """Format an error (from reading a corrupted file) as one short line."""
    if named := re.search(r"GLOBAL (\S+)", str(error)):  # from torch.load
        error = RefusedNameError(named[1])
    first = (str(error).splitlines() or [""])[0][:200]
    if first.startswith("Weights only load failed"):  # torch then recommends disabling it
        first = "not an archive of plain tensors"
    return first if isinstance(error, RefusedNameError) else f"{type(error).__name__}: {first}"


@dataclass(frozen=True)
class Chunk:
    """Part of a global tensor, and where to find it in the shards."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor, which may be split into several chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class TorchDistFolder:
    """Reads tensors and objects from a checkpoint directory.

    Args:
        path (Path): Checkpoint directory.
        checks (FileChecks): Used to verify each shard before we read it. It's up to the caller to
            verify ``.metadata`` first.

    Raises:
        CheckpointError: If files are missing, truncated, corrupted or malicious.
    """

    def __init__(self, path: Path, checks: FileChecks) -> None:
        self.path, self.checks = path, checks
        self._by_index: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}
        refuse_lfs_pointer(path / METADATA, CheckpointError)
        try:
            self.tensors, self.objects = _index(_unpickle(read_regular(path / METADATA)))
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"Could not read {path / METADATA} ({reason(error)}). The file is missing, "
                "corrupted or malicious. Load another checkpoint."
            ) from error
        sizes: dict[str, int] = defaultdict(int)
        for chunk in (
            *(c for t in self.tensors.values() for c in t.chunks),
            *self.objects.values(),
        ):
            sizes[chunk.file] = max(sizes[chunk.file], chunk.start + chunk.length)
        for name, size in sorted(sizes.items()):
            shard = path / name
            refuse_lfs_pointer(shard, CheckpointError)
            if (found := shard.stat().st_size if shard.is_file() else 0) < size:
                raise CheckpointError(
                    f"{shard} is missing or truncated: expected at least {size} bytes, got "
                    f"{found}. Copy it again, or load another checkpoint."
                )

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Load a tensor to CPU and assemble its chunks. Thread-safe.

        Args:
            key (str): Name of the tensor.
            index (tuple[int, ...]): Load only this slice, e.g. ``(layer, expert)`` for the weight
                of one expert.

        Returns:
            Tensor: Has shape ``shape[len(index):]`` and the stored dtype.
        """
        stored, depth = self.tensors[key], len(index)
        shape, whole = stored.shape[depth:], None
        for chunk in self._chunks_at(key, index):
            place = tuple(i - o for i, o in zip(index, chunk.offsets, strict=False))
            part = self._load(key, chunk, stored.dtype)[place]
            if part.shape == shape:
                return part
            whole = torch.empty(shape, dtype=stored.dtype) if whole is None else whole
            box = zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True)
            whole[tuple(slice(o, o + n) for o, n in box)] = part
        return torch.empty(shape, dtype=stored.dtype) if whole is None else whole

    def _chunks_at(self, key: str, index: tuple[int, ...]) -> list[Chunk]:
        """Find all chunks that overlap with ``tensor[index]``."""
        depth = len(index)
        if (key, depth) not in self._by_index:
            found = defaultdict(list)
            for chunk in self.tensors[key].chunks:
                box = list(zip(chunk.offsets, chunk.sizes, strict=True))[:depth]
                for place in itertools.product(*(range(o, o + n) for o, n in box)):
                    found[place].append(chunk)
            self._by_index[key, depth] = found
        return self._by_index[key, depth].get(index, [])

    def read_object(self, key: str) -> Any:
        with self._opened(key, self.objects[key]) as archive:
            return load_plain(archive.read())

    def _load(self, key: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        with self._opened(key, chunk) as archive:
            tensor = torch.load(archive, map_location="cpu", weights_only=True).detach()
            if (tensor.shape, tensor.dtype) != (chunk.sizes, dtype):
                raise ValueError(f"expected {dtype} {chunk.sizes}")
            return tensor

    @contextmanager
    def _opened(self, key: str, chunk: Chunk) -> Iterator[IO[bytes]]:
        """Open a chunk for reading. Errors in the block are converted to CheckpointError."""
        self.checks.check(chunk.file)
        try:
            with open(self.path / chunk.file, "rb", opener=open_regular) as shard:
                view = _create_file_view(cast(io.IOBase, shard), chunk.start, chunk.length)
                yield cast(IO[bytes], view)
        except Exception as error:
            raise CheckpointError(
                f"Could not read {key} at byte {chunk.start} of {self.path / chunk.file} "
                f"({reason(error)}). The file is corrupted or malicious. Load another checkpoint."
            ) from error


def load_plain(source: bytes) -> Any:
    """``torch.load`` with ``weights_only=True``. Other objects become a :class:`Record`.

    We temporarily clear torch's list of safe globals, because Megatron adds its own classes to it.
    """
    with _SAFE_GLOBALS_LOCK:
        trusted = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(source))
            for name in names:
                if name.split(".", 1)[0] not in _OBJECT_PACKAGES:
                    raise RefusedNameError(name)
            torch.serialization.add_safe_globals(
                [(type(name.rsplit(".", 1)[-1], (Record,), {"name": name}), name) for name in names]
            )
            return torch.load(io.BytesIO(source), map_location="cpu", weights_only=True)
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(trusted)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (full := f"{module}.{name}") not in _ALLOWED:
            raise RefusedNameError(full)
        return _ALLOWED[full]


def _unpickle(pickled: bytes) -> metadata.Metadata:
    for opcode, argument, _ in pickletools.genops(pickled):
        # otherwise, the unpickler would allocate a memo of this size
        if opcode.name in _MEMO and not 0 <= int(argument or 0) <= len(pickled):
            raise ValueError(f"memo index {argument} in {len(pickled)} bytes")
    return _Unpickler(io.BytesIO(pickled)).load()


def _index(index: metadata.Metadata) -> tuple[dict[str, StoredTensor], dict[str, Chunk]]:
    """Parse ``.metadata``. If it's malformed, this can raise any kind of error."""
    places: dict[Any, tuple[str, int, int]] = {}
    for where, info in (index.storage_data or {}).items():
        if not is_file_name(info.relative_path):
            raise ValueError(f"shard {info.relative_path!r} is not a file name")
        start, length = _sizes(torch.Size((info.offset, info.length)))
        places[where.fqn, where.offset] = info.relative_path, start, length
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Chunk] = {}
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            tensors[key] = _stored_tensor(key, entry, places)
        else:
            objects[key] = Chunk((), (), *places[key, None])
    return tensors, objects


def _stored_tensor(key: str, entry: metadata.TensorStorageMetadata, places: Any) -> StoredTensor:
    """Collect a tensor's chunks and make sure that they cover it exactly."""
    dtype, shape = entry.properties.dtype, _sizes(entry.size)
    if not isinstance(key, str) or not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no name or dtype")
    chunks, covered = [], 0
    for box in entry.chunks:
        chunk = Chunk(_sizes(box.offsets), _sizes(box.sizes), *places[key, box.offsets])
        ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"a chunk of {key} lies outside of {shape}")
        covered += math.prod(chunk.sizes)
        chunks.append(chunk)
    if len({chunk.offsets for chunk in chunks}) != len(chunks) or covered != math.prod(shape):
        raise ValueError(f"{key} has {math.prod(shape)} elements, but {covered} are stored")
    if _overlap(chunks):
        raise ValueError(f"chunks of {key} overlap, so that others of its elements are not stored")
    return StoredTensor(shape, dtype, tuple(chunks))


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether any two chunks have elements in common.

    Chunks are split into groups along one dimension after another, wherever no chunk extends across
    the border. We treat the few patterns that cannot be separated this way (e.g. a pinwheel of five
    chunks) as overlapping. No parallel layout produces them.
    """
    waiting = [[chunk for chunk in chunks if math.prod(chunk.sizes)]]
    while waiting:
        group = waiting.pop()
        if len(group) <= 1:
            continue
        for dimension in range(len(group[0].sizes)):
            parts = _split(group, dimension)
            if len(parts) > 1:
                break
        else:
            return True
        waiting += parts
    return False


def _split(chunks: Sequence[Chunk], dimension: int) -> list[list[Chunk]]:
    """Split chunks into groups that do not overlap along one dimension."""
    groups: list[list[Chunk]] = []
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dimension]):
        if not groups or chunk.offsets[dimension] >= end:
            groups.append([])
        groups[-1].append(chunk)
        end = max(end, chunk.offsets[dimension] + chunk.sizes[dimension])
    return groups


def _sizes(value: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(value, torch.Size) or min(value, default=0) < 0:
        raise TypeError("a size is not a list of numbers")
    return tuple(value)
