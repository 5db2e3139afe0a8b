"""Submit jobs to Slurm with NeMo-Run."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.staging import write_json
from kha_megatron.recipes.launching import create_experiment
from kha_megatron.recipes.log_lines import Step, parse_steps, read_new_lines
from kha_megatron.recipes.logs import INVALID_INPUT, Failure, find_failure_in_log
from kha_megatron.recipes.prepare import SUBMISSION, Job, check_shared_paths, owned_output
from kha_megatron.recipes.slurm_executor import create_executor

_STATUS_BY_FINAL_STATE = {
    "COMPLETED": "succeeded",
    "CANCELLED": "cancelled",
    "UNKNOWN": "unknown",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    "PREEMPTED": "failed",
}
"""Status of a job by its final Slurm state."""
_ENDED_BY_SLURM = ("CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED", "NODE_FAIL")
"""Final states of jobs that did not end by themselves."""
_POLL_SECONDS = 3.0
_ANSWER_SECONDS = 60.0
"""How long to wait for the answer of a Slurm command."""


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


@dataclass(frozen=True)
class _JobEnd:
    """How one job of a chain ended. See :class:`SubmitResult` for the fields."""

    status: str
    log: str | None = None
    reason: str | None = None
    failure: Failure | None = None


def dry_submission(job: Job) -> Submission:
    """Return the scripts that :func:`submit` would submit."""
    with _create_slurm_experiment(job) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        requests = []
        for slurm_job in experiment.jobs:
            request = repr(slurm_job._dryrun_info).strip()
            requests.append(f"{request}\n")
    return Submission(requests=tuple(requests), script=job.script)


def submit(
    job: Job,
    *,
    detach: bool = False,
    on_step: Callable[[Step], None] | None = None,
) -> SubmitResult:
    """Submit a job (or a chain of jobs) to Slurm, and wait unless ``detach`` is set.

    Args:
        on_step: Called for each training step that Megatron logs.

    Raises:
        MissingDependencyError: If NeMo-Run is not installed.
        ConfigError: If NeMo-Run cannot create the executor or use its home directory.
    """
    start = time.monotonic()
    with owned_output(job), _create_slurm_experiment(job) as experiment:
        check_shared_paths(job.slurm, (sys.executable, str(experiment._exp_dir)))
        error = _submit_experiment(experiment)
        submitted = [slurm_job for slurm_job in experiment.jobs if slurm_job.handle]
        job_ids = tuple(_job_id(slurm_job) for slurm_job in submitted)
        if submitted and job.output is not None and job.output.is_dir():
            write_json(job.output / SUBMISSION, {"slurm_jobs": job_ids})
        if error is None and not submitted:
            error = "NeMo-Run submitted no job."
        stopped_at = None
        if error is not None:
            end = _JobEnd("failed", reason=f"Could not submit the job to Slurm: {error}")
        elif detach:
            end = _JobEnd("submitted", log=_log_path(submitted[-1]))
        else:
            end = _follow_chain(submitted, on_step)
            stopped_at = job.stopped_at
    return SubmitResult(
        status=end.status,
        jobs=job_ids,
        seconds=time.monotonic() - start,
        folder=str(experiment._exp_dir),
        log=end.log,
        reason=end.reason,
        failure=end.failure,
        stopped_at=stopped_at,
    )


def _submit_experiment(experiment: Any) -> str | None:
    """Submit all jobs of an experiment. Return the error message if this fails."""
    try:
        experiment.run(detach=True)
    except Exception as error:  # NeMo-Run does not define exception types
        _, _, last_line = str(error).strip().rpartition("\n")
        return last_line.strip() or type(error).__name__
    return None


@contextmanager
def _create_slurm_experiment(job: Job) -> Iterator[Any]:
    """Create a NeMo-Run experiment. Redirects stdout to stderr, and replaces stdin."""
    assert job.slurm is not None
    stdin = sys.stdin
    with redirect_stdout(sys.stderr), open(os.devnull) as empty_file:
        sys.stdin = empty_file
        try:
            executor = create_executor(job.slurm, job.environment, device=job.device)
            with create_experiment(job, executor, chain=job.slurm.chain) as experiment:
                yield experiment
        finally:
            sys.stdin = stdin


def _job_id(slurm_job: Any) -> str:
    """Return the Slurm job ID, which is at the end of a handle: ``slurm://SESSION/JOB_ID``."""
    _, _, job_id = str(slurm_job.handle).rpartition("/")
    return job_id


def _log_path(slurm_job: Any, restarts: str = "0") -> str:
    """Return the log file of all ranks after a number of restarts."""
    template = str(slurm_job._dryrun_info.request.executor.job_details.srun_stdout)
    log = template.replace("%j", _job_id(slurm_job))
    return log.replace("${SLURM_RESTART_COUNT:-0}", restarts)


