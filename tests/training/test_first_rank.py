"""Test that rank 0 alone looks at checkpoints before Megatron, and that all ranks act alike."""

import json
import os
import re
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from kha_megatron.errors import CheckpointError
from kha_megatron.training import first_rank
from tests.ports import free_port
from tests.training.conftest import MODEL, TRAINING, start

WORDS = ["--device", "cpu", *MODEL, *TRAINING, "--mock-data", "--vocab-size", "300"]
WORDS += ["--kha-value", "mlp", "--train-iters", "2", "--tensor-model-parallel-size", "2"]


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False)


def exchange(store: TCPStore, results: list) -> list:
    """Run an attempt with three ranks for each result. Return what the others received."""
    received = []
    deadline = time.monotonic() + 60
    for result in results:
        ranks = [
            threading.Thread(
                target=lambda: received.append(first_rank._receive(client(store), deadline))
            )
            for _ in range(2)
        ]
        for rank in ranks:
            rank.start()
        first_rank._send(client(store), lambda result=result: result, deadline)
        for rank in ranks:
            rank.join()
    return received


def test_an_attempt_never_gets_the_result_of_another_one(store, monkeypatch):
    """The agent keeps its store when it restarts the ranks."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert exchange(store, [1, 2]) == ['{"result": 1}'] * 2 + ['{"result": 2}'] * 2
    # in this attempt, only one of two other ranks has started
    store.set("attempt", "interrupted")
    store.add("interrupted/ranks", 1)
    assert exchange(store, [3]) == ['{"result": 3}'] * 2


def test_ranks_do_not_wait_forever(store, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(CheckpointError, match="Rank 0 did not report in time"):
        first_rank._receive(client(store), time.monotonic() - 1)
    with pytest.raises(CheckpointError, match="Some ranks have not started in time"):
        first_rank._send(client(store), lambda: 1, time.monotonic() - 1)


def watch(folder: Path, rank: int) -> None:
    """Print what other ranks than 0 do with files in a directory before and in Megatron's load."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.training import checkpointing

    if rank == 0:
        return
    is_loading = threading.Event()

    def report(call: str, path: object) -> None:
        is_path = isinstance(path, str | os.PathLike) and str(path).startswith(str(folder))
        if is_path:
            when = "in" if is_loading.is_set() else "before"
            print(f"rank {rank} called {call} {when} the load for {path}")

    def wrap(call):
        return lambda path, *args, **options: (
            report(call.__name__, path),
            call(path, *args, **options),
        )[1]

    def load(*args, **options):
        is_loading.set()
        return original(*args, **options)

    original = checkpointing._load_base_checkpoint
    checkpointing._load_base_checkpoint = load
    serialization.load_sharded_metadata = wrap(serialization.load_sharded_metadata)
    os.stat = wrap(os.stat)
    os.lstat = wrap(os.lstat)
    audited = ("open", "os.listdir", "os.scandir")
    sys.addaudithook(lambda event, args: event in audited and report(event, args[0]))
    print("watching")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a directory with a checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("ranks") / "save"
    run = start([*WORDS, "--exit-interval", "1", "--save", str(folder)], 2)
    assert run.codes == [0, 0], run.output[-4000:]
    return folder


def test_only_rank_0_looks_at_the_checkpoint_before_megatron(saved):
    directory = ["--load", str(saved), "--save", str(saved)]
    run = start([*WORDS, *directory], 2, before=partial(watch, saved))
    assert run.codes == [0, 0], run.output[-4000:]
    assert "successfully loaded checkpoint" in run.output
    assert run.output.count("watching") == 1
    assert not re.findall("rank 1 called .* before .*", run.output)
    assert "rank 1 called load_sharded_metadata" not in run.output
    shards = {str(file) for file in (saved / "iter_0000001").glob("*.distcp")}
    called = set(re.findall(r"rank 1 called stat in the load for (.+)", run.output))
    assert called & shards < shards  # we verify hashes of a share


def use_own_store(port: int, rank: int) -> None:
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)


def test_ranks_without_an_agent_look_themselves(saved):
    """E.g. started by srun."""
    words = [*WORDS, "--load", str(saved)]
    run = start(words, 2, before=partial(use_own_store, free_port()))
    assert run.codes == [0, 0], run.output[-4000:]
    assert "successfully loaded checkpoint" in run.output


def put_on_own_node(rank: int) -> None:
    os.environ["LOCAL_RANK"] = "0"


def test_all_ranks_exit_with_a_single_error(tmp_path):
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / ".metadata").write_bytes(b"damaged")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    run = start([*WORDS, "--load", str(tmp_path)], 2, before=put_on_own_node)
    assert run.codes == [2, 2], run.output[-4000:]
    assert not run.overdue
    (error,) = run.errors
    assert f"Could not read {folder}/.metadata" in error
