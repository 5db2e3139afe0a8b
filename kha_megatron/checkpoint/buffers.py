"""Memory of tensors that come and go."""

import ctypes
import errno
import math
import mmap
import os

import torch
from torch import Tensor

from kha_megatron.checkpoint.reading import read_at

_LARGE = 2**20
"""Bytes from which on a tensor gets pages of its own."""

_POPULATE_READ = 22
"""Linux's name (5.14) for reading a mapping now: what cannot be read is an error, not a signal."""

_M_MMAP_THRESHOLD = -3
"""glibc's name for the size from which on freed memory goes back to the system."""


def give_back_freed_memory() -> None:
    """Let the C library give large blocks back to the system when they are freed.

    By default glibc keeps blocks of up to 32 MB for each thread once one was freed, which adds up
    to 150 MB in a conversion. For the process; other C libraries are left alone.
    """
    if hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of any content, like ``torch.empty``.

    A large one has huge pages where the system has them: five hundred times fewer page faults.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def from_file(descriptor: int, start: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Elements of an open file from byte ``start`` on, ``[elements]``, in the page cache's memory.

    A large tensor is a private mapping of the file, so that its bytes are hashed and written on
    from where they are: no copy, and no pages of its own. Writing to it leaves the file alone.

    Raises:
        EOFError: the file is too short.
        OSError: the disk refuses. A file that shrinks later kills the process (``SIGBUS``), as it
            does in every reader that maps its files.
    """
    size = elements * dtype.itemsize
    if os.fstat(descriptor).st_size < start + size:
        raise EOFError(f"the file ends before byte {start + size}")
    if size < _LARGE or start % dtype.itemsize:
        tensor = allocate((elements,), dtype)
        read_at(descriptor, bytes_of(tensor), start)
        return tensor
    before = start % mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(descriptor, before + size, access=mmap.ACCESS_COPY, offset=start - before)
    _populate(pages)
    return torch.frombuffer(pages, dtype=dtype, offset=before, count=elements)


def _populate(pages: mmap.mmap) -> None:
    try:
        pages.madvise(_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel
            raise


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    # whatever the stride of a dimension of size one, which view() would not have
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())
