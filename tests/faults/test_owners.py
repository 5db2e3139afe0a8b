"""Test that a directory has one writer at a time, and that checkpoints are ordered by commit."""

import errno
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from kha_megatron.checkpoint import ownership
from kha_megatron.checkpoint.ownership import OWNER, claim, owned
from kha_megatron.checkpoint.tracker import TRACKER, select_iteration
from kha_megatron.errors import OutputError
from tests.faults.jobs import arguments, iteration_folder, resumed, until

HOLD = """
import sys
from pathlib import Path
from kha_megatron.checkpoint.ownership import claim
claim(Path(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Start another process that owns ``tmp_path / "out"``."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_a_second_training_does_not_save_into_the_same_directory(entry, tmp_path, faults_table):
    with owned(tmp_path):
        run = entry(arguments(tmp_path, *until(1)), 2, grace=5)
    assert 2 in run.codes
    (error,) = run.errors
    assert f"{tmp_path} is in use by process {os.getpid()} on " in error
    assert os.listdir(tmp_path) == [OWNER]
    faults_table("Writers", "two trainings with one `--save`", "the second one exits")


@pytest.mark.usefixtures("holder")
@pytest.mark.parametrize("words", [("quickstart",), ("launch", "quickstart")], ids=" ".join)
def test_a_command_does_not_write_beside_another(words, holder, tmp_path, run):
    if words == ("quickstart",):
        (tmp_path / "out" / "quickstart.json").touch()
    before = sorted(os.listdir(tmp_path / "out"))
    code, _, stderr = run(*words, "--output", tmp_path / "out", "--", "--mock-data")
    (error,) = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert code == 2
    assert f"in use by process {holder.pid} on " in error
    assert sorted(os.listdir(tmp_path / "out")) == before


def test_a_killed_owner_blocks_nobody(holder, tmp_path):
    with pytest.raises(OutputError, match=f"process {holder.pid}"):
        claim(tmp_path / "out")
    holder.kill()
    holder.wait()
    with owned(tmp_path / "out"):
        pass


def test_a_requeued_job_takes_over_from_its_crashed_node(holder, tmp_path, monkeypatch):
    file = tmp_path / "out" / OWNER
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    crashed = json.loads(file.read_bytes()) | {"host": "node1", "slurm_job": "77"}
    file.write_text(json.dumps(crashed | {"slurm_job": "76"}))
    with pytest.raises(OutputError, match=r"on node1 \(Slurm job 76\)"):
        claim(tmp_path / "out")
    file.write_text(json.dumps(crashed))
    claim(tmp_path / "out").check()


@pytest.fixture(params=[errno.ENOLCK, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def no_locks(request, monkeypatch):
    """Make file locks fail, as on a file system without locks. Error codes differ."""

    def unsupported(descriptor, operation):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", unsupported)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_run_with_a_heartbeat_keeps_its_directory(
    tmp_path,
    monkeypatch,
    capsys,
    faults_table,
):
    monkeypatch.setattr(ownership, "HEARTBEAT_INTERVAL", 0.05)
    first = claim(tmp_path)
    assert "does not support locks" in capsys.readouterr().err
    with pytest.raises(OutputError, match=f"in use by process {os.getpid()}"):
        claim(tmp_path)

    monkeypatch.setattr(ownership.socket, "gethostname", lambda: "node2")
    long_ago = time.time() - 2 * ownership.HEARTBEAT_TIMEOUT
    os.utime(tmp_path / OWNER, (long_ago, long_ago))
    deadline = time.monotonic() + 20
    while (tmp_path / OWNER).stat().st_mtime == long_ago and time.monotonic() < deadline:
        time.sleep(0.05)
    for clock in (time.time, lambda: 2 * long_ago):  # that of another host may be wrong
        monkeypatch.setattr(ownership.time, "time", clock)
        with pytest.raises(OutputError, match=r"in use by .*, which updated \.owner\.json \d+ sec"):
            claim(tmp_path)
    first.check()
    faults_table("Writers", "a second run, without file locks", "the second one exits")

    first.release()
    with owned(tmp_path):
        pass


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_silent_run_loses_its_directory_and_stops(
    tmp_path,
    monkeypatch,
    faults_table,
):
    first = claim(tmp_path)
    long_ago = time.time() - 2 * ownership.HEARTBEAT_TIMEOUT
    os.utime(tmp_path / OWNER, (long_ago, long_ago))
    monkeypatch.setattr(ownership.socket, "gethostname", lambda: "node2")
    second = claim(tmp_path)
    second.check()
    with pytest.raises(OutputError, match=r"taken over by process .* on node2"):
        first.check()
    first.release()
    second.check()
    second.release()
    faults_table(
        "Writers",
        "a second run, without file locks, and the first one is silent for 6 minutes",
        "the first one stops before its next save",
    )


@pytest.mark.usefixtures("no_locks")
def test_a_run_that_lost_its_directory_does_not_touch_it_when_it_ends(tmp_path, monkeypatch):
    first = claim(tmp_path)
    os.utime(tmp_path / OWNER, (1, 1))
    monkeypatch.setattr(ownership.socket, "gethostname", lambda: "node2")
    claim(tmp_path).release()
    os.utime(tmp_path / OWNER, (1, 1))
    first.release()
    assert (tmp_path / OWNER).stat().st_mtime == 1


def _replace_by_link(file):
    target = file.parent / "authorized_keys"
    target.write_text("precious")
    file.symlink_to(target)
    return target


def _replace_by_dangling_link(file):
    file.symlink_to(file.parent / "absent")
    return file.parent


def _replace_by_fifo(file):
    os.mkfifo(file)
    return file.parent


def _replace_by_directory(file):
    file.mkdir()
    return file.parent


@pytest.mark.parametrize(
    "replace",
    [_replace_by_link, _replace_by_dangling_link, _replace_by_fifo, _replace_by_directory],
)
def test_an_owner_file_that_is_no_regular_file_is_refused(tmp_path, replace):
    written_through = replace(tmp_path / OWNER)
    before = os.stat(written_through)
    with pytest.raises(OutputError, match=r"\.owner\.json is not a regular file"):
        claim(tmp_path)
    assert os.stat(written_through) == before


def test_a_full_disk_is_an_error_in_one_line(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match=r"Cannot write to .*: No space left on device\.$"):
        claim(tmp_path)


def test_the_owner_file_follows_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        with owned(tmp_path):
            mode = (tmp_path / OWNER).stat().st_mode
    finally:
        os.umask(before)
    assert mode & 0o777 == 0o664


def take_over(folder, rank):
    """Let another run take over ``folder`` while rank 0 writes the second checkpoint."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    write = TorchDistSaveShardedStrategy.async_save

    def write_and_lose(self, state, directory, *rest, **options):
        result = write(self, state, directory, *rest, **options)
        if rank == 0 and "iter_0000002" in str(directory):
            file = folder / OWNER
            file.write_text(json.dumps(json.loads(file.read_bytes()) | {"run_id": "other"}))
        return result

    TorchDistSaveShardedStrategy.async_save = write_and_lose


