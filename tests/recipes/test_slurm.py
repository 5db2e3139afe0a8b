"""Slurm jobs: dry runs against golden files, and jobs on fake Slurm commands.

``KHA_WRITE_GOLDEN=1 pytest tests/recipes/test_slurm.py`` writes the golden files again.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.model.run import Run
from kha_megatron.recipes import Slurm, dry_submission, get_recipe, prepare_job, submit
from kha_megatron.recipes.batch_script import run_ranks

GOLDEN = Path(__file__).parent / "golden"
PLAIN = Slurm(
    nodes=2,
    account="acme",
    time="04:00:00",
    environment={"NOTE": "it's $HOME"},
    chain=2,
)
CPU = Slurm(gpus=2, time="00:30:00")
CONTAINER = Slurm(
    nodes=2,
    image="registry.example/train:1",
    mounts=("/data:/data", "/runs:/runs"),
    environment={"NCCL_DEBUG": "INFO"},
    partition="h100",
    account="acme",
    time="04:00:00",
    retries=2,
    settings={"qos": "12", "exclusive": "true", "additional_parameters": '{"reservation": "r"}'},
)
SHARED = Slurm(
    nodes=2,
    time="04:00:00",
    environment={"http_proxy": "proxy:80", "LOWER": "x"},
    settings={
        "cpus_per_task": "64",
        "mem": "500G",
        "setup_lines": "module load cuda",
        "srun_args": '["--mpi=none"]',
        "env_vars": '{"A": "1 2"}',
    },
)


def job_on(slurm, output=Path("/runs/one"), words=()):
    words = ["--mock-data", "--odd=a b$c", *words]
    return prepare_job(
        get_recipe("dense-0.6b"),
        slurm=slurm,
        output=output,
        overrides=words,
    )


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "slurm", "words"),
    [
        ("slurm", PLAIN, []),
        ("slurm-cpu", CPU, ["--device", "cpu"]),
        ("slurm-container", CONTAINER, []),
        ("slurm-shared", SHARED, []),
    ],
)
def test_dry_run_equals_golden_file(name, slurm, words, nemorun_home, monkeypatch):
    monkeypatch.delenv("LOGLEVEL", raising=False)
    submission = dry_submission(job_on(slurm, words=words))
    assert len(submission.requests) == slurm.chain
    text = "\n".join([*submission.requests, "# scripts/train.sh", submission.script])
    text = text.replace(str(Path(sys.executable).parent), "/BIN")
    text = text.replace(str(nemorun_home), "/NEMORUN")
    text = re.sub(r"(dense-0.6b)([_-])\d{12,}", r"\1\2ID", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("KHA_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("04:00:00", "225"), ("0-00:20:30", "17"), ("1-00:00:00", "1425")],
)
def test_run_exits_before_the_time_limit_and_loads_its_own_checkpoint(time, minutes):
    words = job_on(Slurm(time=time)).command
    assert words[words.index("--exit-duration-in-mins") + 1] == minutes
    assert words[words.index("--load") + 1] == words[words.index("--save") + 1]


FAKES = {  # a cluster of one machine that starts the batch script at once
    "sbatch": """
script="${@: -1}"
export SLURM_JOB_ID=77 SLURM_JOB_NODELIST=localhost SLURM_NODEID=0 SLURM_NTASKS_PER_NODE=1
bash "$script" > "$STATE/out" 2>&1 && echo COMPLETED > "$STATE/end" || echo FAILED > "$STATE/end"
echo 77
""",
    "srun": """
[ "$1" = --nodes=1 ] && exec echo 127.0.0.1
while [ "$1" != torchrun ]; do
  [ "$1" = --output ] && exec > "${2//%j/77}" 2>&1
  [ "$1" = --chdir ] && { mkdir -p "$2"; cd "$2"; }
  shift
done
exec "$@"
""",
    "scontrol": """
[ "$1 $2" = "show hostnames" ] && exec echo localhost
[ "$1" = requeue ] && { echo "$@" >> "$STATE/scontrol"; exit; }
[ -n "$SLURM_JOB_ID" ] && exec echo JobState=RUNNING
[ -e "$STATE/hung" ] && { rm "$STATE/hung"; exec sleep 1000; }
[ -e "$STATE/silent" ] && { rm "$STATE/silent"; echo "Unable to contact controller" >&2; exit 1; }
echo "JobId=77 JobName=x JobState=$(cat "$STATE/end") Reason=None Restarts=0 ExitCode=3:0"
""",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return the directory in which the fake Slurm commands keep their state."""
    (tmp_path / "bin").mkdir()
    for name, body in FAKES.items():
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/bash\n{body}")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STATE", str(tmp_path))
    return tmp_path


