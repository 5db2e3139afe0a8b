"""Read PyTorch's distributed checkpoint format (DCP) without executing code from its pickles.

A checkpoint directory contains shards (``__0_0.distcp``), each a sequence of ``torch.save``
archives, and ``.metadata``, a pickle that maps tensors to byte ranges of the shards. PyTorch
unpickles ``.metadata`` as trusted input, whereas the unpickler in this module only accepts an
allow-list of names. Tensors are loaded with ``weights_only=True``, and all other objects are
returned as :class:`Record`.
"""

import io
import itertools
import math
import pathlib
import pickle
import pickletools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.utils import _create_file_view

from kha_megatron.checkpoint.integrity import FileChecks, is_file_name
from kha_megatron.errors import CheckpointError

METADATA = ".metadata"

_OBJECT_PACKAGES = ("argparse", "io", "megatron", "numpy", "pathlib", "signal", "types")
"""Packages that may occur in Megatron's non-tensor state. Their classes are not imported."""

_ALLOWED: dict[str, Any] = {
    **{
        f"torch.distributed.checkpoint.metadata.{name}": getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    "torch.distributed.checkpoint.filesystem._StorageInfo": filesystem._StorageInfo,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.Size": torch.Size,
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib._local.PosixPath": pathlib.PurePosixPath,  # Python 3.13
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}
"""Allow-list for ``.metadata``: all names that PyTorch and Megatron write."""

_MEMO = {"PUT", "BINPUT", "LONG_BINPUT"}


class RefusedNameError(Exception):
    """A pickle refers to a class or function that is not on the allow-list."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it contains {name}, which is not on the allow-list")


class Record:
    """Placeholder for an unpickled object whose class was not imported."""

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
    """Summarize an error that was raised while reading a corrupted file in one line."""
    if named := re.search(r"GLOBAL (\S+)", str(error)):  # of torch.load
        error = RefusedNameError(named[1])
    first = (str(error).splitlines() or [""])[0][:200]
    if first.startswith("Weights only load failed"):  # followed by the advice to disable the check
        first = "not an archive of plain tensors"
    return first if isinstance(error, RefusedNameError) else f"{type(error).__name__}: {first}"


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor and its byte range in a shard."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor and the chunks it was saved in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class TorchDistFolder:
    """Reader of a checkpoint directory.

    Args:
        path: Checkpoint directory.
        checks: Verifies the hash of each shard before it is first read. The caller must have
            verified ``.metadata``.

    Raises:
        CheckpointError: If a file is missing, truncated, corrupted or malicious.
    """

    def __init__(self, path: Path, checks: FileChecks) -> None:
        self.path, self.checks = path, checks
        self._by_index: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}
        try:
            self.tensors, self.objects = _index(_unpickle((path / METADATA).read_bytes()))
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
            if (found := shard.stat().st_size if shard.is_file() else 0) < size:
                raise CheckpointError(
                    f"{shard} is missing or truncated: expected at least {size} bytes, got "
                    f"{found}. Copy it again, or load another checkpoint."
                )

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Load a tensor to the CPU and assemble it from its chunks. This method is thread-safe.

        Args:
            key: Name of the tensor, one of ``tensors``.
            index: Index into the first dimensions, e.g. of a layer and an expert, to load only a
                slice of the tensor.

        Returns:
            Tensor of shape ``shape[len(index):]`` in the stored dtype.

        Raises:
            CheckpointError: If a chunk is corrupted.
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
        """Return the chunks that contain an index of the first dimensions."""
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
        """Load an entry of ``objects`` with :func:`load_plain`."""
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
        """Open the byte range of a chunk. Errors in the block become a CheckpointError."""
        self.checks.check(chunk.file)
        try:
            with (self.path / chunk.file).open("rb") as shard:
                view = _create_file_view(cast(io.IOBase, shard), chunk.start, chunk.length)
                yield cast(IO[bytes], view)
        except Exception as error:
            raise CheckpointError(
                f"Could not read {key} at byte {chunk.start} of {self.path / chunk.file} "
                f"({reason(error)}). The file is corrupted or malicious. Load another checkpoint."
            ) from error


def load_plain(source: bytes) -> Any:
    """Load tensors and plain values with ``torch.load``. Objects are returned as :class:`Record`.

    The safe globals of this process are ignored, because Megatron adds its own classes to them.
    """
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
    """Unpickle ``.metadata`` with the allow-list."""
    for opcode, argument, _ in pickletools.genops(pickled):
        # the unpickler would allocate a memo with this many entries
        if opcode.name in _MEMO and not 0 <= int(argument or 0) <= len(pickled):
            raise ValueError(f"memo index {argument} in {len(pickled)} bytes")
    return _Unpickler(io.BytesIO(pickled)).load()


def _index(index: metadata.Metadata) -> tuple[dict[str, StoredTensor], dict[str, Chunk]]:
    """Extract tensors and objects from ``.metadata``. Raises any error if it is malformed."""
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
    """Build a tensor entry. Raise ValueError unless the chunks cover the tensor exactly."""
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
        raise ValueError(f"{covered} of {math.prod(shape)} elements of {key} are stored")
    return StoredTensor(shape, dtype, tuple(chunks))


def _sizes(value: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(value, torch.Size) or min(value, default=0) < 0:
        raise TypeError("a size is not a list of numbers")
    return tuple(value)
