"""Reader for distributed checkpoints (DCP) that does not execute code from pickles.

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
from collections.abc import Callable, Iterator, Sequence
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
from kha_megatron.errors import CheckpointError, show_value
from kha_megatron.lfs import refuse_lfs_pointer

METADATA = ".metadata"

_OBJECT_PACKAGES = ("argparse", "io", "megatron", "numpy", "pathlib", "signal", "types")
"""Megatron's state may contain objects from these packages. We do not import their classes."""


_ALLOWED_CLASSES = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    # with torch 2.14, each rank's plan, which Megatron adds as an attribute
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
    filesystem._StoragePrefix,  # since the second save with --ckpt-assume-constant-structure
)


def _list_allowed() -> dict[str, Any]:
    allowed: dict[str, Any] = {
        "torch.serialization._get_layout": torch.serialization._get_layout,
        "torch.Size": torch.Size,
        "pathlib.PosixPath": pathlib.PurePosixPath,
        "pathlib._local.PosixPath": pathlib.PurePosixPath,  # Python 3.13
    }
    for allowed_class in _ALLOWED_CLASSES:
        allowed[f"{allowed_class.__module__}.{allowed_class.__name__}"] = allowed_class
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            allowed[str(value)] = value
    return allowed


_ALLOWED = _list_allowed()
"""Allow-list for ``.metadata``. This is everything that PyTorch and Megatron write."""

_SAFE_GLOBALS_LOCK = threading.Lock()  # `compare` reads checkpoints in several threads

_MEMO_OPCODES = {"PUT", "BINPUT", "LONG_BINPUT"}
"""Opcodes of a pickle that store an object under an index, to be referred to later."""

Shape = tuple[int, ...]
Index = tuple[int, ...]
"""Position in the first (or all) dimensions of a tensor."""


