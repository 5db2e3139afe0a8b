"""Write and verify ``integrity.json``, Megatron's list of SHA-256 hashes of a checkpoint's files.

Megatron-Core hashes one file after another on rank 0 and cannot load a checkpoint without hashes.
Here, several threads compute hashes in parallel, and each rank verifies a part of the files.
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
    """Hash all files of a checkpoint directory and write ``integrity.json``."""
    folder = Path(folder)
    found = (file.name for file in folder.iterdir() if file.is_file())
    names = sorted(name for name in found if name != INTEGRITY)
    with ThreadPoolExecutor(_THREADS_TO_WRITE) as pool:
        digests = pool.map(lambda name: _digest(folder / name), names)
        files = dict(zip(names, digests, strict=True))
    with staged_file(folder / INTEGRITY) as staged:
        staged.write_text(json.dumps({"algorithm": "sha256", "files": files}, indent=2))


def read_hashes(folder: Path) -> dict[str, str] | None:
    """Return the hexadecimal SHA-256 of each file, or None if there is no ``integrity.json``."""
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
        raise CheckpointError(f"{file} is corrupted. {_REMEDY}") from error


def is_file_name(name: Any) -> bool:
    """Check that an untrusted value is a plain file name without any path component."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def check_file(file: Path, digest: str) -> None:
    """Raise CheckpointError if the SHA-256 of ``file`` is not ``digest``."""
    try:
        found = _digest(file)
    except OSError as error:
        raise CheckpointError(f"Could not read {file}: {error.strerror}. {_REMEDY}") from error
    if found != digest:
        raise CheckpointError(
            f"Checksum mismatch for {file}: {INTEGRITY} lists SHA-256 {digest[:12]}..., but the "
            f"file has {found[:12]}... {_REMEDY}"
        )


class FileChecks:
    """Verify the hash of each file of a directory once, before the file is first read."""

    def __init__(self, folder: Path, digests: Mapping[str, str]) -> None:
        self._folder = folder
        self._digests = digests
        self._pool = ThreadPoolExecutor(_THREADS_TO_VERIFY)
        self._lock = threading.Lock()
        self._checks: dict[str, Future[None]] = {}

    def check(self, name: str) -> None:
        """Verify a file, or wait for another thread that is already verifying it."""
        if name not in self._digests:
            return
        with self._lock:
            if name not in self._checks:
                path, digest = self._folder / name, self._digests[name]
                self._checks[name] = self._pool.submit(check_file, path, digest)
        self._checks[name].result()


def verify_hashes(folder: str | Path) -> None:
    """Verify all listed files, each on one of the ranks. Every rank must call this function.

    Raises:
        CheckpointError: If a file is corrupted or missing. All ranks raise the same error.
    """
    import torch.distributed as dist

    folder = Path(folder)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    problem = None
    try:
        digests = read_hashes(folder)
        if digests is None:
            announce(f"Skipping verification of {folder} because it has no {INTEGRITY}.")
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
