"""Recover from a run that was killed while saving, and explain failures to load or save.

With a tracker file without a number Megatron exits with code 0, and without a tracker file it
starts from scratch. The file is therefore repaired before Megatron reads it.
"""

import ctypes
import errno
import os
import re
import shutil
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kha_megatron.announcements import announce, is_first_rank
from kha_megatron.checkpoint.torch_dist import reason
from kha_megatron.checkpoint.tracker import (
    RELEASE,
    TRACKER,
    newest,
    repair,
    select_checkpoint,
)
from kha_megatron.errors import CheckpointError, OutputError

_WAIT = 60  # seconds for a shared file system to show what rank 0 wrote
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SCHEDULE = re.compile(
    r"OptimizerParamScheduler: class input value (.+) and checkpoint\s*value (.+) for (.+) do not "
)
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def repair_tracker(args: Namespace) -> None:
    """Point the tracker file to the last complete checkpoint. Call on every rank at the start.

    Applies only if ``--save`` is ``--load``. Rank 0 writes, and the other ranks wait to see it.

    Raises:
        CheckpointError: the other ranks do not see what rank 0 wrote.
        OutputError: the tracker file cannot be written.
    """
    if args.ckpt_format != "torch_dist" or not args.load or not args.save:
        return
    folder = Path(args.load)
    if not folder.is_dir() or folder.resolve() != Path(args.save).resolve():
        return
    verdict = select_checkpoint(folder)
    # Megatron reads the tracker file even with --ckpt-step
    readable = verdict.tracker in (None, RELEASE) or verdict.tracker.isdecimal()
    if args.ckpt_step and readable:
        return
    if is_first_rank():
        repair(verdict)
        return
    deadline = time.monotonic() + _WAIT
    while verdict.problem and verdict.newest:
        if time.monotonic() > deadline:
            late = f"and rank 0 did not repair it within {_WAIT} s"
            raise CheckpointError(f"{verdict.folder / TRACKER} {verdict.problem}, {late}.")
        time.sleep(0.1)
        verdict = select_checkpoint(folder)


def warn_of_a_fresh_start(args: Namespace) -> None:
    """Warn if ``--save`` contains a checkpoint that the run does not load."""
    if args.load or not args.save or "://" in args.save:
        return
    if found := newest(Path(args.save)):
        announce(
            f"WARNING: {args.save} holds {found.name}, which this run does not load and may "
            f"overwrite. Add --load {args.save} to resume."
        )


def end_children_with_the_rank() -> None:
    """Make the kernel end the forked processes (writers, loaders) of a rank that dies (Linux).

    Otherwise a writer would continue in a directory that the next run writes to.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        os.register_at_fork(after_in_child=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))


@contextmanager
def explain_failures(args: Namespace) -> Iterator[None]:
    """Convert failures to read or write a checkpoint to errors of one line.

    Raises:
        OutputError: a checkpoint could not be written.
        CheckpointError: a checkpoint could not be read.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        if error.args[0] == "read":
            why = next((reason(e) for e, _ in error.failures.values()), "see the other ranks")
            raise CheckpointError(
                f"{args.load} cannot be read ({why}). Choose another checkpoint with --ckpt-step."
            ) from error
        if error.args[0] != "write" or not args.save:
            raise
        raise _not_written(args.save, "see the lines above") from error
    except AssertionError as error:
        if (found := _SCHEDULE.search(str(error))) is None:
            raise
        given, stored, name = found.groups()
        raise CheckpointError(
            f"The {name} is {given}, but {args.load} was saved with {stored}. Add "
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
        f"Could not write a checkpoint to {save}: {why} ({free} MB free). Free space and run the "
        f"same command again. It resumes from {last.name if last else 'the start'}."
    )
