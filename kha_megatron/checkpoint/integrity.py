"""SHA-256 of every file of a checkpoint: Megatron's ``integrity.json``, written and checked faster.

Megatron-Core 0.19 hashes all files one after another on rank 0 while the other ranks wait, and
refuses to load what was saved without hashes. The file is the same here, so that each can check
what the other wrote; files are hashed by several threads, a load shares them among the ranks, and
it is written at once or not at all.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Self

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.reading import is_file_name, read_json, regular
from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.errors import CheckpointError

INTEGRITY = "integrity.json"
_THREADS_TO_WRITE = 16  # one rank hashes what all have written
_THREADS_TO_VERIFY = 2  # all ranks of a machine hash at once


def write_hashes(folder: str | Path, known: Mapping[str, str] = MappingProxyType({})) -> None:
    """Hash every file of ``folder`` and write the list.

    Args:
        folder: of one iteration or release.
        known: hashes by file name that need not be computed again.

    Raises:
        OutputError: the disk refuses.
    """
    folder = Path(folder)
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    names = [name for name in names if name != INTEGRITY]
    with ThreadPoolExecutor(_THREADS_TO_WRITE) as pool:
        digests = pool.map(lambda name: known.get(name) or _digest(folder / name), names)
        files = dict(zip(names, digests, strict=True))
    with staged_file(folder / INTEGRITY) as staged:
        staged.write_text(json.dumps({"algorithm": "sha256", "files": files}, indent=2))


def read_hashes(folder: Path) -> dict[str, str] | None:
    """Hexadecimal SHA-256 by file name, or None if the checkpoint was saved without.

    Raises:
        CheckpointError: it is damaged.
    """
    file = folder / INTEGRITY
    try:
        content = read_json(file)
        files = content["files"]
        if content.get("algorithm") != "sha256" or not all(map(_is_entry, files.items())):
            raise ValueError("not a list of SHA-256")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is damaged: copy it again, or take another checkpoint"
        ) from error
    return files


def check_file(file: Path, digest: str) -> None:
    """Compare a file with its entry in the list.

    Raises:
        CheckpointError: it is missing or holds something else.
    """
    try:
        actual = _digest(file)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}), and {INTEGRITY} lists it: copy it again, "
            "or take another checkpoint"
        ) from error
    if actual != digest:
        raise CheckpointError(
            f"{file} is damaged: its SHA-256 begins with {actual[:12]}, {INTEGRITY} says "
            f"{digest[:12]}: copy it again, or take another checkpoint"
        )


class FileChecks:
    """The hashes of a folder's files, each compared once. Safe to use from several threads."""

    def __init__(self, folder: Path, digests: Mapping[str, str] = MappingProxyType({})) -> None:
        self._folder = folder
        self._digests = digests
        self._pool = ThreadPoolExecutor(_THREADS_TO_VERIFY)
        self._lock = threading.Lock()
        self._checks: dict[str, Future[None]] = {}
        self._wait = True

    @classmethod
    def of(cls, folder: Path) -> Self:
        """By the folder's own list; nothing is compared if the checkpoint was saved without.

        Raises:
            CheckpointError: the list is damaged.
        """
        return cls(folder, read_hashes(folder) or {})

    def check(self, name: str) -> None:
        """Call it before a file is read from; returns at once for a file that is not listed.

        Raises:
            CheckpointError: the file is damaged.
        """
        if name not in self._digests:
            return
        with self._lock:
            if name not in self._checks:
                path, digest = self._folder / name, self._digests[name]
                self._checks[name] = self._pool.submit(check_file, path, digest)
        if self._wait:
            self._checks[name].result()

    def _finish(self) -> None:
        for check in list(self._checks.values()):
            check.result()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside of the block files are hashed while they are read; its end waits for the hashes.

        Until then nothing that was read may be relied on.

        Raises:
            CheckpointError: at the end of the block, if a file is damaged.
        """
        self._wait = False
        try:
            try:
                yield
            except CheckpointError:
                self._finish()  # what cannot be read is most likely of a damaged file
                raise
            self._finish()
        finally:
            self._wait = True
            for check in self._checks.values():
                check.cancel()


def verify_hashes(folder: str | Path) -> None:
    """Check every file that is listed, each on one of the ranks. Call it on every rank.

    A checkpoint that was saved without a list passes, and rank 0 says so.

    Raises:
        CheckpointError: on every rank, naming the first file that is damaged or missing.
    """
    import torch.distributed as dist

    folder = Path(folder)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    problem = None
    try:
        digests = read_hashes(folder)
        if digests is None:
            announce(f"{folder} was saved without hashes: not verified")
        else:
            largest_first = sorted(digests, key=lambda name: -_size(folder / name))
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
    with open(file, "rb", opener=regular) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _is_entry(item: tuple[str, str]) -> bool:
    name, digest = item
    return isinstance(digest, str) and is_file_name(name)
