"""Output and exit codes of ``kha-megatron launch``."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kha_megatron import recipes
from kha_megatron.cli import app, following
from kha_megatron.data import prepare
from kha_megatron.recipes import Failure, LaunchResult, Step, SubmitResult, megatron_check
from tests.checkpoint.saved import save
from tests.recipes.conftest import data, forked_megatron_check, nemorun_home  # noqa: F401
from tests.training.conftest import corpus  # noqa: F401

LAUNCH = ["launch", "quickstart", "--dry-run"]


def run(*words: str, code: int = 0):
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.fast
@pytest.mark.usefixtures("forked_megatron_check")
def test_dry_run_prints_the_command_for_a_shell(data, tmp_path, nemorun_home):  # noqa: F811
    output = tmp_path / "an output"
    words = ["--data", str(data), "--output", str(output), "--nproc", "4", "--device", "cpu"]
    extra = ["--", "--global-batch-size", "32", "--moe-layer-freq", "([0]*1+[1]*3)"]
    extra += ["--min-lr=-1e-3", "--swiglu"]
    text = run(*LAUNCH, *words, *extra).stdout
    as_json = json.loads(run(*LAUNCH, *words, "--json", *extra).stdout)

    fake = 'torchrun() { printf "%s\\0" "$PWD" "$OMP_NUM_THREADS" "${PATH%%:*}" "$@"; }'
    done = subprocess.run(
        ["bash", "-c", f"{fake}\n{text}"],
        capture_output=True,
        check=True,
    )
    folder, threads, path, *command = done.stdout.decode().split("\0")[:-1]
    training = command.index("kha_megatron.training")

    def value(option):
        return command[command.index(option) + 1]

    assert folder == os.getcwd()
    assert threads == "1"
    assert path == os.path.dirname(sys.executable)
    assert value("--nproc-per-node") == "4"
    assert command[training - 4 : training] == ["--no-python", sys.executable, "-u", "-m"]
    assert value("--save") == str(output / "checkpoints")
    assert value("--data-path") == str(data / "corpus")
    assert value("--hybrid-layer-pattern") == "*-*E*E*E"
    assert "--min-lr=-1e-3" in command
    assert "--min-lr" not in command
    assert command.count("--swiglu") == 1

    # the launcher draws a new rendezvous id each time
    assert as_json["words"][-len(command[training:]) :] == command[training:]
    assert as_json["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert as_json["folder"] == folder
    assert not output.exists()
    assert list((nemorun_home / "experiments" / "quickstart").iterdir()) == []


@pytest.mark.usefixtures("forked_megatron_check")
def test_dry_run_needs_no_data(nemorun_home):  # noqa: F811
    words = ["launch", "table2/mlp-v", "--executor", "slurm", "--nodes", "4", "--time", "01:00:00"]
    result = run(*words, "--dry-run")
    assert "No training data given. To run this job, add --data DIR" in result.stderr
    pattern = f"--hybrid-layer-pattern '{18 * '*E'}'"
    for printed in (pattern, "--expert-model-parallel-size 8 --moe-grouped-gemm", "nodes=4"):
        assert printed in result.stdout
    assert "No training data given" in str(run(*words, code=1).exception)


@pytest.mark.usefixtures("forked_megatron_check", "nemorun_home")
@pytest.mark.parametrize(
    ("recipe", "words", "extra", "message"),
    [
        ("interactive/talking-gqa4", [], [], ""),
        (
            "interactive/talking-gqa4",
            ["--gpu-memory", "40GB"],
            [],
            "WARNING: The largest rank needs about 47.9 GB of GPU memory",
        ),
        ("interactive/talking-gqa4", ["--device", "cpu"], ["--micro-batch-size", "8"], ""),
        (
            "table3/mla-baseline",
            [],
            [
                "--tensor-model-parallel-size=2",
                "--sequence-parallel",
                "--expert-model-parallel-size=4",
            ],
            "Cannot estimate the memory of MLA with --tensor-model-parallel-size.",
        ),
    ],
)
def test_a_job_that_does_not_fit_is_announced(recipe, words, extra, message):
    result = run("launch", recipe, "--dry-run", *words, "--", "--mock-data", *extra)
    announced = [line for line in result.stderr.splitlines() if "memory" in line]
    assert len(announced) == bool(message)
    assert message in result.stderr


@pytest.mark.parametrize("mode", [["--dry-run"], ["--executor", "slurm", "--time", "01:00:00"]])
def test_misspelled_argument_is_refused(mode, nemorun_home, tmp_path, request):  # noqa: F811
    if mode != ["--dry-run"]:  # which checks in a new process, as users do
        request.getfixturevalue("forked_megatron_check")
    words = ["launch", "quickstart", "--nproc", "2", "--output", str(tmp_path / "run"), *mode]
    result = run(*words, "--", "--mock-data", "--trian-iters", "5", code=1)
    assert str(result.exception) == "unrecognized arguments: --trian-iters 5"
    assert not (tmp_path / "run").exists()


WITHOUT_MEGATRON = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
from kha_megatron.cli import main
main()
"""


