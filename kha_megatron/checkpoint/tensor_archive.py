"""Tensors in ``torch.save`` archives: found, so that they are read in place.

An archive is a zip file whose records are stored as they are: ``data.pkl``, a pickle that describes
the tensor, and ``data/0``, its bytes. ``torch.load`` copies the bytes, and can only be told what to
trust for a whole process at a time. Here the pickle may name what describes a tensor, of which
nothing is called or imported, and the answer is where the bytes lie.
"""

import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
"""Kinds of storage; every newer dtype is stored as untyped bytes."""

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class RefusedNameError(Exception):
    """A file names a class or function that no checkpoint needs; it was not imported."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it names {name}, which no checkpoint needs and which was not run")


_OF_ALL = {"torch.Size": tuple} | {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
_MEMO = {"PUT", "BINPUT", "LONG_BINPUT"}


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle in which every name stands for what it is given for it: nothing is imported.

    Args:
        pickled: all of it. Memory is bounded by its size: what a pickle says of the sizes of its
            parts, and at which place of its memo one is kept, must fit into that.
        known: what names besides sizes and dtypes stand for.

    Raises:
        RefusedNameError: by ``load``, for any other name.
        Exception: anything, for damaged data.
    """

    def __init__(self, pickled: bytes, known: Mapping[str, Any]) -> None:
        for opcode, argument, _ in pickletools.genops(pickled):
            # the unpickler makes room for all places of the memo up to this one
            if opcode.name in _MEMO and not 0 <= int(argument or 0) <= len(pickled):
                raise ValueError(f"place {argument} of the memo in {len(pickled)} bytes")
        super().__init__(io.BytesIO(pickled))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        for known in (_OF_ALL, self._known):
            if full in known:
                return known[full]
        raise RefusedNameError(full)


class ArchivedTensor(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """The byte of the file at which its first element begins."""
    elements: int
    """How many elements are stored from there on."""

    def row(self, index: int) -> "ArchivedTensor":
        """One index of the first dimension."""
        skipped = index * self.stride[0]
        return ArchivedTensor(
            self.dtype,
            self.shape[1:],
            self.stride[1:],
            self.start + skipped * self.dtype.itemsize,
            self.elements - skipped,
        )

    @property
    def extent(self) -> int:
        """How many elements from its first to its last one, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


class FileSlice(io.RawIOBase):
    """A readable part of an open file, which other threads may read at the same time."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length = descriptor, start, length
        self._at = 0

    def readable(self) -> bool:
        """Always: it is for reading."""
        return True

    def seekable(self) -> bool:
        """Always: reads go by place."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As for any file; not before the beginning of the part."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"{base + offset} is before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As for any file; ends with the part."""
        wanted = memoryview(buffer)[: max(0, self._length - self._at)]
        count = os.preadv(self._descriptor, [wanted], self._start + self._at) if wanted else 0
        self._at += count
        return count


def find_tensor(descriptor: int, start: int, length: int) -> ArchivedTensor:
    """The tensor of the archive at these bytes of an open file; reads no tensor data.

    Raises:
        RefusedNameError: the archive names what no tensor needs.
        Exception: anything, for damaged data.
    """
    part = io.BufferedReader(FileSlice(descriptor, start, length))
    with zipfile.ZipFile(part) as archive:
        index = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        prefix = index.removesuffix("data.pkl")
        if f"{prefix}byteorder" in archive.namelist():
            order = _stored(archive, f"{prefix}byteorder")
            if archive.read(order) != b"little":
                raise ValueError("it was written by a big-endian machine")
        pickled = archive.read(_stored(archive, index))
        tensor = _Unpickler(pickled, _NAMES).load()
        if not isinstance(tensor, _Tensor):
            raise TypeError("it holds no tensor")
        record = _stored(archive, f"{prefix}data/{tensor.storage.key}")
        # the central directory knows where a record's own header is, not how long that one is
        part.seek(record.header_offset + 26)
        name, extra = struct.unpack("<HH", part.read(4))
        data = record.header_offset + 30 + name + extra
    return _place(tensor, start + data, min(record.file_size, length - data))


def _stored(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    record = archive.getinfo(name)
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    return record


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    dtype: torch.dtype | None
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _place(tensor: _Tensor, start: int, size: int) -> ArchivedTensor:
    """Where the tensor is, if it fits into the ``size`` bytes of its storage."""
    dtype = tensor.storage.dtype or tensor.dtype
    numbers = (tensor.offset, *tensor.shape, *tensor.stride)
    if not isinstance(dtype, torch.dtype) or len(tensor.shape) != len(tensor.stride):
        raise TypeError("it describes no tensor")
    if any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("a size is negative")
    elements = size // dtype.itemsize - tensor.offset
    first = start + tensor.offset * dtype.itemsize
    found = ArchivedTensor(dtype, tuple(tensor.shape), tuple(tensor.stride), first, elements)
    if found.extent > elements:
        raise ValueError(f"{found.extent} elements are described, {elements} are stored")
    return found


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, *more: Any
) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise TypeError("it describes no tensor")
    return _Tensor(storage, more[0] if more else None, offset, tuple(shape), tuple(stride))


def _parameter(tensor: Any, _grad: Any, _hooks: Any) -> Any:
    return tensor


_NAMES = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "collections.OrderedDict": OrderedDict,
    "torch.storage.UntypedStorage": None,
    **{f"torch.{name}": dtype for name, dtype in _STORAGES.items()},
}
"""What the pickle of a tensor names, and what stands for it here."""


class _Unpickler(InertUnpickler):
    def persistent_load(self, saved: Any) -> _Storage:
        kind, dtype, key, *_ = saved
        if kind != "storage" or not isinstance(key, str):
            raise TypeError("it describes no tensor")
        return _Storage(dtype, key)
