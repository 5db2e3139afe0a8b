"""Read PyTorch's distributed checkpoint format without executing code in it.

A directory holds ``.metadata``, a pickle that lists which bytes of which shard make up which
tensor, and the shards (``__0_0.distcp``), which are concatenated ``torch.save`` archives. PyTorch
unpickles ``.metadata`` as trusted input. Here an unpickler with a list of allowed names reads it.
Tensors are loaded with ``weights_only=True``, and other objects become :class:`Record` values.
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
"""Packages of the classes in Megatron's non-tensor state, as in its list of safe globals."""

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
"""The object for each name that PyTorch and Megatron write into ``.metadata``."""

_MEMO = {"PUT", "BINPUT", "LONG_BINPUT"}


class RefusedNameError(Exception):
    """A pickle names a class or function that is not allowed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it names {name}, which is not allowed and was not run")


class Record:
    """An object of the class ``name`` in a pickle, which was not imported."""

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
    """Return the cause of an error in a damaged file, on one line."""
    if named := re.search(r"GLOBAL (\S+)", str(error)):  # of torch.load
        error = RefusedNameError(named[1])
    first = (str(error).splitlines() or [""])[0][:200]
    return first if isinstance(error, RefusedNameError) else f"{type(error).__name__}: {first}"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and its bytes in a shard."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, and the chunks that the ranks wrote."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class TorchDistFolder:
    """The tensors and objects of one directory.

    Args:
        path: The directory.
        checks: Compares shards with their hashes before they are first read. The caller has checked
            ``.metadata``.

    Raises:
        CheckpointError: A file is missing, damaged, hostile or too short.
    """

    def __init__(self, path: Path, checks: FileChecks) -> None:
        self.path, self.checks = path, checks
        self._by_index: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}
        try:
            self.tensors, self.objects = _index(_unpickle((path / METADATA).read_bytes()))
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"{path / METADATA} is missing, damaged or hostile ({reason(error)}). Load another "
                "checkpoint."
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
                    f"{shard} is missing or cut short. Expected at least {size} bytes, got {found}."
                    " Copy it again, or load another checkpoint."
                )

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return the tensor ``key`` on the CPU, assembled from its chunks. Thread-safe.

        Args:
            key: A key of ``tensors``.
            index: Read only this index of the first dimensions, such as a layer and an expert.

        Returns:
            A tensor of the stored dtype and ``shape[len(index):]``.

        Raises:
            CheckpointError: A chunk is damaged.
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
        """Return the chunks that hold an index of the first dimensions."""
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
        """Return an entry of ``objects``, as :func:`load_plain` does."""
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
        """Open the bytes of a chunk. Report an error of the block as damage of the shard."""
        self.checks.check(chunk.file)
        try:
            with (self.path / chunk.file).open("rb") as shard:
                view = _create_file_view(cast(io.IOBase, shard), chunk.start, chunk.length)
                yield cast(IO[bytes], view)
        except Exception as error:
            raise CheckpointError(
                f"{self.path / chunk.file}: {key} at byte {chunk.start} cannot be read "
                f"({reason(error)}). The file is damaged or hostile. Load another checkpoint."
            ) from error


def load_plain(source: bytes) -> Any:
    """Load tensors and plain values with ``torch.load``. Objects become :class:`Record` values.

    Ignore the safe globals of this process, to which Megatron adds its own.
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
    """Unpickle ``.metadata`` with allowed names only. Bound the memory by its size."""
    for opcode, argument, _ in pickletools.genops(pickled):
        # the unpickler allocates the whole memo up to this index
        if opcode.name in _MEMO and not 0 <= int(argument or 0) <= len(pickled):
            raise ValueError(f"memo index {argument} in {len(pickled)} bytes")
    return _Unpickler(io.BytesIO(pickled)).load()


def _index(index: metadata.Metadata) -> tuple[dict[str, StoredTensor], dict[str, Chunk]]:
    """Return the tensors and objects of an unpickled index. Malformed ones can raise any error."""
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
    """Return a tensor. Raise ValueError unless its chunks lie in it and cover all elements."""
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