@pytest.mark.parametrize("mode", [["--dry-run"], ["--executor=slurm", "--time=01:00:00"]])
def test_megatron_is_not_needed_to_prepare_a_job(mode, nemorun_home, tmp_path):  # noqa: F811
    words = ["launch", "laptop/dense", "--output", str(tmp_path / "run"), *mode]
    words += ["--", "--mock-data", "--trian-iters", "5"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEGATRON, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Megatron is not installed here. Its arguments are checked when the job" in done.stderr
    if "--dry-run" in mode:
        assert done.returncode == 0, done.stderr
        assert "--trian-iters 5" in done.stdout
    else:
        assert "Could not submit the job to Slurm" in done.stderr


@pytest.mark.usefixtures("nemorun_home")
def test_variables_of_another_job_are_ignored(request, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "x")
    kha_megatron = request.getfixturevalue("run")
    words = ["launch", "laptop/dense", "--nproc", "2", "--dry-run"]
    code, _, stderr = kha_megatron(*words)
    assert code == 0, stderr
    assert "No training data given" in stderr  # printed by the first rank only
    assert "WARNING" not in stderr


@pytest.mark.usefixtures("forked_megatron_check")
def test_missing_scheduler_exits_with_1(nemorun_home, tmp_path):  # noqa: F811
    words = ["--account", "a", "--time", "01:00:00", "--output", str(tmp_path / "out"), "--json"]
    words = ["launch", "dense-0.6b", "--executor", "slurm", *words, "--", "--mock-data"]
    result = run(*words, code=1)
    assert "Could not submit the job to Slurm" in result.stderr
    assert json.loads(result.stdout)["succeeded"] is False


@pytest.mark.parametrize("code", [1, 2])
def test_failed_rank_is_quoted_and_sets_the_exit_code(code, tmp_path, monkeypatch):
    failure = Failure(1, code, tmp_path / "log", ("RuntimeError: the disk [red]is full",))
    step = Step(5, 100, 80, 0.5, 7.25)
    checkpoints = tmp_path / "out" / "checkpoints"

    def train(job, *, on_step):
        on_step(Step(3, 100, 48, 0.5, 7.5))
        on_step(step)
        save(checkpoints, 4, {})
        return result

    words = ["launch", "quickstart", "--output", str(checkpoints.parent), "--json", "--"]
    words += ["--mock-data", "--train-iters", "100"]
    monkeypatch.setattr(sys, "argv", ["kha-megatron", *words])
    monkeypatch.setattr(following, "_SECONDS_BETWEEN_LINES", 0)
    result = LaunchResult(
        status="failed",
        seconds=1.0,
        last_step=step,
        failure=failure,
        log=tmp_path / "all",
        rank_logs=tmp_path,
    )
    monkeypatch.setattr(recipes, "launch_job", train)
    done = run(*words, code=code)
    assert "RuntimeError: the disk [red]is full" in done.stderr
    assert f"rank 1 failed with exit code {code}" in done.stderr
    # 32 samples of 256 tokens in two steps of 0.5 s
    assert "iteration 5/100 loss 7.2500, 8,192 tokens/s, 0:00:48 left" in done.stderr
    resume = shlex.join([*words[:5], "--resume", *words[5:]])
    hint = f"checkpoint is at iteration 4 of 100. To continue, run: kha-megatron {resume}\n"
    assert (hint in done.stderr) is (code == 1)  # with 2, the arguments are wrong
    printed = json.loads(done.stdout)
    assert printed["succeeded"] is False
    assert printed["failure"]["rank"] == 1
    assert printed["last_step"]["loss"] == 7.25


@pytest.mark.parametrize("status", ["submitted", "failed"])
def test_only_jobs_that_ended_can_be_resumed(status, tmp_path, monkeypatch):
    save(tmp_path / "out" / "checkpoints", 2, {})

    def submit(job, *, detach, on_step):
        return SubmitResult(status=status, jobs=("42",), seconds=1.0, folder="experiment")

    monkeypatch.setattr(recipes, "submit", submit)
    monkeypatch.setattr(recipes.prepare, "_check_same_run", lambda path, run: None)
    monkeypatch.setattr(megatron_check, "_run_check", lambda words, environment: (0, ""))
    words = ["launch", "laptop/dense", "--executor=slurm", "--time=01:00:00", "--detach"]
    words += ["--resume", "--output", str(tmp_path / "out"), "--", "--mock-data"]
    done = run(*words, code=int(status == "failed"))
    assert f"Status: {status}, jobs: 42" in done.stderr
    assert ("To continue, run:" in done.stderr) is (status == "failed")


@pytest.mark.versions
@pytest.mark.whole
def test_a_stopped_run_continues_with_the_printed_command(corpus, tmp_path, nemorun_home):  # noqa: F811
    prepared = Path(corpus[corpus.index("--data-path") + 1]).parent
    words = ["laptop/dense", "--data", str(prepared), "--output", str(tmp_path / "a run")]
    words += shlex.split("""-- --train-iters 6 --exit-interval 4 --log-interval 1 --num-layers 1
        --global-batch-size 3 --micro-batch-size 3""")

    def launch(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kha_megatron", "launch", *words]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    stopped = launch(*words)
    assert stopped.returncode == 0, stopped.stderr
    assert "Training stopped after" in stopped.stderr
    start = "at iteration 4 of 6. To continue, run: kha-megatron launch "
    _, _, hint = stopped.stderr.partition(start)
    resumed = launch(*shlex.split(hint.splitlines()[0]))
    assert resumed.returncode == 0, resumed.stderr
    assert "Training finished after" in resumed.stderr
    assert "iteration 6/6" in resumed.stderr
    assert "To continue" not in resumed.stderr

    prepare([Path(json.__file__).parent], tmp_path / "other", vocab_size=300)
    words[2] = str(tmp_path / "other")
    refused = launch(*words[:5], "--resume", *words[5:], "--split", "4,1,0")
    assert refused.returncode == 2, refused.stderr
    assert "starting" not in refused.stderr
    assert f"tokens in {tmp_path / 'other' / 'tokenizer'} have other ids" in refused.stderr
