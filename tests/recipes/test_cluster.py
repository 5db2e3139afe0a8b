"""Other places to run: dry runs against golden files, a whole Slurm job on stand-ins, refusals.

``KHA_WRITE_GOLDEN=1 pytest tests/recipes/test_cluster.py`` writes the golden files anew.
"""

import getpass
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.model.run import Run, hear
from kha_megatron.plan.search import planned
from kha_megatron.recipes import Cluster, dry_submission, get_recipe, prepare, submit
from kha_megatron.recipes.checks import check_layout
from kha_megatron.recipes.slurm import follow

GOLDEN = Path(__file__).parent / "golden"
IMAGE = "registry.example/train:1"
SLURM = {"account": "acme", "time": "04:00:00"}

CLUSTERS = {
    "docker": Cluster(
        executor="docker",
        gpus=2,
        image=IMAGE,
        mounts=("/data:/data", "/runs:/runs"),
        settings={"shm_size": "30g", "privileged": "true"},
    ),
    "slurm": Cluster(
        executor="slurm", nodes=2, **SLURM, environment={"NOTE": "it's $HOME"}, chain=2
    ),
    "slurm-cpu": Cluster(executor="slurm", gpus=2, time="00:30:00"),
    "slurm-container": Cluster(
        executor="slurm",
        nodes=2,
        image=IMAGE,
        mounts=("/data:/data", "/runs:/runs"),
        environment={"NCCL_DEBUG": "INFO"},
        partition="h100",
        retries=2,
        host="me@login.example",
        folder="/home/me/jobs",
        **SLURM,
        settings={
            "qos": "12",
            "exclusive": "true",
            "additional_parameters": '{"reservation": "r"}',
        },
    ),
    "slurm-fault-tolerant": Cluster(
        executor="slurm", image=IMAGE, fault_tolerant=True, retries=3, **SLURM
    ),
    "lepton": Cluster(
        executor="lepton",
        nodes=2,
        image=IMAGE,
        settings={"nemo_run_dir": "/nemo", "resource_shape": "gpu.8xh100"},
    ),
    "kubeflow": Cluster(
        executor="kubeflow",
        nodes=2,
        image=IMAGE,
        environment={"NOTE": "here"},
        settings={"namespace": "training", "workdir_pvc": "work"},
    ),
    "skypilot": Cluster(
        executor="skypilot",
        nodes=2,
        image=f"docker:{IMAGE}",
        code="git",
        settings={"infra": "k8s", "gpus": "H100"},
    ),
}

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: t
contexts: [{name: t, context: {cluster: t, user: t}}]
clusters: [{name: t, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: t, user: {}}]
"""  # fmt: skip


def job_on(cluster, output=Path("/runs/one"), words=()):
    words = ["--mock-data", "--odd=a b$c", *words]
    return prepare(get_recipe("dense-0.6b"), cluster=cluster, output=output, overrides=words)


@pytest.mark.parametrize("name", CLUSTERS)
def test_dry_runs_equal_their_golden_files(name, nemorun_home, tmp_path, monkeypatch):
    cluster = CLUSTERS[name]
    for module in {"kubeflow": ["kubernetes"], "skypilot": ["sky"]}.get(name, []):
        pytest.importorskip(module, reason=f"needs the {name} extra")
    if name == "kubeflow":
        (tmp_path / "kubeconfig").write_text(KUBECONFIG)
        location = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
        monkeypatch.setattr(location, str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("LOGLEVEL", raising=False)
    words = ["--device", "cpu"] if name.endswith("cpu") else []
    submission = dry_submission(job_on(cluster, words=words))
    assert len(submission.requests) == cluster.chain
    text = "\n".join([*submission.requests, "# scripts/train.sh", submission.script])
    text = text.replace(str(Path(sys.executable).parent), "/BIN")
    text = text.replace(str(nemorun_home), "/NEMORUN")
    text = text.replace(f"/workdir/{getpass.getuser()}/", "/workdir/ME/")
    text = re.sub(r"(dense-0.6b)([_-])\d{12,}", r"\1\2ID", text)
    text = re.sub(r"\btrain-[a-z0-9]{11,}\b", "train-ID", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("KHA_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_the_script_gives_every_argument_unchanged(nemorun_home):
    submission = dry_submission(job_on(CLUSTERS["slurm"]))
    printed = subprocess.run(
        ["bash", "-c", f"exec() {{ printf '%s\\0' \"$@\"; }}\n{submission.script}"],
        capture_output=True, check=True,
    ).stdout.decode().split("\0")  # fmt: skip
    assert printed[printed.index("--odd") + 1] == "a b$c"
    assert printed[:4] == [sys.executable, "-u", "-m", "kha_megatron.training"]


def test_a_job_that_may_be_started_again_loads_nothing_else():
    with pytest.raises(ConfigError, match=r"--load /other: .* --pretrained-checkpoint"):
        job_on(CLUSTERS["slurm-container"], words=["--load", "/other"])


def test_time_limits_and_restarts_reach_megatron():
    words = job_on(CLUSTERS["slurm"]).command
    assert words[words.index("--exit-duration-in-mins") + 1] == "225"  # 15 minutes to spare
    shorter = Cluster(executor="slurm", account="a", time="0-00:20:30")
    words = job_on(shorter).command
    assert words[words.index("--exit-duration-in-mins") + 1] == "17"  # 3 of 20.5
    assert words[words.index("--load") + 1] == words[words.index("--save") + 1]
    given = job_on(CLUSTERS["slurm-container"]).command
    assert given[given.index("--load") + 1] == given[given.index("--save") + 1]
    assert given[0] == "python"
    assert "--enable-ft-package" in job_on(CLUSTERS["slurm-fault-tolerant"]).command


STAND_INS = {  # a cluster of this machine: the batch script runs at once
    "sbatch": """
