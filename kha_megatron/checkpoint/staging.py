"""Write files and directories so that a crash, an error or Ctrl-C leaves nothing half-written."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kha_megatron.checkpoint.ownership import OWNER, try_lock
from kha_megatron.errors import OutputError


def check_output_folder(
    folder: Path,
    *,
    overwrite: bool,
    mark: str | None = None,
    only: Sequence[str] = (),
    inside: bool = False,
) -> None:
    """Raise OutputError if a command must not write a directory.

    Args:
        folder: The directory, which may not exist yet.
        overwrite: Whether a directory that is not empty may be replaced.
        mark: File that the directory must hold to be replaced.
        only: Patterns of the files that may be deleted. Empty for all files.
        inside: Write into the directory instead of replacing it.
    """
    target = folder.resolve()
    if _siblings(target)[1].is_dir() and not target.exists():
        with _locked(target):
            _clean_up(target)
    if not folder.exists():
        return
    held = sorted(path for path in folder.iterdir() if path.name != OWNER)
    foreign = [path.name for path in held if only and not any(map(path.match, only))]
    if not inside and os.path.ismount(target):  # a mount point cannot be renamed
        problem = f"{folder} is a mount point and cannot be replaced. Choose a directory inside it."
    elif not held:
        return
    elif not overwrite:
        problem = (
            f"{folder} is not empty ({len(held)} entries). Choose another directory, or add "
            "--overwrite."
        )
    elif mark and not (folder / mark).is_file():
        problem = (
            f"{folder} holds no {mark}, so that --overwrite does not delete it. Choose another "
            "directory."
        )
    elif foreign:
        problem = f"{folder} holds {foreign[0]}, which is not from this command. Move it."
    else:
        return
    raise OutputError(problem)


def check_room(folder: Path, needed: int) -> None:
    """Raise OutputError unless the disk of an existing directory has ``needed`` bytes free."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OutputError(
            f"Expected {needed:,} free bytes on the disk of {folder}, got {free:,}. Make room."
        )


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a new directory that replaces ``target`` when the block exits without an error.

    All files are flushed to disk first. If the block fails, ``target`` is unchanged. If ``target``
    is a link, the directory behind it is replaced. The remains of a killed process are removed.

    Raises:
        OutputError: The disk is full or failed, or another process is writing ``target``.
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
        raise OutputError(f"Cannot write {target}: {error.strerror or error}") from error


def _siblings(target: Path) -> tuple[Path, Path]:
    """Return the temporary names of the new and of the old directory."""
    return target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.replaced")


def _clean_up(target: Path) -> None:
    """Move the old directory back unless it was replaced, and remove the other one."""
    staged, replaced = _siblings(target)
    if replaced.exists() and not target.exists():
        replaced.rename(target)
    for path in (staged, replaced):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of ``target``. The kernel frees it when this process dies."""
    file = target.with_name(f".{target.name}.lock")
    with file.open("a") as opened:
        if try_lock(opened.fileno(), target) is False:
            raise OutputError(
                f"{target} is being written by another process. Choose another directory."
            )
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Yield a new file that replaces ``target`` when the block exits without an error."""
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
        raise OutputError(f"Cannot write {target}: {error.strerror or error}") from error


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
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
