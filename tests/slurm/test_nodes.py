"""Train on two of three nodes of a real Slurm while nodes, network and disks fail."""

import os
import re
import shutil
import signal
import time

import pytest

from tests.faults.jobs import resumed, small_disk
from tests.slurm.cluster import Launch, Node, call

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        os.environ.get("KHA_TEST_SLURM") != "alone",
        reason="needs `make test-slurm`",
    ),
]
SAME = "same losses as on one node"


@pytest.fixture
def nodes():
    """Return the three nodes. Repair them after the test."""
    nodes = [Node(number) for number in (1, 2, 3)]
    yield nodes
    for node in nodes:
        node.repair()


@pytest.fixture
def launch(data, tmp_path, nodes):
    """Return a function ``(*options)`` that starts a training on two nodes with one rank each."""
    started = []

    def start(*options, **values):
        values = {"home": tmp_path, "ranks": 1, "iterations": 8, "save": 2} | values
        started.append(Launch(data, *options, "--nodes", "2", **values))
        return started[-1]

    yield start
    for run in started:
        run.process.kill()
        run.process.wait()
    call("scancel", "--partition", "three", "--user", "root")


@pytest.fixture(scope="module")
def losses(data, tmp_path_factory):
    """Return iterations and losses on one node with two ranks."""
    home = tmp_path_factory.mktemp("one-node")
    run = Launch(data, home=home, iterations=8, save=2)
    assert run.end() == 0, run.log
    assert run.iterations == list(range(1, 9))
    return run.losses


def check_resumed(run, saved, losses) -> None:
    """Check that a second start resumed from ``saved`` and computed the losses of one node."""
    assert run.end() == 0, run.log
    assert resumed(run.text) == saved
    again = 8 - saved
    assert run.losses[-again:] == losses[-again:]
    assert run.losses[:-again] == losses[: len(run.losses) - again]
    assert run.saved == 8


def crash(run, node, when) -> int:
    """Crash a node while ``when()`` is true. Return the last complete checkpoint."""
    while True:
        run.until(lambda: run.saved and when())
        node.signal(signal.SIGSTOP)  # nothing changes between the check and the crash
        if when():
            node.crash()
            return run.saved
        node.signal(signal.SIGCONT)


def test_two_nodes_reach_the_losses_of_one(launch, losses, nodes_table):
    run = launch()
    assert run.end() == 0, run.log
    assert run.losses == losses
    nodes_table("none", SAME)


ASYNC = ["--async-save", "--async-strategy", "mcore"]


@pytest.mark.parametrize(
    ("moment", "megatron"),
    [
        ("between two saves", []),
        ("during a save", []),
        ("during an asynchronous save", ASYNC),
    ],
)
def test_crash(moment, megatron, launch, nodes, losses, nodes_table):
    run = launch(megatron=megatron)
    first, second, third = nodes
    if moment == "between two saves":
        saved = crash(run, second, lambda: not run.saving and run.iterations[-1] > run.saved)
    else:  # of rank 0, which also completes the checkpoint
        saved = crash(run, first, lambda: run.saving > run.saved)
    run.until(lambda: third.ranks)
    check_resumed(run, saved, losses)
    nodes_table(
        f"a node crashes {moment}",
        f"requeued onto the third node, resumes from iteration {saved} of 8, {SAME}",
    )


def test_lost_network(launch, nodes, losses, nodes_table):
    run = launch()
    first, _, third = nodes
    run.until(lambda: run.saved)
    first.set_network("down")
    ranks = first.ranks
    time.sleep(8)  # the iteration and a save may go on for a moment
    saved = run.saved
    written = [rank.io_counters().write_bytes for rank in ranks]
    before = snapshot(run.output)
    run.until(lambda: run.state == "PENDING")
    assert snapshot(run.output) == before
    run.until(lambda: third.ranks)
    check_resumed(run, saved, losses)
    assert [rank.io_counters().write_bytes for rank in ranks] == written
    after = snapshot(run.output)
    first.set_network("up")
    for rank in ranks:
        rank.wait(180)
    assert snapshot(run.output) == after
    nodes_table(
        "the first node loses its network",
        f"requeued onto the third node, resumes from iteration {saved} of 8, {SAME}; the isolated "
        "rank writes nothing",
    )


