"""SIGTERM in all processes of a job, which Slurm sends before it preempts the job."""

import functools
import signal
import subprocess
import sys

import pytest

from tests.faults.jobs import arguments, iteration_folder, resumed, until
from tests.processes import wait_until

HELPERS = ["--async-save", "--async-strategy", "mcore", "--num-workers", "1"]


def _once_committed(folder) -> float:
    wait_until((folder / "metadata.json").exists)
    return 0.0


@pytest.mark.parametrize("helpers", [HELPERS, pytest.param([], marks=pytest.mark.whole)])
def test_run_saves_and_exits(helpers, entry, tmp_path):
    """Data loaders, checkpoint writers and their queues get the signal too."""
    words = arguments(tmp_path, *helpers, "--exit-signal-handler", "--save-interval", "3")
    moment = functools.partial(_once_committed, iteration_folder(tmp_path, 3))
    run = entry(words, 2, kill_after=moment, kill_with=signal.SIGTERM)
    assert (run.codes, run.helpers) == ([0, 0], False), run.output[-3000:]
    assert "exiting program after receiving SIGTERM" in run.output
    last = max(int(path.name[5:]) for path in tmp_path.glob("iter_*"))
    assert 3 <= last < 90
    again = entry([*words, *until(last + 1)], 2)
    assert again.codes == [0, 0], again.output[-3000:]
    assert resumed(again.output) == last


CHILDREN = """
import multiprocessing, os, signal, time
from kha_megatron.training.recovery import protect_children

if __name__ == "__main__":
    protect_children()
    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    children = [
        multiprocessing.get_context(method).Process(target=time.sleep, args=(1000,))
        for method in ("fork", "spawn", "forkserver")
    ]
    for child in children:
        child.start()
    for pid in (os.getpid(), *(child.pid for child in children)):
        os.kill(pid, signal.SIGTERM)
    for child in children:
        child.join(1)
    print(len(received), [child.exitcode for child in children])
    for child in children:
        child.kill()
"""


def test_children_do_not_end_by_sigterm(tmp_path):
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "1 [None, None, None]\n", done.stderr
