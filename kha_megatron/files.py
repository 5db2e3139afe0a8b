"""Writing folders so that a crash, an error or Ctrl-C leaves nothing half-written."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kha_megatron.errors import OutputError


def check_output_folder(
    folder: Path, *, overwrite: bool, mark: str | None = None, only: str | None = None
) -> None:
    """Refuse a folder that must not be replaced, before any long work.

    Args:
        folder: where a command will write; it may not exist yet.
        overwrite: whether the user allows to replace a folder of ours.
        mark: the file by which a folder of ours is known: ``overwrite`` never deletes one without.
        only: a pattern that every file in it must have to be deleted by ``overwrite``.

    Raises:
        OutputError: it is a file, or holds something that would be lost.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputError(f"{folder} is a file: name a folder")
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
    if foreign := [file.name for file in held if only and not file.match(only)]:
        raise OutputError(
            f"{folder} holds {foreign[0]}, which is none of {only} and which --overwrite would "
            "delete: name another folder"
        )


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A new sibling folder that takes ``target``'s place when the block ends well.

    Everything in it is flushed to disk first. If the block fails, it is removed and what was at
    ``target`` is still there. A link to a folder stays one: the folder behind it is replaced.

    Raises:
        OutputError: the disk refuses (full, read-only, no permission).
    """
    target = target.resolve()
    staged = target.with_name(f".{target.name}.partial-{os.getpid()}")
    replaced = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.mkdir()
        yield staged
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
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """The same for one file: the block writes the path it is given.

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


def flush(path: Path) -> None:
    """Force a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