script="${@: -1}"
export SLURM_JOB_ID=77 SLURM_JOB_NODELIST=localhost SLURM_NODEID=0 SLURM_NTASKS_PER_NODE=1
bash "$script" > "$STATE/out" 2>&1 && echo COMPLETED > "$STATE/end" || echo FAILED > "$STATE/end"
echo 77
""",
    "srun": """
[ "$1" = --nodes=1 ] && exec echo 127.0.0.1
while [ "$1" != torchrun ] && [ "$1" != ft_launcher ]; do
  [ "$1" = --output ] && exec > "${2//%j/77}" 2>&1
  [ "$1" = --chdir ] && { mkdir -p "$2"; cd "$2"; }
  shift
done
exec "$@"
""",
    "ft_launcher": """
exec torchrun "$@"
""",
    "scontrol": """
[ "$1 $2" = "show hostnames" ] && exec echo localhost
[ "$1" = requeue ] && { echo "$@" >> "$STATE/scontrol"; exit; }
[ -e "$STATE/silent" ] && { rm "$STATE/silent"; echo "Unable to contact controller" >&2; exit 1; }
[ -e "$STATE/forgotten" ] && { echo "Invalid job id specified" >&2; exit 1; }
echo "JobId=77 JobName=x JobState=$(cat "$STATE/end") Reason=None Restarts=0 ExitCode=3:0"
""",
    "sacct": """
[ -e "$STATE/accounting" ] || { echo "Slurm accounting storage is disabled" >&2; exit 1; }
echo "$(cat "$STATE/end")|3:0"
""",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder in which the stand-ins of Slurm's commands leave what happened."""
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
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
code = int(sys.argv[sys.argv.index("--code") + 1]) if os.environ["RANK"] == "1" else 0
sys.exit(code and (print("the disk is full", file=sys.stderr), code)[1])
"""


@pytest.mark.parametrize(
    ("code", "knows", "status"),
    [
        (0, ["silent"], "succeeded"),  # the controller, once it answers
        (3, [], "failed"),
        (0, ["forgotten", "accounting"], "succeeded"),
        (3, ["forgotten", "accounting"], "failed"),
        (0, ["forgotten"], "unknown"),
    ],
)
def test_a_slurm_job_to_its_end(code, knows, status, slurm, scripted, nemorun_home, monkeypatch):
    monkeypatch.setattr("kha_megatron.recipes.slurm._POLL_SECONDS", 0.1)
    for name in knows:
        (slurm / name).touch()
    cluster = Cluster(
        executor="slurm", gpus=2, retries=1, environment={"NOTE": "it's $HOME"}, **SLURM
    )
    recipe = scripted(
        RANK,
        run=Run.of(vocab_size=90).updated(["--code", str(code), "--save", str(slurm / "runs")]),
    )
    words = ["--mock-data", "--odd=a b$c"]
    steps = []
    result = submit(prepare(recipe, cluster=cluster, overrides=words), on_step=steps.append)
    printed = (slurm / "out").read_text()
    assert result.status == status, printed
    assert result.succeeded == (status == "succeeded")
    assert len(result.jobs) == 1
    assert {step.loss for step in steps} == {2.5}
    for rank in (0, 1):
        seen = (slurm / f"rank{rank}").read_text()
        assert seen == "it's $HOME|a b$c"
    assert (slurm / "scontrol").exists() == (code != 0)  # requeue
    if status == "failed":
        assert "job 77 as FAILED (exit code 3:0" in result.reason
        assert (result.failure.rank, result.failure.exit_code) == (1, 3)
        assert "the disk is full" in result.failure.lines  # two streams have no order


@pytest.mark.parametrize("lost", [OSError("timed out"), SystemExit(1)])
def test_a_job_is_followed_through_a_lost_connection(lost, monkeypatch):
    monkeypatch.setattr("kha_megatron.recipes.slurm._POLL_SECONDS", 0)
    answers = iter([lost, "JobState=RUNNING", lost, "JobState=COMPLETED", ""])

    class Tunnel:
        def run(self, command, **_):
            if isinstance(answer := next(answers), BaseException):
                raise answer
            return SimpleNamespace(ok=True, stdout=answer, stderr="")

    details = SimpleNamespace(srun_stdout="log-%j.out")
    executor = SimpleNamespace(tunnel=Tunnel(), job_details=details)
    info = SimpleNamespace(request=SimpleNamespace(executor=executor))
    monkeypatch.setattr("kha_megatron.recipes.slurm._new_lines", lambda *_: [])
    assert follow([SimpleNamespace(handle="slurm://x/77", _dryrun_info=info)]).status == "succeeded"


ENDING = """
import os, sys
if "--finish" in sys.argv:  # as our entry point does: tests/faults/test_restarts.py
    open(os.environ["FAULT_TOL_FINISHED_FLAG_FILE"], "w").close()
