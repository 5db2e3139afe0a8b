"""``kha-megatron compare``: interruption, failures and refusals of the command."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kha_megatron.cli import app
from kha_megatron.compare import parse_variants, plan, runs
from kha_megatron.compare.statistics import final_loss
from kha_megatron.errors import ConfigError, DataError, OutputError
from kha_megatron.recipes import get_recipe
from kha_megatron.recipes.log_lines import VALIDATION_LOSS, read_history
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


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (["--recipe", "quikstart"], ConfigError, "unknown recipe"),
        ([], DataError, "no training data"),
        (
            ["--device", "cuda", "--jobs", "2", "--", "--mock-data"],
            ConfigError,
            "Expected --jobs 1 on GPUs",
        ),
    ],
)
def test_bad_input_is_refused(words, error, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["compare", *words])
    assert isinstance(result.exception, error)
    assert match in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def _command(data: Path, output: Path, seeds: int, *more: str) -> list[str]:
    words = ["compare", "--data", str(data), "--output", str(output), "--nproc", "1"]
    words += ["--variants", VARIANTS, "--seeds", str(seeds), "--held-out", str(HELD_OUT)]
    words += ["--jobs", "1", "--", *SMALL, *more]
    return [sys.executable, "-m", "kha_megatron", *words]


def _wait_until(condition, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _named(tracker: Path) -> str:
    """What a tracker file says; nothing in the moment between its making and its first number."""
    return tracker.read_text() if tracker.exists() else ""


@pytest.mark.whole
@pytest.mark.parametrize(("seeds", "at"), [(1, 1), (2, 2)], ids=["2 runs", "4 runs"])
def test_a_killed_comparison_resumes_bit_for_bit(
    corpus,  # noqa: F811
    nemorun_home,  # noqa: F811
    tmp_path,
    seeds,
    at,
):
    """Killed without warning after a checkpoint of the second of two runs, or third of four."""
    data = Path(corpus[corpus.index("--data-path") + 1]).parent
    output = tmp_path / "a comparison"
    planned = plan(
        get_recipe("quickstart"),
        parse_variants(VARIANTS),
        seeds,
        output=output,
        data=data,
        overrides=SMALL,
        ranks=1,
        held_out=HELD_OUT,
    )
    killed = planned.runs[at]
    tracker = killed.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    first = subprocess.Popen(
        _command(data, output, seeds), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_until(lambda: _named(tracker) or first.poll() is not None)
        assert first.poll() is None, first.communicate()[1][-4000:]
    finally:
        first.kill()
        first.communicate()
    _wait_until(lambda: not runs._live_ranks(killed.folder))  # no rank outlives its command
    marks = tracker.parent.glob("iter_*/metadata.json")  # which Megatron writes last
    saved = max(int(mark.parent.name[5:]) for mark in marks if mark.stat().st_size)
    assert saved in (15, 30, 45)
    assert [run.result is not None for run in planned.runs] == [True] * at + [False] * seeds
    kept = [(run.folder / "result.json").read_bytes() for run in planned.runs[:at]]
    assert json.loads((output / "report.json").read_text())["finished"] == at

    second = subprocess.run(
        _command(data, output, seeds), capture_output=True, text=True, check=False, timeout=600
    )
    assert second.returncode == 0, second.stderr[-4000:]
    assert f"{killed.folder.name}: resumes from iteration {saved}\n" in second.stderr
    assert "baseline-seed1" not in second.stderr
    assert second.stdout == f"{output / 'report.html'}\n"
    assert [(run.folder / "result.json").read_bytes() for run in planned.runs[:at]] == kept
    results = [run.result for run in planned.runs]
    assert [r["starts"] for r in results] == [1 + (i == at) for i in range(2 * seeds)]

    # as one run that nothing happened to, of another command, to the last bit
    alone = start([*killed.config.words(), "--tensorboard-dir", str(tmp_path / "alone")])
    assert alone.codes == [0], alone.output[-4000:]
    expected = losses(tmp_path / "alone")
    assert results[at]["losses"] == [expected[i] for i in range(1, ITERATIONS + 1)]
    ((_, judged),) = read_history(tmp_path / "alone")[VALIDATION_LOSS]
    assert results[at]["held_out"] == judged
    assert abs(judged - final_loss(results[at]["losses"])) < 0.5

    # of one seed: the same weights and the same first batch; of another: others
    firsts = [result["losses"][0] for result in results]
    assert firsts[::2] == firsts[1::2]
    assert len(set(firsts)) == seeds
    one, two = (result["losses"] for result in results[:2])
    assert one[-1] != two[-1]
    assert final_loss(one) < one[0] - 0.3
    _check_report(output, results)

    words = _command(data, output, seeds)[3:]
    told = json.loads(CliRunner().invoke(app, [words[0], "--json", *words[1:]]).stdout)
    assert (told.pop("succeeded"), told.pop("page")) == (True, str(output / "report.html"))
    assert told == json.loads((output / "report.json").read_text())

    other = CliRunner().invoke(app, [*words, "--lr", "1"])
    assert isinstance(other.exception, OutputError)
    assert "was started with other arguments (--lr" in str(other.exception)


def _check_report(output: Path, results: list[dict]) -> None:
    report = json.loads((output / "report.json").read_text())
    assert report["finished"] == report["planned"] == len(results)
    base, kv = report["variants"]
    ends = [final_loss(result["losses"]) for result in results]
    mean = sum(ends[1::2]) / len(ends[1::2]) - sum(ends[::2]) / len(ends[::2])
    assert kv["delta"]["mean"] == pytest.approx(mean, abs=1e-12)
    assert len(results) == 2 or kv["delta"]["half_width"] > 0
    assert base["cost"]["kha"] == 0
    assert kv["cost"]["kha"] == 2 * 4 * 8 * 8  # layers, matrices, D x D
    assert base["seconds_per_step"] > 0
    assert [(m["projection"], m["matrix"]) for m in kv["matrices"]] == [
        *(("key", "proj"), ("value", "up"), ("value", "gate"), ("value", "down"))
    ]
    assert all(0 < layer["distance"] < 1 for m in kv["matrices"] for layer in m["layers"])
    text = (output / "report.html").read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 4
    assert " runs have" not in text
    checkpoints = sorted(p.parent.name for p in output.glob("runs/*/checkpoints/iter_*"))
    assert checkpoints == ["checkpoints"] * len(results)  # only the last of each run is kept
    assert not list(output.rglob("*.partial-*"))


@pytest.mark.whole
def test_parallel_runs_end_with_their_command(
    corpus,  # noqa: F811
    nemorun_home,  # noqa: F811
    tmp_path,
):
    """Both ranks at work, then SIGTERM: the command says 143, and no rank is left."""
    data = Path(corpus[corpus.index("--data-path") + 1]).parent
    output = tmp_path / "two"
    words = ["--data", str(data), "--output", str(output), "--nproc", "1", "--jobs", "2"]
    words += ["--variants", VARIANTS, "--seeds", "1", "--null", "--", *SMALL]
    command = [sys.executable, "-m", "kha_megatron", "compare", *words, "--train-iters", "9999"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
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
    assert "run the same command again to continue" in rest
    runs_begun = sorted(folder.name for folder in (output / "runs").iterdir())
    assert runs_begun == ["baseline-seed1", "null-seed1"]  # the third waited for its turn
    assert not any(runs._live_ranks(output / "runs" / name) for name in runs_begun)


GIVEN_TO_ANOTHER_THREAD = """
import signal, threading
from kha_megatron import cli, recipes

