"""Write and verify Megatron's ``integrity.json``, i.e. the SHA-256 of each checkpoint file.

In Megatron-Core, rank 0 hashes one file after another while all ranks wait, and checkpoints without
hashes cannot be loaded at all. Here, each rank hashes its own shards after writing them, in the
same background process as the writes (``--async-save``). Rank 0 only collects the results.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.reading import MAX_JSON_BYTES, open_regular, read_regular
from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.errors import CheckpointError
from kha_megatron.lfs import refuse_lfs_pointer

INTEGRITY = "integrity.json"
_REMEDY = "Copy it again, or load another checkpoint."
_RANK_HASHES = "hashes-"
"""Prefix of files with the hashes of a rank. They only exist during a save."""
_THREADS_TO_WRITE = 16
_THREADS_TO_VERIFY = 2
"""Threads that hash files, per rank. All ranks on a node verify files at the same time."""


def write_and_hash(
    write: Callable,
    rank: int,
    buckets: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write the shards of a rank, and store their hashes for :func:`write_hashes`.

    This is a function of the module so that it can be sent to another process.

    Args:
        write: Megatron's function, which is called with all other arguments.
        buckets: Sequence of tuples that start with the path of a shard.
    """
    write(rank, buckets, *args, **kwargs)
    shards = []
    for path, *_ in buckets:
        shards.append(Path(path))
    digests = _hash_files(shards)
    target = shards[0].with_name(f"{_RANK_HASHES}{rank}.json")
    unfinished = target.with_suffix(".tmp")
    unfinished.write_text(json.dumps(digests))
    unfinished.replace(target)


def write_hashes(folder: str | Path) -> None:
    """Write ``integrity.json``. Hashes all files that :func:`write_and_hash` has not hashed."""
    folder = Path(folder)
    digests: dict[str, str] = {}
    rank_files = list(folder.glob(f"{_RANK_HASHES}*.json"))
    for file in rank_files:
        digests |= json.loads(read_regular(file, MAX_JSON_BYTES))
        file.unlink()
    not_hashed = []
    for file in folder.iterdir():
        is_hashed = file.name in digests or file.name == INTEGRITY
        if file.is_file() and not is_hashed:
            not_hashed.append(file)
    digests |= _hash_files(not_hashed)
    sorted_digests = dict(sorted(digests.items()))
    content = {"algorithm": "sha256", "files": sorted_digests}
    with staged_file(folder / INTEGRITY) as staged:
        staged.write_text(json.dumps(content, indent=2))


def _hash_files(files: Sequence[Path]) -> dict[str, str]:
    """Return the hex digests of files by name."""
    digests = {}
    with ThreadPoolExecutor(_THREADS_TO_WRITE) as pool:
        for file, digest in zip(files, pool.map(hash_file, files), strict=True):
            digests[file.name] = digest
    return digests


def read_hashes(folder: Path) -> dict[str, str] | None:
    """Read ``{file name: hex digest}``. None if there is no ``integrity.json``."""
    file = folder / INTEGRITY
    if not file.exists():
        return None
    try:
        content = json.loads(read_regular(file, MAX_JSON_BYTES))
        if content["algorithm"] != "sha256":
            raise ValueError
        digests = {}
        for name, digest in content["files"].items():
            if not is_file_name(name):
                raise ValueError
            digests[name] = str(digest)
        return digests
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is corrupted. {_REMEDY}") from error


def is_file_name(name: Any) -> bool:
    """Return True for plain file names. Guards against paths like ``../x``."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return not set(name) & set("/\\\0")


def check_file(file: Path, digest: str) -> None:
    """Raise CheckpointError if the SHA-256 of a file does not match."""
    refuse_lfs_pointer(file, CheckpointError)
    try:
        actual_digest = hash_file(file)
    except OSError as error:
        raise CheckpointError(f"Could not read {file}: {error.strerror}. {_REMEDY}") from error
    if actual_digest != digest:
        raise CheckpointError(
            f"Checksum mismatch for {file}: {INTEGRITY} lists SHA-256 {digest[:12]}..., but the "
            f"file has {actual_digest[:12]}... {_REMEDY}"
        )


class FileChecks:
    """Verifies hashes lazily, and only once per file."""

    def __init__(self, folder: Path, digests: Mapping[str, str]) -> None:
        self._folder = folder
        self._digests = digests
        self._pool = ThreadPoolExecutor(_THREADS_TO_VERIFY)
        self._lock = threading.Lock()
        self._checks: dict[str, Future[None]] = {}

    def check(self, name: str) -> None:
        """Verify a file. If another thread is already doing that, wait for it."""
        if name not in self._digests:
            return
        digest = self._digests[name]
        with self._lock:
            if name not in self._checks:
                self._checks[name] = self._pool.submit(
                    check_file,
                    self._folder / name,
                    digest,
                )
            check = self._checks[name]
        check.result()


def verify_hashes(folder: str | Path) -> None:
    """Verify all files in ``integrity.json``. Must be called on all ranks.

    Each rank verifies some of the files. If any of them is missing or corrupted, all ranks raise
    the same CheckpointError.
    """
    import torch.distributed as dist

    folder = Path(folder)
    rank = 0
    num_ranks = 1
    if dist.is_initialized():
        rank = dist.get_rank()
        num_ranks = dist.get_world_size()
    digests = _read_hashes_on_first_rank(folder, rank, num_ranks)
    if digests is None:
        announce(f"Skipping verification of {folder} because it has no {INTEGRITY}.")
        return
    names = list(digests)
    error_on_this_rank = _verify_files(folder, digests, names[rank::num_ranks])
    errors = [error_on_this_rank] * num_ranks
    if num_ranks > 1:
        dist.all_gather_object(errors, error_on_this_rank)
    messages = sorted(error for error in errors if error is not None)
    if messages:
        raise CheckpointError(messages[0])


def _read_hashes_on_first_rank(folder: Path, rank: int, num_ranks: int) -> dict[str, str] | None:
    """Call :func:`_hashes_by_size` on rank 0. Return its result, or raise its error, on all."""
    import torch.distributed as dist

    digests = None
    error_message = None
    if rank == 0:
        try:
            digests = _hashes_by_size(folder)
        except CheckpointError as error:
            error_message = str(error)
    if num_ranks > 1:
        broadcast: list[Any] = [digests, error_message]
        dist.broadcast_object_list(broadcast, src=0)
        digests, error_message = broadcast
    if error_message is not None:
        raise CheckpointError(error_message)
    return digests


def _verify_files(
    folder: Path,
    digests: Mapping[str, str],
    names: Sequence[str],
) -> str | None:
    """Verify some of the files. Return the error message if one is missing or corrupted."""

    def verify(name: str) -> None:
        check_file(folder / name, digests[name])

    try:
        with ThreadPoolExecutor(_THREADS_TO_VERIFY) as pool:
            list(pool.map(verify, names))
    except CheckpointError as error:
        return str(error)
    return None


def _hashes_by_size(folder: Path) -> dict[str, str] | None:
    """Read the hashes of all files, the largest first, so that ranks get similar amounts."""
    digests = read_hashes(folder)
    if digests is None:
        return None
    sizes = dict.fromkeys(digests, 0)
    for file in folder.iterdir():
        sizes[file.name] = file.stat().st_size
    names = sorted(digests, key=sizes.__getitem__, reverse=True)
    return {name: digests[name] for name in names}


def hash_file(file: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with open(file, "rb", opener=open_regular) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