def test_a_run_whose_directory_was_taken_over_commits_nothing(entry, tmp_path):
    run = entry(arguments(tmp_path, *until(4)), 2, before=functools.partial(take_over, tmp_path))
    assert any("was taken over by process" in error for error in run.errors), run.output[-3000:]
    found = select_iteration(tmp_path)
    assert found.newest == iteration_folder(tmp_path, 1)
    assert found.incomplete == ["iter_0000002"]


def test_after_a_rollback_the_new_branch_resumes(entry, tmp_path, faults_table):
    def train(*more):
        run = entry(arguments(tmp_path, *more), 1)
        assert run.codes == [0], run.output[-3000:]
        return run

    train(*until(4))
    assert resumed(train("--ckpt-step", "2", *until(3)).output) == 2
    for torn in ("", "junk"):
        (tmp_path / TRACKER).write_text(torn)
        assert select_iteration(tmp_path).newest == iteration_folder(tmp_path, 3)
    run = train(*until(5))
    assert resumed(run.output) == 3
    faults_table("Rollbacks", "the tracker file is torn afterwards", "the new branch resumes")


def test_a_tracker_file_that_was_set_back_by_hand_is_followed(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "save")
    (folder / TRACKER).write_text("1")
    assert select_iteration(folder).newest == iteration_folder(folder, 1)
