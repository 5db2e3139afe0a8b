"""Find the right checkpoint in a ``--save`` directory, even if the tracker file is wrong.

Megatron writes files in this order:

1. shards and ``.metadata``
2. ``metadata.json``, the commit mark
3. ``integrity.json``
4. the tracker file, ``latest_checkpointed_iteration.txt``

If a job is killed before (2), the checkpoint is incomplete and must not be loaded. If it is killed
before (4), the checkpoint is fine, but the tracker file does not name it yet.

Our entry point also writes ``commit.json`` with the current time just before (2). We order
checkpoints by this time instead of their iteration. After a rollback, there can be checkpoints with
higher iterations that are not part of the run anymore.
"""

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.integrity import INTEGRITY
from kha_megatron.checkpoint.manifest import CONVERTED_FROM
from kha_megatron.checkpoint.reading import open_regular, read_regular
from kha_megatron.checkpoint.staging import flush, staged_file
from kha_megatron.errors import CheckpointError, download_hint

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Used instead of an iteration, both as directory name and in the tracker file."""

NON_PERSISTENT = "non_persistent"
"""Subdirectory for ``--non-persistent-ckpt-type global``, unless another one is set."""

COMMIT_MARK = "metadata.json"
"""Megatron writes this after all shards. Without it, a checkpoint is incomplete."""

COMMIT = "commit.json"
"""``{"time": <ns since epoch>}``, see :func:`record_commit`."""

_MAX_BYTES = 2**16
"""The tracker file, the commit mark and ``commit.json`` have less than 200 bytes."""

_CHECKPOINT_FILES = (
    INTEGRITY,
    COMMIT_MARK,
    COMMIT,
    ".integrity*",
    ".metadata*",
    "*.distcp",
    CONVERTED_FROM,
)
"""All files of a checkpoint. We delete them in this order."""


class Selection(NamedTuple):
    """Result of :func:`select_iteration`."""

    folder: Path
    tracker: str | None
    newest: Path | None
    """The checkpoint to load (always complete), if there is one."""
    named: Path | None
    """The checkpoint that the tracker file names. Might be incomplete."""
    problem: str | None
    """What's wrong with the tracker file. None if it names ``newest``."""
    incomplete: list[str]
    """Incomplete checkpoints with a higher iteration than ``newest``."""

    def line(self, doing: str) -> str | None:
        """Log message, e.g. ``resuming from iter_0000007: ...``. None if everything's fine."""
        messages = []
        if self.problem and self.newest:
            messages.append(f"{doing} {self.newest.name}: {TRACKER} {self.problem}")
        if self.incomplete:
            names = ", ".join(self.incomplete)
            messages.append(f"ignoring {names}: incomplete checkpoint")
        if not messages:
            return None
        return f"{self.folder}: {'; '.join(messages)}"


def select_iteration(folder: Path) -> Selection:
    """Select the checkpoint to load from a ``--save`` directory.

    Normally, we use the one in the tracker file, as long as it is complete. However, if another
    checkpoint was committed after the tracker file was written, the job must have been killed
    before it could update the tracker, so we use that checkpoint instead.

    If the tracker file does not help, we use the checkpoint that was committed last. Other programs
    do not record the commit time, so for their checkpoints we go by iteration (release is 0).
    """
    file = folder / TRACKER
    tracker = read_tracker(file)
    saves = _list_saves(folder)
    commits = {}
    for iteration, path in saves.items():
        if is_complete(path):
            commits[iteration] = _commit(path)
    named = _parse_tracker(tracker)
    newest = _last_committed(commits)
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
        tracker_time = file.stat().st_mtime_ns
        newest = _newest_since_tracker(commits, named, tracker_time=tracker_time)
        if newest != named:
            name = saves[newest].name
            problem = f"names {tracker}, but {name} was completed after that"
    incomplete = []
    for iteration in sorted(saves.keys() - commits.keys()):
        if iteration > (newest or 0):
            incomplete.append(saves[iteration].name)
    return Selection(
        folder=folder,
        tracker=tracker,
        newest=None if newest is None else saves[newest],
        named=None if named is None else saves.get(named),
        problem=problem,
        incomplete=incomplete,
    )