def snapshot(folder):
    """Return size and time of the last change of each file and directory."""
    sizes_and_times = {}
    for path in folder.rglob("*"):
        status = path.stat()
        sizes_and_times[path] = (status.st_size, status.st_mtime_ns)
    return sizes_and_times


def test_slow_node_with_a_full_disk(launch, nodes, losses, nodes_table):
    first, second, _ = nodes
    first.set_hosts((first.place / "hosts").read_text() + "10.77.0.101 kn1\n")
    assert first.run("hostname --ip-address").split() == ["10.77.0.1", "10.77.0.101"]
    second.delay(0.1)
    second.run("dd if=/dev/zero of=/tmp/full bs=1M 2>/dev/null || true")
    run = launch(last=2)  # an iteration takes 20 s
    assert run.end() == 0, run.log
    assert run.losses == losses[:2]
    nodes_table("`/tmp` of a node is full, its round trips take 200 ms; two addresses", SAME)


def test_late_first_node_whose_ipv6_address_comes_first(launch, nodes, losses, nodes_table):
    hosts = ""
    for number in (1, 2, 3):
        hosts += f"2001:db8::{number} kn{number}\n"
        hosts += f"10.77.0.{number} kn{number}\n"
    for node in nodes:
        node.set_hosts(hosts)
    first = nodes[0]
    assert first.run("hostname --ip-address").startswith("2001:db8::1")
    first.run("echo 65 >/tmp/late")  # by default, torchrun waits for one minute
    run = launch()
    assert run.end() == 0, run.log
    assert run.losses == losses
    nodes_table("the first node joins 65 s late; its IPv6 address comes first", SAME)


def test_first_node_without_address(launch, nodes, nodes_table):
    nodes[0].set_hosts("127.0.0.1 localhost\n")
    run = launch("--retries", "1")
    assert run.end() == 1
    (line,) = re.findall(r"^ *error: Node .*", run.log, re.M)
    assert "Node kn1 resolves its own host name to ''" in line
    assert "Traceback" not in run.log
    nodes_table("the first node does not resolve its own host name", "error in one line")


def test_two_jobs_with_one_first_node(launch, losses, tmp_path, nodes_table):
    runs = []
    for nodelist in ("kn[1-2]", "kn1,kn3"):
        parameters = f'additional_parameters={{"nodelist": "{nodelist}"}}'
        run = launch("--set", parameters, output=tmp_path / str(len(runs)))
        runs.append(run)
    for run in runs:
        run.until(lambda run=run: run.iterations)
    assert [run.state for run in runs] == ["RUNNING"] * 2
    for run in runs:
        assert run.end() == 0, run.log
        assert run.losses == losses
    nodes_table("two jobs share their first node", SAME)


def test_full_shared_directory(launch, losses, tmp_path, nodes_table):
    with small_disk(tmp_path, "70m") as disk:  # two checkpoints
        run = launch(output=disk / "run")
        assert run.end() == 2, run.log
        assert f"Could not write a checkpoint to {run.output / 'checkpoints'}" in run.log
        call("mount", "-o", "remount,size=200m", str(disk))
        saved = run.saved
        again = launch("--resume", output=disk / "run")
        assert again.end() == 0, again.log
        assert again.losses == losses[saved:]
    nodes_table(
        "the shared directory is full",
        f"exits with an error; with more space, resumes from iteration {saved} of 8, {SAME}",
    )


def test_path_that_is_not_shared_is_refused(launch, data, nodes_table):
    shutil.copytree(data, "/tmp/data")
    for words in (["--output", "/tmp/run"], ["--data", "/tmp/data"]):
        run = launch(*words)
        assert run.end() == 2
        assert "because every node has its own /" in run.log
    nodes_table("a path is in `/tmp`", "refused before submission")
