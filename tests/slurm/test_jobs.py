"""Train with ``kha-megatron launch`` on a real Slurm, which ``make test-slurm`` starts."""

import os
import re
import signal
import subprocess
import time

import pytest

from tests.slurm.cluster import Launch, call

RESUMED = "resumes from its last checkpoint"

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif("KHA_TEST_SLURM" not in os.environ, reason="needs `make test-slurm`"),
]


def test_requeued_job_goes_on_from_its_checkpoint(data, tmp_path, nodes_table):
    run = Launch(data, home=tmp_path)
    run.until(lambda: run.saved == 16)
    call("scontrol", "requeue", run.job)
    assert run.end() == 0, run.log
    assert run.saved == 24
    again = run.iterations.index(17, run.iterations.index(16))
    assert run.iterations[again:] == list(range(17, 25))
    assert run.iterations[:16] == list(range(1, 17))
    assert "iteration 24/24 loss" in run.log
    nodes_table("`scontrol requeue`", RESUMED)


def test_training_that_fails_is_tried_again(data, tmp_path):
    run = Launch(data, "--retries", "1", "--env", "KHA_CONFIG=x", home=tmp_path)
    assert run.end() == 2, run.log  # an invalid setting
    assert f"job {run.job} ended with state FAILED (exit code 1:0" in run.log
    assert "KHA_CONFIG only applies to layer specs" in run.log
    assert "_1.out" in run.log  # the log of the second start
    assert run.saved == 0


def test_cancelled_job_ends_with_1_and_a_chain_goes_on_from_it(data, tmp_path):
    run = Launch(data, home=tmp_path)
    run.until(lambda: run.saved == 8)
    call("scancel", run.job)
    assert run.end() == 1
    assert f"job {run.job} ended with state CANCELLED" in run.log
    trains = subprocess.run(
        ["pgrep", "-f", "--", f"--save {run.output}"],
        stdout=subprocess.DEVNULL,
    )
    assert trains.returncode == 1  # no process, whoever its parent is
    saved = run.saved
    assert 8 <= saved < 24  # it may have saved when Slurm sent SIGTERM

    chain = Launch(data, "--resume", "--chain", "2", home=tmp_path)
    assert chain.end() == 0, chain.log
    assert chain.iterations == list(range(saved + 1, 25))
    assert len(re.findall(r"is COMPLETED", chain.log)) == 2


def preempt() -> None:
    """Submit a job with a higher priority, which needs all cores of the node."""
    words = ["--partition", "urgent", "--cpus-per-task", "2", "--output", "/dev/null"]
    call("sbatch", *words, "--wrap", "sleep 15")


HELPERS = ["--async-save", "--async-strategy", "mcore", "--num-workers", "1"]


@pytest.mark.parametrize(
    ("stop", "megatron", "row"),
    [
        ("preempt", [], "the job is preempted, with a grace period"),
        (
            "preempt",
            HELPERS,
            "a job with `--async-save` and data loader workers is preempted",
        ),
        ("scancel", HELPERS, "`scancel --signal TERM`"),
    ],
    ids=["preempted", "preempted with helper processes", "SIGTERM"],
)
def test_job_that_gets_sigterm_saves_and_is_requeued(
    stop,
    megatron,
    row,
    data,
    tmp_path,
    nodes_table,
):
    """It has no retry that it could use, and no iteration is trained twice."""
    partition = "grace" if stop == "preempt" else "one"
    run = Launch(
        data,
        "--partition",
        partition,
        home=tmp_path,
        save=100,
        megatron=megatron,
    )
    run.until(lambda: len(run.iterations) > 3)
    if stop == "preempt":
        preempt()
    else:
        call("scancel", "--signal", "TERM", run.job)
    run.until(lambda: run.saved)
    saved = run.saved
    run.until(lambda: run.state == "RUNNING" and run.restarts == 1)
    assert run.end() == 0, run.log
    assert 3 < saved < 24
    assert run.iterations == list(range(1, 25))
    assert "FAILED" not in run.log
    assert not list(tmp_path.rglob("*.failures"))
    nodes_table(row, "saves, is requeued without using up a retry, trains no iteration twice")