def _follow_chain(submitted: Sequence[Any], on_step: Callable[[Step], None] | None) -> _JobEnd:
    """Wait for all jobs of a chain. Return how the last one ended."""
    for slurm_job in submitted:
        announce(f"Submitted Slurm job {_job_id(slurm_job)} with log file {_log_path(slurm_job)}")
    *earlier_jobs, last_job = submitted
    for slurm_job in earlier_jobs:
        end = _follow_job(slurm_job, on_step)
        if end.failure is not None and end.failure.exit_code == INVALID_INPUT:
            return end  # the batch script has canceled the rest of the chain
        if end.reason:
            announce(end.reason)
    return _follow_job(last_job, on_step)


def _follow_job(slurm_job: Any, on_step: Callable[[Step], None] | None) -> _JobEnd:
    """Wait for a job, including requeued attempts. Return how it ended."""
    job_id = _job_id(slurm_job)
    properties = {"JobState": "PENDING"}
    announced = None
    log = ""
    position = 0
    while True:
        # query the state before reading, so that no line is missed. If Slurm does not answer, the
        # last known properties remain
        properties |= _query_properties(job_id)
        state = properties["JobState"]
        current_log = _log_path(slurm_job, properties.get("Restarts", "0"))
        if current_log != log:  # the job was requeued, and each attempt has a log of its own
            log = current_log
            position = 0
        message = f"Slurm job {job_id} is {state}, log file: {log}"
        if message != announced:
            announce(message)
            announced = message
        if os.path.exists(log):
            position = _report_steps(log, position, on_step)
        if state in _STATUS_BY_FINAL_STATE:
            return _describe_end(job_id, properties, log)
        time.sleep(_POLL_SECONDS)


def _report_steps(
    log: str,
    position: int,
    on_step: Callable[[Step], None] | None,
) -> int:
    """Report all training steps in a log from a position on. Return the new position."""
    with open(log, "rb") as file:
        file.seek(position)
        for step in parse_steps(read_new_lines(file)):
            if on_step is not None:
                on_step(step)
        return file.tell()


def _describe_end(job_id: str, properties: Mapping[str, str], log: str) -> _JobEnd:
    state = properties["JobState"]
    if state == "COMPLETED":
        return _JobEnd(_STATUS_BY_FINAL_STATE[state], log)
    if state == "UNKNOWN":
        reason = f"Slurm has no information about job {job_id}. See the log file {log}."
    else:
        exit_code = properties.get("ExitCode", "unknown")
        slurm_reason = properties.get("Reason", "unknown")
        reason = (
            f"Slurm job {job_id} ended with state {state} (exit code {exit_code}, reason "
            f"{slurm_reason})"
        )
    failure = _find_failure(log, properties.get("StdOut", ""))
    if state in _ENDED_BY_SLURM and failure is not None and failure.rank is None:
        failure = None  # the log ends with tracebacks of SIGTERM
    return _JobEnd(_STATUS_BY_FINAL_STATE[state], log, reason, failure)


def _find_failure(ranks_log: str, batch_log: str) -> Failure | None:
    """Find the first error in the log of the ranks, or of the batch script if they wrote none."""
    for log in (Path(ranks_log), Path(batch_log)):
        if log.is_file() and log.stat().st_size:
            return find_failure_in_log(log)
    return None


def _query_properties(job_id: str) -> dict[str, str]:
    """Query the properties of a Slurm job, e.g. ``{"JobState": "RUNNING", ...}``.

    ``scontrol`` only knows current and recent jobs, so we fall back to ``sacct`` for older ones.
    Returns {} if the controller does not respond.
    """
    result = _run_slurm_command("scontrol", "show", "job", "--oneliner", job_id)
    if result.returncode == 0:
        properties: dict[str, str] = {}
        for name, value in re.findall(r"(\w+)=(\S*)", result.stdout):
            properties.setdefault(name, value)  # later ones may be free text
        return properties
    if "Invalid job id" in result.stderr:
        return _query_accounting(job_id)
    error = result.stderr.strip()
    announce(f"scontrol failed and will be retried: {error}", once=job_id)
    return {}


def _query_accounting(job_id: str) -> dict[str, str]:
    """Query the state and exit code of a job that has ended.

    The state is UNKNOWN if there is no answer, e.g. on clusters without accounting.
    """
    result = _run_slurm_command("sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,ExitCode")
    _, _, last_line = result.stdout.strip().rpartition("\n")  # e.g. CANCELLED by 1000|0:15
    state_and_user, _, exit_code = last_line.partition("|")
    state, _, _ = state_and_user.partition(" ")
    return {"JobState": state or "UNKNOWN", "ExitCode": exit_code}


def _run_slurm_command(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of Slurm. If it cannot be run, return exit code 1 and the reason."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_ANSWER_SECONDS} s"
    except FileNotFoundError as error:  # e.g. no sacct without accounting
        reason = str(error)
    return subprocess.CompletedProcess(command, 1, "", reason)
