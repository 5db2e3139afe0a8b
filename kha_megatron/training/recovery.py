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

from torch.distributed.checkpoint.api import CheckpointException

from kha_megatron.announcements import announce, is_first_rank
from kha_megatron.checkpoint.torch_dist import reason
from kha_megatron.checkpoint.tracker import (
    RELEASE,
    TRACKER,
    Selection,
    is_object_store,
    newest,
    repair,
    select_iteration,
)
from kha_megatron.errors import CheckpointError, KHAError, OutputError, show_value

_REPAIR_TIMEOUT = 60
"""Seconds until rank 0's repair must be visible to other ranks on a shared file system."""

_PR_SET_PDEATHSIG = 1
"""Option of ``prctl`` that sets the signal sent when the parent dies, from ``linux/prctl.h``."""

_SCHEDULE_DIFFERS = re.compile(
    r"OptimizerParamScheduler: class input value (?P<value>.+) and checkpoint\s*value "
    r"(?P<saved_value>.+) for (?P<name>.+) do not "
)
"""Megatron's error for a learning rate schedule that differs from the checkpoint."""

_ARGUMENT_DIFFERS = re.compile(
    r"(?P<name>\w+) value from checkpoint \((?P<saved_value>.*)\) is not equal to the input "
    r"argument value \((?P<value>.*)\)"
)
"""Megatron's error for any other argument that differs from the checkpoint."""

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def repair_tracker(args: Namespace) -> bool:
    """Point the tracker file to the newest complete checkpoint, before Megatron reads it.

    Only done if ``--save`` and ``--load`` are the same directory. Rank 0 changes the file. If other
    ranks call this too (because they were not started by torchrun), they wait for the change.

    Returns:
        bool: Whether the tracker file was wrong. In this case, all other ranks have to call
        :func:`wait_for_repaired_tracker`.

    Raises:
        CheckpointError: See :func:`wait_for_repaired_tracker`.
        OutputError: If the tracker file cannot be written.
    """
    selection = _select_to_repair(args)
    if selection is None:
        return False
    if is_first_rank():
        repair(selection)
    else:
        wait_for_repaired_tracker(args)
    return selection.tracker_problem is not None


def wait_for_repaired_tracker(args: Namespace) -> None:
    """Wait until this rank sees the tracker file that rank 0 has repaired.

    Raises:
        CheckpointError: If this takes longer than a minute.
    """
    deadline = time.monotonic() + _REPAIR_TIMEOUT
    while True:
        selection = _select_to_repair(args)
        if selection is None or selection.tracker_problem is None:
            return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{selection.folder / TRACKER} {selection.tracker_problem}, and it was not "
                f"repaired by rank 0 within {_REPAIR_TIMEOUT} s."
            )
        time.sleep(0.1)


def _select_to_repair(args: Namespace) -> Selection | None:
    """Select the checkpoint to resume from, or return None if the tracker file must not change."""
    if args.ckpt_format != "torch_dist" or not args.load or not args.save:
        return None
    directory = Path(args.load)
    if not directory.is_dir() or directory.resolve() != Path(args.save).resolve():
        return None
    selection = select_iteration(directory)
    # With --ckpt-step, the user selects the checkpoint, and the tracker file may name any other.
    # But Megatron still parses the file, and exits if it cannot.
    if args.ckpt_step and _can_megatron_parse(selection.tracker_content):
        return None
    return selection


def _can_megatron_parse(tracker_content: str | None) -> bool:
    """Whether Megatron accepts this content of a tracker file (None if there is no file)."""
    if tracker_content is None or tracker_content == RELEASE:
        return True
    return tracker_content.isdecimal()


def warn_of_a_fresh_start(args: Namespace) -> None:
    """Warn about a missing ``--load`` if ``--save`` already contains a checkpoint."""
    if args.load or not args.save or is_object_store(args.save):
        return
    checkpoint = newest(Path(args.save))
    if checkpoint is not None:
        announce(
            f"WARNING: {args.save} contains {checkpoint.name}, which this run may overwrite. To "
            f"resume from it, add --load {args.save}"
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

    def prepare_forked_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    os.register_at_fork(after_in_child=prepare_forked_child)
    _block_sigterm_in_spawned_children()


def _block_sigterm_in_spawned_children() -> None:
    """Replace the function with which multiprocessing's methods spawn and forkserver start a child.

    Such a child runs no at-fork handlers, but inherits the signal mask of the thread that starts
    it.
    """
    util: Any = multiprocessing.util
    original_spawn = util.spawnv_passfds

    def spawn_with_blocked_sigterm(*args: Any) -> int:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return original_spawn(*args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    util.spawnv_passfds = spawn_with_blocked_sigterm


@contextmanager
def explain_failures(args: Namespace) -> Iterator[None]:
    """Turn exceptions from failed saves and loads into one-line errors.

    Raises:
        OutputError: If a checkpoint cannot be written, e.g. because the disk is full.
        CheckpointError: If a checkpoint cannot be read, or was saved with other arguments.
    """
    explanation: KHAError | None
    try:
        yield
    except CheckpointException as error:
        explanation = _explain_checkpoint_exception(error, args)
        if explanation is None:
            raise
        raise explanation from error
    except AssertionError as error:
        explanation = _explain_assertion(str(error), args)
        if explanation is None:
            raise
        raise explanation from error
    except OSError as error:
        if error.errno not in _DISK_ERRORS or not args.save:
            raise
        raise _not_written(args.save, error.strerror or str(error)) from error


def _explain_checkpoint_exception(
    error: CheckpointException,
    args: Namespace,
) -> KHAError | None:
    """Explain an error of PyTorch's distributed checkpoints, which contains those of all ranks."""
    # raised as CheckpointException("read", {rank: (rank_error, stack_summary)})
    failed_step = error.args[0]
    if failed_step == "read":
        causes = [reason(rank_error) for rank_error, _ in error.failures.values()]
        cause = causes[0] if causes else "see the other ranks"
        return CheckpointError(
            f"Could not read a checkpoint from {args.load}: {cause}. Choose another checkpoint "
            "with --ckpt-step."
        )
    if failed_step == "write" and args.save:
        return _not_written(args.save, "see the lines above")
    return None


def _explain_assertion(message: str, args: Namespace) -> KHAError | None:
    """Explain an assertion of Megatron that compares arguments with those of the checkpoint."""
    argument = _ARGUMENT_DIFFERS.search(message)
    if argument is not None:
        saved_value = show_value(argument["saved_value"])
        return CheckpointError(
            f"{argument['name']} is {argument['value']}, but {args.load} was saved with "
            f"{saved_value}. Use the value of that run, or start a new run in another directory."
        )
    schedule = _SCHEDULE_DIFFERS.search(message)
    if schedule is not None:
        saved_value = show_value(schedule["saved_value"])
        return CheckpointError(
            f"The {schedule['name']} is {schedule['value']}, but {args.load} was saved with "
            f"{saved_value}. Add --override-opt-param-scheduler to use the new value, or "
            "--use-checkpoint-opt-param-scheduler to keep the one in the checkpoint."
        )
    return None


def _not_written(save: str, cause: str) -> OutputError:
    directory = Path(save)
    checkpoint = newest(directory)
    existing = directory if directory.is_dir() else directory.parent
    free_megabytes = shutil.disk_usage(existing).free >> 20
    return OutputError(
        f"Could not write a checkpoint to {save}: {cause} ({free_megabytes} MB free). Free some "
        "space and run the same command again to resume from "
        f"{checkpoint.name if checkpoint else 'the start'}."
    )
