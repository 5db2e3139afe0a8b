"""Test that a checkpoint belongs to one run, and that its hashes do not delay training."""

import functools
import json
import re
import shutil
import time

import pytest
import torch

from kha_megatron.checkpoint import integrity
from kha_megatron.checkpoint.integrity import INTEGRITY, read_hashes
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.ownership import OWNER
from tests.faults.jobs import arguments, iteration_folder, resumed, until

ASYNC = ["--async-save", "--async-strategy", "mcore"]


def lose_the_directory_before_the_second_save(folder, other, rank):
    """Let the run of ``other`` take over ``folder`` and save, just before rank 1 writes its shard.

    This is what happens if a job is requeued while a node of its first attempt is cut off.
    """
    if rank != 1:
        return
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data

    def write_late(transforms, local_proc_idx, write_bucket, *args, **kwargs):
        if "iter_0000002" in write_bucket[0]:
            owner = folder / OWNER
            owner.write_text(json.dumps(json.loads(owner.read_bytes()) | {"run_id": "second"}))
            shutil.rmtree(iteration_folder(folder, 2))
            shutil.copytree(iteration_folder(other, 2), iteration_folder(folder, 2))
        return write(transforms, local_proc_idx, write_bucket, *args, **kwargs)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write_late)


def test_a_late_shard_does_not_get_into_the_checkpoint_of_another_run(
    entry,
    tmp_path,
    faults_table,
):
    folder = tmp_path / "save"
    apart = tmp_path / "apart"
    second = entry(arguments(apart, *until(2), "--seed", "4"), 2)
    assert second.codes == [0, 0], second.output[-3000:]
    lose = functools.partial(lose_the_directory_before_the_second_save, folder, apart)
    first = entry(arguments(folder, *until(3), "--seed", "3"), 2, before=lose)
    assert any("was taken over by" in error for error in first.errors), first.output[-3000:]
    faults_table(
        "Writers",
        "a run is taken over while one of its ranks still writes",
        "no mixed checkpoint",
    )
    ours = MegatronCheckpoint.open(iteration_folder(folder, 2))
    theirs = MegatronCheckpoint.open(iteration_folder(apart, 2))
    assert read_hashes(ours.path) == read_hashes(theirs.path)
    for key in theirs.keys():  # noqa: SIM118
        assert torch.equal(ours.tensor(key), theirs.tensor(key)), key


def test_what_an_interrupted_save_has_left_is_removed(entry, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "save")
    left = []
    for parent in (folder, folder / "non_persistent"):
        left.append(parent / ".iter_0000003.partial-0123abcd")
    for path in left:
        path.mkdir(parents=True)
        (path / "__0_0.distcp").write_bytes(b"torn")
    run = entry(arguments(folder, *until(3)), 2)
    assert run.codes == [0, 0], run.output[-3000:]
    assert resumed(run.output) == 2
    for path in left:
        assert f"removing {path}" in "".join(run.remarks)
    assert [path.name for path in folder.rglob(".iter_*")] == []
    names = {path.name for path in iteration_folder(folder, 3).iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json", INTEGRITY} <= names
    assert set(read_hashes(iteration_folder(folder, 3))) == names - {INTEGRITY}


def hash_slowly(seconds, rank):
    """Let the hash of each shard take ``seconds`` longer."""
    hash_file = integrity.hash_file

    def slow(file):
        if file.suffix == ".distcp":
            time.sleep(seconds)
        return hash_file(file)

    integrity.hash_file = slow


def iteration_seconds(output):
    return [float(ms) / 1000 for ms in re.findall(r"iteration \(ms\): ([\d.]+)", output)]


@pytest.mark.whole
def test_iterations_around_saves_without_hashes(entry, tmp_path, faults_table):
    """This is what hashing is compared with."""
    words = arguments(tmp_path, *until(8), *ASYNC, "--no-verify-integrity")
    words[words.index("--save-interval") + 1] = "2"
    run = entry(words, 2)
    assert run.codes == [0, 0], run.output[-3000:]
    assert read_hashes(iteration_folder(tmp_path, 8)) is None
    slowest = max(iteration_seconds(run.output)[1:])
    faults_table("Hashes", "two ranks, `--async-save`", "no hashes", f"{slowest:.2f} s")


@pytest.mark.parametrize("seconds", [5, pytest.param(20, marks=pytest.mark.whole)])
def test_hashing_delays_no_iteration(entry, tmp_path, seconds, faults_table):
    words = arguments(tmp_path, *until(8), *ASYNC)
    words[words.index("--save-interval") + 1] = "2"
    start = time.monotonic()
    run = entry(words, 2, before=functools.partial(hash_slowly, seconds))
    assert run.codes == [0, 0], run.output[-3000:]
    assert time.monotonic() - start > seconds
    slowest = max(iteration_seconds(run.output)[1:])  # the first one allocates memory
    assert slowest < 2
    faults_table(
        "Hashes",
        "two ranks, `--async-save`",
        f"{seconds} s for each shard",
        f"{slowest:.2f} s",
    )
    for iteration in (2, 4, 6, 8):
        MegatronCheckpoint.open(iteration_folder(tmp_path, iteration))
        assert "__1_0.distcp" in read_hashes(iteration_folder(tmp_path, iteration))
