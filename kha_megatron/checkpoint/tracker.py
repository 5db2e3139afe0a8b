"""Find the checkpoint to read in a ``--save`` directory, whatever its tracker file says.

Megatron writes the shards, ``.metadata``, the commit mark, the hashes, and last, not atomically,
the tracker file. A killed save therefore leaves a directory without a mark, which must not be
loaded, or a complete checkpoint that the tracker file does not name, which must not be lost.
Everything that reads a ``--save`` directory calls :func:`judge`.
"""

import re
from pathlib import Path
from typing import NamedTuple

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.integrity import INTEGRITY
from kha_megatron.checkpoint.manifest import CONVERTED_FROM
from kha_megatron.checkpoint.reading import read_json
from kha_megatron.checkpoint.staging import flush, staged_file
from kha_megatron.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Content of the tracker file, and name of the directory, of weights without an iteration."""

COMMIT_MARK = "metadata.json"
"""Megatron writes this file last. A checkpoint without it was never completed."""

_OF_A_SAVE = (INTEGRITY, COMMIT_MARK, ".integrity*", ".metadata*", "*.distcp", CONVERTED_FROM)
"""Files of a checkpoint, in the order of removal. Hashes without a mark would look like damage."""


class Verdict(NamedTuple):
    """What a ``--save`` directory holds, and which checkpoint to take."""

    folder: Path
    tracker: str | None
    """Content of the tracker file; None if there is none."""
    newest: Path | None
    """The complete iteration or release to take; None if none is complete."""
    named: Path | None
    """The directory that the tracker file names, if it exists, complete or not."""
    problem: str | None
    """Why not to follow the tracker file; None if it names ``newest``."""
    incomplete: list[str]
    """Incomplete checkpoints newer than ``newest``, which are ignored."""

    def line(self, doing: str) -> str | None:
        """Return one line such as ``resuming from iter_0000007: ...``; None if all is well."""
        words = []
        if self.problem and self.newest:
            words.append(f"{doing} {self.newest.name}: {TRACKER} {self.problem}")
        if self.incomplete:
            words.append(f"ignoring {', '.join(self.incomplete)}: the save was cut short")
        return f"{self.folder}: {'; '.join(words)}" if words else None


def judge(folder: Path) -> Verdict:
    """Choose the checkpoint of a ``--save`` directory.

    Resume, launch, compare, convert, verify and inspect use this. The tracker file is followed if
    it names a complete checkpoint, unless a higher one was completed after it: then the job was
    killed before it wrote the tracker file, or somebody set the file back (use Megatron's
    ``--ckpt-step`` to roll back). Otherwise the highest complete iteration is taken. A release
    counts as iteration 0.

    Raises:
        CheckpointError: The tracker file cannot be read.
    """
    tracker = _read(folder / TRACKER)
    saves = {n: path for path in folder.iterdir() if (n := iteration_of(path)) is not None}
    marks = {
        n: (path / COMMIT_MARK).stat().st_mtime_ns if (path / COMMIT_MARK).exists() else 0
        for n, path in saves.items()
        if is_complete(path)
    }
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
    """Return the newest complete checkpoint; None if there is none or no directory."""
    return judge(folder).newest if folder.is_dir() else None


def resolve(path: Path) -> Path:
    """Return the checkpoint to read from a ``--save`` directory, or ``path`` if it is one.

    If no checkpoint is complete, return what the tracker file names, so that the reader can report
    the format or the missing file.

    Raises:
        CheckpointError: There is neither.
    """
    if not path.is_dir():
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
    """Write the chosen checkpoint into the tracker file, atomically, and log it."""
    if verdict.problem and verdict.newest:
        with staged_file(verdict.folder / TRACKER) as staged:
            staged.write_text(tracker_word(verdict.newest))
    if line := verdict.line("resuming from"):
        announce(line)


def folder_name(iteration: int) -> str:
    """Return ``iter_0000123``, the directory of an iteration."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """Return the iteration that a directory's name gives, 0 for a release, or None."""
    if path.name == RELEASE:
        return 0
    return int(path.name[5:]) if re.fullmatch(r"iter_[0-9]{7,}", path.name) else None


def tracker_word(path: Path) -> str:
    """Return the content of a tracker file that names a checkpoint."""
    return RELEASE if path.name == RELEASE else str(iteration_of(path))


def is_complete(path: Path) -> bool:
    """Return whether a torch_dist checkpoint was completed, even if it was damaged later.

    Megatron writes the mark after all shards, not atomically, and the hashes after the mark.
    """
    if (path / INTEGRITY).is_file():
        return True
    try:
        return "sharded_backend" in read_json(path / COMMIT_MARK)
    except (OSError, ValueError, TypeError):
        return False


def choices(folder: Path) -> str:
    """Return the end of an error message: the complete checkpoints that the user can name."""
    complete = sorted(p.name for p in folder.iterdir() if is_complete(p)) if folder.is_dir() else []
    if not complete:
        return ": no complete checkpoint is in it"
    return f": name one of its folders instead ({', '.join(complete[-5:])})"


def clear_for_overwriting(path: str | Path) -> None:
    """Remove an earlier checkpoint from a directory that is about to be written, its marks first.

    A job that is killed during the new save then leaves no mixture that looks complete. Files that
    are no part of a checkpoint stay.
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
    """Return the first bytes of a tracker file. An iteration has at most 19 digits."""
    try:
        with tracker.open("rb") as stream:
            return stream.read(64).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{tracker} cannot be read ({error.strerror}): remove it, or name an iteration's folder"
        ) from error
