"""Open files in directories that other users may have written.

Opening a FIFO waits for its writer, and a device such as ``/dev/zero`` never ends. So we only open
regular files, and limit the size of JSON files.
"""

import errno
import os
import stat
from pathlib import Path

MAX_JSON_BYTES = 2**27
"""The largest JSON files list all tensors or shards of a model (10 MB for 90,000 tensors)."""


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without blocking. Can be passed to ``open`` as ``opener``.

    Raises:
        OSError: If it is anything but a regular file, e.g. a FIFO, a device or a directory.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular(file: Path, limit: int | None = None) -> bytes:
    """Read a regular file.

    Raises:
        OSError: If it is not a regular file, or larger than ``limit`` bytes.
    """
    with open(file, "rb", opener=open_regular) as stream:
        if limit is None:
            return stream.read()
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(file))
    return content