def _list_saves(folder: Path) -> dict[int, Path]:
    """Return the directories of all checkpoints by iteration."""
    saves = {}
    for path in folder.iterdir():
        iteration = iteration_of(path)
        if iteration is not None:
            saves[iteration] = path
    return saves


def _parse_tracker(tracker: str | None) -> int | None:
    """Return the iteration that a tracker file names (0 for ``release``), or None."""
    if tracker == RELEASE:
        return 0
    if tracker is None or not re.fullmatch(r"[0-9]{1,19}", tracker):
        return None
    return int(tracker)


def _last_committed(commits: Mapping[int, "_Commit"]) -> int | None:
    def order(iteration: int) -> tuple[int, int]:
        commit = commits[iteration]
        recorded_time = commit.time if commit.recorded else 0
        return recorded_time, iteration

    return max(commits, key=order, default=None)


def _newest_since_tracker(
    commits: Mapping[int, "_Commit"],
    named: int,
    *,
    tracker_time: int,
) -> int:
    """Return the last iteration that was committed after the tracker file was written.

    This is the iteration that the tracker file names, if there is no later one.
    """
    newest = named
    newest_time = max(tracker_time + 1, commits[named].time)
    for iteration, commit in sorted(commits.items()):
        is_candidate = commit.recorded or iteration > named
        if is_candidate and commit.time >= newest_time:
            newest = iteration
            newest_time = commit.time
    return newest


def read_tracker(file: Path) -> str | None:
    """Return the content of a tracker file, or None if there is no such file."""
    if not file.is_file():
        return None
    with open(file, errors="replace", opener=open_regular) as stream:
        return stream.read(_MAX_BYTES).strip()


def partial_save(path: Path, run_id: str) -> Path:
    """Return the directory to which a run writes the checkpoint ``path`` before it is complete."""
    return path.with_name(f".{path.name}.partial-{run_id}")


def partial_saves(folder: Path) -> list[Path]:
    """List the directories of saves that are still running or were interrupted."""
    pattern = ".iter_*.partial-*"
    return [*sorted(folder.glob(pattern)), *sorted(folder.glob(f"{NON_PERSISTENT}/{pattern}"))]


def publish(written: Path, final: Path) -> None:
    """Rename a complete checkpoint, after flushing it to disk.

    Args:
        written (Path): The result of :func:`partial_save`.
        final (Path): An empty directory, or one that does not exist. If it contains files of other
            programs, they are kept.
    """
    for file in (*written.iterdir(), written):
        flush(file)
    try:
        written.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        marks = (COMMIT_MARK, INTEGRITY)
        for file in sorted(written.iterdir(), key=lambda file: file.name in marks):
            file.rename(final / file.name)
        written.rmdir()
    flush(final.parent)


def record_commit(path: Path) -> None:
    """Write ``commit.json``. Call this right before writing the commit mark.

    The recorded time is always later than for other checkpoints in the same ``--save`` directory,
    even if the clocks of two machines differ.
    """
    latest = 0
    for save in _list_saves(path.parent).values():
        if is_complete(save):
            commit = _commit(save)
            latest = max(latest, commit.time)
    with staged_file(path / COMMIT) as staged:
        staged.touch()
        now = staged.stat().st_mtime_ns  # same clock as for the mtime of the tracker file
        commit_time = max(now, latest + 1)
        staged.write_text(json.dumps({"time": commit_time}))


class _Commit(NamedTuple):
    time: int
    recorded: bool
    """False if there is no ``commit.json``, and ``time`` is the mtime of the commit mark."""


def _commit(path: Path) -> _Commit:
    try:
        content = json.loads(read_regular(path / COMMIT, _MAX_BYTES))
        return _Commit(time=int(content["time"]), recorded=True)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        mark = path / COMMIT_MARK
        time = mark.stat().st_mtime_ns if mark.exists() else 0
        return _Commit(time=time, recorded=False)


