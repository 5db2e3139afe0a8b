"""Detect Git LFS pointers, the small text files that stand in for files not yet downloaded.

Cloning a repository without Git LFS leaves such pointers in place of models and datasets.
"""

import stat
from pathlib import Path

from kha_megatron.errors import KHAError

_FIRST_LINES = (
    b"version https://git-lfs.github.com/spec/",
    b"version https://hawser.github.com/spec/",
)
_MAX_BYTES = 1024  # by the specification


def is_lfs_pointer(file: Path) -> bool:
    """Return True if a file is a Git LFS pointer. False for files that cannot be read."""
    try:
        status = file.stat()
        # opening a pipe could wait forever; most shards are too large to be opened at all
        if not stat.S_ISREG(status.st_mode) or status.st_size >= _MAX_BYTES:
            return False
        content = file.read_bytes()
    except OSError:
        return False
    return content.startswith(_FIRST_LINES) and b"\noid " in content


def refuse_lfs_pointer(file: Path, error: type[KHAError]) -> None:
    """Raise ``error`` if a file is a Git LFS pointer."""
    if is_lfs_pointer(file):
        raise error(
            f"{file} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its "
            "repository to download the file."
        )
