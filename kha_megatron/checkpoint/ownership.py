"""Keep two processes from writing to the same directory.

The owner holds a lock (``flock``) on ``.owner.json`` until it exits. Even if it gets killed, the
kernel releases the lock.

Some cluster file systems don't support locks, or other nodes don't see them. That's why there's
also a random run ID in the file. The owner checks it before and after writing, and stops if someone
else has changed it.
"""

import errno
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from kha_megatron.announcements import announce
from kha_megatron.errors import OutputError

OWNER = ".owner.json"

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Ownership:
    """Returned by :func:`claim`. Call :meth:`check` to see if we still own the directory."""

    def __init__(self, directory: Path, descriptor: int, run_id: str) -> None:
        self.directory = directory
        self.run_id = run_id
        self._descriptor = descriptor

    def check(self) -> None:
        """Raise OutputError if another run has taken over the directory in the meantime."""
        owner = _read_owner(self.directory / OWNER)
        if owner and owner["run_id"] != self.run_id:
            raise OutputError(
                f"{self.directory} was taken over by {_describe(owner)}. This run stops so that "
                "the two runs do not overwrite each other's checkpoints. Use another directory."
            )

    def release(self) -> None:
        """Release the lock. Doesn't delete the file, since that could race with a new owner."""
        os.close(self._descriptor)


def claim(directory: Path) -> Ownership:
    """Create a directory (if it doesn't exist) and become its owner.

    If a Slurm job gets requeued, it can take over the directory from its previous attempt. This
    also works if the node crashed and the file server hasn't released the lock yet.

    Raises:
        OutputError: If another process owns the directory, or we can't write to it.
    """
    file = directory / OWNER
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise OutputError(f"Cannot write to {directory}: {error.strerror}.") from error
    try:
        locked = try_lock(descriptor, directory)
        owner = _read_owner(file)
        in_use = (
            not _is_requeued(owner) if locked is False else locked is None and _is_running(owner)
        )
        if in_use:
            raise OutputError(
                f"{directory} is in use by {_describe(owner)}. Wait until that process has ended, "
                "or choose another directory."
            )
        run_id = uuid.uuid4().hex
        content = {"run_id": run_id, **_this_process()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode(), 0)
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return Ownership(directory, descriptor, run_id)


@contextmanager
def owned(directory: Path) -> Iterator[Ownership]:
    """Context manager that calls :func:`claim` and releases the directory on exit."""
    ownership = claim(directory)
    try:
        yield ownership
    finally:
        ownership.release()


def has_files(directory: Path) -> bool:
    """Return True if the directory contains any files besides ``.owner.json``."""
    return directory.is_dir() and any(path.name != OWNER for path in directory.iterdir())


def try_lock(descriptor: int, target: Path) -> bool | None:
    """Try to lock an open file (non-blocking).

    Returns:
        bool | None: True if we got the lock, and False if another process has it. None if the file
        system doesn't support locks (this logs a warning with ``target``).
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        announce(
            f"WARNING: the file system of {target} does not support locks ({error.strerror}). Make "
            "sure that no other process writes to it.",
            once=(try_lock, target),
        )
        return None
    return True


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "slurm_restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _read_owner(file: Path) -> dict[str, Any]:
    try:
        owner = dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
    return owner if owner.keys() >= _this_process().keys() else {}


def _is_requeued(owner: dict[str, Any]) -> bool:
    this = _this_process()
    return (
        this["slurm_job"] is not None
        and owner.get("slurm_job") == this["slurm_job"]
        and owner.get("slurm_restarts", 0) < this["slurm_restarts"]
    )


def _is_running(owner: dict[str, Any]) -> bool:
    if owner.get("host") != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(owner["pid"]).create_time() - owner["created"]) < 1
    except psutil.NoSuchProcess:
        return False


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    job = f" (Slurm job {owner['slurm_job']})" if owner.get("slurm_job") else ""
    return f"process {owner['pid']} on {owner['host']}{job}, started {owner['started']}"
