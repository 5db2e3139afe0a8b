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
    """The ``--save`` directory."""
    tracker_content: str | None
    """None if there is no tracker file."""
    newest: Path | None
    """The checkpoint to load (always complete), if there is one."""
    named: Path | None
    """The checkpoint that the tracker file names. Might be incomplete."""
    tracker_problem: str | None
    """Predicate of an error message about the tracker file, e.g. ``is missing``.

    None if the tracker file names ``newest``, or if ``newest`` is None.
    """
    incomplete: list[str]
    """Incomplete checkpoints with a higher iteration than ``newest``."""

    def describe(self, action: str) -> str | None:
        """Return a log message like ``resuming from iter_0000007: ...``.

        Args:
            action (str): What is done with ``newest``, e.g. ``resuming from``.

        Returns:
            str | None: None if the tracker file is correct and no checkpoint is ignored.
        """
        messages = []
        if self.tracker_problem and self.newest:
            messages.append(f"{action} {self.newest.name}: {TRACKER} {self.tracker_problem}")
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
    tracker_file = folder / TRACKER
    tracker_content = read_tracker(tracker_file)
    paths = _list_checkpoints(folder)
    commits = {}
    for iteration, path in paths.items():
        if is_complete(path):
            commits[iteration] = _read_commit(path)
    named_iteration = _parse_tracker(tracker_content)
    if named_iteration is None or named_iteration not in commits:
        iteration_to_load = _last_committed(commits)
    else:
        tracker_time = tracker_file.stat().st_mtime_ns
        iteration_to_load = _newest_since_tracker(
            commits,
            named_iteration,
            tracker_time=tracker_time,
        )
    path_to_load = None
    tracker_problem = None
    if iteration_to_load is not None:
        path_to_load = paths[iteration_to_load]
        tracker_problem = _find_tracker_problem(tracker_content, path_to_load, commits)
    incomplete = []
    for iteration in sorted(paths.keys() - commits.keys()):
        if iteration > (iteration_to_load or 0):
            incomplete.append(paths[iteration].name)
    return Selection(
        folder=folder,
        tracker_content=tracker_content,
        newest=path_to_load,
        named=None if named_iteration is None else paths.get(named_iteration),
        tracker_problem=tracker_problem,
        incomplete=incomplete,
    )


def _list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the directories of all checkpoints, complete or not, by iteration."""
    paths = {}
    for path in folder.iterdir():
        iteration = iteration_of(path)
        if iteration is not None:
            paths[iteration] = path
    return paths


def _find_tracker_problem(
    tracker_content: str | None,
    path_to_load: Path,
    commits: Mapping[int, "_Commit"],
) -> str | None:
    """Return ``Selection.tracker_problem``, given the checkpoint that should be loaded."""
    if tracker_content is None:
        return "is missing"
    named_iteration = _parse_tracker(tracker_content)
    if named_iteration is None:
        return f"contains {tracker_content[:20]!r} instead of an iteration"
    if named_iteration not in commits:
        return f"names {tracker_content}, which is not a complete checkpoint"
    if named_iteration != iteration_of(path_to_load):
        return f"names {tracker_content}, but {path_to_load.name} was completed after that"
    return None


def _parse_tracker(content: str | None) -> int | None:
    """Return the iteration that a tracker file names (0 for ``release``), or None."""
    if content == RELEASE:
        return 0
    if content is None or not re.fullmatch(r"[0-9]{1,19}", content):
        return None
    return int(content)


def _last_committed(commits: Mapping[int, "_Commit"]) -> int | None:
    def recorded_time_and_iteration(iteration: int) -> tuple[int, int]:
        commit = commits[iteration]
        recorded_time = commit.time if commit.is_recorded else 0
        return recorded_time, iteration

    return max(commits, key=recorded_time_and_iteration, default=None)


def _newest_since_tracker(
    commits: Mapping[int, "_Commit"],
    named: int,
    *,
    tracker_time: int,
) -> int:
    """Return the last iteration that was committed after the tracker file was written.

    This is the iteration that the tracker file names, if there is no later one.
    """
    newest_iteration = named
    newest_time = max(tracker_time + 1, commits[named].time)
    for iteration, commit in sorted(commits.items()):
        # copying checkpoints changes modification times, also those of older iterations
        is_candidate = commit.is_recorded or iteration > named
        if is_candidate and commit.time >= newest_time:
            newest_iteration = iteration
            newest_time = commit.time
    return newest_iteration


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
        # the marks come last, so that an incomplete checkpoint never looks complete
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
    for checkpoint in _list_checkpoints(path.parent).values():
        if is_complete(checkpoint):
            commit = _read_commit(checkpoint)
            latest = max(latest, commit.time)
    with staged_file(path / COMMIT) as staged:
        staged.touch()
        now = staged.stat().st_mtime_ns  # same clock as for the mtime of the tracker file
        commit_time = max(now, latest + 1)
        staged.write_text(json.dumps({"time": commit_time}))


class _Commit(NamedTuple):
    """When a checkpoint was completed."""

    time: int
    """Nanoseconds since the epoch."""
    is_recorded: bool
    """False if there is no ``commit.json``, and ``time`` is the mtime of the commit mark."""


def _read_commit(path: Path) -> _Commit:
    try:
        content = json.loads(read_regular(path / COMMIT, _MAX_BYTES))
        return _Commit(time=int(content["time"]), is_recorded=True)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        mark = path / COMMIT_MARK
        time = mark.stat().st_mtime_ns if mark.exists() else 0
        return _Commit(time=time, is_recorded=False)


def newest(folder: Path) -> Path | None:
    """Return the checkpoint to resume from. None if there is no complete checkpoint."""
    if not folder.is_dir():
        return None
    return select_iteration(folder).newest


def is_object_store(directory: str | Path | None) -> bool:
    """Whether a directory is in an object store (e.g. ``msc://``), where we repair nothing."""
    return "://" in str(directory)


def find_checkpoint(path: Path) -> Path:
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
        if selection.tracker_content is not None:
            problem = f"{selection.tracker_content[:20]!r} in {TRACKER}"
        raise CheckpointError(f"{path} has {problem}. {describe_complete(path)}")
    message = selection.describe("loading")
    if message:
        announce(message, once=message)
    return checkpoint


def repair(selection: Selection) -> None:
    """Fix the tracker file (and log this) if it does not name the selected checkpoint."""
    if selection.tracker_problem and selection.newest:
        with staged_file(selection.folder / TRACKER) as staged:
            staged.write_text(tracker_word(selection.newest))
    message = selection.describe("resuming from")
    if message:
        announce(message)


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


def describe_complete(folder: Path) -> str:
    """Return a sentence with the complete checkpoints (at most five), for error messages."""
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
