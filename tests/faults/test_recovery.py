"""Test which checkpoint of a directory a run resumes from, without Megatron."""

import json
import os
import threading
from argparse import Namespace

import pytest

from kha_megatron.checkpoint.integrity import INTEGRITY
from kha_megatron.checkpoint.tracker import COMMIT_MARK, TRACKER, clear_for_overwriting
from kha_megatron.errors import CheckpointError
from kha_megatron.training import recovery

PARTIAL = "partial"
COMPLETE = "complete"
TORN_MARK = "torn mark"


def make(folder, tracker, *saves):
    """Create directories of iterations 1, 2, ... in the order they were saved, and the tracker."""
    for number, state in enumerate(saves, 1):
        save = folder / f"iter_{number:07d}"
        save.mkdir(parents=True)
        (save / "__0_0.distcp").write_bytes(b"shard")
        if state != PARTIAL:
            mark = json.dumps({"sharded_backend": "torch_dist"})
            (save / COMMIT_MARK).write_text(mark if state == COMPLETE else mark[:9])
            os.utime(save / COMMIT_MARK, (number, number))
    if tracker is not None:
        (folder / TRACKER).write_text(tracker)
        os.utime(folder / TRACKER, (0.5, 0.5))  # before all commits
    return folder


def args(folder, **changes):
    values = {
        "load": str(folder),
        "save": str(folder),
        "ckpt_step": None,
        "ckpt_format": "torch_dist",
    }
    return Namespace(**values | changes)


def tracker(folder):
    return (folder / TRACKER).read_text()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("found", "saves", "resume", "why"),
    [
        ("", (COMPLETE, COMPLETE), "2", "contains '' instead of an iteration"),
        ("²", (COMPLETE, COMPLETE), "2", "contains '²' instead of an iteration"),
        ("7" * 5000, (COMPLETE,), "1", "instead of an iteration"),
        (None, (COMPLETE,), "1", "is missing"),
        ("3", (COMPLETE, COMPLETE, PARTIAL), "2", "names 3, which is not"),
        ("3", (COMPLETE, COMPLETE, TORN_MARK), "2", "names 3, which is not"),
        ("", (COMPLETE, PARTIAL, TORN_MARK), "1", "instead of an iteration"),
        ("1", (COMPLETE, COMPLETE, PARTIAL), "2", "names 1, but iter_0000002 was completed after"),
    ],
)
def test_the_tracker_file_is_repaired(tmp_path, capsys, found, saves, resume, why):
    make(tmp_path, found, *saves)
    recovery.repair_tracker(args(tmp_path))
    assert tracker(tmp_path) == resume
    (line,) = capsys.readouterr().err.splitlines()
    start = f"kha_megatron: {tmp_path}: resuming from iter_000000{resume}: {TRACKER} "
    assert line.startswith(start)
    assert why in line
    _, _, ignored = line.partition("; ignoring ")
    for number, state in enumerate(saves, 1):
        name = f"iter_000000{number}"
        assert (name in ignored) == (state != COMPLETE)
        assert (tmp_path / name / "__0_0.distcp").exists()
    recovery.repair_tracker(args(tmp_path))
    assert "resuming" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "saves", "touched"),
    [
        ("2", (COMPLETE, COMPLETE), None),
        ("release", (PARTIAL,), None),
        (None, (), None),
        ("", (PARTIAL,), None),
        pytest.param("2", (COMPLETE,) * 3, 2, id="rolled back with --ckpt-step"),
        pytest.param("2", (COMPLETE,) * 2, 1, id="copied in another order"),
    ],
)
def test_no_repair_without_a_better_checkpoint(tmp_path, capsys, found, saves, touched):
    make(tmp_path, found, *saves)
    if touched:
        os.utime(tmp_path / f"iter_000000{touched}" / COMMIT_MARK, (9, 9))
    recovery.repair_tracker(args(tmp_path))
    assert (tmp_path / TRACKER).exists() == (found is not None)
    assert found is None or tracker(tmp_path) == found
    assert "resuming" not in capsys.readouterr().err


