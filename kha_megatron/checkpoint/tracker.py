"""Which iteration of a ``--save`` folder is taken, whatever its tracker file says.

Megatron writes shards, ``.metadata``, the commit mark, the hashes and last, not atomically, the
tracker file. A kill leaves a folder without a mark, which must not be loaded, or a complete folder
that the tracker file does not name, which must not be lost. Everyone who reads a folder asks
:func:`judge`.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.integrity import INTEGRITY
from kha_megatron.checkpoint.manifest import CONVERTED_FROM
from kha_megatron.checkpoint.reading import read_json, regular
from kha_megatron.checkpoint.staging import flush, staged_file
from kha_megatron.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What the tracker file says, and how the folder is called, of weights without an iteration."""

COMMIT_MARK = "metadata.json"
"""Megatron writes this file last of a torch_dist save: a folder without it was never completed."""

_LONGEST = 64  # bytes of a tracker file that are read: no iteration has as many digits
_OF_A_SAVE = (
    INTEGRITY,
    COMMIT_MARK,
    f".{INTEGRITY}.partial-*",
    ".metadata*",
    "*.distcp",
    CONVERTED_FROM,
)
"""The files of a save. The hashes go before the mark: alone they would tell of damage."""


class Verdict(NamedTuple):
    """What a ``--save`` folder holds, and what is to be done about it."""

    folder: Path
    tracker: str | None
    """What the tracker file says, the beginning of it; None if there is none."""
    newest: Path | None
    """The complete iteration (or release) to take; None if no save is complete."""
    named: Path | None
    """The folder that the tracker file names, if it is there, complete or not."""
    problem: str | None
    """Why the tracker file is not to be followed; None if it names ``newest``."""
    incomplete: list[str]
    """Folders whose save was cut short, newer than ``newest``: they are ignored."""

    def line(self, doing: str) -> str | None:
        """One line for the user, such as ``resuming from iter_0000007: ...``; None: all is well."""
        words = []
        if self.problem and self.newest:
            words.append(f"{doing} {self.newest.name}: {TRACKER} {self.problem}")
        if self.incomplete:
            words.append(f"ignoring {', '.join(self.incomplete)}: the save was cut short")
        return f"{self.folder}: {'; '.join(words)}" if words else None


def judge(folder: Path) -> Verdict:
    """Which save of a folder is taken: by resume, launch, compare, convert, verify and inspect.

    The tracker file is right if it names a complete save, unless a higher one was completed after
    that: then a kill came before the tracker file was written, or somebody set it back (a rollback
    that is meant is Megatron's ``--ckpt-step``). If it is missing, torn or names what is not
    complete, the highest complete iteration is taken. A release counts as iteration 0.

    Args:
        folder: an existing folder.

    Raises:
        CheckpointError: the tracker file cannot be read at all.
    """
    tracker = _read(folder / TRACKER)
    saves = {n: path for path in folder.iterdir() if (n := iteration_of(path)) is not None}
    marks = {n: _time(path / COMMIT_MARK) for n, path in saves.items() if is_complete(path)}
    named = _number(tracker)
    newest, problem = max(marks, default=None), None
    if newest is None:
        pass
    elif tracker is None:
        problem = "is missing"
    elif named is None:
        problem = f"holds {tracker[:20]!r} instead of an iteration"
    elif named not in marks:
        problem = f"names {tracker[:20]}, whose save never completed"
    else:
        newest = max(n for n in marks if n >= named and marks[n] >= marks[named])
        if newest != named:
            problem = f"names {tracker}, and {saves[newest].name} was completed after it"
    cut_short = sorted(n for n in saves if n not in marks and n > (newest or 0))
    return Verdict(
        folder,
        tracker,
        saves[newest] if newest is not None else None,
        saves.get(named) if named is not None else None,
        problem,
        [saves[n].name for n in cut_short],
    )