RANK = """
import os, sys, time
from pathlib import Path
folder = Path(__file__).parent
seen = folder / f"rank{os.environ['RANK']}"
seen.with_suffix(".part").write_text(os.environ["NOTE"] + "|" + sys.argv[-1])
seen.with_suffix(".part").rename(seen)
while not (folder / "rank0").exists():  # a rank that fails ends the others
    time.sleep(0.01)
print(" iteration  7/  7 | lm loss: 2.5E+00 |", flush=True)
print("the disk is full", file=sys.stderr)
sys.exit(int(sys.argv[sys.argv.index("--code") + 1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.parametrize("code", [3, pytest.param(0, marks=pytest.mark.whole)])
def test_job_is_followed_to_its_end(code, slurm, scripted, nemorun_home, monkeypatch):
    """``make test-slurm`` does the same with a real Slurm, and with one that forgets the job."""
    monkeypatch.setattr("kha_megatron.recipes.slurm._POLL_SECONDS", 0.1)
    monkeypatch.setattr("kha_megatron.recipes.slurm._ANSWER_SECONDS", 1.0)
    for state in ("hung", "silent"):  # the controller answers at the third request
        (slurm / state).touch()
    resources = Slurm(
        gpus=2,
        retries=1,
        environment={"NOTE": "it's $HOME"},
        time="04:00:00",
    )
    run = Run.from_values(vocab_size=90).updated(
        ["--code", str(code), "--save", str(slurm / "runs")]
    )
    words = ["--mock-data", "--odd=a b$c"]
    steps = []
    job = prepare_job(scripted(RANK, run=run), slurm=resources, overrides=words)
    result = submit(job, on_step=steps.append)
    printed = (slurm / "out").read_text()
    assert result.status == ("failed" if code else "succeeded"), printed
    assert result.jobs == ("77",)
    assert {step.loss for step in steps} == {2.5}
    for rank in (0, 1):
        assert (slurm / f"rank{rank}").read_text() == "it's $HOME|a b$c"
    assert (slurm / "scontrol").exists() == (code != 0)  # requeue
    if code:
        assert "job 77 ended with state FAILED (exit code 3:0" in result.reason
        assert result.failure.rank == 1
        assert result.failure.exit_code == 3
        assert "the disk is full" in result.failure.lines  # two streams have no order


STEP = """
timeout() { shift; "$@"; }
command() { echo "$STEP_LOG" >"${3//%j/77}"; return $CODE; } # srun
scontrol() { [ "$1" = show ] && echo "$JOB" || echo "$@" >&3; }
squeue() { printf '%s(unfulfilled)\\n' '78 afterany:77' '79 afterany:78' '80 afterany:177'; }
scancel() { echo scancel $1 >&3; }
SLURM_JOB_ID=77
"""
FAILED = "Root Cause (first observed failure):\n  exitcode  : {} (pid: 7)"
FAILED_AT = FAILED.replace("  exitcode", "  time      : 2026-11-21_07:15:{:02}\n  exitcode")
INVALID_FIRST = f"{FAILED_AT.format(4, 1)}\n{FAILED_AT.format(3, 2)}\n{FAILED_AT.format(5, 1)}"
TERMINATED = "torch...SignalException: Process 7 got signal: 15"
AGAIN = "requeue 77"


@pytest.mark.parametrize(
    ("log", "job", "options", "calls"),
    [
        (FAILED.format(1), "JobState=RUNNING", {}, ["", "", ""]),
        (FAILED.format(1), "JobState=RUNNING", {"retries": 2}, [AGAIN, AGAIN, ""]),
        (TERMINATED, "JobState=RUNNING", {"retries": 1}, [AGAIN, AGAIN, AGAIN]),
        (f"{TERMINATED}\n{FAILED.format(1)}", "JobState=RUNNING", {}, [AGAIN, AGAIN]),
        # srun ends the other nodes of a rank that failed
        (f"{FAILED.format(1)}\n{TERMINATED}", "JobState=RUNNING", {"retries": 1}, [AGAIN, ""]),
        (TERMINATED, "JobState=COMPLETING Reason=None", {"retries": 2}, ["", "", ""]),
        (FAILED.format(1), "JobState=RUNNING", {"chain": 3}, ["", "", ""]),
        (INVALID_FIRST, "JobState=RUNNING", {"chain": 3}, ["scancel 79\nscancel 78"]),
        (
            FAILED.format(2),
            "JobState=RUNNING",
            {"chain": 3, "retries": 1},
            [AGAIN, "scancel 79\nscancel 78"],
        ),
    ],
)
def test_step_that_fails_is_requeued(log, job, options, calls, tmp_path):
    script = f"{STEP}\n{run_ranks(Slurm(time='01:00:00', **options))}\n"
    script += f"srun --output {tmp_path}/log_%j_${{RESTARTS}}.out torchrun"
    environment = {
        "STEP_LOG": log,
        "JOB": job,
        "CODE": "1",
        "PATH": os.environ["PATH"],
    }
    for restarts, call in enumerate(calls):
        words = ["bash", "-c", f"{script} 3>{tmp_path}/calls"]
        variables = environment | {"RESTARTS": str(restarts)}
        done = subprocess.run(
            words,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr == ""
        assert (tmp_path / "calls").read_text().strip() == call


@pytest.mark.parametrize(
    ("slurm", "options", "match"),
    [
        (Slurm(time="4h"), {}, "--time must be HH:MM:SS"),
        (CONTAINER, {"output": Path("runs/one")}, "--output must be an absolute path .*, got"),
        (CONTAINER, {"words": ["--load", "/other"]}, "--load /other is not supported here"),
        (
            replace(PLAIN, mounts=("/a:/b",)),
            {},
            "--mount /a:/b has no effect without --container-i",
        ),
        (replace(CONTAINER, mounts=("/a",)), {}, "--mount must have the format HOST:.*, got '/a'"),
        (
            replace(CONTAINER, mounts=("/a:",)),
            {},
            "--mount must have the format HOST:.*, got '/a:'",
        ),
        (PLAIN, {"output": Path("/tmp/one")}, "/tmp/one/ch.* because every node has its own /tmp"),
    ],
)
def test_bad_input_is_refused(slurm, options, match, nemorun_home):
    with pytest.raises(ConfigError, match=match):
        dry_submission(job_on(slurm, **options))


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ("reservation=r1", r"""--set 'additional_parameters={"reservation": "r1"}'"""),
        ("nodelist=n1", r"""--set 'additional_parameters={"nodelist": "n1"}'"""),
        ("mail-type=END", r"""no field 'mail-type'.*{"mail-type": "END"}"""),
        ("nodes=2", "--set nodes is not supported. Use --nodes"),
        ("ntasks_per_node=4", "Use --nproc"),
        ("heterogeneous=true", "--set heterogeneous is not supported, because launch sets"),
        ("job_name=x", "--set job_name is not supported"),
        ("run_as_group=true", "--set run_as_group is not supported"),
        ("cpus_per_task=x", "--set cpus_per_task=x: the value must be valid JSON of type int"),
        ("cpus_per_task=true", "of type int"),
        ("segment=2.5", "of type int"),
        ("srun_args=--mpi=none", "of type list"),
        ('env_vars={"a-b": "1"}', "'a-b' is not a valid name of an environment variable"),
        ('env_vars={"A": 1}', "environment variable A must be a string, got 1"),
    ],
)
def test_setting_that_cannot_work_is_refused(setting, match, nemorun_home):
    settings = dict([setting.split("=", 1)])
    with pytest.raises(ConfigError, match=match):
        dry_submission(job_on(Slurm(time="04:00:00", settings=settings)))


def resources_of(*settings: str) -> set[str]:
    """Return the options of sbatch and srun for CPUs and memory."""
    slurm = Slurm(time="04:00:00", settings=dict(each.split("=", 1) for each in settings))
    (request,) = dry_submission(job_on(slurm)).requests
    options = r"(--(?:exclusive|mem|cpu)\S*)"
    (srun,) = re.findall(r"^srun .* torchrun ", request, re.M)
    return {
        *re.findall(rf"^#SBATCH {options}", request, re.M),
        *(f"srun {option}" for option in re.findall(options, srun)),
    }


WHOLE_NODES = {"--exclusive", "--mem=0", "srun --mem=0", "srun --cpu-bind=none"}


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ([], WHOLE_NODES),
        (["exclusive=true"], WHOLE_NODES),
        (["exclusive=user"], {"--exclusive=user"}),
        (["exclusive=false"], set()),
        (["mem=100G"], {"--exclusive", "--mem=100G", "srun --cpu-bind=none"}),
        (["cpus_per_task=32"], {"--cpus-per-task=32", "srun --cpus-per-task=32"}),
        (
            ['additional_parameters={"cpus-per-task": 32}'],
            {"--cpus-per-task=32", "srun --cpus-per-task=32"},
        ),
        (["gpus_per_node=null"], WHOLE_NODES),
    ],
)
def test_gpu_jobs_get_whole_nodes_unless_asked_otherwise(settings, options, nemorun_home):
    assert resources_of(*settings) == options
