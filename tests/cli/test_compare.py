"""``kha-megatron compare``: interruption and failures."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from kha_megatron import recipes
from kha_megatron.cli import app
from kha_megatron.compare.statistics import compute_final_loss
from kha_megatron.compare.trials import plan_comparison
from kha_megatron.compare.variants import parse_variants
from kha_megatron.errors import OutputError
from kha_megatron.recipes import Failure, LaunchResult, get_recipe
from kha_megatron.recipes.log_lines import VALIDATION_LOSS, read_history
from tests.processes import wait_until
from tests.recipes.conftest import nemorun_home  # noqa: F401
from tests.training.conftest import corpus, losses, start  # noqa: F401

ITERATIONS = 60
SMALL = shlex.split(f"""
--train-iters {ITERATIONS} --log-interval 5 --num-layers 2 --hidden-size 32 --kv-channels 8
--num-experts 4 --moe-ffn-hidden-size 16 --seq-length 28 --micro-batch-size 3 --global-batch-size 3
--tensor-model-parallel-size 1 --expert-model-parallel-size 1
""")
HELD_OUT = 5
VARIANTS = "baseline,kv=--kha-key linear --kha-value mlp"


def _ranks_of(folder: Path) -> list[psutil.Process]:
    """Return the processes whose command line names the checkpoints of a run."""
    save = str(folder / "checkpoints")
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        command_line = process.info["cmdline"] or ()
        if save in command_line:
            processes.append(process)
    return processes


@pytest.mark.whole
def test_a_killed_comparison_resumes_bit_for_bit(corpus, nemorun_home, tmp_path):  # noqa: F811
    """Kill the command after a checkpoint of the third of four runs."""
    data = Path(corpus[corpus.index("--data-path") + 1]).parent
    output = tmp_path / "a comparison"
    planned = plan_comparison(
        get_recipe("quickstart"),
        parse_variants(VARIANTS),
        2,
        output=output,
        data=data,
        overrides=SMALL,
        ranks=1,
        held_out_sequences=HELD_OUT,
    )
    killed = planned.trials[2]
    checkpoints = killed.folder / "checkpoints"
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    words = ["compare", "--data", str(data), "--output", str(output), "--nproc", "1"]
    words += ["--variants", VARIANTS, "--seeds", "2", "--held-out", str(HELD_OUT)]
    words += ["--jobs", "1", "--", *SMALL]
    command = [sys.executable, "-m", "kha_megatron", *words]
    first = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # the tracker file is empty for a moment after it is created
        wait_until(
            lambda: first.poll() is not None or (tracker.exists() and tracker.read_text()),
            seconds=400,
        )
        assert first.poll() is None, first.communicate()[1][-4000:]
    finally:
        first.kill()
        first.communicate()
    wait_until(lambda: not _ranks_of(killed.folder))  # no rank outlives its command
    saved = 0
    for mark in checkpoints.glob("iter_*/metadata.json"):  # which Megatron writes last
        if mark.stat().st_size:
            saved = max(saved, int(mark.parent.name.removeprefix("iter_")))
    assert saved
    assert [trial.result is not None for trial in planned.trials] == [True, True, False, False]
    finished = [trial.folder / "result.json" for trial in planned.trials[:2]]
    before = [file.read_bytes() for file in finished]
    assert json.loads((output / "report.json").read_text())["finished"] == 2

    second = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert second.returncode == 0, second.stderr[-4000:]
    assert f"{killed.name}: resuming from iteration {saved}\n" in second.stderr
    assert "baseline-seed1" not in second.stderr
    assert "kv: held-out loss" in second.stderr
    assert second.stdout == f"{output / 'report.html'}\n"
    assert [file.read_bytes() for file in finished] == before
    results = [trial.result for trial in planned.trials]
    assert [result["starts"] for result in results] == [1, 1, 2, 1]

    # bitwise equal to an uninterrupted run
    alone = start([*killed.config.words(), "--tensorboard-dir", str(tmp_path / "alone")])
    assert alone.codes == [0], alone.output[-4000:]
    expected = losses(tmp_path / "alone")
    resumed = results[2]
    assert resumed["losses"] == [expected[i] for i in range(1, ITERATIONS + 1)]
    ((_, held_out),) = read_history(tmp_path / "alone")[VALIDATION_LOSS]
    assert resumed["held_out"] == held_out
    assert abs(held_out - compute_final_loss(resumed["losses"])) < 0.5

    # runs of one seed start from the same weights and the same first batch
    baseline, kv, second_baseline, second_kv = (result["losses"] for result in results)
    assert baseline[0] == kv[0] != second_baseline[0] == second_kv[0]
    assert baseline[-1] != kv[-1]
    assert compute_final_loss(baseline) < baseline[0] - 0.3
    _check_report(output, results)

    printed = CliRunner().invoke(app, ["compare", "--json", *words[1:]])
    report = json.loads(printed.stdout)
    assert report.pop("succeeded") is True
    assert report.pop("page") == str(output / "report.html")
    assert report == json.loads((output / "report.json").read_text())

    other = CliRunner().invoke(app, [*words, "--lr", "1"])
    assert isinstance(other.exception, OutputError)
    assert "was started with other arguments (--lr" in str(other.exception)


def _check_report(output: Path, results: list[dict]) -> None:
    report = json.loads((output / "report.json").read_text())
    assert report["finished"] == report["planned"] == 4
    _, kv = report["variants"]
    ends = [compute_final_loss(result["losses"]) for result in results]
    mean = sum(ends[1::2]) / 2 - sum(ends[::2]) / 2
    assert kv["delta"]["mean"] == pytest.approx(mean, abs=1e-12)
    assert kv["delta"]["half_width"] > 0
    matrices = [(entry["projection"], entry["matrix"]) for entry in kv["matrices"]]
    assert matrices == [("key", "proj"), ("value", "up"), ("value", "gate"), ("value", "down")]
    for entry in kv["matrices"]:
        assert all(0 < layer["distance"] < 1 for layer in entry["layers"])
    text = (output / "report.html").read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 4
    checkpoints = [path.parent.name for path in output.glob("runs/*/checkpoints/iter_*")]
    assert checkpoints == ["checkpoints"] * 4  # only the last of each run is kept
    assert not list(output.rglob("*.partial-*"))


@pytest.mark.whole
def test_sigterm_stops_parallel_runs(corpus, nemorun_home, tmp_path):  # noqa: F811
    data = Path(corpus[corpus.index("--data-path") + 1]).parent
    output = tmp_path / "two"
    words = ["--data", str(data), "--output", str(output), "--nproc", "1", "--jobs", "2"]
    words += ["--variants", VARIANTS, "--seeds", "1", "--null", "--", *SMALL]
    command = [sys.executable, "-m", "kha_megatron", "compare", *words, "--train-iters", "9999"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    seen = ""
    try:
        for line in process.stderr:
            seen += line
            if all(f"{name}-seed1: iteration" in seen for name in ("baseline", "null")):
                break
        assert process.poll() is None, seen
        process.terminate()
        _, rest = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 143, seen + rest
    assert "the same command again to continue" in rest
    runs_begun = sorted(folder.name for folder in (output / "runs").iterdir())
    assert runs_begun == ["baseline-seed1", "null-seed1"]  # --jobs 2: the third has not started
    assert not any(_ranks_of(output / "runs" / name) for name in runs_begun)


SIGNAL_TO_ANOTHER_THREAD = """
import signal, threading
from kha_megatron import cli, recipes

