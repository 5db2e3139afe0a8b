"""A disk that refuses a checkpoint stops the run with one line and costs no other checkpoint."""

import errno
import functools
import os
import shutil
import subprocess

import pytest

from kha_megatron.checkpoint.integrity import verify_hashes
from kha_megatron.checkpoint.tracker import COMMIT_MARK
from tests.faults import writes
from tests.faults.jobs import arguments, iteration_folder, resumed, until


def refuse(folder, wanted, victim, rank):
    """In the rank: every step of the wanted kind fails as on a full disk."""

    def at(step):
        if rank == victim and writes.is_step(wanted, step):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writes.watch(folder, at)


def check_stopped(run, folder):
    assert 0 not in run.codes, run.output[-3000:]
    assert run.codes[0] == 2, run.output[-3000:]
    (error,) = run.errors
    assert f"a checkpoint could not be written to {folder}, whose disk has" in error
    assert error.endswith("with the same command, which resumes from iter_0000001")
    assert not (iteration_folder(folder, 2) / COMMIT_MARK).exists()


def check_resumed(run, folder):
    assert run.codes == [0, 0], run.output[-3000:]
    assert resumed(run.output) == 1
    assert "ignoring iter_0000002: the save was cut short" in "".join(run.remarks)
    verify_hashes(iteration_folder(folder, 2))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("victim", "wanted"),
    [(1, ("half", "iter_0000002/*.distcp")), (0, ("half", "iter_0000002/.metadata.tmp"))],
    ids=["a shard", "the index"],
)
def test_a_refused_write_of_one_rank(entry, tmp_path, faults_table, victim, wanted):
    folder = tmp_path / "save"
    run = entry(arguments(folder), 2, before=functools.partial(refuse, folder, wanted, victim))
    check_stopped(run, folder)
    check_resumed(entry(arguments(folder, *until(2)), 2), folder)
    faults_table("Full disks", f"a write of `{wanted[1]}` by rank {victim}", str(run.codes), 1)


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, 1 MB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a full disk needs a mount, which this machine does not allow")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def test_a_disk_that_is_really_full(entry, disk, faults_table):
    folder, ballast = disk / "save", disk / "ballast"
    assert entry(arguments(folder, *until(1)), 2).codes == [0, 0]
    used = sum(file.stat().st_size for file in iteration_folder(folder, 1).iterdir())
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free - used // 2))
    run = entry(arguments(folder), 2)
    check_stopped(run, folder)
    assert not run.overdue
    assert run.codes == [2, 2]
    ballast.unlink()
    check_resumed(entry(arguments(folder, *until(2)), 2), folder)
    faults_table("Full disks", "every write: a file system of 1 MB", str(run.codes), 1)
