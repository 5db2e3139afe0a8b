"""Test that a full disk stops training with one line and keeps the last checkpoint."""

import errno
import functools
import os
import re
import shutil

import pytest

from kha_megatron.checkpoint.integrity import verify_hashes
from kha_megatron.checkpoint.tracker import COMMIT_MARK, TRACKER
from tests.faults import writes
from tests.faults.jobs import arguments, iteration_folder, resumed, small_disk, until

SAVE = ".iter_0000002.partial-*"
"""The directory of the second save, before it is complete."""


def refuse(folder, wanted, victim, rank):
    """Make every step of the wanted kind fail in one rank as on a full disk."""

    def at(step):
        if rank == victim and writes.is_step(wanted, step):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writes.watch(folder, at)


def check_stopped(run, folder):
    assert 0 not in run.codes, run.output[-3000:]
    assert run.codes[0] == 2, run.output[-3000:]
    (error,) = run.errors
    assert f"Could not write a checkpoint to {folder}: " in error
    assert error.endswith("to resume from iter_0000001.")
    assert not (iteration_folder(folder, 2) / COMMIT_MARK).exists()
    verify_hashes(iteration_folder(folder, 1))


@pytest.fixture
def first(saved):
    """Return a function that copies a ``--save`` directory with iteration 1."""

    def copy(folder):
        shutil.copytree(saved, folder, ignore=shutil.ignore_patterns("iter_0000002"))
        (folder / TRACKER).write_text("1")
        return folder

    return copy


@pytest.mark.whole
@pytest.mark.parametrize(
    ("victim", "wanted"),
    [(1, ("half", f"{SAVE}/*.distcp")), (0, ("half", f"{SAVE}/.metadata.tmp"))],
    ids=["a shard", "the index"],
)
def test_a_failed_write_of_one_rank(entry, first, tmp_path, faults_table, victim, wanted):
    folder = first(tmp_path / "save")
    run = entry(arguments(folder), 2, before=functools.partial(refuse, folder, wanted, victim))
    check_stopped(run, folder)
    again = entry(arguments(folder, *until(2)), 2)
    assert again.codes == [0, 0], again.output[-3000:]
    assert resumed(again.output) == 1
    assert "ignoring iter_0000002: incomplete checkpoint" in "".join(again.remarks)
    verify_hashes(iteration_folder(folder, 2))
    faults_table("Full disks", f"a write of `{wanted[1]}` by rank {victim}", str(run.codes), 1)


def test_a_full_file_system(entry, first, tmp_path, faults_table):
    with small_disk(tmp_path, "1m") as disk:
        folder = first(disk / "save")
        used = sum(file.stat().st_size for file in iteration_folder(folder, 1).iterdir())
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - used // 2))
        run = entry(arguments(folder), 2)
        check_stopped(run, folder)
        assert not run.overdue
        if run.codes[1] != 2:  # it had written its shards before rank 0 failed
            assert run.codes[1] == 1, run.output[-6000:]
            assert re.search("Connection (closed|reset) by peer", run.output), run.output[-6000:]
    faults_table("Full disks", "every write: a file system of 1 MB", "[2, 1 or 2]", 1)
