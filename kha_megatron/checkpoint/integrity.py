"""Write and check ``integrity.json``, Megatron's list of the SHA-256 of every file of a checkpoint.

Megatron-Core hashes all files one after another on rank 0, and refuses to load a checkpoint without
hashes. Here several threads hash, and the ranks share the files at load time.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.errors import CheckpointError

INTEGRITY = "integrity.json"
_REMEDY = "Copy it again, or load another checkpoint."
_THREADS_TO_WRITE = 16  # one rank hashes the files of all ranks
_THREADS_TO_VERIFY = 2  # all ranks of a machine hash at the same time


def write_hashes(folder: str | Path) -> None:
    """Hash every file of a checkpoint and write the list."""
    folder = Path(folder)
    found = (file.name for file in folder.iterdir() if file.is_file())
    names = sorted(name for name in found if name != INTEGRITY)
    with ThreadPoolExecutor(_THREADS_TO_WRITE) as pool:
        digests = pool.map(lambda name: _digest(folder / name), names)
        files = dict(zip(names, digests, strict=True))
    with staged_file(folder / INTEGRITY) as staged:
        staged.write_text(json.dumps({"algorithm": "sha256", "files": files}, indent=2))


def read_hashes(folder: Path) -> dict[str, str] | None:
    """Return the hexadecimal SHA-256 of each file; None if the checkpoint has no list."""
    file = folder / INTEGRITY
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_bytes())
        files: dict[str, str] = content["files"]
        if content["algorithm"] != "sha256" or not all(map(is_file_name, files)):
            raise ValueError
        return {name: str(digest) for name, digest in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged. {_REMEDY}") from error


def is_file_name(name: Any) -> bool:
    """Return whether a value read from a file names a file in the same directory."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def check_file(file: Path, digest: str) -> None:
    """Raise CheckpointError if the file does not have this SHA-256."""
    try:
        found = _digest(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}). {_REMEDY}") from error
    if found != digest:
        short = f"{digest[:12]}... as in {INTEGRITY}, got {found[:12]}..."
        raise CheckpointError(f"{file} is damaged. Expected SHA-256 {short} {_REMEDY}")


class FileChecks:
    """Compare each file of a directory with its hash once, before the file is first read."""

    def __init__(self, folder: Path, digests: Mapping[str, str]) -> None:
        self._folder = folder
        self._digests = digests
        self._pool = ThreadPoolExecutor(_THREADS_TO_VERIFY)
        self._lock = threading.Lock()
        self._checks: dict[str, Future[None]] = {}

    def check(self, name: str) -> None:
        """Check a file, or wait until another thread has checked it."""
        if name not in self._digests:
            return
        with self._lock:
            if name not in self._checks:
                path, digest = self._folder / name, self._digests[name]
                self._checks[name] = self._pool.submit(check_file, path, digest)
        self._checks[name].result()


def verify_hashes(folder: str | Path) -> None:
    """Check every listed file on one of the ranks. Call this on every rank.

    Raises:
        CheckpointError: A file is damaged or missing. Every rank raises the same error.
    """
    import torch.distributed as dist

    folder = Path(folder)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    problem = None
    try:
        digests = read_hashes(folder)
        if digests is None:
            announce(f"{folder} has no {INTEGRITY}: its files are not verified.")
        else:
            sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
            largest_first = sorted(digests, key=lambda name: -sizes.get(name, 0))
            mine = largest_first[rank::size]
            with ThreadPoolExecutor(_THREADS_TO_VERIFY) as pool:
                list(pool.map(lambda name: check_file(folder / name, digests[name]), mine))
    except CheckpointError as error:
        problem = str(error)
    problems = [problem] * size
    if size > 1:
        dist.all_gather_object(problems, problem)
    if found := sorted(filter(None, problems)):
        raise CheckpointError(found[0])


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
