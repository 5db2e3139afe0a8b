"""Memory of tensors that come and go."""

import ctypes
import math
import mmap

import torch
from torch import Tensor

_LARGE = 2**20
"""Bytes from which on a tensor gets pages of its own."""

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


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    # whatever the stride of a dimension of size one, which view() would not have
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())
