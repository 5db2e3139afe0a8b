"""Find the checkpoint to read in a ``--save`` directory, whatever its tracker file says.

Megatron writes the shards, ``.metadata``, the commit mark, the hashes, and finally the tracker
file. A killed save therefore leaves either a directory without a mark, which must not be loaded, or
a complete checkpoint that the tracker file does not name, which must not be lost.

Just before the mark, our entry point writes ``commit.json`` with the time of the commit.
Checkpoints are ordered by this time and not by their iteration, because a run that was rolled back
to an earlier iteration leaves checkpoints with higher iterations behind.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.integrity import INTEGRITY
from kha_megatron.checkpoint.manifest import CONVERTED_FROM
from kha_megatron.checkpoint.staging import flush, staged_file
from kha_megatron.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Name of the directory of a checkpoint without an iteration, and content of its tracker file."""

COMMIT_MARK = "metadata.json"
"""File that Megatron writes after all shards. A checkpoint without this file is incomplete."""

COMMIT = "commit.json"
"""``{"time": nanoseconds since the epoch}``, written by :func:`record_commit`."""

_CHECKPOINT_FILES = (
    INTEGRITY,
    COMMIT_MARK,
    COMMIT,
    ".integrity*",
    ".metadata*",
    "*.distcp",
    CONVERTED_FROM,
)
"""Files of a checkpoint in the order in which they are removed."""


class Selection(NamedTuple):
    """Result of :func:`select_iteration`."""

    folder: Path
    tracker: str | None
    """Content of the tracker file, or None if it does not exist."""
    newest: Path | None
    """Complete checkpoint to load, or None if there is none."""
    named: Path | None
    """Checkpoint named by the tracker file, whether or not it is complete."""
    problem: str | None
    """Reason for not following the tracker file, or None if it names ``newest``."""
    incomplete: list[str]
    """Names of incomplete checkpoints with a higher iteration than ``newest``."""

    def line(self, doing: str) -> str | None:
        """Return a log line such as ``resuming from iter_0000007: ...``, or None if all is well."""
        words = []
        if self.problem and self.newest:
            words.append(f"{doing} {self.newest.name}: {TRACKER} {self.problem}")
        if self.incomplete:
            words.append(f"ignoring {', '.join(self.incomplete)}: incomplete checkpoint")
        return f"{self.folder}: {'; '.join(words)}" if words else None


def select_iteration(folder: Path) -> Selection:
    """Select the checkpoint to load from a ``--save`` directory.

    Follow the tracker file if it names a complete checkpoint, unless another checkpoint was
    committed after the tracker file was written. In that case the job was killed before it updated
    the tracker file. Otherwise select the checkpoint that was committed last. Checkpoints of other
    programs do not record when they were committed, so the highest iteration counts as the last. A
    release counts as iteration 0.
    """
    file = folder / TRACKER
    tracker = file.read_text(errors="replace").strip() if file.is_file() else None
    saves = {n: path for path in folder.iterdir() if (n := iteration_of(path)) is not None}
    commits = {n: _commit(path) for n, path in saves.items() if is_complete(path)}
    number = re.fullmatch(r"[0-9]{1,19}", tracker or "")
    named = int(number[0]) if number else 0 if tracker == RELEASE else None
    newest = max(commits, key=lambda n: (commits[n].recorded and commits[n].time, n), default=None)
    problem = None
    if newest is None:
        pass
    elif tracker is None:
        problem = "is missing"
    elif named is None:
        problem = f"contains {tracker[:20]!r} instead of an iteration"
    elif named not in commits:
        problem = f"names {tracker}, which is not a complete checkpoint"
    else:
        written = file.stat().st_mtime_ns
        later = [
            n
            for n, commit in commits.items()
            if commit.time > written
            and commit.time >= commits[named].time
            and (commit.recorded or n > named)
        ]
        newest = max(later, key=lambda n: (commits[n].time, n), default=named)
        if newest != named:
            problem = f"names {tracker}, but {saves[newest].name} was completed after that"
    cut_short = sorted(n for n in saves if n not in commits and n > (newest or 0))
    return Selection(
        folder,
        tracker,
        saves[newest] if newest is not None else None,
        saves.get(named) if named is not None else None,
        problem,
        [saves[n].name for n in cut_short],
    )