class RefusedNameError(Exception):
    """Raised if a pickle contains a class or function that is not on the allow-list."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it contains {name}, which is not on the allow-list")


class Record:
    """Placeholder for an object from a pickle, since we do not import its class."""

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
    if refused_name := re.search(r"GLOBAL (\S+)", str(error)):  # from torch.load
        error = RefusedNameError(refused_name[1])
    lines = str(error).splitlines()
    first_line = lines[0][:200] if lines else ""
    if first_line.startswith("Weights only load failed"):  # torch then recommends disabling it
        first_line = "not an archive of plain tensors"
    if isinstance(error, RefusedNameError):
        return first_line
    return f"{type(error).__name__}: {first_line}"


@dataclass(frozen=True)
class Chunk:
    """Part of a global tensor, and where to find it in the shards."""

    offsets: Index
    """Position of its first element in the global tensor."""
    sizes: Shape
    file: str
    start: int
    """First byte in the file."""
    length: int
    """Number of bytes."""

    @property
    def ends(self) -> Index:
        """Position after its last element in each dimension."""
        ends = []
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            ends.append(offset + size)
        return tuple(ends)


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor, which may be split into several chunks."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


ChunksByIndex = dict[Index, list[Chunk]]
"""Chunks that contain elements of the slice at an index."""


class TorchDistFolder:
    """Reads tensors and objects from a checkpoint directory.

    Args:
        path (Path): Checkpoint directory.
        checks (FileChecks): Used to verify each shard before we read it. It is up to the caller to
            verify ``.metadata`` first.

    Raises:
        CheckpointError: If files are missing, truncated, corrupted or malicious.
    """

    def __init__(self, path: Path, checks: FileChecks) -> None:
        self.path = path
        self.checks = checks
        self._chunks_by_index: dict[tuple[str, int], ChunksByIndex] = {}
        """By tensor name and length of the index, see :meth:`_chunks_at`."""
        refuse_lfs_pointer(path / METADATA, CheckpointError)
        try:
            pickled = read_regular(path / METADATA)
            self.tensors, self.objects = _parse_metadata(_unpickle(pickled))
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"Could not read {path / METADATA} ({reason(error)}). The file is missing, "
                "corrupted or malicious. Load another checkpoint."
            ) from error
        self._check_shard_sizes()

    def _check_shard_sizes(self) -> None:
        chunks = list(self.objects.values())
        for tensor in self.tensors.values():
            chunks += tensor.chunks
        expected_sizes: dict[str, int] = defaultdict(int)
        for chunk in chunks:
            end = chunk.start + chunk.length
            expected_sizes[chunk.file] = max(expected_sizes[chunk.file], end)
        for name, expected_size in sorted(expected_sizes.items()):
            shard = self.path / name
            refuse_lfs_pointer(shard, CheckpointError)
            size = 0
            if shard.is_file():
                size = shard.stat().st_size
            if size < expected_size:
                raise CheckpointError(
                    f"{shard} is missing or truncated: expected at least {expected_size} bytes, "
                    f"got {size}. Copy it again, or load another checkpoint."
                )

    def read(self, key: str, index: Index = ()) -> Tensor:
        """Load a tensor to CPU and assemble its chunks. Thread-safe.

        Args:
            key (str): Name of the tensor.
            index (tuple[int, ...]): Load only this slice, e.g. ``(layer, expert)`` for the weight
                of one expert.

        Returns:
            Tensor: Has shape ``shape[len(index):]`` and the stored dtype.
        """
        stored = self.tensors[key]
        depth = len(index)
        shape = stored.shape[depth:]
        assembled = None
        for chunk in self._chunks_at(key, index):
            tensor = self._load(key, chunk, stored.dtype)
            for position, offset in zip(index, chunk.offsets, strict=False):
                tensor = tensor[position - offset]
            if tensor.shape == shape:  # this chunk contains the entire slice
                return tensor
            if assembled is None:
                assembled = torch.empty(shape, dtype=stored.dtype)
            slices = []
            for offset, end in zip(chunk.offsets[depth:], chunk.ends[depth:], strict=True):
                slices.append(slice(offset, end))
            assembled[tuple(slices)] = tensor
        if assembled is None:
            return torch.empty(shape, dtype=stored.dtype)
        return assembled

    def _chunks_at(self, key: str, index: Index) -> list[Chunk]:
        """Find all chunks that overlap with ``tensor[index]``."""
        depth = len(index)
        if (key, depth) not in self._chunks_by_index:
            stored = self.tensors[key]
            self._chunks_by_index[key, depth] = _group_by_index(stored.chunks, depth)
        chunks_by_index = self._chunks_by_index[key, depth]
        return chunks_by_index.get(index, [])

    def read_object(self, key: str) -> Any:
        with self._opened(key, self.objects[key]) as archive:
            return load_plain(archive.read())

    def _load(self, key: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        with self._opened(key, chunk) as archive:
            tensor = torch.load(archive, map_location="cpu", weights_only=True)
            if tensor.shape != chunk.sizes or tensor.dtype != dtype:
                raise ValueError(f"expected {dtype} {chunk.sizes}")
            return tensor.detach()

    @contextmanager
    def _opened(self, key: str, chunk: Chunk) -> Iterator[IO[bytes]]:
        """Open a chunk for reading. Errors in the block are converted to CheckpointError."""
        self.checks.check(chunk.file)
        path = self.path / chunk.file
        try:
            with open(path, "rb", opener=open_regular) as shard:
                view = _create_file_view(
                    cast(io.IOBase, shard),
                    chunk.start,
                    chunk.length,
                )
                yield cast(IO[bytes], view)
        except Exception as error:
            raise CheckpointError(
                f"Could not read {key} at byte {chunk.start} of {path} ({reason(error)}). The file "
                "is corrupted or malicious. Load another checkpoint."
            ) from error


def _group_by_index(
    chunks: Sequence[Chunk],
    depth: int,
) -> ChunksByIndex:
    """Map each index of the first ``depth`` dimensions to the chunks that overlap with it."""
    chunks_by_index: ChunksByIndex = defaultdict(list)
    for chunk in chunks:
        ranges = []
        for offset, end in zip(chunk.offsets[:depth], chunk.ends[:depth], strict=True):
            ranges.append(range(offset, end))
        for index in itertools.product(*ranges):
            chunks_by_index[index].append(chunk)
    return chunks_by_index


def load_plain(source: bytes) -> Any:
    """``torch.load`` with ``weights_only=True``. Other objects become a :class:`Record`.

    We temporarily clear torch's list of safe globals, because Megatron adds its own classes to it.
    """
    with _SAFE_GLOBALS_LOCK:
        trusted = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(source))
            placeholders = [_placeholder(name) for name in names]
            torch.serialization.add_safe_globals(placeholders)
            return torch.load(io.BytesIO(source), map_location="cpu", weights_only=True)
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(trusted)


_SafeGlobal = Callable[..., Any] | tuple[Callable[..., Any], str]


def _placeholder(name: str) -> _SafeGlobal:
    """Create a subclass of :class:`Record` for the class or function with this qualified name."""
    package, _, _ = name.partition(".")
    if package not in _OBJECT_PACKAGES:
        raise RefusedNameError(name)
    _, _, class_name = name.rpartition(".")
    record_type = type(class_name, (Record,), {"name": name})
    return record_type, name


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        qualified_name = f"{module}.{name}"
        if qualified_name not in _ALLOWED:
            raise RefusedNameError(qualified_name)
        return _ALLOWED[qualified_name]


def _unpickle(pickled: bytes) -> metadata.Metadata:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name not in _MEMO_OPCODES:
            continue
        # otherwise, the unpickler would allocate a memo of this size
        memo_index = int(argument or 0)
        if memo_index < 0 or memo_index > len(pickled):
            raise ValueError(f"memo index {argument} in {len(pickled)} bytes")
    return _Unpickler(io.BytesIO(pickled)).load()


@dataclass(frozen=True)
class _Location:
    """The bytes of a chunk or an object."""

    file: str
    start: int
    length: int

    def chunk(self, offsets: Index = (), sizes: Shape = ()) -> Chunk:
        return Chunk(
            offsets=offsets,
            sizes=sizes,
            file=self.file,
            start=self.start,
            length=self.length,
        )


_Locations = dict[tuple[str, torch.Size | None], _Location]
"""Locations by name and offsets. Objects do not have offsets."""


def _parse_metadata(
    parsed: metadata.Metadata,
) -> tuple[dict[str, StoredTensor], dict[str, Chunk]]:
    """Return all tensors and objects by name. Can raise any error if ``parsed`` is malformed."""
    locations: _Locations = {}
    storage_data = parsed.storage_data or {}
    for stored, info in storage_data.items():
        if not is_file_name(info.relative_path):
            raise ValueError(f"shard {show_value(info.relative_path)} is not a file name")
        start, length = _to_sizes(torch.Size((info.offset, info.length)))
        location = _Location(info.relative_path, start, length)
        locations[stored.fqn, stored.offset] = location
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Chunk] = {}
    for key, entry in parsed.state_dict_metadata.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            tensors[key] = _parse_tensor(key, entry, locations)
        else:
            objects[key] = locations[key, None].chunk()
    return tensors, objects


def _parse_tensor(
    key: str,
    entry: metadata.TensorStorageMetadata,
    locations: _Locations,
) -> StoredTensor:
    """Collect a tensor's chunks and make sure that they cover it exactly."""
    dtype = entry.properties.dtype
    shape = _to_sizes(entry.size)
    if not isinstance(key, str) or not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no name or dtype")
    chunks = []
    stored_elements = 0
    for stored_chunk in entry.chunks:
        location = locations[key, stored_chunk.offsets]
        offsets = _to_sizes(stored_chunk.offsets)
        sizes = _to_sizes(stored_chunk.sizes)
        chunk = location.chunk(offsets, sizes)
        for end, size in zip(chunk.ends, shape, strict=True):
            if end > size:
                raise ValueError(f"a chunk of {key} lies outside of {shape}")
        chunks.append(chunk)
        stored_elements += math.prod(chunk.sizes)
    elements = math.prod(shape)
    unique_offsets = {chunk.offsets for chunk in chunks}
    if len(unique_offsets) != len(chunks) or stored_elements != elements:
        raise ValueError(f"{key} has {elements} elements, but {stored_elements} are stored")
    if _overlap(chunks):
        raise ValueError(f"chunks of {key} overlap, so that others of its elements are not stored")
    return StoredTensor(shape, dtype, tuple(chunks))


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether any two chunks have elements in common.

    Chunks are split into groups along one dimension after another, wherever no chunk extends across
    the border. We treat the few patterns that cannot be separated this way (e.g. a pinwheel of five
    chunks) as overlapping. No parallel layout produces them.
    """
    not_empty = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    unchecked_groups = [not_empty]
    while unchecked_groups:
        group = unchecked_groups.pop()
        if len(group) <= 1:
            continue
        smaller_groups = _split_along_any_dimension(group)
        if len(smaller_groups) == 1:
            return True
        unchecked_groups += smaller_groups
    return False


def _split_along_any_dimension(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Split chunks along the first dimension that separates them. Returns one group if none does.

    There must be at least one chunk.
    """
    for dimension in range(len(chunks[0].sizes)):
        groups = _split(chunks, dimension)
        if len(groups) > 1:
            return groups
    return [list(chunks)]


def _split(chunks: Sequence[Chunk], dimension: int) -> list[list[Chunk]]:
    """Split chunks into groups that do not overlap along one dimension."""
    groups: list[list[Chunk]] = []
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dimension]):
        start = chunk.offsets[dimension]
        if not groups or start >= end:
            groups.append([])
        groups[-1].append(chunk)
        end = max(end, start + chunk.sizes[dimension])
    return groups


def _to_sizes(value: Sequence[int]) -> Shape:
    """Convert to a tuple. Raises TypeError for anything but a ``torch.Size`` without negatives."""
    if not isinstance(value, torch.Size) or any(size < 0 for size in value):
        raise TypeError("a size is not a list of numbers")
    return tuple(value)
