"""Train on Slurm with NeMo-Run: request resources, submit a chain of jobs and follow them."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.staging import write_json
from kha_megatron.errors import ConfigError
from kha_megatron.recipes.launching import create_experiment, import_nemo_run
from kha_megatron.recipes.log_lines import Step, parse_step, read_new_lines
from kha_megatron.recipes.logs import Failure, find_failure_in_text
from kha_megatron.recipes.prepare import SUBMISSION, Job, Slurm, owned_output

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
    """One batch script per job of the chain."""
    script: str
    """Command of every rank, which NeMo-Run copies to ``scripts/train.sh``."""


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
    """Return what :func:`submit` would submit; raise the same errors."""
    with _experiment(job) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        requests = tuple(f"{item._dryrun_info!r}".strip() + "\n" for item in experiment.jobs)
    return Submission(requests=requests, script=job.script)


def submit(
    job: Job, *, detach: bool = False, on_step: Callable[[Step], None] | None = None
) -> SubmitResult:
    """Submit the chain of jobs, and wait for its end unless ``detach`` is set.

    ``on_step`` is called with each progress line that Megatron logs.

    Raises:
        MissingDependencyError: NeMo-Run is not installed.
        ConfigError: NeMo-Run cannot create the executor or use its home directory.
    """
    start = time.monotonic()
    with owned_output(job), _experiment(job) as experiment:
        error = ""
        try:
            experiment.run(detach=True)
        except Exception as raised:  # whatever sbatch and NeMo-Run raise
            lines = [line.strip() for line in str(raised).split("\n") if line.strip()]
            error = lines[-1] if lines else type(raised).__name__
        taken = [item for item in experiment.jobs if item.handle]
        if taken and job.output is not None and job.output.is_dir():
            write_json(job.output / SUBMISSION, {"slurm_jobs": [_job_id(item) for item in taken]})
        end: dict[str, Any]
        if error:
            end = {"status": "failed", "reason": f"Slurm did not take the job: {error}"}
        elif detach:
            end = {"status": "submitted", "log": _log_path(taken[-1])}
        else:
            for item in taken:
                announce(f"Slurm took job {_job_id(item)}; its log: {_log_path(item)}")
            for item in taken:
                end = _follow(item, on_step)
                if item is not taken[-1] and end["reason"]:
                    announce(end["reason"])
    return SubmitResult(
        jobs=tuple(map(_job_id, taken)),
        seconds=time.monotonic() - start,
        folder=str(experiment._exp_dir),
        **end,
    )


@contextmanager
def _experiment(job: Job) -> Iterator[Any]:
    """Create the job's NeMo-Run experiment.

    NeMo-Run's output goes to stderr, and its subprocesses do not read from the terminal.
    """
    assert job.slurm is not None
    stdin = sys.stdin
    with redirect_stdout(sys.stderr), open(os.devnull) as nothing:
        sys.stdin = nothing
        try:
            executor = _executor(job.slurm, job.environment, device=job.device)
            with create_experiment(job, executor, chain=job.slurm.chain) as experiment:
                yield experiment
        finally:
            sys.stdin = stdin


def _executor(slurm: Slurm, environment: Mapping[str, str], *, device: str) -> Any:
    """Create NeMo-Run's ``SlurmExecutor``. The variables of ``slurm`` override ``environment``."""
    run, variables = import_nemo_run(), {**environment, **slurm.environment}
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
        "poll_estimated_start_time": False,  # NeMo-Run would print it on stdout
    }
    if slurm.image is None:
        values["setup_lines"] = f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
    elif variables:  # otherwise pyxis keeps the image's own values
        values["container_env"] = list(variables)
    if slurm.account is None:  # NeMo-Run derives the job's name from it
        values["job_name_prefix"] = "kha-megatron."
    if device == "cpu":  # torchrun is one task; since Slurm 22.05 steps inherit no CPU count
        values["cpus_per_task"] = slurm.gpus
        values["srun_args"] = [f"--cpus-per-task={slurm.gpus}"]
    else:
        values["gpus_per_node"] = slurm.gpus
    if slurm.chain > 1:  # start the next job whether or not the previous one succeeded
        values["dependency_type"] = "afterany"
    hints = get_type_hints(run.SlurmExecutor)
    known = {item.name for item in fields(run.SlurmExecutor) if item.init}
    for name, text in slurm.settings.items():  # fields that are not text take JSON
        if name not in known:
            raise ConfigError(f"Expected --set with a field of SlurmExecutor, got {name}.")
        takes_text = str in (hints[name], *get_args(hints[name]))
        try:
            values[name] = text if takes_text and text[:1] != "[" else json.loads(text)
        except ValueError:
            raise ConfigError(f"Expected JSON in --set {name}={text}.") from None
    try:
        return run.SlurmExecutor(**values)
    except Exception as error:  # NeMo-Run has no exception class of its own
        raise ConfigError(f"NeMo-Run cannot create a Slurm executor: {error}") from error


