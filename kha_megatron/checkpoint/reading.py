"""Opening files that others made: regular ones only, and without waiting for one.

Whoever opens a FIFO waits for its writer, for ever; a device or a socket may do anything. So what
is no regular file is refused before it is opened, and again of the descriptor, since another may
have taken its place in between.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kha_megatron.checkpoint.staging import SLICE

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def regular(file: str | Path, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a regular file: what ``open(file, opener=regular)`` opens it with.

    Raises:
        OSError: ``strerror`` says what else it is, or what the system refuses.
    """
    _check(file, os.stat(file))
    return _checked(file, os.open(file, flags | os.O_CLOEXEC | os.O_NONBLOCK))


def regular_below(folder: Path, file: Path) -> int:
    """The descriptor of a regular file in a folder: no part of the way there is a link.

    Whoever swaps a file or a folder for a link while this looks is refused: each part is opened
    inside of the one before.

    Args:
        folder: without links itself.
        file: a path below it.

    Raises:
        OSError: ``ELOOP`` or ``ENOTDIR`` of a link; otherwise as :func:`regular`.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    descriptor = os.open(folder, flags | os.O_DIRECTORY)
    *folders, name = file.relative_to(folder).parts
    for part in folders:
        descriptor = _inside(descriptor, part, flags | os.O_DIRECTORY)
    return _checked(file, _inside(descriptor, name, flags))


def _inside(folder: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    finally:
        os.close(folder)


def _checked(file: str | Path, descriptor: int) -> int:
    """The descriptor of what was opened; closed if that is no regular file."""
    try:
        _check(file, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check(file: str | Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(0, f"it is {kind}, no regular file", str(file))


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """The descriptor of a regular file that is read from by place.

    Raises:
        OSError: as :func:`regular`.
    """
    descriptor = regular(file)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(file: Path) -> bytes:
    """All of a regular file.

    Raises:
        OSError: as :func:`regular`.
    """
    with open(file, "rb", opener=regular) as stream:
        return stream.read()


def read_json(file: Path) -> Any:
    """What the JSON of a regular file says.

    Raises:
        OSError: as :func:`regular`.
        ValueError: it is no JSON, is nested too deeply, or holds a number of thousands of digits.
    """
    try:
        return json.loads(read_bytes(file))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_file_name(name: Any) -> bool:
    """Whether what a file says of another names one beside it, and none elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def read_at(descriptor: int, buffer: bytearray | memoryview, start: int) -> None:
    """Fill ``buffer`` from byte ``start`` of a file on.

    Raises:
        EOFError: the file is too short.
    """
    left = memoryview(buffer)
    while left:
        count = os.preadv(descriptor, [left[:SLICE]], start)
        if not count:
            raise EOFError(f"the file ends at byte {start}")
        left, start = left[count:], start + count