"""


@pytest.mark.parametrize("finished", [False, True])
def test_a_fault_tolerant_job_is_queued_again_until_it_has_finished(
    finished, slurm, scripted, nemorun_home, monkeypatch
):
    monkeypatch.setattr("kha_megatron.recipes.slurm._POLL_SECONDS", 0.1)
    cluster = Cluster(executor="slurm", gpus=1, retries=2, fault_tolerant=True, **SLURM)
    run = Run.of(vocab_size=90).updated(["--save", str(slurm / "runs")])
    words = ["--mock-data", "--device", "cpu", *(["--finish"] if finished else [])]
    result = submit(prepare(scripted(ENDING, run=run), cluster=cluster, overrides=words))
    assert result.succeeded, (slurm / "out").read_text()
    assert (slurm / "scontrol").exists() != finished, (slurm / "out").read_text()


def test_a_scheduler_that_is_not_there_is_a_failed_job(monkeypatch, nemorun_home, tmp_path):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    result = submit(job_on(CLUSTERS["slurm"]))
    assert not result.succeeded
    assert "slurm did not take the job" in result.reason


@pytest.mark.parametrize(
    ("cluster", "match"),
    [
        ({"executor": "pbs"}, "unknown executor 'pbs': choose one of local, docker, slurm"),
        ({"executor": "docker"}, "docker needs --container-image"),
        ({"executor": "slurm", "account": "a"}, "slurm needs --time"),
        ({"executor": "docker", "image": "x", "nodes": 2}, "docker has no --nodes"),
        ({"executor": "lepton", "image": "x", "partition": "p"}, "lepton has no --partition"),
        ({"executor": "kubeflow", "image": "x", "chain": 2}, "kubeflow has no --chain"),
        ({"executor": "kubeflow", "image": "x", "code": "git"}, "kubeflow has no --code"),
        ({"executor": "docker", "image": "x", "retries": 1}, "docker has no --retries"),
        ({"executor": "skypilot", "image": "x"}, "skypilot ships .* give --code git"),
        ({"executor": "slurm", **SLURM, "nodes": 0}, "--nodes 0: give a whole number from 1"),
        ({"executor": "slurm", **SLURM, "gpus": 0}, "--nproc 0: give a whole number from 1"),
        ({"executor": "slurm", **SLURM, "retries": -1}, "--retries -1: give a whole number"),
        ({"executor": "local", "nodes": 2}, "without --nodes: remove it, or choose an executor"),
        ({"executor": "slurm", **SLURM, "host": "h@x"}, "--host h@x needs --folder"),
        ({"executor": "slurm", **SLURM, "folder": "/x"}, "--folder /x is for --host"),
        ({"executor": "slurm", **SLURM, "chain": 2, "fault_tolerant": True}, "remove one of them"),
    ],
)
def test_what_an_executor_cannot_have_is_refused(cluster, match):
    with pytest.raises(ConfigError, match=match):
        Cluster(**cluster)


@pytest.mark.parametrize(
    ("cluster", "match"),
    [
        ({"executor": "slurm", "account": "a", "time": "4h"}, "--time 4h: give HH:MM:SS"),
        ({"executor": "slurm", **SLURM, "environment": {"note": "x"}}, "--env note: .* NOTE"),
        ({"executor": "slurm", **SLURM, "settings": {"qso": "x"}}, "--set qso: .* mean qos"),
        ({"executor": "slurm", **SLURM, "settings": {"signal": "TERM@60"}, "code": "/no/such"},
         "--code /no/such: give git or a folder"),
        ({"executor": "docker", "image": "x", "settings": {"privileged": "yes"}}, "as JSON"),
        ({"executor": "lepton", "image": "x"}, "lepton needs --set nemo_run_dir=VALUE"),
        ({"executor": "slurm", **SLURM, "host": "login", "folder": "/x"}, "give USER@HOST"),
    ],
)  # fmt: skip
def test_what_nemo_run_cannot_take_is_refused(cluster, match, nemorun_home):
    with pytest.raises(ConfigError, match=match):
        dry_submission(job_on(Cluster(**cluster)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"settings": {"namespace": "t"}}, "kubeflow needs --set workdir_pvc=CLAIM"),
        ({"environment": {"NOTE": "it is"}}, "--env NOTE=it is: .* without quotes"),
    ],
)
def test_what_kubeflows_script_would_lose_is_refused(changes, match, nemorun_home):
    pytest.importorskip("kubernetes", reason="needs the kubeflow extra")
    with pytest.raises(ConfigError, match=match):
        dry_submission(job_on(replace(CLUSTERS["kubeflow"], **changes)))


@pytest.mark.parametrize("name", ["slurm-container", "docker", "kubeflow"])
def test_a_path_from_this_folder_on_is_refused_where_ranks_have_other_files(name):
    with pytest.raises(ConfigError, match=r"--output runs/one is relative.*as the ranks see it"):
        job_on(CLUSTERS[name], output=Path("runs/one"))
    with pytest.raises(ConfigError, match=r"--data mine is relative.*as the ranks see it"):
        prepare(get_recipe("dense-0.6b"), cluster=CLUSTERS[name], data=Path("mine"))


def test_a_path_from_this_folder_on_is_taken_where_ranks_have_the_same_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = job_on(CLUSTERS["slurm"], output=Path("one")).command
    assert words[words.index("--save") + 1] == str(tmp_path / "one/checkpoints")


def test_a_folder_that_a_shell_would_split_is_refused(nemorun_home, monkeypatch, tmp_path):
    odd = Cluster(executor="slurm", **SLURM, host="me@login.example", folder="/home/me/my jobs")
    with pytest.raises(ConfigError, match=r"in /home/me/my jobs: set .* --folder of a --host"):
        dry_submission(job_on(odd))
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "my nemo"))
    with pytest.raises(ConfigError, match=r"my nemo.*: set NEMORUN_HOME, or"):
        dry_submission(job_on(CLUSTERS["slurm"]))


@pytest.mark.parametrize("name", ["kubeflow", "skypilot"])
def test_a_missing_extra_is_named(name, nemorun_home, monkeypatch):
    found = importlib.util.find_spec
    hidden = {"kubernetes", "sky"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in hidden else found(n))
    with pytest.raises(ConfigError, match=rf"pip install 'kha-megatron\[{name}\]'"):
        dry_submission(job_on(CLUSTERS[name]))


@pytest.mark.parametrize(("gpus", "fixed"), [(16, []), (64, ["--tensor-model-parallel-size", "2"])])
def test_the_plans_layout_is_legal_and_keeps_what_is_fixed(gpus, fixed):
    recipe = get_recipe("moe-a1.6b-14.6b")
    sizes = planned(recipe.run_for(fixed), gpus, 80e9, fixed=hear(fixed))
    run = recipe.updated(**sizes).run
    check_layout(run, gpus)
    if fixed:
        assert sizes["tensor_model_parallel_size"] == 2
        assert sizes["sequence_parallel"]
    assert run.kha == recipe.run.kha


def test_a_model_that_fits_nowhere_is_refused():
    with pytest.raises(ConfigError, match="fits on 8 GPUs of 10 GB in no layout"):
        planned(get_recipe("moe-a1.6b-14.6b").run, 8, 10e9, fixed=())