def _job_id(job: Any) -> str:
    """Return Slurm's id of one of NeMo-Run's jobs."""
    return str(job.handle).rpartition("/")[2]


def _log_path(job: Any, restarts: str = "0") -> str:
    """Return the path of the log of a job's ranks. Each restart of the job has its own log."""
    log = str(job._dryrun_info.request.executor.job_details.srun_stdout)
    return log.replace("%j", _job_id(job)).replace("${SLURM_RESTART_COUNT:-0}", restarts)


def _follow(job: Any, on_step: Callable[[Step], None] | None) -> dict[str, Any]:
    """Wait for the end of one of NeMo-Run's jobs, through requeues.

    Return ``status``, ``log``, ``reason`` and ``failure`` of a :class:`SubmitResult`.
    """
    job_id, announced, path, position = _job_id(job), "", "", 0
    facts = {"JobState": "PENDING"}
    while True:
        facts |= _query(job_id)  # before reading the log, so that no line is missed
        state = facts["JobState"]
        if (newest := _log_path(job, facts.get("Restarts", "0"))) != path:
            path, position = newest, 0
        if (text := f"job {job_id} is {state}; its log: {path}") != announced:
            announce(text)
            announced = text
        if os.path.exists(path):
            with open(path, "rb") as file:
                file.seek(position)
                for step in filter(None, map(parse_step, read_new_lines(file))):
                    if on_step is not None:
                        on_step(step)
                position = file.tell()
        if state in _ENDS:
            break
        time.sleep(_POLL_SECONDS)
    end: dict[str, Any] = {"status": _ENDS[state], "log": path, "reason": None, "failure": None}
    if state == "COMPLETED":
        return end
    why = f"exit code {facts.get('ExitCode', 'unknown')}, {facts.get('Reason', 'no reason given')}"
    end["reason"] = f"Slurm ended job {job_id} as {state} ({why})"
    if state == "UNKNOWN":
        end["reason"] = f"Slurm no longer knows job {job_id}, and has no accounting. See its log."
    for log in (Path(path), Path(facts.get("StdOut", ""))):  # the ranks' log, or else the batch's
        if log.is_file() and (size := log.stat().st_size):
            with log.open("rb") as file:
                file.seek(max(0, size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
            return end | {"failure": find_failure_in_text(text, log)}
    return end


def _query(job_id: str) -> dict[str, str]:
    """Return what Slurm reports about a job; an empty dict while its controller does not answer.

    ``scontrol`` answers while the controller remembers the job, ``sacct`` afterwards. NeMo-Run uses
    only ``sacct``, which needs accounting.
    """
    answer = _run("scontrol", "show", "job", "--oneliner", job_id)
    if answer.returncode == 0:
        pairs = re.findall(r"(\w+)=(\S*)", answer.stdout)
        return dict(reversed(pairs))  # the first value counts: free text comes later
    if "Invalid job id" not in answer.stderr:
        announce(f"Waiting for scontrol, which failed: {answer.stderr.strip()}", once=job_id)
        return {}
    answer = _run("sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,ExitCode")
    state, _, code = answer.stdout.strip().rpartition("\n")[2].partition("|")
    return {"JobState": state.partition(" ")[0] or "UNKNOWN", "ExitCode": code}


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError as error:  # sacct is missing without accounting
        return subprocess.CompletedProcess(command, 1, "", str(error))