def test_preemption_without_grace(data, tmp_path, nodes_table):
    run = Launch(data, "--partition", "no-grace", home=tmp_path)
    run.until(lambda: run.saved == 8)
    preempt()
    run.until(lambda: run.restarts == 1)
    saved = run.saved
    assert run.end() == 0, run.log
    assert run.saved == 24
    assert saved >= 8
    assert "FAILED" not in run.log
    nodes_table("the job is preempted, without a grace period", RESUMED)


def test_time_limit_uses_a_retry(data, tmp_path, nodes_table):
    options = ["--time", "00:02:00", "--retries", "1"]
    late = ["--exit-duration-in-mins", "60"]  # the run does not exit before the limit
    run = Launch(data, *options, home=tmp_path, iterations=4000, megatron=late)
    run.until(lambda: run.restarts == 1, 400)
    assert run.end() == 1
    assert f"job {run.job} ended with state TIMEOUT" in run.log
    assert "SignalException" not in run.log  # how torchrun ends
    assert run.saved > 0
    assert run.iterations.count(1) == 1  # it was resumed
    (failures,) = tmp_path.rglob("*.failures")
    assert failures.read_text().split() == ["failed", "failed"]
    nodes_table("the job reaches its time limit", f"uses a retry, {RESUMED}")


def test_invalid_arguments_end_a_chain(data, tmp_path):
    run = Launch(data, "--chain", "3", "--env", "KHA_CONFIG=x", home=tmp_path)
    jobs = [run.job, *(str(int(run.job) + number) for number in (1, 2))]
    assert run.end() == 2, run.log
    assert "KHA_CONFIG only applies to layer specs" in run.log
    for job in jobs[1:]:
        assert "JobState=CANCELLED" in call("scontrol", "show", "job", job)


def test_cancelled_job_uses_no_retry(data, tmp_path):
    run = Launch(data, "--retries", "3", home=tmp_path)
    run.until(lambda: run.saved == 8)
    call("scancel", run.job)
    assert run.end() == 1
    assert f"job {run.job} ended with state CANCELLED" in run.log


def test_step_that_is_killed_is_started_again(data, tmp_path):
    run = Launch(data, "--retries", "1", home=tmp_path)
    run.until(lambda: run.saved == 8)
    (step,) = re.findall(rf"^{run.job}\.(\d+)$", call("squeue", "-s", "-h", "-o", "%i"), re.M)
    call("scancel", "--signal", "KILL", f"{run.job}.{step}")
    assert run.end() == 0, run.log
    assert run.saved == 24


def test_job_that_slurm_has_forgotten(data, tmp_path):
    """The launcher is stopped for a while, as a sleeping laptop is. Accounting knows the end."""
    run = Launch(data, home=tmp_path)
    run.until(lambda: run.saved == 8)
    run.process.send_signal(signal.SIGSTOP)
    ask = ["scontrol", "show", "job", run.job]
    deadline = time.monotonic() + 400
    while "Invalid job id" not in subprocess.run(ask, capture_output=True, text=True).stderr:
        assert time.monotonic() < deadline
        time.sleep(2)
    run.process.send_signal(signal.SIGCONT)
    code = run.end()
    assert run.saved == 24
    if os.environ["KHA_TEST_SLURM"] == "accounts":
        assert code == 0, run.log
    else:
        assert code == 1
        assert f"Slurm has no information about job {run.job}" in run.log


def test_refused_job_and_a_job_left_alone(data, tmp_path):
    refused = Launch(data, "--partition", "nowhere", home=tmp_path)
    assert refused.end() == 1
    assert "Could not submit the job to Slurm" in refused.log
    assert "Invalid partition" in refused.log
    alone = Launch(data, "--detach", home=tmp_path)
    assert alone.end() == 0
    assert "submitted" in alone.log
    assert "Log of all ranks: /" in alone.log
    call("scancel", re.search(r"jobs: (\d+)", alone.log)[1])
