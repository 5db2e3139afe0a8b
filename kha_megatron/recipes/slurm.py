"""Train on Slurm with NeMo-Run: request resources, submit a chain of jobs and follow them."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.recipes.launching import (
    TASK,
    check_scripts_folder,
    experiment_of,
    nemo_run,
    task_of,
)
from kha_megatron.recipes.log_lines import Step, new_lines, parse_step
from kha_megatron.recipes.logs import Failure, failure_in
from kha_megatron.recipes.prepare import Job, Slurm

RENDEZVOUS = 29500
"""Port and id under which the nodes of one job find each other."""

_FAILED = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
_ENDS = {"COMPLETED": "succeeded", "CANCELLED": "cancelled", "UNKNOWN": "unknown"}
_ENDS |= dict.fromkeys(_FAILED, "failed")
_POLL_SECONDS = 3.0
_TAIL_BYTES = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What NeMo-Run would submit."""

    requests: tuple[str, ...]
    """One batch script for each job of the chain."""
    script: str
    """The command of every rank. NeMo-Run copies it to ``scripts/train.sh``."""


@dataclass(frozen=True, kw_only=True)
class SubmitResult:
    """How the last job of a chain ended."""

    status: str
    """``succeeded``, ``failed``, ``cancelled``, ``unknown``, or ``submitted`` when detached."""
    jobs: tuple[str, ...]
    """Slurm's job ids, in the order of the chain."""
    seconds: float
    folder: str
    """NeMo-Run's directory with the batch scripts."""
    log: str | None = None
    """Output of all ranks of the last job."""
    reason: str | None = None
    """Why the job was not submitted, or why it failed."""
    failure: Failure | None = None
    """The end of the log of a failed job."""

    @property
    def succeeded(self) -> bool:
        """Whether the training succeeded, or was submitted with ``detach``."""
        return self.status in ("succeeded", "submitted")


def dry_submission(job: Job) -> Submission:
    """Return what :func:`submit` would submit.

    Raises:
        MissingDependencyError: NeMo-Run is not installed.
        ConfigError: NeMo-Run cannot make the executor or use its home directory.
    """
    with _quiet(), _experiment(job) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        requests = tuple(f"{item._dryrun_info!r}".strip() + "\n" for item in experiment.jobs)
    return Submission(requests=requests, script=job.script)