def newest(folder: Path) -> Path | None:
    """The newest complete save of a folder; None if it holds none or does not exist."""
    return judge(folder).newest if folder.is_dir() else None


def resolve(path: Path) -> Path:
    """The save to read from a ``--save`` folder, or ``path`` if it is one; announces a choice.

    Where nothing is complete, it is what the tracker file names: another format than torch_dist, or
    a save that was cut short, of which the reader says more.

    Raises:
        CheckpointError: there is neither.
    """
    if not os.path.isdir(path):
        raise CheckpointError(
            f"{path} is not a folder: name a --save folder, iter_0000123 in it, or a Hugging Face "
            "model folder"
        )
    if not (path / TRACKER).exists() and (
        (path / COMMIT_MARK).exists() or iteration_of(path) is not None
    ):
        return path
    verdict = judge(path)
    if (found := verdict.newest or verdict.named) is None:
        held = f"holds no {TRACKER}"
        if verdict.tracker is not None:
            held = f"holds {verdict.tracker[:20]!r} in {TRACKER}"
        raise CheckpointError(f"{path} {held}{choices(path)}")
    if line := verdict.line("taking"):
        announce(line, once=line)
    return found


def repair(verdict: Verdict) -> None:
    """Write into the tracker file what :func:`judge` found, atomically, and say so.

    Raises:
        OutputError: the tracker file cannot be written.
    """
    if verdict.problem and verdict.newest:
        with staged_file(verdict.folder / TRACKER) as staged:
            staged.write_text(tracker_word(verdict.newest))
    if line := verdict.line("resuming from"):
        announce(line)


def folder_name(iteration: int) -> str:
    """``iter_0000123``, the folder of an iteration."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """The iteration that a folder's name says, 0 for a release; None for any other name."""
    if path.name == RELEASE:
        return 0
    return int(path.name[5:]) if re.fullmatch(r"iter_[0-9]{7,}", path.name) else None


def tracker_word(path: Path) -> str:
    """What a tracker file says to name a save's folder."""
    return RELEASE if path.name == RELEASE else str(iteration_of(path))


def is_complete(path: Path) -> bool:
    """Whether a torch_dist save ended, be it damaged since or not.

    Megatron writes the mark after all shards, not atomically, and the hashes after the mark.
    """
    if (path / INTEGRITY).is_file():
        return True
    try:
        return "sharded_backend" in read_json(path / COMMIT_MARK)
    except (OSError, ValueError, TypeError):
        return False


def choices(folder: Path) -> str:
    """The end of an error's line: the complete saves of a folder that could be named instead."""
    complete = sorted(p.name for p in folder.iterdir() if is_complete(p)) if folder.is_dir() else []
    if not complete:
        return ": no complete checkpoint is in it"
    return f": name one of its folders instead ({', '.join(complete[-5:])})"


def clear_for_overwriting(path: str | Path) -> None:
    """Remove an earlier save from a folder that is about to be written, its commit marks first.

    A kill in between or during the new save then leaves a folder that looks as incomplete as it
    is, without shards of another layout. What is no part of a save stays.
    """
    path = Path(path)
    held = [file for pattern in _OF_A_SAVE for file in path.glob(pattern)]
    if not held:
        return
    what = "a checkpoint" if is_complete(path) else "a save that was cut short"
    announce(f"{path} holds {what}, which is replaced")
    for file in held:
        file.unlink()
        if file.name in (INTEGRITY, COMMIT_MARK):
            flush(path)


def _number(tracker: str | None) -> int | None:
    if tracker == RELEASE:
        return 0
    return int(tracker) if tracker and tracker.isascii() and tracker.isdecimal() else None


def _read(tracker: Path) -> str | None:
    try:
        with open(tracker, "rb", opener=regular) as stream:
            return stream.read(_LONGEST).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{tracker} cannot be read ({error.strerror}): remove it, or name an iteration's folder"
        ) from error


def _time(mark: Path) -> int:
    return mark.stat().st_mtime_ns if mark.exists() else 0
