"""Memory of tensors that come and go: given back to the system at once, and seen as bytes."""

import math
import mmap

import torch
from torch import Tensor

_LARGE = 2**20
"""Bytes from which on a tensor gets pages of its own."""


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of any content, like ``torch.empty``.

    A large one has pages of its own, which the system gets back when the tensor is freed. The C
    library keeps freed memory for each thread, which adds up to several of the largest tensors.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # five hundred times fewer page faults
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    # whatever the stride of a dimension of size one, which view() would not have
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())
