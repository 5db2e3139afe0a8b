"""Going on after a run was killed while it saved, and ending well when it cannot save.

Megatron writes shards, ``.metadata``, the commit mark, the manifest and last, not atomically, the
tracker file. A kill leaves a folder without a mark, which must not be loaded, or a complete folder
that the tracker file does not name, which must not be lost. A tracker file without a number makes
Megatron exit with code 0.
"""

import errno
import os
import re
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.megatron import COMMIT_MARK, TRACKER, is_committed
from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.checkpoint.torch_dist import RefusedNameError, reason
from kha_megatron.errors import CheckpointError, OutputError

_WAIT = 60  # seconds for a shared file system to show what rank 0 wrote
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


class Verdict(NamedTuple):
    """What a ``--save`` folder holds, and what is to be done about it."""

    tracker: str | None
    """What the tracker file says; None if there is none."""
    resume: int | None
    """The iteration to go on from; None starts from scratch or is for Megatron to decide."""
    problem: str | None
    """Why the tracker file must be replaced, if it must."""
    incomplete: list[str]
    """Folders whose save was cut short, newer than ``resume``: they are ignored."""


def repair_tracker(args: Namespace) -> None:
    """Point the tracker file at the last complete checkpoint. Call it on every rank, at the start.

    Only where the run saves into the folder it loads (a job that is queued again); only the
    tracker file is touched, atomically, by rank 0. A number that was put there after the last save
    is a choice, as is ``--ckpt-step``, and is left alone. All ranks come to the same verdict from
    the same files, before and after the repair; the others wait until they see it.

    Raises:
        CheckpointError: the other ranks do not see what rank 0 wrote.
        OutputError: the tracker file cannot be written.
    """
    if args.ckpt_format != "torch_dist" or not args.load or not args.save:
        return
    folder = Path(args.load)
    if not folder.is_dir() or folder.resolve() != Path(args.save).resolve():
        return
    verdict = judge(folder)
    if args.ckpt_step and not _stops_megatron(verdict.tracker):
        return
    if os.environ.get("RANK", "0") == "0":
        _repair(folder, verdict)
    else:
        _wait(folder, verdict)


def judge(folder: Path) -> Verdict:
    """Which checkpoint a run that was killed goes on from.

    A complete folder that is newer than the tracker file was finished when the kill came before
    the tracker was written: it is the last. Otherwise the tracker file is right, if it names a
    complete folder; if not, the highest complete iteration is taken.
    """
    tracker, written = _read(folder / TRACKER)
    folders = {
        int(path.name[5:]): path
        for path in folder.iterdir()
        if re.fullmatch(r"iter_\d{7,}", path.name)
    }
    complete = {i: _time(path / COMMIT_MARK) for i, path in folders.items() if is_committed(path)}
    named = int(tracker) if tracker and tracker.isascii() and tracker.isdecimal() else None
    resume, problem = named, None
    if tracker == "release" or not complete:
        resume = None
    elif named in complete:
        resume = max((i for i, made in complete.items() if made > written), default=named)
        if resume != named:
            problem = f"names {named}, and {_name(resume)} was completed after it"
    else:
        resume = max(complete)
        if tracker is None:
            problem = "is missing"
        elif named is None:
            problem = f"holds {tracker[:20]!r} instead of an iteration"
        else:
            problem = f"names {named}, whose save never completed"
    newer = sorted(i for i in folders if i not in complete and i > (resume or 0))
    return Verdict(tracker, resume, problem, [_name(i) for i in newer])


def _repair(folder: Path, verdict: Verdict) -> None:
    words = []
    if verdict.problem:
        with staged_file(folder / TRACKER) as staged:
            staged.write_text(str(verdict.resume))
        words.append(f"resuming from {_name(verdict.resume)}: {TRACKER} {verdict.problem}")
    if verdict.incomplete:
        words.append(f"ignoring {', '.join(verdict.incomplete)}: the save was cut short")
    if words:
        announce(f"{folder}: {'; '.join(words)}")


def _wait(folder: Path, verdict: Verdict) -> None:
    deadline = time.monotonic() + _WAIT
    while verdict.problem:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{folder / TRACKER} {verdict.problem}, and rank 0 did not repair it within "
                f"{_WAIT} s: write {verdict.resume} into it, or share the folder among all machines"
            )
        time.sleep(0.1)
        verdict = judge(folder)


@contextmanager
def failures_explained(args: Namespace) -> Iterator[None]:
    """Turn a write that the disk refused, or a read that PyTorch refused, into one line.

    Raises:
        OutputError: a checkpoint could not be written.
        CheckpointError: a checkpoint could not be read.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        if error.args[0] == "read":
            why = next((_why(e) for e, _ in error.failures.values()), "another rank says why")
            raise CheckpointError(
                f"{args.load} holds what cannot be read ({why}): the checkpoint is damaged or "
                "hostile, take another with --ckpt-step"
            ) from error
        if error.args[0] != "write" or not args.save:
            raise
        raise _refused(args.save, "the lines above say why") from error
    except OSError as error:
        if error.errno not in _DISK or not args.save:
            raise
        raise _refused(args.save, error.strerror) from error


def _why(error: Exception) -> str:
    """Without PyTorch's advice to load it all the same."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return str(RefusedNameError(named[1])) if named else reason(error)


def _refused(save: str, why: str) -> OutputError:
    folder = Path(save)
    last = judge(folder).resume if folder.is_dir() else None
    again = f"resumes from {_name(last)}" if last else "starts from the beginning"
    free = shutil.disk_usage(folder if folder.is_dir() else folder.parent).free >> 20
    return OutputError(
        f"a checkpoint could not be written to {save}, whose disk has {free} MB free ({why}): make "
        f"room and start again with the same command, which {again}"
    )


def _stops_megatron(tracker: str | None) -> bool:
    """Megatron reads the tracker file even if ``--ckpt-step`` says which iteration to take."""
    return tracker is not None and tracker != "release" and not tracker.isdecimal()


def _read(tracker: Path) -> tuple[str | None, int]:
    """Content and time of writing, in nanoseconds, of one and the same file."""
    try:
        with tracker.open("rb") as stream:
            text = stream.read(64).decode(errors="replace").strip()
            return text, os.fstat(stream.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None, 0


def _time(mark: Path) -> int:
    return mark.stat().st_mtime_ns if mark.exists() else 0


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"
