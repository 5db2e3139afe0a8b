"""``kha-megatron launch`` as a user types it: what it prints, and the exit code."""

import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kha_megatron.cli import app
from kha_megatron.errors import ConfigError, DataError
from tests.recipes.conftest import data, nemorun_home, scripted  # noqa: F401

LAUNCH = ["launch", "quickstart", "--dry-run"]
SLURM = [*LAUNCH, "--executor", "slurm", "--time", "04:00:00"]


def run(*words: str, code: int = 0):
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == code, result.output
    return result


def test_dry_run_prints_the_command_for_a_shell(data, tmp_path, nemorun_home):  # noqa: F811
    output = tmp_path / "an output"
    words = ["--data", str(data), "--output", str(output), "--nproc", "4", "--device", "cpu"]
    extra = [
        "--",
        "--global-batch-size",
        "32",
        "--moe-layer-freq",
        "([0]*1+[1]*3)",
        "--lr=-1e-3",
        "--swiglu",
    ]
    text = run(*LAUNCH, *words, *extra).stdout
    as_json = json.loads(run(*LAUNCH, *words, "--json", *extra).stdout)

    stand_in = 'torchrun() { printf "%s\\0" "$PWD" "$OMP_NUM_THREADS" "${PATH%%:*}" "$@"; }'
    done = subprocess.run(["bash", "-c", f"{stand_in}\n{text}"], capture_output=True, check=True)
    folder, threads, path, *command = done.stdout.decode().split("\0")[:-1]
    training = command.index("kha_megatron.training")
    assert (folder, threads) == (os.getcwd(), "1")
    assert path == os.path.dirname(sys.executable)
    assert command[command.index("--nproc-per-node") + 1] == "4"
    assert command[training - 4 : training] == ["--no-python", sys.executable, "-u", "-m"]
    assert command[command.index("--save") + 1] == str(output / "checkpoints")
    assert command[command.index("--data-path") + 1] == str(data / "corpus")
    assert command[command.index("--moe-layer-freq") + 1] == "([0]*1+[1]*3)"
    assert "--lr=-1e-3" in command
    assert "--lr" not in command
    assert command.count("--swiglu") == 1

    # the launcher draws a new rendezvous id each time
    assert as_json["words"][-len(command[training:]) :] == command[training:]
    assert as_json["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert as_json["folder"] == folder
    assert not output.exists()
    assert list((nemorun_home / "experiments" / "quickstart").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (["launch", "quikstart"], ConfigError, "unknown recipe"),
        ([*LAUNCH, "--executor", "slurm"], ConfigError, "Expected --time as HH:MM:SS"),
        ([*LAUNCH, "--nodes", "2"], ConfigError, "Expected --executor slurm"),
        ([*LAUNCH, "--detach", "--", "--mock-data"], ConfigError, "Expected --executor slurm"),
        ([*SLURM, "--env", "A"], ConfigError, "Expected --env NAME=VALUE, got A"),
        ([*LAUNCH, "--data", "/no/such"], DataError, "/no/such/corpus.bin"),
        ([*LAUNCH, "--", "--train-iters", "abc"], ConfigError, "--train-iters abc"),
        ([*LAUNCH, "stray"], ConfigError, "unexpected argument 'stray'"),
    ],
)
def test_bad_input_is_refused(words, error, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, error)
    assert match in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--heads moh.shared=4 --heads moh.active=1", "shares 4 of 4 heads"),
        ("--heads gate.key=head", "before QK-norm"),
        ("--heads gate.output=head --flash-decode", "remove --flash-decode"),
        ("--heads talking.max_tokens=255", "256 tokens, more than"),
        ("--heads collaborative.dim=30", "turns 32 features"),
    ],
)
def test_heads_that_the_ranks_would_refuse_are_refused(words, match):
    result = CliRunner().invoke(app, [*LAUNCH, "--", "--mock-data", *words.split()])
    assert isinstance(result.exception, ConfigError)
    assert re.search(match, str(result.exception)), result.exception


def test_heads_too_wide_for_fused_kernels_are_refused_before_submission(nemorun_home):  # noqa: F811
    words = ["launch", "table2/baseline", "--executor", "slurm", "--dry-run", "--time", "1:00:00"]
    words += ["--account", "a", "--output", "/runs", "--nproc", "8", "--", "--mock-data"]
    words += ["--heads", "collaborative.dim=512"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError)
    assert "dim=512 on fused attention kernels" in str(result.exception)
    run(*words, "--attention-backend", "unfused")


def test_an_upcycled_run_finds_itself_when_it_is_started_again(tmp_path, nemorun_home):  # noqa: F811
    output = tmp_path / "run"
    words = ["--json", "--output", str(output), "--", "--mock-data", "--kha-upcycle"]
    command = json.loads(run(*LAUNCH, *words).stdout)["words"]
    assert command[command.index("--load") + 1] == command[command.index("--save") + 1]


def test_slurm_needs_no_account_and_no_whole_node(nemorun_home, tmp_path):  # noqa: F811
    words = ["launch", "dense-0.6b", "--executor", "slurm", "--time", "04:00:00", "--dry-run"]
    words += ["--nproc", "3", "--output", str(tmp_path / "out"), "--json"]
    batch = ["--global-batch-size", "510"]
    (request,) = json.loads(run(*words, "--", "--mock-data", *batch).stdout)["requests"]
    assert "#SBATCH --gpus-per-node=3\n" in request
    assert "--nproc-per-node 3 " in request
    assert "account" not in request


def test_job_that_no_scheduler_takes_exits_with_1(nemorun_home, tmp_path):  # noqa: F811
    words = ["--account", "a", "--time", "01:00:00", "--output", str(tmp_path / "out"), "--json"]
    words = ["launch", "dense-0.6b", "--executor", "slurm", *words, "--", "--mock-data"]
    result = run(*words, code=1)
    assert "Slurm did not take the job" in result.stderr
    assert json.loads(result.stdout)["succeeded"] is False


def test_a_megatron_argument_before_the_dashes_is_refused():
    assert "--lr" in run("launch", "quickstart", "--lr", "1", code=2).stderr


FAILING = """
import os, sys, time
print(" iteration        5/     100 | lm loss: 7.25E+00 |", flush=True)
if os.environ["RANK"] == "1":
    raise RuntimeError("the disk [red]is full")
time.sleep(100)
"""

AS_RECIPE = """
import sys
from dataclasses import replace
from kha_megatron import cli, recipes
recipe = replace(recipes.get_recipe("quickstart"), name="failing", entry=sys.argv.pop(1))
recipes.RECIPES = {"failing": recipe}
cli.main()
"""


def test_a_failing_rank_makes_the_command_fail_and_is_quoted(tmp_path, nemorun_home):  # noqa: F811
    script = tmp_path / "rank.py"
    script.write_text(FAILING)
    words = ["launch", "failing", "--output", str(tmp_path / "out"), "--json", "--", "--mock-data"]
    done = subprocess.run(
        [sys.executable, "-c", AS_RECIPE, str(script), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: the disk [red]is full" in done.stderr
    assert "rank 1 failed with exit code 1" in done.stderr
    assert "iteration 5/100 loss 7.2500" in done.stderr
    result = json.loads(done.stdout)
    assert result["succeeded"] is False
    assert result["failure"]["rank"] == 1
    assert result["last_step"]["loss"] == 7.25
    assert os.path.exists(result["log"])
