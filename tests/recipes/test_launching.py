"""Launches with the real NeMo-Run: arguments of the ranks, how a run ends, and no survivors."""

import argparse
import json
import os
import signal
import subprocess
import sys

import pytest

from kha_megatron.errors import MissingDependencyError
from kha_megatron.recipes import get_recipe, launch_job, prepare_job
from kha_megatron.recipes.launching import dry_run
from tests.processes import is_alive, wait_until

ODD = ["a b", "$HOME", "it's", "~", "([0]*1+[1]*3)", "-1e-3", "", "a\nb", "*", '"', "\\"]

RANK = """
import json, os, subprocess, sys, time
rank = os.environ["RANK"]
facts = {"argv": sys.argv[1:], "omp": os.environ["OMP_NUM_THREADS"], "cwd": os.getcwd(),
         "python": sys.executable, "world": os.environ["WORLD_SIZE"],
         "helper": subprocess.Popen(["sleep", "3000"]).pid}
path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"rank{rank}")
with open(path + ".part", "w") as file:
    json.dump(facts, file)
os.rename(path + ".part", path + ".json")
if rank == "1":
    for i in (3, 7):
        print(f" iteration  {i}/  7 | consumed samples:  {i * 8} | lm loss: {9 - i}.5E+00 |")
    while not os.path.exists(path[:-1] + "0.json"):  # a rank that fails ends the others
        time.sleep(0.01)
    sys.exit("the disk [red]is full" if "--fail" in sys.argv else 0)
"""


@pytest.mark.parametrize("fail", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_ranks_receive_every_argument_unchanged(
    fail,
    scripted,
    tmp_path,
    nemorun_home,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr("kha_megatron.recipes.launching._POLL_SECONDS", 0.1)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    words = ["--mock-data", *(f"--odd{i}={value}" for i, value in enumerate(ODD))]
    before = signal.getsignal(signal.SIGTERM)
    job = prepare_job(
        scripted(RANK),
        overrides=[*words, *["--fail"] * fail],
        output=tmp_path / "out put",
    )
    steps = []
    result = launch_job(job, on_step=steps.append)

    assert result.succeeded is not fail
    if fail:
        assert result.failure.rank == 1
        assert result.failure.exit_code == 1
        assert "the disk [red]is full" in result.failure.lines
    assert f"log of all ranks of {job.output} to {result.log}\n" in capsys.readouterr().err
    assert [(s.iteration, s.total, s.samples, s.loss) for s in steps] == [
        (3, 7, 24, 6.5),
        (7, 7, 56, 2.5),
    ]
    assert result.last_step == steps[-1]
    assert "iteration  7/  7" in result.log.read_text()
    assert result.log.is_relative_to(nemorun_home)
    assert signal.getsignal(signal.SIGTERM) is before
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for i in range(len(ODD)):
        parser.add_argument(f"--odd{i}")
    for rank in (0, 1):
        facts = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert facts["argv"] == list(job.command[job.command.index(job.recipe.entry) + 1 :])
        assert list(vars(parser.parse_known_args(facts["argv"])[0]).values()) == ODD
        assert facts["omp"] == "5"
        assert facts["world"] == "2"
        assert facts["cwd"] == os.getcwd()
        assert facts["python"] == sys.executable
        assert not is_alive(facts["helper"])


SLEEP = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3000)"])
path = pathlib.Path(__file__).with_name(f"pids{os.environ['RANK']}")
path.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".part").rename(path)
time.sleep(3000)
"""

INTERRUPTED = """
import sys
from dataclasses import replace
from kha_megatron.recipes import get_recipe, launch_job, prepare_job
recipe = replace(get_recipe("quickstart"), name="interrupted", entry=sys.argv[1])
try:
    launch_job(prepare_job(recipe, overrides=["--mock-data"]))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.whole)],
)
def test_no_process_of_any_rank_outlives_the_launch(number, tmp_path, nemorun_home):
    script = tmp_path / "rank.py"
    script.write_text(SLEEP)
    files = [tmp_path / "pids0", tmp_path / "pids1"]
    driver = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(script)],
        stdout=subprocess.PIPE,
        text=True,
    )
    pids: list[int] = []
    try:
        wait_until(lambda: all(file.exists() for file in files) or driver.poll() is not None)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert len(pids) == 4
        assert all(map(is_alive, pids))
        driver.send_signal(number)
        output, _ = driver.communicate(timeout=180)
        assert output == ("interrupted\n" if number == signal.SIGTERM else "")
        if number == signal.SIGKILL:  # the guard ends the ranks a moment later
            wait_until(lambda: not any(map(is_alive, pids)))
        assert not any(map(is_alive, pids))
    finally:
        driver.kill()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job():
    return prepare_job(get_recipe("quickstart"), overrides=["--mock-data"])


def test_missing_packages_are_refused(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_run", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[launch\]'"):
        dry_run(job)
    monkeypatch.setitem(sys.modules, "emerging_optimizers", None)
    with pytest.raises(MissingDependencyError, match=r"--optimizer muon .*'\.\[muon\]'"):
        prepare_job(get_recipe("quickstart"), overrides=["--mock-data", "--optimizer", "muon"])
