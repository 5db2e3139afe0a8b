"""Runs under the real NeMo-Run: what ranks receive, how a run ends, and that none survives."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kha_megatron.errors import ConfigError, MissingDependencyError
from kha_megatron.recipes import get_recipe, launch, prepare
from kha_megatron.recipes.launching import dry_run

ODD = ["a b", "$HOME", "it's", "~", "([0]*1+[1]*3)", "-1e-3", "", "a\nb", "*", '"', "\\"]

ECHO = """
import json, os, subprocess, sys
rank = int(os.environ["RANK"])
folder = os.path.dirname(os.path.abspath(__file__))
facts = {"argv": sys.argv[1:], "omp": os.environ["OMP_NUM_THREADS"], "cwd": os.getcwd(),
         "python": sys.executable, "world": os.environ["WORLD_SIZE"],
         "helper": subprocess.Popen(["sleep", "3000"]).pid}
with open(os.path.join(folder, f"rank{rank}.json"), "w") as file:
    json.dump(facts, file)
if rank == 1:
    for i in (3, 7):
        print(f" iteration  {i}/  7 | consumed samples:  {i * 8} | lm loss: {9 - i}.5E+00 |")
"""


def test_ranks_receive_every_argument_unchanged(
    scripted, tmp_path, nemorun_home, monkeypatch, capsys
):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    words = [f"--odd{i}={value}" for i, value in enumerate(ODD)]
    before = signal.getsignal(signal.SIGTERM)
    job = prepare(scripted(ECHO), overrides=["--mock-data", *words], output=tmp_path / "out put")
    steps = []
    result = launch(job, on_step=steps.append)

    assert result.succeeded, result.failure
    assert result.failure is None
    said = capsys.readouterr().err  # from the start, for who wants to follow it
    assert f"{job.output}: log of all ranks: {result.log}\n" in said
    assert [(s.iteration, s.total, s.samples, s.loss) for s in steps] == [
        (3, 7, 24, 6.5),
        (7, 7, 56, 2.5),
    ]
    assert result.last_step == steps[-1]
    assert "iteration  7/  7" in result.log.read_text()
    assert result.log.is_relative_to(nemorun_home)
    assert signal.getsignal(signal.SIGTERM) is before
    for rank in (0, 1):
        facts = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert facts["argv"] == list(job.command[job.command.index(job.recipe.entry) + 1 :])
        assert _values(facts["argv"]) == ODD
        assert (facts["omp"], facts["world"]) == ("5", "2")
        assert (facts["cwd"], facts["python"]) == (os.getcwd(), sys.executable)
        assert not _alive(facts["helper"])  # which its rank has left behind


def _values(words: list[str]) -> list[str]:
    """What argparse makes of ``--odd0 ... --odd10``."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for i in range(len(ODD)):
        parser.add_argument(f"--odd{i}")
    return list(vars(parser.parse_known_args(words)[0]).values())


SLEEP = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3000)"])
pathlib.Path(__file__).with_name(f"pids{os.environ['RANK']}.part").write_text(
    f"{os.getpid()} {child.pid}")
os.rename(pathlib.Path(__file__).with_name(f"pids{os.environ['RANK']}.part"),
          pathlib.Path(__file__).with_name(f"pids{os.environ['RANK']}"))
time.sleep(3000)
"""

INTERRUPTED = """
import sys
from dataclasses import replace
from kha_megatron.recipes import get_recipe, launch, prepare
recipe = replace(get_recipe("quickstart"), name="interrupted", entry=sys.argv[1])
try:
    launch(prepare(recipe, overrides=["--mock-data"]))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.whole)]
)
def test_no_process_of_any_rank_outlives_the_launch(number, tmp_path, nemorun_home):
    """SIGTERM becomes the KeyboardInterrupt that Ctrl-C is; of SIGKILL nobody here hears."""
    script = tmp_path / "rank.py"
    script.write_text(SLEEP)
    files = [tmp_path / "pids0", tmp_path / "pids1"]
    driver = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(script)], stdout=subprocess.PIPE, text=True
    )
    pids: list[int] = []
    try:
        _wait_until(lambda: all(file.exists() for file in files) or driver.poll() is not None)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert len(pids) == 4
        assert all(map(_alive, pids))
        driver.send_signal(number)
        output, _ = driver.communicate(timeout=180)
        assert output == ("interrupted\n" if number == signal.SIGTERM else "")
        if number == signal.SIGKILL:  # its guard needs a moment, and grants the ranks another
            _wait_until(lambda: not any(map(_alive, pids)))
        assert not any(map(_alive, pids))
    finally:
        driver.kill()
        for pid in filter(_alive, pids):
            os.kill(pid, signal.SIGKILL)


def _wait_until(condition, seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def job():
    return prepare(get_recipe("quickstart"), overrides=["--mock-data"])


def test_without_nemo_run(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_run", None)
    with pytest.raises(MissingDependencyError, match=r"kha-megatron\[launch\]"):
        dry_run(job)


def test_nemo_run_that_cannot_be_imported_is_not_called_missing(job, monkeypatch, tmp_path):
    (tmp_path / "nemo_run.py").write_text("import leptonai_of_another_version\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nemo_run", raising=False)
    with pytest.raises(ConfigError, match=r"leptonai_of_another_version.*pip install"):
        launch(job)


def test_without_torchrun(job, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="torchrun is neither in"):
        dry_run(job)
