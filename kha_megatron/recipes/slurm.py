"""Submit jobs to Slurm with NeMo-Run."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.staging import write_json
from kha_megatron.recipes.launching import create_experiment
from kha_megatron.recipes.log_lines import Step, parse_step, read_new_lines
from kha_megatron.recipes.logs import Failure, find_failure_in_log
from kha_megatron.recipes.prepare import SUBMISSION, Job, check_shared_paths, owned_output
from kha_megatron.recipes.slurm_executor import create_executor

_FAILED = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
_ENDS = {"COMPLETED": "succeeded", "CANCELLED": "cancelled", "UNKNOWN": "unknown"}
_ENDS |= dict.fromkeys(_FAILED, "failed")
_POLL_SECONDS = 3.0
_ANSWER_SECONDS = 60.0
_INVALID = 2
"""Exit code of ranks with invalid arguments or files."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Generated Slurm scripts. See :func:`dry_submission`."""

    requests: tuple[str, ...]
    """One batch script per job in the chain."""
    script: str
    """Contents of ``scripts/train.sh``. Every rank runs this script."""


@dataclass(frozen=True, kw_only=True)
class SubmitResult:
    """How the last job of a chain ended."""

    status: str
    """``succeeded``, ``failed``, ``cancelled``, ``unknown``, or ``submitted`` if detached."""
    jobs: tuple[str, ...]
    """IDs of all submitted Slurm jobs."""
    seconds: float
    folder: str
    """NeMo-Run's experiment directory."""
    log: str | None = None
    """Combined log of all ranks."""
    reason: str | None = None
    """Error message if the submission or the job failed."""
    failure: Failure | None = None
    stopped_at: int | None = None
    """Iteration to resume from, if the run ended before its last iteration."""

    @property
    def succeeded(self) -> bool:
        return self.status in ("succeeded", "submitted")


def dry_submission(job: Job) -> Submission:
    """Return the scripts that :func:`submit` would submit."""
    with _experiment(job) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        requests = tuple(f"{item._dryrun_info!r}".strip() + "\n" for item in experiment.jobs)
    return Submission(requests=requests, script=job.script)


def submit(
    job: Job, *, detach: bool = False, on_step: Callable[[Step], None] | None = None
) -> SubmitResult:
    """Submit a job (or a chain of jobs) to Slurm, and wait unless ``detach`` is set.

    Args:
        on_step: Called for each training step that Megatron logs.

    Raises:
        MissingDependencyError: If NeMo-Run is not installed.
        ConfigError: If NeMo-Run cannot create the executor or use its home directory.
    """
    start = time.monotonic()
    with owned_output(job), _experiment(job) as experiment:
        error = ""
        check_shared_paths(job.slurm, (sys.executable, str(experiment._exp_dir)))
        try:
            experiment.run(detach=True)
        except Exception as raised:  # NeMo-Run does not define exception types
            lines = [line.strip() for line in str(raised).split("\n") if line.strip()]
            error = lines[-1] if lines else type(raised).__name__
        submitted = [item for item in experiment.jobs if item.handle]
        job_ids = tuple(map(_job_id, submitted))
        if submitted and job.output is not None and job.output.is_dir():
            write_json(job.output / SUBMISSION, {"slurm_jobs": job_ids})
        end: dict[str, Any]
        if error:
            end = {"status": "failed", "reason": f"Could not submit the job to Slurm: {error}"}
        elif detach:
            end = {"status": "submitted", "log": _log_path(submitted[-1])}
        else:
            for item in submitted:
                announce(f"Submitted Slurm job {_job_id(item)} with log file {_log_path(item)}")
            for item in submitted:
                end = _follow(item, on_step)
                failure = end["failure"]
                if failure is not None and failure.exit_code == _INVALID:
                    break  # the batch script has canceled the rest of the chain
                if item is not submitted[-1] and end["reason"]:
                    announce(end["reason"])
            end["stopped_at"] = job.stopped_at
    return SubmitResult(
        jobs=job_ids, seconds=time.monotonic() - start, folder=str(experiment._exp_dir), **end
    )


@contextmanager
def _experiment(job: Job) -> Iterator[Any]:
    """Create a NeMo-Run experiment. Redirects stdout to stderr, and replaces stdin."""
    assert job.slurm is not None
    stdin = sys.stdin
    with redirect_stdout(sys.stderr), open(os.devnull) as nothing:
        sys.stdin = nothing
        try:
            executor = create_executor(job.slurm, job.environment, device=job.device)
            with create_experiment(job, executor, chain=job.slurm.chain) as experiment:
                yield experiment
        finally:
            sys.stdin = stdin


def _job_id(job: Any) -> str:
    return str(job.handle).rpartition("/")[2]


def _log_path(job: Any, restarts: str = "0") -> str:
    log = str(job._dryrun_info.request.executor.job_details.srun_stdout)
    return log.replace("%j", _job_id(job)).replace("${SLURM_RESTART_COUNT:-0}", restarts)


def _follow(job: Any, on_step: Callable[[Step], None] | None) -> dict[str, Any]:
    """Wait for a job, including requeued attempts. Returns fields of :class:`SubmitResult`."""
    job_id, announced, path, position = _job_id(job), "", "", 0
    facts = {"JobState": "PENDING"}
    while True:
        facts |= _query(job_id)  # query the state before reading, so that no line is missed
        state = facts["JobState"]
        if (newest := _log_path(job, facts.get("Restarts", "0"))) != path:
            path, position = newest, 0
        if (text := f"Slurm job {job_id} is {state}, log file: {path}") != announced:
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
    why = f"exit code {facts.get('ExitCode', 'unknown')}, reason {facts.get('Reason', 'unknown')}"
    end["reason"] = f"Slurm job {job_id} ended with state {state} ({why})"
    if state == "UNKNOWN":
        end["reason"] = f"Slurm has no information about job {job_id}. See the log file {path}."
    for log in (Path(path), Path(facts.get("StdOut", ""))):  # log of the ranks or batch script
        if log.is_file() and log.stat().st_size:
            return end | {"failure": find_failure_in_log(log)}
    return end


def _query(job_id: str) -> dict[str, str]:
    """Query the properties of a Slurm job, e.g. ``{"JobState": "RUNNING", ...}``.

    ``scontrol`` only knows current and recent jobs, so we fall back to ``sacct`` for older ones.
    (Clusters without accounting don't have it.) Returns {} if the controller doesn't respond.
    """
    answer = _run("scontrol", "show", "job", "--oneliner", job_id)
    if answer.returncode == 0:
        pairs = re.findall(r"(\w+)=(\S*)", answer.stdout)
        return dict(reversed(pairs))  # use the first value, since later ones may be free text
    if "Invalid job id" not in answer.stderr:
        announce(f"scontrol failed and will be retried: {answer.stderr.strip()}", once=job_id)
        return {}
    answer = _run("sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,ExitCode")
    state, _, code = answer.stdout.strip().rpartition("\n")[2].partition("|")
    return {"JobState": state.partition(" ")[0] or "UNKNOWN", "ExitCode": code}


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_ANSWER_SECONDS} s"
    except FileNotFoundError as error:  # e.g. no sacct without accounting
        reason = str(error)
    return subprocess.CompletedProcess(command, 1, "", reason)