def launch(job, *, on_step, stop):
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    print(stop.wait(60), flush=True)
    raise KeyboardInterrupt

recipes.launch = launch
cli.main()
"""


def test_a_signal_delivered_to_another_thread_stops_the_command(tmp_path):
    words = ["compare", "--output", str(tmp_path / "out"), "--nproc", "1", "--jobs", "1", "--"]
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_TO_ANOTHER_THREAD, *words, *SMALL, "--mock-data"],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert (done.returncode, done.stdout) == (143, "True\n"), done.stderr


FAILING = """
import os, sys
print(" iteration        5/     40 | lm loss: 7.25E+00 |", flush=True)
raise RuntimeError("the disk [red]is full")
"""

AS_RECIPE = """
import sys
from dataclasses import replace
from kha_megatron import cli, recipes
recipe = replace(recipes.get_recipe("quickstart"), name="failing", entry=sys.argv.pop(1))
recipes.RECIPES = {"failing": recipe}
cli.main()
"""


def test_a_failure_of_the_first_run_ends_the_command(tmp_path, nemorun_home):  # noqa: F811
    script = tmp_path / "rank.py"
    script.write_text(FAILING)
    words = ["compare", "--recipe", "failing", "--output", str(tmp_path / "out"), "--nproc", "2"]
    words.append("--json")
    done = subprocess.run(
        [sys.executable, "-c", AS_RECIPE, str(script), *words, "--", "--mock-data"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: the disk [red]is full" in done.stderr
    assert "kha_mlp-seed1" not in done.stderr
    assert not (tmp_path / "out" / "report.html").exists()
    told = json.loads(done.stdout)
    assert (told["succeeded"], told["page"]) == (False, None)
    assert "exit code 1" in told["failures"]["baseline-seed1"]
