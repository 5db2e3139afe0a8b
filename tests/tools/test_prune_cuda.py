"""Removing the code of other GPUs from a library, on containers made here."""

import struct
import subprocess

import prune_cuda


def entry(architecture, code):
    """Return an entry of a container: a header of 64 bytes, and code."""
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, 2, 0x101, len(header), len(code))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + code


def container(*entries):
    content = b"".join(entries)
    return struct.pack("<IHHQ", prune_cuda.CONTAINER_MAGIC, 1, 16, len(content)) + content


def entries(code):
    """Return ``(architecture, code)`` of each entry of the first container in ``code``."""
    _, _, header_size, size = struct.unpack_from("<IHHQ", code)
    found = []
    position = header_size
    while position < header_size + size:
        _, _, entry_header_size, code_size = struct.unpack_from("<HHIQ", code, position)
        (architecture,) = struct.unpack_from("<I", code, position + 28)
        start = position + entry_header_size
        found.append((architecture, bytes(code[start : start + code_size])))
        position = start + code_size
    return found


def test_keeps_one_architecture_and_all_addresses():
    mixed = container(entry(80, b"a" * 24), entry(90, b"b" * 40), entry(100, b"c" * 8))
    only_old = container(entry(80, b"d" * 16))
    last = container(entry(90, b"e" * 8), entry(80, b"f" * 32))
    gap = bytes(24)
    code = bytearray(mixed + gap + only_old + last)
    removed = prune_cuda.prune(code, 90)
    assert removed == {80: 24 + 64 + 32 + 64, 100: 8 + 64}
    assert len(code) == len(mixed + gap + only_old + last)
    assert entries(code) == [(90, b"b" * 40)]
    second = len(mixed) + len(gap)
    assert code[second : second + len(only_old)] == only_old
    assert entries(code[second + len(only_old) :]) == [(90, b"e" * 8)]
    assert b"a" not in code
    assert b"f" * 2 not in code


def test_finds_sections_of_a_library(tmp_path):
    source = tmp_path / "library.c"
    source.write_text(
        'const char fat[32] __attribute__((section(".nv_fatbin"))) = "the containers";\n'
        "int function(void) { return fat[0]; }\n"
    )
    library = tmp_path / "library.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    section = prune_cuda.find_section(library, prune_cuda.CONTAINERS)
    assert library.read_bytes()[section].startswith(b"the containers")
    assert prune_cuda.find_section(library, prune_cuda.LINKED) is None
