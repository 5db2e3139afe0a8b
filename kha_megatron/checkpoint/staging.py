"""Atomic writes, so that a crash or Ctrl-C does not leave partial output behind."""

import glob
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kha_megatron.checkpoint.ownership import OWNER, Lock, open_for_locking, try_lock
from kha_megatron.errors import OutputError


def check_output_folder(
    folder: Path,
    *,
    overwrite: bool,
    mark: str | None = None,
    only: Sequence[str] = (),
    inside: bool = False,
) -> None:
    """Raise OutputError if a command would overwrite anything other than its own output.

    Args:
        folder (Path): Output directory. Does not have to exist yet.
        overwrite (bool): Whether the user passed ``--overwrite``.
        mark (str, optional): File that identifies previous output of the same command. We do not
            replace directories without it.
        only (Sequence[str]): Glob patterns of files that may be deleted (everything if empty).
        inside (bool): Set this if the command writes into the directory instead of replacing it.
    """
    target = Path(os.path.realpath(folder))  # unlike resolve(), does not fail on a symlink loop
    if not target.exists() and _leftovers(target, "replaced"):
        with _locked(target) as is_locked:
            if is_locked:
                _clean_up(target)  # restores the directory that a killed process was replacing
    if not folder.exists():
        _check_parents(target)
        return
    if not inside and os.path.ismount(target):  # a mount point cannot be renamed
        raise OutputError(
            f"{folder} is a mount point and cannot be replaced. Use a directory inside it."
        )
    existing = sorted(path for path in folder.iterdir() if path.name != OWNER)
    if not existing:
        return
    if not overwrite:
        raise OutputError(
            f"{folder} is not empty ({len(existing)} entries). Choose another directory, or add "
            "--overwrite to replace it."
        )
    if mark and not (folder / mark).is_file():
        raise OutputError(
            f"{folder} contains no {mark}, so it was not written by this command and is not "
            "overwritten. Choose another directory."
        )
    if not only:
        return
    for path in existing:
        is_own_output = any(path.match(pattern) for pattern in only)
        if not is_own_output:
            raise OutputError(
                f"{folder} contains {path.name}, which was not written by this command. Move it "
                "to another directory."
            )


def _check_parents(target: Path) -> None:
    """Raise OutputError if ``target`` cannot be created because it needs a file as a directory."""
    existing = target
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():  # a file, or symlinks in a loop
        raise OutputError(f"Could not write {target}: {existing} is not a directory.")


def check_room(folder: Path, required_bytes: int) -> None:
    """Raise OutputError if there is less free disk space than ``required_bytes``."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < required_bytes:
        raise OutputError(
            f"Not enough disk space for {folder}: {required_bytes:,} bytes are required, but only "
            f"{free_bytes:,} are free."
        )


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that replaces ``target`` if the block succeeds.

    Example::

        with staged_folder(target) as folder:
            (folder / "config.json").write_text("{}")

    Everything is flushed to disk before the rename. On errors, ``target`` does not change. If it is
    a symlink, we replace the directory it points to. Leftovers of killed processes are cleaned up.

    Raises:
        OutputError: If we cannot write, or another process is already writing to ``target``.
    """
    target = Path(os.path.realpath(target))
    staged = _temporary_name(target, "partial")
    replaced = _temporary_name(target, "replaced")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target) as is_locked:
            if is_locked:
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
                _restore(replaced, target)
                shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"Could not write {target}: {error.strerror or error}") from error


def _temporary_name(target: Path, suffix: str) -> Path:
    """Return a hidden sibling of ``target`` that no other process uses, on any host."""
    token = secrets.token_hex(4)
    return target.with_name(f".{target.name}.{suffix}-{token}")


def _leftovers(target: Path, suffix: str) -> list[Path]:
    """List the temporary siblings that killed processes have left, the oldest first."""
    token = "[0-9a-f]" * 8
    name = glob.escape(target.name)
    paths = target.parent.glob(f".{name}.{suffix}-{token}")
    return sorted(paths, key=lambda path: path.stat().st_mtime)


def _restore(replaced: Path, target: Path) -> None:
    """Undo a half-finished replacement, or delete the directory that was replaced."""
    if replaced.exists() and not target.exists():
        replaced.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _clean_up(target: Path) -> None:
    """Restore or remove what killed processes have left.

    Only call this with the lock. Without it, another process may still write to these directories.
    """
    for replaced in reversed(_leftovers(target, "replaced")):
        _restore(replaced, target)
    for staged in _leftovers(target, "partial"):
        shutil.rmtree(staged, ignore_errors=True)


@contextmanager
def _locked(target: Path) -> Iterator[bool]:
    """Lock ``target``. If we get killed, the kernel releases the lock.

    Yields:
        bool: False if the file system does not support locks.

    Raises:
        OutputError: If another process has the lock.
    """
    file = target.with_name(f".{target.name}.lock")
    descriptor, is_locked = _open_locked(file, target)
    try:
        yield is_locked
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _open_locked(file: Path, target: Path) -> tuple[int, bool]:
    """Open and lock ``file``. Returns its descriptor, and whether the file system has locks.

    The previous owner deletes its lock file. If it does so between our ``open`` and our ``flock``,
    we hold the lock of a deleted file, while a third process creates and locks a new one. So we
    start again until the file that we locked is the one with this name.
    """
    while True:
        descriptor = open_for_locking(file)
        try:
            lock = try_lock(descriptor, target)
            if lock is Lock.HELD_BY_ANOTHER_PROCESS:
                raise OutputError(
                    f"{target} is being written by another process. Choose another directory."
                )
            if lock is Lock.UNSUPPORTED:
                return descriptor, False
            if _is_file_of(file, descriptor):
                return descriptor, True
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_file_of(path: Path, descriptor: int) -> bool:
    """Whether ``path`` still names the file that ``descriptor`` has open."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Like :func:`staged_folder`, but for a single file."""
    staged = _temporary_name(target, "partial")
    try:
        try:
            yield staged
            flush(staged)
            staged.replace(target)
            flush(target.parent)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"Could not write {target}: {error.strerror or error}") from error


def write_json(target: Path, content: Any) -> None:
    with staged_file(target) as staged:
        staged.write_text(as_json(content) + "\n", encoding="utf-8")


def as_json(content: Any) -> str:
    """Like ``json.dumps``, but NaN and Inf become null, and paths become strings."""
    return json.dumps(_plain(content), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, Path):
        return str(value)
    return value


def flush(path: Path) -> None:
    """``fsync`` a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