def test_only_the_directory_that_the_run_saves_to_is_repaired(tmp_path):
    make(tmp_path, "", COMPLETE)
    for other in ({"save": str(tmp_path / "other")}, {"save": None}, {"load": None}):
        recovery.repair_tracker(args(tmp_path, **other))
    recovery.repair_tracker(args(tmp_path, ckpt_format="torch"))
    assert tracker(tmp_path) == ""
    recovery.repair_tracker(args(tmp_path, save=f"{tmp_path}/../{tmp_path.name}/"))
    assert tracker(tmp_path) == "1"


def test_with_ckpt_step_only_unreadable_tracker_files_are_repaired(tmp_path):
    make(tmp_path, None, COMPLETE, COMPLETE, PARTIAL)
    for found, repaired in (("3", "3"), ("", "2")):
        (tmp_path / TRACKER).write_text(found)
        recovery.repair_tracker(args(tmp_path, ckpt_step=1))
        assert tracker(tmp_path) == repaired


def test_a_damaged_checkpoint_with_hashes_is_not_skipped_silently(tmp_path):
    make(tmp_path, "2", COMPLETE, TORN_MARK)
    (tmp_path / "iter_0000002" / INTEGRITY).write_text("{}")
    recovery.repair_tracker(args(tmp_path))
    assert tracker(tmp_path) == "2"


def test_an_iteration_replaces_the_release_that_the_run_started_from(tmp_path):
    make(tmp_path, "release", COMPLETE)
    release = tmp_path / "release"
    (tmp_path / "iter_0000001").rename(release)
    recovery.repair_tracker(args(tmp_path))
    assert tracker(tmp_path) == "release"
    make(tmp_path, None, COMPLETE)
    recovery.repair_tracker(args(tmp_path))
    assert tracker(tmp_path) == "1"


def test_warning_if_a_run_does_not_load_its_own_checkpoints(tmp_path, capsys):
    recovery.warn_of_a_fresh_start(args(tmp_path, load=None))
    make(tmp_path, "2", COMPLETE, COMPLETE)
    recovery.warn_of_a_fresh_start(args(tmp_path))
    recovery.warn_of_a_fresh_start(args(tmp_path, load=None, save=None))
    object_store = args(tmp_path, load=None, save="msc://bucket/run")
    recovery.warn_of_a_fresh_start(object_store)
    assert not capsys.readouterr().err
    recovery.warn_of_a_fresh_start(args(tmp_path, load=None))
    (line,) = capsys.readouterr().err.splitlines()
    assert "contains iter_0000002" in line
    assert line.endswith(f"add --load {tmp_path}")


def test_other_ranks_wait_for_the_repair(tmp_path, monkeypatch):
    make(tmp_path, "", COMPLETE)
    monkeypatch.setenv("RANK", "1")
    repair = threading.Timer(0.3, lambda: (tmp_path / TRACKER).write_text("1"))
    repair.start()
    recovery.repair_tracker(args(tmp_path))
    assert tracker(tmp_path) == "1"

    (tmp_path / TRACKER).write_text("")
    monkeypatch.setattr(recovery, "_REPAIR_TIMEOUT", 0.2)
    with pytest.raises(CheckpointError, match="not repaired by rank 0"):
        recovery.repair_tracker(args(tmp_path))


def test_clearing_a_checkpoint_keeps_other_files(tmp_path, capsys):
    save = make(tmp_path, None, COMPLETE) / "iter_0000001"
    for name in (INTEGRITY, f".{INTEGRITY}.partial-7", ".metadata", ".metadata.tmp", "notes.txt"):
        (save / name).write_text("x")
    clear_for_overwriting(save)
    assert [file.name for file in save.iterdir()] == ["notes.txt"]
    assert "replacing the checkpoint" in capsys.readouterr().err
    clear_for_overwriting(save)
    assert not capsys.readouterr().err