def newest(folder: Path) -> Path | None:
    """Return the checkpoint to resume from. None if there is no complete checkpoint."""
    if not folder.is_dir():
        return None
    return select_iteration(folder).newest


def is_object_store(directory: str | Path | None) -> bool:
    """Whether a directory is in an object store (e.g. ``msc://``), where we repair nothing."""
    return "://" in str(directory)


def resolve(path: Path) -> Path:
    """Find the checkpoint to read for a user-specified path (a checkpoint or ``--save`` directory).

    If there is no complete checkpoint, return the one in the tracker file, so that the reader can
    report what is missing.

    Raises:
        CheckpointError: If there is no checkpoint at all.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a directory. Pass a Megatron --save directory, one of its iter_* "
            f"directories, or a Hugging Face model directory.{download_hint(path)}"
        )
    has_commit_mark = (path / COMMIT_MARK).exists()
    if has_commit_mark or iteration_of(path) is not None:
        is_save_directory = (path / TRACKER).exists()
        if not is_save_directory:
            return path
    selection = select_iteration(path)
    checkpoint = selection.newest or selection.named
    if checkpoint is None:
        problem = f"no {TRACKER}"
        if selection.tracker is not None:
            problem = f"{selection.tracker[:20]!r} in {TRACKER}"
        raise CheckpointError(f"{path} has {problem}. {choices(path)}")
    line = selection.line("loading")
    if line:
        announce(line, once=line)
    return checkpoint


def repair(selection: Selection) -> None:
    """Fix the tracker file (and log this) if it does not name the selected checkpoint."""
    if selection.problem and selection.newest:
        with staged_file(selection.folder / TRACKER) as staged:
            staged.write_text(tracker_word(selection.newest))
    line = selection.line("resuming from")
    if line:
        announce(line)


def folder_name(iteration: int) -> str:
    """Directory name of an iteration, e.g. ``iter_0000123``."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """Parse the iteration from a directory name (0 for ``release``). None for other names."""
    if path.name == RELEASE:
        return 0
    if not re.fullmatch(r"iter_[0-9]{7,}", path.name):
        return None
    return int(path.name.removeprefix("iter_"))


def tracker_word(path: Path) -> str:
    """What the tracker file should contain for a given checkpoint."""
    if path.name == RELEASE:
        return RELEASE
    return str(iteration_of(path))


def is_complete(path: Path) -> bool:
    """Return True if a ``torch_dist`` checkpoint was saved completely.

    The hashes are written after the commit mark, so it is enough to find those. If there are none,
    we check the content of the commit mark, since Megatron does not write it atomically.
    """
    if (path / INTEGRITY).is_file():
        return True
    try:
        mark = json.loads(read_regular(path / COMMIT_MARK, _MAX_BYTES))
        return bool(mark["sharded_backend"] == "torch_dist")
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def choices(folder: Path) -> str:
    """List complete checkpoints (at most five), to be appended to an error message."""
    complete = []
    for path in folder.iterdir():
        if iteration_of(path) is not None and is_complete(path):
            complete.append(path.name)
    if not complete:
        return f"There is no complete checkpoint in {folder}."
    last_names = sorted(complete)[-5:]
    return f"Complete checkpoints in {folder}: {', '.join(last_names)}."


def clear_for_overwriting(path: str | Path) -> None:
    """Delete an old checkpoint before a new one is saved to the same directory.

    We delete the commit marks first. Otherwise, if the job is killed while saving, the mix of old
    and new shards would look like a complete checkpoint.
    """
    path = Path(path)
    files: list[Path] = []
    for pattern in _CHECKPOINT_FILES:
        files += path.glob(pattern)
    if not files:
        return
    checkpoint = "checkpoint" if is_complete(path) else "incomplete checkpoint"
    announce(f"replacing the {checkpoint} {path}")
    for file in files:
        file.unlink()
        if file.name in (INTEGRITY, COMMIT_MARK):
            flush(path)
