"""Writing folders so that a crash, an error or Ctrl-C leaves nothing half-written."""

import errno
import fcntl
import glob
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from kha_megatron.errors import OutputError


def check_output_folder(
    folder: Path,
    *,
    overwrite: bool,
    mark: str | None = None,
    only: Sequence[str] = (),
    inside: bool = False,
) -> None:
    """Refuse a folder that must not be replaced, before any long work.

    One that a killed :func:`staged_folder` had just moved aside is put back first.

    Args:
        folder: where a command will write; it may not exist yet.
        overwrite: whether the user allows to replace a folder of ours.
        mark: the file by which a folder of ours is known: ``overwrite`` never deletes one without.
        only: patterns, one of which everything in it must have to be deleted by ``overwrite``.
        inside: whether it is written into, and not replaced by :func:`staged_folder`.

    Raises:
        OutputError: it is a file or a mount point, holds something that would be lost, or is being
            written.
    """
    target = folder.resolve()
    try:
        target.exists()
    except OSError as error:  # of a name that is too long, for one
        raise OutputError(f"cannot write {folder}: {error.strerror}") from error
    if not target.exists() and _aside(target):
        with _locked(target):
            _clean_up(target)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputError(f"{folder} is a file: name a folder")
    if not inside and os.path.ismount(target):  # no other folder can take its place
        raise OutputError(f"{folder} is a mount point: name a folder inside it")
    held = sorted(folder.iterdir())
    if not held:
        return
    if not overwrite:
        raise OutputError(
            f"{folder} is not empty ({len(held)} entries): name another folder, or add --overwrite"
        )
    if mark and not (folder / mark).is_file():
        raise OutputError(
            f"{folder} is not empty and holds no {mark}, so it is not one of ours: "
            "--overwrite will not delete it, name another folder"
        )
    if foreign := [path.name for path in held if only and not any(map(path.match, only))]:
        raise OutputError(
            f"{folder} holds {foreign[0]}, which this command never writes and --overwrite would "
            "delete: move it away, or name another folder"
        )


def check_room(folder: Path, needed: int) -> None:
    """Refuse to begin what an existing folder's disk cannot hold.

    Raises:
        OutputError: it has less than ``needed`` bytes free.
    """
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OutputError(
            f"cannot write {folder}: {needed:,} bytes are needed and its disk has {free:,} free: "
            "make room, or name a folder on another disk"
        )


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A new sibling folder that takes ``target``'s place when the block ends well.

    Everything in it is flushed to disk first. If the block fails, it is removed and what was at
    ``target`` is still there. A link to a folder stays one: the folder behind it is replaced. A
    lock, which the kernel frees when a process dies, keeps others out; what a killed process left
    is cleaned up, and what it had moved aside is put back.

    Raises:
        OutputError: the disk refuses (full, read-only, no permission), or another process is
            writing ``target``.
    """
    target = target.resolve()
    staged = target.with_name(f".{target.name}.partial-{os.getpid()}")
    replaced = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            _clean_up(target)
            try:
                staged.mkdir()
                yield staged
                _publish(staged, target, replaced)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
                if target.exists():
                    shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error


def _publish(staged: Path, target: Path, replaced: Path) -> None:
    """Flush, and let the new folder take the place of the old one."""
    for path in (*staged.rglob("*"), staged):
        flush(path)
    try:
        if target.exists():
            target.rename(replaced)
        staged.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    flush(target.parent)


def _aside(target: Path) -> list[Path]:
    """What a process that was killed between the two renames had moved aside, the oldest first."""
    held = target.parent.glob(f".{glob.escape(target.name)}.replaced-*")
    return sorted(held, key=lambda path: path.stat().st_mtime)


def _clean_up(target: Path) -> None:
    """Put back or remove what killed processes have left; only under the lock."""
    if not target.exists() and (aside := _aside(target)):
        aside[-1].rename(target)
    for path in (
        *_aside(target),
        *target.parent.glob(f".{glob.escape(target.name)}.partial-*"),
    ):
        shutil.rmtree(path, ignore_errors=True)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock(descriptor: int, target: Path) -> None:
    """Take an open file's lock; where the disk has none, as Lustre without ``flock``, warn of it.

    Args:
        target: what the lock is for.

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"the disk of {target} has no locks ({error.strerror}): let no other process "
            "write there",
            RuntimeWarning,
            stacklevel=3,
        )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keep every other process from writing ``target``.

    Raises:
        OutputError: another one is.
    """
    file = target.with_name(f".{target.name}.lock")
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            lock(descriptor, target)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise OutputError(
                f"{target} is being written by process {holder or '(unknown)'}: wait for its end, "
                "or name another folder"
            ) from None
        except OSError:
            os.close(descriptor)
            raise
        if _is_at(file, descriptor):
            break
        os.close(descriptor)  # its last holder has removed it
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """A new file that takes ``target``'s place, flushed, when the block that writes it ends well.

    Raises:
        OutputError: the disk refuses.
    """
    staged = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        yield staged
        flush(staged)
        staged.replace(target)
        flush(target.parent)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it was moved, never made, or the error above says more
            staged.unlink()


def write_json(target: Path, content: Any) -> None:
    """Write a file of :func:`as_json`, at once or not at all.

    Raises:
        OutputError: the disk refuses.
    """
    with staged_file(target) as staged:
        staged.write_text(as_json(content) + "\n", encoding="utf-8")


def as_json(content: Any) -> str:
    """Plain values as indented JSON, which has no NaN and no infinity: they are null. Paths are
    text."""
    return json.dumps(_plain(content), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def flush(path: Path) -> None:
    """Force a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


SLICE = 2 * 2**20
"""Bytes that are read or written at a time, while they are in the processor's cache."""


def write_at(
    descriptor: int,
    data: bytes | memoryview,
    start: int,
    seen: Callable[[memoryview], object] = lambda part: None,
    alone: AbstractContextManager[object] | None = None,
) -> None:
    """Put ``data`` at byte ``start`` of a file; ``seen`` gets each part that is written.

    Threads that write to one file give the same lock as ``alone``: the kernel lets in one at a time
    as well, but has the others wait for it with a busy processor.
    """
    left = memoryview(data)
    while left:
        part = left[:SLICE]
        seen(part)
        left = left[len(part) :]
        while part:
            with alone or nullcontext():
                count = os.pwrite(descriptor, part, start)
            if count == SLICE and hasattr(os, "posix_fadvise"):
                # lets the disk begin now, instead of at the flush
                os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)
            part, start = part[count:], start + count
