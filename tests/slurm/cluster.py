"""Training with ``kha-megatron launch`` on the cluster that ``tools/test_slurm.sh`` starts."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.faults.jobs import iteration_folder
from tests.processes import wait_until

KHA = Path(sys.executable).with_name("kha-megatron")
SCRIPT = Path(__file__).parents[2] / "tools" / "test_slurm.sh"
SMALL = ["--micro-batch-size", "4", "--global-batch-size", "4", "--log-interval", "1"]


def call(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class Launch:
    """A running ``kha-megatron launch`` of ``iterations`` steps, with its output and its log."""

    def __init__(
        self,
        data: Path,
        *options: str,
        home: Path,
        output=None,
        iterations=24,
        save=8,
        ranks=2,
        last=None,
        megatron=(),
    ):
        self.output = output or home / "run"
        self._iterations = iterations
        self._log = home / f"log{len(list(home.iterdir()))}"
        words = ["launch", "quickstart", "--data", data, "--output", self.output]
        words += ["--executor", "slurm", "--device", "cpu", "--time", "00:30:00"]
        if "--nodes" not in options:
            # other tests, which run at the same time, do not stop the only node of this partition
            words += ["--partition", "one"]
        words += ["--nproc", ranks, *options, "--", *SMALL]
        words += ["--train-iters", iterations, "--save-interval", save]
        if last:
            words += ["--exit-interval", last]
        words += megatron
        with self._log.open("w") as file:
            self.process = subprocess.Popen(
                [KHA, *map(str, words)],
                stdout=file,
                stderr=file,
                env=os.environ | {"NEMORUN_HOME": str(home)},
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
        return int(tracker.read_text() or 0) if tracker.exists() else 0

    @property
    def saving(self) -> int:
        """Iteration whose checkpoint has been started but not finished, or 0."""
        checkpoints = self.output / "checkpoints"
        iterations = [0]
        for folder in checkpoints.glob("iter_*"):
            iterations.append(int(folder.name.removeprefix("iter_")))
        newest = max(iterations)
        metadata = iteration_folder(checkpoints, newest) / ".metadata"
        return 0 if metadata.exists() else newest

    @property
    def text(self) -> str:
        """The logs of all ranks and all starts of the job."""
        text = ""
        for name in sorted(set(re.findall(r"log file:? (\S+)", self.log))):
            log = Path(name)
            if log.exists():
                text += log.read_text()
        return text

    @property
    def iterations(self) -> list[int]:
        """Iterations in the logs of all starts, in order."""
        return [number for number, _ in self.losses]

    @property
    def losses(self) -> list[tuple[int, str]]:
        """Iterations and losses in the logs of all starts, in order, as Megatron prints them."""
        pattern = rf"\biteration +(\d+)/ +{self._iterations} \|.* lm loss: (\S+)"
        matches = re.findall(pattern, self.text)
        return [(int(number), loss) for number, loss in matches]

    @property
    def state(self) -> str:
        return call("squeue", "-h", "-j", self.job, "-o", "%T")[:-1]

    @property
    def restarts(self) -> int:
        job = call("scontrol", "show", "job", self.job)
        return int(re.search(r"Restarts=(\d+)", job)[1])

    def until(self, condition, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.01)

    def end(self) -> int:
        code = self.process.wait(400)
        lines = [line for line in self.log.splitlines() if not line.startswith("iteration ")]
        assert len(lines) < 60, self.log  # no line is repeated
        return code


class Node:
    """A node of the cluster."""

    def __init__(self, number: int) -> None:
        self.name = f"kn{number}"
        self.address = f"10.77.0.{number}"
        self.place = Path(os.environ["SLURM_CONF"]).parent
        self._pid_file = self.place / f"{self.name}.pid"
        self._delay: subprocess.Popen | None = None

    @property
    def processes(self) -> list[psutil.Process]:
        """Processes of the node, from the outermost."""
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # it is starting
            outer = psutil.Process(int(self._pid_file.read_text()))
            return [outer, *outer.children(recursive=True)]
        return []

    @property
    def ranks(self) -> list[psutil.Process]:
        ranks = []
        for process in self.processes:
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "kha_megatron.training" in process.cmdline():
                    ranks.append(process)
        return ranks

    @property
    def state(self) -> str:
        return call("sinfo", "-h", "-N", "-n", self.name, "-o", "%T")

    def run(self, command: str) -> str:
        return call("nsenter", "-t", str(self.processes[1].pid), "-a", "sh", "-c", command)

    def signal(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def crash(self) -> None:
        """Kill all processes at once. The kernel kills the inner ones with the outermost."""
        processes = self.processes
        processes[0].kill()
        psutil.wait_procs(processes, 20)

    def set_hosts(self, text: str) -> None:
        """Replace ``/etc/hosts`` of the node."""
        (self.place / self.name / "hosts").write_text(text)

    def set_network(self, state: str) -> None:
        call("ip", "link", "set", self.name, state)

    def delay(self, seconds: float) -> None:
        """Delay every packet from and to this node."""
        script = Path(__file__).with_name("delay.py")
        self._delay = subprocess.Popen([sys.executable, script, self.name, str(seconds)])
        wait_until(lambda: self.connect() > seconds, 30)

    def connect(self) -> float:
        """Return the seconds to connect to the node's slurmd."""
        start = time.monotonic()
        with contextlib.suppress(OSError), socket.create_connection((self.address, 16818), 20):
            return time.monotonic() - start
        return 0.0

    def repair(self) -> None:
        """Undo everything above, and wait until Slurm can use the node."""
        if self._delay is not None:
            self._delay.send_signal(signal.SIGTERM)
            self._delay.wait()
            self._delay = None
        self.set_network("up")
        self.set_hosts((self.place / "hosts").read_text())
        self.signal(signal.SIGCONT)
        if not self.processes:
            subprocess.Popen([SCRIPT, "node", self.name])
        wait_until(lambda: len(self.processes) > 2, 60)
        wait_until(lambda: not re.search(r"down|unk|\*", self.state), 90)
        self.run("rm -f /tmp/full /tmp/late")