def record_commit(path: Path) -> None:
    """Record the time at which a checkpoint is committed, right before its commit mark.

    The time is later than that of all other checkpoints in the same ``--save`` directory, even if
    the clocks of two machines differ.
    """
    others = (other for other in path.parent.iterdir() if other != path and is_complete(other))
    latest = max((_commit(other).time for other in others), default=0)
    with staged_file(path / COMMIT) as staged:
        staged.touch()
        now = staged.stat().st_mtime_ns  # by the clock that also dates the tracker file
        staged.write_text(json.dumps({"time": max(now, latest + 1)}))


class _Commit(NamedTuple):
    time: int
    recorded: bool
    """False if ``time`` is only the modification time of the commit mark."""


def _commit(path: Path) -> _Commit:
    try:
        return _Commit(int(json.loads((path / COMMIT).read_bytes())["time"]), True)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        mark = path / COMMIT_MARK
        return _Commit(mark.stat().st_mtime_ns if mark.exists() else 0, False)


def newest_other(path: Path) -> Path | None:
    """Return the newest checkpoint beside ``path`` that our entry point has committed.

    The entry point saves no weights that are not finite.
    """
    others = [other for other in path.parent.iterdir() if other != path and iteration_of(other)]
    recorded = [other for other in others if _commit(other).recorded and is_complete(other)]
    return max(recorded, key=_commit, default=None)


def newest(folder: Path) -> Path | None:
    """Return the checkpoint that a run would resume from, or None if no checkpoint is complete."""
    return select_iteration(folder).newest if folder.is_dir() else None


def resolve(path: Path) -> Path:
    """Return the checkpoint to read, given a checkpoint or a ``--save`` directory.

    If no checkpoint is complete, the one named by the tracker file is returned, so that the reader
    reports what is missing.

    Raises:
        CheckpointError: If there is no checkpoint.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a directory. Pass a Megatron --save directory, one of its iter_* "
            "directories, or a Hugging Face model directory."
        )
    if not (path / TRACKER).exists() and (
        (path / COMMIT_MARK).exists() or iteration_of(path) is not None
    ):
        return path
    selection = select_iteration(path)
    if (found := selection.newest or selection.named) is None:
        found_text = "no" if selection.tracker is None else f"{selection.tracker[:20]!r} in"
        raise CheckpointError(f"{path} has {found_text} {TRACKER}. {choices(path)}")
    if line := selection.line("loading"):
        announce(line, once=line)
    return found


def repair(selection: Selection) -> None:
    """Make the tracker file name the selected checkpoint, and log the change."""
    if selection.problem and selection.newest:
        with staged_file(selection.folder / TRACKER) as staged:
            staged.write_text(tracker_word(selection.newest))
    if line := selection.line("resuming from"):
        announce(line)


def folder_name(iteration: int) -> str:
    """Return the directory name of an iteration, e.g. ``iter_0000123``."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """Return the iteration of a checkpoint directory (0 for ``release``), or None for others."""
    if path.name == RELEASE:
        return 0
    return int(path.name[5:]) if re.fullmatch(r"iter_[0-9]{7,}", path.name) else None


def tracker_word(path: Path) -> str:
    """Return the content of a tracker file that names the given checkpoint."""
    return RELEASE if path.name == RELEASE else str(iteration_of(path))


def is_complete(path: Path) -> bool:
    """Check whether saving a ``torch_dist`` checkpoint was completed.

    Megatron does not write the commit mark atomically, but it writes the hashes after the mark.
    """
    if (path / INTEGRITY).is_file():
        return True
    try:
        return "sharded_backend" in json.loads((path / COMMIT_MARK).read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def choices(folder: Path) -> str:
    """List the complete checkpoints of a directory, as the end of an error message."""
    complete = sorted(path.name for path in folder.iterdir() if is_complete(path))
    if not complete:
        return f"There is no complete checkpoint in {folder}."
    return f"Complete checkpoints in {folder}: {', '.join(complete[-5:])}."


def clear_for_overwriting(path: str | Path) -> None:
    """Remove the files of an earlier checkpoint, commit marks first, before saving a new one.

    If the job is killed during the save, the mixture of old and new shards does not look complete.
    """
    path = Path(path)
    held = [file for pattern in _CHECKPOINT_FILES for file in path.glob(pattern)]
    if not held:
        return
    announce(f"replacing the {'' if is_complete(path) else 'incomplete '}checkpoint {path}")
    for file in held:
        file.unlink()
        if file.name in (INTEGRITY, COMMIT_MARK):
            flush(path)
