"""Train with ``kha-megatron launch`` on a real Slurm, which ``make test-slurm`` starts."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kha_megatron

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif("KHA_TEST_SLURM" not in os.environ, reason="needs `make test-slurm`"),
]
KHA = Path(sys.executable).with_name("kha-megatron")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "data"
    source = Path(kha_megatron.__file__).parent
    words = ["data", "prepare", "--from", source, "--glob", "*.py", "--out", folder]
    subprocess.run([KHA, *words], check=True, capture_output=True)
    return folder


class Launch:
    """A running ``kha-megatron launch`` with its output directory and its log."""

    def __init__(self, data: Path, home: Path, *options: str) -> None:
        self.output, self._log = home / "run", home / f"log{len(list(home.iterdir()))}"
        words = ["launch", "quickstart", "--data", data, "--output", self.output, *options]
        words += ["--executor", "slurm", "--device", "cpu", "--nproc", "2", "--time", "00:30:00"]
        words += ["--", "--train-iters", "60", "--save-interval", "20", "--log-interval", "1"]
        with self._log.open("w") as file:
            self.process = subprocess.Popen(
                [KHA, *words], stdout=file, stderr=file, env=os.environ | {"NEMORUN_HOME": home}
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def job(self) -> str:
        self.until(lambda: "Submitted Slurm job" in self.log)
        return re.search(r"Submitted Slurm job (\d+)", self.log)[1]

    @property
    def saved(self) -> int:
        tracker = self.output / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    @property
    def iterations(self) -> list[int]:
        """Iterations in the logs of all starts, in order."""
        logs = sorted(set(re.findall(r"log file:? (\S+)", self.log)))
        text = "".join(Path(log).read_text() for log in logs if os.path.exists(log))
        return [int(number) for number in re.findall(r"\biteration +(\d+)/ +60 \|", text)]

    def until(self, condition, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.2)

    def end(self) -> int:
        code = self.process.wait(400)
        assert len(self.log.splitlines()) < 60, self.log  # no line is repeated
        return code


def call(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def test_requeued_job_goes_on_from_its_checkpoint(data, tmp_path):
    run = Launch(data, tmp_path)
    run.until(lambda: run.saved == 40)
    call("scontrol", "requeue", run.job)
    assert run.end() == 0, run.log
    assert run.saved == 60
    again = run.iterations.index(41, run.iterations.index(40))
    assert run.iterations[again:] == list(range(41, 61))
    assert run.iterations[:40] == list(range(1, 41))
    assert "iteration 60/60 loss" in run.log


def test_training_that_fails_is_tried_again_and_ends_with_1(data, tmp_path):
    run = Launch(data, tmp_path, "--retries", "1", "--env", "KHA_CONFIG=x")
    assert run.end() == 1
    assert f"job {run.job} ended with state FAILED (exit code 1:0" in run.log
    assert "KHA_CONFIG only applies to layer specs" in run.log
    assert "_1.out" in run.log  # the log of the second start
    assert run.saved == 0


def test_cancelled_job_ends_with_1_and_a_chain_goes_on_from_it(data, tmp_path):
    run = Launch(data, tmp_path)
    run.until(lambda: run.saved == 20)
    call("scancel", run.job)
    assert run.end() == 1
    assert f"job {run.job} ended with state CANCELLED" in run.log
    trains = subprocess.run(
        ["pgrep", "-f", "--", f"--save {run.output}"], stdout=subprocess.DEVNULL
    )
    assert trains.returncode == 1  # no process, whoever its parent is
    saved = run.saved
    assert saved in (20, 40)

    chain = Launch(data, tmp_path, "--resume", "--chain", "2")
    assert chain.end() == 0, chain.log
    assert chain.iterations == list(range(saved + 1, 61))
    assert len(re.findall(r"is COMPLETED", chain.log)) == 2


def test_step_that_is_killed_is_started_again(data, tmp_path):
    run = Launch(data, tmp_path, "--retries", "1")
    run.until(lambda: run.saved == 20)
    (step,) = re.findall(rf"^{run.job}\.(\d+)$", call("squeue", "-s", "-h", "-o", "%i"), re.M)
    call("scancel", "--signal", "KILL", f"{run.job}.{step}")
    assert run.end() == 0, run.log
    assert run.saved == 60


def test_job_that_slurm_has_forgotten(data, tmp_path):
    """The launcher is stopped for a while, as a sleeping laptop is. Accounting knows the end."""
    run = Launch(data, tmp_path)
    run.until(lambda: run.saved == 20)
    run.process.send_signal(signal.SIGSTOP)
    ask, deadline = ["scontrol", "show", "job", run.job], time.monotonic() + 400
    while "Invalid job id" not in subprocess.run(ask, capture_output=True, text=True).stderr:
        assert time.monotonic() < deadline
        time.sleep(2)
    run.process.send_signal(signal.SIGCONT)
    code = run.end()
    assert run.saved == 60
    if os.environ["KHA_TEST_SLURM"] == "accounts":
        assert code == 0, run.log
    else:
        assert code == 1
        assert f"Slurm has no information about job {run.job}" in run.log


def test_refused_job_and_a_job_left_alone(data, tmp_path):
    refused = Launch(data, tmp_path, "--partition", "nowhere")
    assert refused.end() == 1
    assert "Could not submit the job to Slurm" in refused.log
    assert "Invalid partition" in refused.log
    alone = Launch(data, tmp_path, "--detach")
    assert alone.end() == 0
    assert "submitted" in alone.log
    assert "Log of all ranks: /" in alone.log
    call("scancel", re.search(r"jobs: (\d+)", alone.log)[1])
