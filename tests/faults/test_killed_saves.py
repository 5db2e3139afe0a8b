"""Kill a job at steps of its saves. Each run resumes from the last complete checkpoint."""

import functools
import random
import shutil
import time
from pathlib import Path

import pytest

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.tracker import COMMIT_MARK, TRACKER
from tests.faults import writes
from tests.faults.jobs import arguments, iteration_folder, resumed, until

MARK = "*/metadata.json"
TRACK = f".{TRACKER}.partial-*"
INDEX = "*/.metadata.tmp"
PLACES = [
    # rank, all ranks or one, step of that rank, which of its kind; whether the save is complete
    (0, "one", ("mkdir", "iter_*"), 1, False),
    (1, "one", ("open", "*.distcp"), 1, False),
    (1, "all", ("half", "*.distcp"), 4, False),
    (1, "one", ("write", "*.distcp"), 12, False),
    (1, "all", ("fsync", "*.distcp"), 1, False),
    (0, "all", ("open", INDEX), 1, False),
    (0, "one", ("half", INDEX), 1, False),
    (0, "one", ("rename", "*/.metadata"), 1, False),
    (0, "one", ("rename", "*/commit.json"), 1, False),
    (0, "all", ("half", MARK), 1, False),
    (0, "one", ("write", MARK), 1, False),
    (1, "one", ("half", "*/hashes-1.tmp"), 1, False),
    (0, "all", ("half", "*/.integrity.json.*"), 1, False),
    (0, "all", ("rename", "*/integrity.json"), 1, False),
    (0, "all", ("rename", "iter_*"), 1, True),
    (0, "all", ("open", TRACK), 2, True),  # the first one repairs the tracker file
    (0, "all", ("half", TRACK), 1, True),
    (0, "all", ("rename", TRACKER), 1, True),
]
FEW = [(0, "all", ("open", TRACK), 1, True), (0, "all", ("half", MARK), 1, False)]
"""The cases of ``make test``: an old tracker file, and a checkpoint without its mark."""

RANDOM = 3
"""Number of runs that are killed at a random time of a save."""
ASYNC = ["--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker"]


def _once_saving(saved: Path, delay: float) -> float:
    """Wait for the first file of a save, and return ``delay``."""
    start = time.time()
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if saved.exists() and saved.stat().st_mtime > start:
            break
        time.sleep(0.002)
    return delay


def _last_complete(folder: Path) -> int:
    iterations = [0]
    for mark in folder.glob(f"iter_{MARK}"):
        if mark.stat().st_size:
            iterations.append(int(mark.parent.name.removeprefix("iter_")))
    return max(iterations)


def _kill_at_random(entry, faults_table, folder, seed, longest, *words):
    """Kill a run up to ``longest`` seconds after it began to save. Return the last iteration."""
    before = _last_complete(folder)
    delay = random.Random(seed).uniform(0, longest)
    next_save = iteration_folder(folder, before + 1)
    run = entry(
        arguments(folder, *words),
        2,
        kill_after=functools.partial(_once_saving, next_save, delay),
    )
    assert run.codes == [-9, -9], run.output[-3000:]
    assert resumed(run.output) == before
    last = _last_complete(folder)
    assert last >= before
    place = f"{1000 * delay:.0f} ms after its first file"
    complete = "yes" if last > before else "no"
    kind = "asynchronous" if words else "synchronous"
    faults_table("Kills", kind, "both ranks", place, complete, last)
    return last


def test_killed_jobs_resume_from_the_last_complete_checkpoint(entry, tmp_path, whole, faults_table):
    folder = tmp_path / "save"
    note = tmp_path / "killed"
    last = 0
    places = PLACES[::-1] if whole else FEW
    for rank, whom, step, count, complete in places:
        note.unlink(missing_ok=True)
        fault = functools.partial(
            writes.kill_at,
            folder,
            step,
            count,
            rank,
            whom == "all",
            note,
        )
        run = entry(arguments(folder), 2, before=fault, grace=4)  # the other rank may hang
        where = f"{whom} of the ranks at {step} {count} of rank {rank}"
        assert note.exists(), f"never reached {where}: {run.output[-3000:]}"
        assert run.codes[rank] == -9
        assert 0 not in run.codes, where
        assert resumed(run.output) == last, where
        if complete:
            last += 1
        faults_table(
            "Kills",
            "synchronous",
            "both ranks" if whom == "all" else f"rank {rank}",
            f"{step[0]} {count} of `{step[1]}`",
            "yes" if complete else "no",
            last,
        )
        assert last == 0 or (iteration_folder(folder, last) / COMMIT_MARK).exists()
        assert complete or iteration_folder(folder, last + 1).exists(), where

    for seed in range(RANDOM if whole else 0):
        last = _kill_at_random(entry, faults_table, folder, seed, 0.1)

    rest = entry(arguments(folder, *until(last + 2)), 2)
    assert rest.codes == [0, 0], rest.output[-3000:]
    assert resumed(rest.output) == last


@pytest.mark.whole
def test_jobs_killed_during_an_asynchronous_save_resume(entry, tmp_path, faults_table):
    folder = tmp_path / "save"
    for seed in range(12):
        last = _kill_at_random(entry, faults_table, folder, seed, 1, *ASYNC)
    rest = entry(arguments(folder, *until(last + 1), *ASYNC), 2)
    assert rest.codes == [0, 0], rest.output[-3000:]
    assert resumed(rest.output) == last
    assert MegatronCheckpoint.open(folder).iteration == last + 1


def test_a_kill_while_a_checkpoint_is_replaced_leaves_no_mixture(entry, saved, tmp_path):
    """A run that was rolled back saves an iteration again. Megatron would keep its old mark."""
    folder = shutil.copytree(saved, tmp_path / "save")
    note = tmp_path / "killed"
    fault = functools.partial(
        writes.kill_at,
        folder,
        ("half", ".iter_0000002.partial-*/*.distcp"),
        3,
        1,
        True,
        note,
    )
    run = entry(arguments(folder, "--ckpt-step", "1"), 2, before=fault)
    assert run.codes == [-9, -9], run.output[-3000:]
    assert not run.helpers
    assert resumed(run.output) == 1
    assert "replacing the checkpoint" in "".join(run.remarks)
    assert (folder / TRACKER).read_text() == "2"
    assert not (iteration_folder(folder, 2) / COMMIT_MARK).exists()

    rest = entry(arguments(folder, *until(2)), 2)
    assert rest.codes == [0, 0], rest.output[-3000:]
    assert resumed(rest.output) == 1
    (line,) = [line for line in rest.remarks if "resuming" in line]
    message = (
        f"resuming from iter_0000001: {TRACKER} names 2, which is not a complete checkpoint; "
        "ignoring iter_0000002: incomplete checkpoint"
    )
    assert line.endswith(message)
    assert MegatronCheckpoint.open(folder).iteration == 2