def launch(job, *, on_step, stop):
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    print(stop.wait(60), flush=True)
    raise KeyboardInterrupt

recipes.launch_job = launch
cli.main()
"""


def test_a_signal_delivered_to_another_thread_stops_the_command(tmp_path):
    words = ["compare", "--output", str(tmp_path / "out"), "--nproc", "1", "--jobs", "1", "--"]
    done = subprocess.run(
        [sys.executable, "-c", SIGNAL_TO_ANOTHER_THREAD, *words, *SMALL, "--mock-data"],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert (done.returncode, done.stdout) == (143, "True\n"), done.stderr


@pytest.mark.fast
def test_a_failure_of_the_first_run_ends_the_command(tmp_path, monkeypatch):
    lines = ("RuntimeError: the disk [red]is full",)
    failure = Failure(rank=0, exit_code=1, log=tmp_path / "log", lines=lines)
    result = LaunchResult(
        status="failed",
        seconds=1.0,
        last_step=None,
        failure=failure,
        log=tmp_path / "log",
        rank_logs=tmp_path,
    )
    monkeypatch.setattr(recipes, "launch_job", lambda *_, **__: result)
    words = ["--output", str(tmp_path / "out"), "--jobs", "1", "--json", "--", "--mock-data"]
    done = CliRunner().invoke(app, ["compare", *words])
    assert done.exit_code == 1
    assert "RuntimeError: the disk [red]is full" in done.stderr
    assert "kha_mlp-seed1" not in done.stderr
    assert not (tmp_path / "out" / "report.html").exists()
    printed = json.loads(done.stdout)
    assert printed["succeeded"] is False
    assert printed["page"] is None
    assert "exit code 1" in printed["failures"]["baseline-seed1"]
