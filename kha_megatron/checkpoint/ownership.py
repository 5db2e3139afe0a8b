"""Keep two processes from writing to the same directory.

The owner holds a lock (``flock``) on ``.owner.json`` until it exits. Even if it gets killed, the
kernel releases the lock.

Some cluster file systems do not support locks, or other nodes do not see them. That's why there is
also a random run ID in the file. The owner checks it before and after writing, and stops if someone
else has changed it. Without locks, the owner also updates the file's modification time every 30
seconds, and nobody takes over the directory of an owner that did so recently.
"""

import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any

import psutil

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.reading import open_regular
from kha_megatron.errors import OutputError

OWNER = ".owner.json"

HEARTBEAT_INTERVAL = 30
"""Seconds between two updates of the modification time (without file locks)."""

HEARTBEAT_TIMEOUT = 180
"""Seconds since the last update after which an owner on another host counts as dead."""

_MAX_OWNER_BYTES = 2**16

_NOT_REGULAR = (errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Error codes for links, directories and devices."""


class Lock(Enum):
    """Result of :func:`try_lock`."""

    ACQUIRED = auto()
    HELD_BY_ANOTHER_PROCESS = auto()
    UNSUPPORTED = auto()
    """The file system has no locks."""


class Ownership:
    """Returned by :func:`claim`. Call :meth:`check` to see if we still own the directory."""

    def __init__(
        self,
        directory: Path,
        descriptor: int,
        run_id: str,
        *,
        needs_heartbeat: bool,
    ) -> None:
        self.directory = directory
        self.run_id = run_id
        self._descriptor = descriptor
        self._is_released = threading.Event()
        if needs_heartbeat:
            thread = threading.Thread(
                target=self._send_heartbeats,
                name="heartbeat",
                daemon=True,
            )
            thread.start()

    def check(self) -> None:
        """Raise OutputError if another run has taken over the directory in the meantime."""
        owner = self._other_owner()
        if owner is not None:
            raise OutputError(
                f"{self.directory} was taken over by {_describe(owner)}. This run stops so that "
                "the two runs do not overwrite each other's checkpoints. Use another directory."
            )

    def release(self) -> None:
        """Release the lock, and clear the file so that other hosts do not wait for heartbeats.

        Does not delete the file, since that could race with a new owner.
        """
        self._is_released.set()
        if self._read_owner().get("run_id") == self.run_id:  # may be empty, if taken over and ended
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _other_owner(self) -> dict[str, Any] | None:
        """Return the run that has taken over the directory, or None."""
        owner = self._read_owner()
        if not owner or owner["run_id"] == self.run_id:
            return None
        return owner

    def _read_owner(self) -> dict[str, Any]:
        file = self.directory / OWNER
        try:
            descriptor = open_regular(file, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return {}
        try:
            return _read_owner(descriptor)
        finally:
            os.close(descriptor)

    def _send_heartbeats(self) -> None:
        while not self._is_released.wait(HEARTBEAT_INTERVAL):
            if self._other_owner() is not None:
                return
            with suppress(OSError):
                os.utime(self.directory / OWNER, follow_symlinks=False)


def claim(directory: Path) -> Ownership:
    """Create a directory (if it does not exist) and become its owner.

    If a Slurm job gets requeued, it can take over the directory from its previous attempt. This
    also works if the node crashed and the file server has not released the lock yet.

    Raises:
        OutputError: If another process owns the directory, or we cannot write to it.
    """
    try:
        return _claim(directory)
    except OSError as error:
        raise OutputError(f"Cannot write to {directory}: {error.strerror}.") from error


def _claim(directory: Path) -> Ownership:
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = open_for_locking(directory / OWNER)
    try:
        lock = try_lock(descriptor, directory)
        previous_owner = _read_owner(descriptor)
        _refuse_running_owner(directory, descriptor, previous_owner, lock)
        run_id = uuid.uuid4().hex
        content = json.dumps({"run_id": run_id, **_this_process()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content.encode(), 0)
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return Ownership(
        directory,
        descriptor,
        run_id,
        needs_heartbeat=lock is Lock.UNSUPPORTED,
    )


def _refuse_running_owner(
    directory: Path,
    descriptor: int,
    owner: dict[str, Any],
    lock: Lock,
) -> None:
    """Raise OutputError if another process still writes to ``directory``.

    A requeued job may also take over a directory whose lock the file server has not released yet.
    """
    if lock is Lock.ACQUIRED or _is_requeued(owner):
        return
    if lock is Lock.HELD_BY_ANOTHER_PROCESS or _runs_on_this_host(owner):
        raise OutputError(
            f"{directory} is in use by {_describe(owner)}. Wait until that process has ended, or "
            "choose another directory."
        )
    silence = _file_system_time(directory) - os.fstat(descriptor).st_mtime
    if _is_on_another_host(owner) and silence < HEARTBEAT_TIMEOUT:
        raise OutputError(
            f"{directory} is in use by {_describe(owner)}, which updated {OWNER} {silence:.0f} "
            f"seconds ago. If that process has ended, try again after {HEARTBEAT_TIMEOUT} seconds "
            "without an update. Otherwise, choose another directory."
        )


def _file_system_time(directory: Path) -> float:
    """Return the time by the clock that sets modification times, which may be a file server's."""
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.fstat(file.fileno()).st_mtime


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
    if not directory.is_dir():
        return False
    return any(path.name != OWNER for path in directory.iterdir())


def try_lock(descriptor: int, target: Path) -> Lock:
    """Try to lock an open file (non-blocking).

    If the file system does not support locks, this logs a warning with ``target``. File systems
    report this with many different error codes.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.HELD_BY_ANOTHER_PROCESS
    except OSError as error:
        announce(
            f"WARNING: the file system of {target} does not support locks ({error.strerror}). Make "
            "sure that no other process writes to it.",
            once=(try_lock, target),
        )
        return Lock.UNSUPPORTED
    return Lock.ACQUIRED


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "slurm_restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def open_for_locking(file: Path) -> int:
    """Open a file for reading and writing and create it if necessary. Returns the descriptor.

    Raises:
        OutputError: If it is a link, a directory or a device. Whoever placed a link there could
            make us overwrite any file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        return open_regular(file, flags)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise OutputError(f"{file} is not a regular file. Delete it.") from error
        raise


def _read_owner(descriptor: int) -> dict[str, Any]:
    """Parse an owner file. Returns an empty dictionary if it has no valid content."""
    try:
        content = os.pread(descriptor, _MAX_OWNER_BYTES, 0)
        owner = dict(json.loads(content))
    except (OSError, ValueError, TypeError):
        return {}
    is_valid = owner.keys() >= _this_process().keys()
    return owner if is_valid else {}


def _is_requeued(owner: dict[str, Any]) -> bool:
    """Whether the owner is an earlier attempt of the Slurm job that this process belongs to."""
    this_process = _this_process()
    if this_process["slurm_job"] is None:
        return False
    if owner.get("slurm_job") != this_process["slurm_job"]:
        return False
    return bool(owner.get("slurm_restarts", 0) < this_process["slurm_restarts"])


def _is_on_another_host(owner: dict[str, Any]) -> bool:
    if not owner:
        return False
    return bool(owner["host"] != socket.gethostname())


def _runs_on_this_host(owner: dict[str, Any]) -> bool:
    if not owner or _is_on_another_host(owner):
        return False
    try:
        created = psutil.Process(owner["pid"]).create_time()
    except psutil.NoSuchProcess:
        return False
    return abs(created - owner["created"]) < 1  # otherwise, another process got the same ID


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    process = f"process {owner['pid']} on {owner['host']}"
    if owner.get("slurm_job"):
        process += f" (Slurm job {owner['slurm_job']})"
    return f"{process}, started {owner['started']}"
