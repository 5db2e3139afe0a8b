"""Low-level helpers for safetensors files.

The format is simple::

    8 bytes   size of the header (little-endian)
    header    JSON with dtype, shape and offsets of each tensor
    data      all tensors, contiguous
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kha_megatron.checkpoint.reading import open_regular
from kha_megatron.errors import CheckpointError
from kha_megatron.lfs import refuse_lfs_pointer

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtype names in the header. ``save_file`` sorts tensors in this order."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_POSITIONS = {dtype: position for position, dtype in enumerate(DTYPE_NAMES)}


class TensorEntry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header(entries: Iterable[TensorEntry]) -> tuple[bytes, dict[str, int]]:
    """Build the same header that ``save_file`` would write.

    Returns:
        tuple[bytes, dict[str, int]]: Header (with its size field), and the file offset of each
            tensor.
    """
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data_offsets = {}
    start = 0
    for entry in sorted(entries, key=_file_order):
        end = start + entry.nbytes
        content[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (start, end),
        }
        data_offsets[entry.name] = start
        start = end
    encoded = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    padding = -len(encoded) % 8  # the format aligns data to 8 bytes
    encoded += b" " * padding
    size = len(encoded).to_bytes(8, "little")
    header_bytes = size + encoded
    file_offsets = {}
    for name, data_offset in data_offsets.items():
        file_offsets[name] = len(header_bytes) + data_offset
    return header_bytes, file_offsets


def _file_order(entry: TensorEntry) -> tuple[int, str]:
    return _POSITIONS[entry.dtype], entry.name


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the header of a file. Raises CheckpointError if it is corrupted."""
    refuse_lfs_pointer(file, CheckpointError)
    try:
        os.close(open_regular(file))  # safe_open would wait for a FIFO
        entries = {}
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118
                stored = opened.get_slice(name)
                dtype = DTYPES[stored.get_dtype()]
                shape = tuple(stored.get_shape())
                entries[name] = TensorEntry(name, dtype, shape)
        return entries
    except (OSError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"Could not read {file}: {error}. Copy the file again.") from error


def read_tensor(file: Path, name: str) -> Tensor:
    """Load a tensor to CPU.

    The file stays memory-mapped only as long as the tensor is alive, so reading a large file tensor
    by tensor does not need much memory.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"Could not read {file}: {error}. Copy the file again.") from error


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the raw bytes of a CPU tensor in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