def submit(
    job: Job, *, detach: bool = False, on_step: Callable[[Step], None] | None = None
) -> SubmitResult:
    """Submit the chain of jobs, and wait for its end unless ``detach`` is set.

    Args:
        job: from :func:`~kha_megatron.recipes.prepare.prepare`.
        on_step: called with each progress line that Megatron logs.

    Raises:
        MissingDependencyError: NeMo-Run is not installed.
        ConfigError: NeMo-Run cannot make the executor or use its home directory.
    """
    start = time.monotonic()
    ended: dict[str, Any] = {"status": "submitted"}
    with _quiet(), _experiment(job) as experiment:
        try:
            experiment.run(detach=True)
        except Exception as error:  # whatever sbatch and NeMo-Run raise
            lines = str(error).split("\n")
            why = next((line for line in reversed(lines) if line.strip()), type(error).__name__)
            ended = {"status": "failed", "reason": f"slurm did not take the job: {why.strip()}"}
        taken = [item for item in experiment.jobs if item.handle]
        if ended["status"] == "submitted":
            ended["log"] = log_of(taken[-1])
            if not detach:
                ended = follow(taken, on_step)
    return SubmitResult(
        jobs=tuple(map(number_of, taken)),
        seconds=time.monotonic() - start,
        folder=str(experiment._exp_dir),
        **ended,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Send NeMo-Run's output to stderr, and keep its subprocesses from reading the terminal."""
    stdin = sys.stdin
    with redirect_stdout(sys.stderr), open(os.devnull) as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = stdin


@contextmanager
def _experiment(job: Job) -> Iterator[Any]:
    """Make a NeMo-Run experiment with the chain's jobs, each after the one before."""
    assert job.slurm is not None
    executor = executor_of(job.slurm, job.environment, device=job.device)
    with experiment_of(job, executor) as experiment:
        before: list[str] = []
        for number in range(job.slurm.chain):
            name = TASK if job.slurm.chain == 1 else f"{TASK}-{number + 1}"
            before = [experiment.add(task_of(job), name=name, dependencies=before)]
        check_scripts_folder(experiment.jobs[0].executor.job_dir)
        yield experiment


def executor_of(slurm: Slurm, environment: Mapping[str, str], *, device: str) -> Any:
    """Make NeMo-Run's ``SlurmExecutor``.

    Args:
        environment: the recipe's variables. Those of ``slurm`` replace them.
        device: ``cuda`` or ``cpu``. No GPUs are requested for ``cpu``.

    Raises:
        ConfigError: NeMo-Run refuses a setting.
    """
    run, variables = nemo_run(), {**environment, **slurm.environment}
    values: dict[str, Any] = {
        "account": slurm.account,
        "partition": slurm.partition,
        "time": slurm.time,
        "nodes": slurm.nodes,
        "ntasks_per_node": slurm.gpus,
        "container_image": slurm.image,
        "container_mounts": list(slurm.mounts),
        "retries": slurm.retries,
        "packager": run.Packager(),
        # NeMo-Run writes `export NAME=value` without quotes
        "env_vars": {name: shlex.quote(value) for name, value in variables.items()},
        "launcher": run.Torchrun(rdzv_port=RENDEZVOUS, rdzv_id=RENDEZVOUS),
        "tunnel": run.LocalTunnel(job_dir=""),  # NeMo-Run's home directory
        "poll_estimated_start_time": False,  # it would be printed on stdout
    }
    if slurm.image is None:
        values["setup_lines"] = f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
    elif variables:  # without this pyxis keeps the image's own values
        values["container_env"] = list(variables)
    if slurm.account is None:  # NeMo-Run derives the job's name from it
        values["job_name_prefix"] = "kha-megatron."
    if device == "cpu":  # torchrun is one task; since Slurm 22.05 steps inherit no CPU count
        values["cpus_per_task"] = slurm.gpus
        values["srun_args"] = [f"--cpus-per-task={slurm.gpus}"]
    else:
        values["gpus_per_node"] = slurm.gpus
    if slurm.chain > 1:  # start the next job whether or not the one before succeeded
        values["dependency_type"] = "afterany"
    try:
        return run.SlurmExecutor(**values | _settings(slurm.settings, run.SlurmExecutor))
    except Exception as error:  # NeMo-Run raises whatever it likes
        raise ConfigError(f"NeMo-Run cannot make a Slurm executor: {error}") from error


def _settings(settings: Mapping[str, str], executor: type) -> dict[str, Any]:
    """Parse ``--set NAME=VALUE``. Fields that are not text take JSON."""
    hints = get_type_hints(executor)
    known = {item.name for item in fields(executor) if item.init}
    values: dict[str, Any] = {}
    for name, text in settings.items():
        if name not in known:
            raise ConfigError(f"Expected --set with a field of SlurmExecutor, got {name}.")
        takes_text = str in (hints[name], *get_args(hints[name]))
        try:
            values[name] = text if takes_text and text[:1] != "[" else json.loads(text)
        except ValueError:
            raise ConfigError(f"Expected JSON in --set {name}={text}.") from None
    return values


def follow(jobs: Sequence[Any], on_step: Callable[[Step], None] | None = None) -> dict[str, Any]:
    """Wait for the end of each submitted job of a chain, through requeues.

    ``scontrol`` answers while Slurm's controller remembers a job. ``sacct`` is asked afterwards.
    NeMo-Run asks only ``sacct``, which needs accounting.

    Args:
        jobs: NeMo-Run's jobs.
        on_step: called with each progress line that Megatron logs.

    Returns:
        ``status``, ``log``, ``reason`` and ``failure`` of the last job's :class:`SubmitResult`.
    """
    for job in jobs:
        announce(f"Slurm has taken job {number_of(job)}; its log: {log_of(job)}")
    for job in jobs:
        ended = _follow(job, on_step)
        if job is not jobs[-1] and ended["reason"]:
            announce(ended["reason"])
    return ended


def number_of(job: Any) -> str:
    """Return Slurm's id of one of NeMo-Run's jobs."""
    return str(job.handle).rpartition("/")[2]


def log_of(job: Any, restarts: str = "0") -> str:
    """Return the path of the log of a job's ranks. Each start of the job has its own log."""
    log = str(job._dryrun_info.request.executor.job_details.srun_stdout)
    return log.replace("%j", number_of(job)).replace("${SLURM_RESTART_COUNT:-0}", restarts)


def _follow(job: Any, on_step: Callable[[Step], None] | None) -> dict[str, Any]:
    number, said, path, seen = number_of(job), "", "", 0
    facts = {"JobState": "PENDING"}
    while True:
        facts |= _facts(number)  # before reading the log, so that the whole log is read
        state = facts["JobState"]
        if (now := log_of(job, facts.get("Restarts", "0"))) != path:
            path, seen = now, 0
        if (text := f"job {number} is {state}; its log: {path}") != said:
            announce(said := text)
        if os.path.exists(path):
            with open(path, "rb") as file:
                file.seek(seen)
                for step in filter(None, map(parse_step, new_lines(file))):
                    if on_step is not None:
                        on_step(step)
                seen = file.tell()
        if state in _ENDS:
            break
        time.sleep(_POLL_SECONDS)
    reason = f"Slurm ended job {number} as {state} (exit code {facts.get('ExitCode', 'unknown')}, "
    reason += f"{facts.get('Reason', 'no reason given')})"
    if state == "COMPLETED":
        return {"status": "succeeded", "log": path, "reason": None, "failure": None}
    if state == "UNKNOWN":
        reason = f"Slurm no longer knows job {number}, and has no accounting. See its log."
    return {"status": _ENDS[state], "log": path, "reason": reason, "failure": _failure(path, facts)}


def _facts(number: str) -> dict[str, str]:
    """Return what Slurm reports about a job; nothing while its controller does not answer."""
    asked = _ask("scontrol", "show", "job", "--oneliner", number)
    if asked.returncode == 0:
        found = re.findall(r"(\w+)=(\S*)", asked.stdout)
        return dict(reversed(found))  # the first of a name counts: users' text comes later
    if "Invalid job id" not in asked.stderr:
        announce(f"scontrol does not answer, waiting for it: {asked.stderr.strip()}", once=number)
        return {}
    asked = _ask("sacct", "-n", "-X", "-P", "-j", number, "-o", "State,ExitCode")
    state, _, code = asked.stdout.strip().rpartition("\n")[2].partition("|")
    return {"JobState": state.partition(" ")[0] or "UNKNOWN", "ExitCode": code}


def _failure(path: str, facts: dict[str, str]) -> Failure | None:
    """Read the end of the ranks' log, or of the batch script's log if no rank wrote any."""
    for log in (Path(path), Path(facts.get("StdOut", ""))):
        if log.is_file() and (size := log.stat().st_size):
            with log.open("rb") as file:
                file.seek(max(0, size - _TAIL_BYTES))
                return failure_in(file.read().decode(errors="replace"), log)
    return None


def _ask(*command: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError as error:  # no accounting, hence no sacct
        return subprocess.CompletedProcess(command, 1, "", str(error))
