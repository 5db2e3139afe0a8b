"""Resume after a job was killed during a save, and explain failed saves and loads.

The tracker file has to be repaired before Megatron reads it. If it contains no number, Megatron
exits with code 0. If it is missing, Megatron starts from scratch.
"""

import ctypes
import errno
import multiprocessing.util
import os
import re
import shutil
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce, is_first_rank
from kha_megatron.checkpoint.torch_dist import reason
from kha_megatron.checkpoint.tracker import (
    RELEASE,
    TRACKER,
    is_object_store,
    newest,
    repair,
    select_iteration,
)
from kha_megatron.errors import CheckpointError, OutputError, show_value

_WAIT = 60  # seconds until rank 0's changes must be visible on a shared file system
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SCHEDULE = re.compile(
    r"OptimizerParamScheduler: class input value (.+) and checkpoint\s*value (.+) for (.+) do not "
)
_DIFFERING = re.compile(
    r"(\w+) value from checkpoint \((.*)\) is not equal to the input argument value \((.*)\)"
)
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def repair_tracker(args: Namespace) -> bool:
    """Point the tracker file to the newest complete checkpoint.

    Only done if ``--save`` and ``--load`` are the same directory. Call this on rank 0 before
    Megatron is initialized. If it returns True, call it on all other ranks, which then wait until
    they see the change.

    Returns:
        bool: True if the tracker file was or has to be changed.

    Raises:
        CheckpointError: If a rank does not see the change within a minute.
        OutputError: If the tracker file cannot be written.
    """
    if args.ckpt_format != "torch_dist" or not args.load or not args.save:
        return False
    folder = Path(args.load)
    if not folder.is_dir() or folder.resolve() != Path(args.save).resolve():
        return False
    verdict = select_iteration(folder)
    # Megatron reads the tracker file even with --ckpt-step
    readable = verdict.tracker in (None, RELEASE) or verdict.tracker.isdecimal()
    if args.ckpt_step and readable:
        return False
    is_wrong = verdict.problem is not None and verdict.newest is not None
    if is_first_rank():
        repair(verdict)
        return is_wrong
    deadline = time.monotonic() + _WAIT
    while verdict.problem and verdict.newest:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{verdict.folder / TRACKER} {verdict.problem}, and it was not repaired by rank 0 "
                f"within {_WAIT} s."
            )
        time.sleep(0.1)
        verdict = select_iteration(folder)
    return is_wrong


def warn_of_a_fresh_start(args: Namespace) -> None:
    """Warn about a missing ``--load`` if ``--save`` already contains a checkpoint."""
    if args.load or not args.save or is_object_store(args.save):
        return
    if found := newest(Path(args.save)):
        announce(
            f"WARNING: {args.save} contains {found.name}, which this run may overwrite. To resume "
            f"from it, add --load {args.save}"
        )


def protect_children() -> None:
    """Block SIGTERM in child processes, and kill forked ones when their rank dies. Linux only.

    Before a job is preempted, Slurm sends SIGTERM to all of its processes. With
    ``--exit-signal-handler``, the rank then saves a checkpoint, which needs its children (data
    loaders, checkpoint writers and their queues). An orphaned writer, on the other hand, could
    write into the checkpoint directory of the next run.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return

    def prepare_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def spawn(*args: Any) -> int:
        # the new process inherits the mask of this thread
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return original_spawn(*args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    os.register_at_fork(after_in_child=prepare_child)
    util: Any = multiprocessing.util
    original_spawn = util.spawnv_passfds
    util.spawnv_passfds = spawn


@contextmanager
def explain_failures(args: Namespace) -> Iterator[None]:
    """Turn exceptions from failed saves and loads into one-line errors.

    Raises:
        OutputError: If a checkpoint cannot be written, e.g. because the disk is full.
        CheckpointError: If a checkpoint cannot be read, or was saved with other arguments.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        if error.args[0] == "read":
            why = next((reason(e) for e, _ in error.failures.values()), "see the other ranks")
            raise CheckpointError(
                f"Could not read a checkpoint from {args.load}: {why}. Choose another checkpoint "
                "with --ckpt-step."
            ) from error
        if error.args[0] != "write" or not args.save:
            raise
        raise _not_written(args.save, "see the lines above") from error
    except AssertionError as error:
        if differing := _DIFFERING.search(str(error)):
            name, stored, given = differing.groups()
            raise CheckpointError(
                f"{name} is {given}, but {args.load} was saved with {show_value(stored)}. Use the "
                "value of that run, or start a new run in another directory."
            ) from error
        if (found := _SCHEDULE.search(str(error))) is None:
            raise
        given, stored, name = found.groups()
        raise CheckpointError(
            f"The {name} is {given}, but {args.load} was saved with {show_value(stored)}. Add "
            "--override-opt-param-scheduler to use the new value, or "
            "--use-checkpoint-opt-param-scheduler to keep the one in the checkpoint."
        ) from error
    except OSError as error:
        if error.errno not in _DISK or not args.save:
            raise
        raise _not_written(args.save, error.strerror or str(error)) from error


def _not_written(save: str, why: str) -> OutputError:
    folder = Path(save)
    last = newest(folder)
    free = shutil.disk_usage(folder if folder.is_dir() else folder.parent).free >> 20
    return OutputError(
        f"Could not write a checkpoint to {save}: {why} ({free} MB free). Free some space and run "
        f"the same command again to resume from {last.name if last else 'the start'}."
    )
