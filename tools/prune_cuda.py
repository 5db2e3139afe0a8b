"""Make a CUDA shared library small enough to carry, by removing the code of other GPUs.

``python tools/prune_cuda.py LIBRARY 90`` keeps only the machine code for compute capability 9.0
(sm_90) and code for linking is overwritten with zeros. The file is changed in place and keeps its
size, because the library refers to its parts by their addresses. The zeros compress well. Run
``strip --strip-all`` on the result.

The section ``.nv_fatbin`` consists of containers, each with a header and entries. An entry is the
code of one source file for one architecture.
"""

import argparse
import re
import struct
import subprocess
from collections import Counter
from pathlib import Path

CONTAINERS = ".nv_fatbin"
LINKED = "__nv_relfatbin"
"""Section with code for linking with other device code, which no program needs at run time."""

CONTAINER_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of the entries
_ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of the header, bytes of the code
_ARCHITECTURE = 28
"""Offset of the architecture in the header of an entry."""
_ALIGNMENT = 8


def find_section(library: Path, name: str) -> slice | None:
    """Return the bytes of the file that a section of an ELF library occupies, or None."""
    headers = subprocess.check_output(["readelf", "-SW", str(library)], text=True)
    number = "([0-9a-f]+)"
    pattern = rf"\s{re.escape(name)}\s+\w+\s+{number} {number} {number}\s"
    match = re.search(pattern, headers)
    if match is None:
        return None
    offset = int(match[2], 16)
    size = int(match[3], 16)
    return slice(offset, offset + size)


def prune(code: bytearray, architecture: int) -> Counter[int]:
    """Remove the entries of other architectures from all containers in ``code``, in place.

    A container without an entry for ``architecture`` is not changed.

    Returns:
        The number of removed bytes by architecture.
    """
    removed: Counter[int] = Counter()
    position = 0
    while position + _CONTAINER.size <= len(code):
        magic, _, header_size, size = _CONTAINER.unpack_from(code, position)
        if magic != CONTAINER_MAGIC:
            position += _ALIGNMENT
            continue
        start = position + header_size
        end = start + size
        kept = bytearray()
        others: Counter[int] = Counter()
        entry = start
        while entry < end:
            _, _, entry_header_size, code_size = _ENTRY.unpack_from(code, entry)
            (entry_architecture,) = struct.unpack_from("<I", code, entry + _ARCHITECTURE)
            next_entry = entry + entry_header_size + code_size
            if entry_architecture == architecture:
                kept += code[entry:next_entry]
            else:
                others[entry_architecture] += next_entry - entry
            entry = next_entry
        if kept:
            code[start:end] = kept + bytes(size - len(kept))
            struct.pack_into("<Q", code, position + 8, len(kept))
            removed += others
        position = end
    return removed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("architecture", type=int, help="for example 90 for sm_90")
    args = parser.parse_args()
    content = bytearray(args.library.read_bytes())
    containers = find_section(args.library, CONTAINERS)
    if containers is None:
        parser.error(f"{args.library} has no section {CONTAINERS}.")
    code = content[containers]
    removed = prune(code, args.architecture)
    content[containers] = code
    linked = find_section(args.library, LINKED)
    if linked is not None:
        content[linked] = bytes(linked.stop - linked.start)
    args.library.write_bytes(content)
    megabytes = {architecture: round(size / 1e6, 1) for architecture, size in removed.items()}
    print(f"{args.library.name}: removed MB by architecture: {megabytes}")


if __name__ == "__main__":
    main()
