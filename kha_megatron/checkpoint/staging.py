"""Write files and directories so that a crash, an error or Ctrl-C leaves nothing half-written."""

import errno
import fcntl
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    """Refuse a directory that must not be replaced, before any long work.

    Args:
        folder: Where a command will write. It may not exist yet.
        overwrite: Whether the user allows to replace a directory of ours.
        mark: A file that every directory of ours holds.
        only: Patterns of the files that ``overwrite`` may delete. Empty for all files.
        inside: Whether the command writes into the directory instead of replacing it.
    """
    target = folder.resolve()
    if _siblings(target)[1].is_dir() and not target.exists():
        with _locked(target):
            _clean_up(target)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputError(f"{folder} is a file: name a folder")
    if not inside and os.path.ismount(target):  # a mount point cannot be renamed
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
    """Check that the disk of an existing directory has ``needed`` bytes free."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OutputError(
            f"cannot write {folder}: {needed:,} bytes are needed and its disk has {free:,} free: "
            "make room, or name a folder on another disk"
        )


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a new directory that replaces ``target`` when the block exits without an error.

    Everything is flushed to disk first. If the block fails, the new directory is removed and
    ``target`` is unchanged. If ``target`` is a link, the directory behind it is replaced. A lock
    keeps other processes out. What a killed process left behind is cleaned up.

    Raises:
        OutputError: The disk refuses, or another process is writing ``target``.
    """
    target = target.resolve()
    staged, replaced = _siblings(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            _clean_up(target)
            try:
                staged.mkdir()
                yield staged
                for path in (*staged.rglob("*"), staged):
                    flush(path)
                if target.exists():
                    target.rename(replaced)
                staged.rename(target)
                flush(target.parent)
            finally:
                _clean_up(target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error


def _siblings(target: Path) -> tuple[Path, Path]:
    """Return where the new directory is written and where the old one is moved."""
    return target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.replaced")


def _clean_up(target: Path) -> None:
    """Move the old directory back if nothing took its place, and remove the rest."""
    staged, replaced = _siblings(target)
    if replaced.exists() and not target.exists():
        replaced.rename(target)
    for path in (staged, replaced):
        shutil.rmtree(path, ignore_errors=True)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock(descriptor: int, target: Path) -> None:
    """Lock an open file, or warn that the disk of ``target`` has no locks (some Lustre mounts).

    Raises:
        BlockingIOError: Another process holds the lock.
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
    """Hold the lock of ``target``. The kernel frees it when this process dies."""
    file = target.with_name(f".{target.name}.lock")
    with file.open("a") as opened:
        try:
            lock(opened.fileno(), target)
        except BlockingIOError:
            raise OutputError(
                f"{target} is being written by another process: wait until it ends, or name "
                "another folder"
            ) from None
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Yield a new file that replaces ``target`` when the block exits without an error.

    Raises:
        OutputError: The disk refuses.
    """
    staged = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        try:
            yield staged
            flush(staged)
            staged.replace(target)
            flush(target.parent)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error


def write_json(target: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    with staged_file(target) as staged:
        staged.write_text(as_json(content) + "\n", encoding="utf-8")


def as_json(content: Any) -> str:
    """Format plain values as indented JSON. NaN and infinity become null, paths become strings."""
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
    """Force a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
