"""Handing a job to a cluster through NeMo-Run: the dry run, the submission and how it ended."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kha_megatron.errors import ConfigError
from kha_megatron.history.log_lines import Step
from kha_megatron.recipes.cluster import Cluster, executor_of
from kha_megatron.recipes.launching import (
    TASK,
    Job,
    check_scripts_folder,
    experiment_of,
    nemo_run,
    script_of,
    task_of,
)
from kha_megatron.recipes.logs import Failure
from kha_megatron.recipes.slurm import follow, log_of, number_of


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What NeMo-Run would hand to the cluster; one request for each job of a chain."""

    requests: tuple[str, ...]
    """Slurm's batch script, Docker's containers, the other executors' job."""
    script: str
    """What every rank runs: NeMo-Run ships it as ``scripts/train.sh``."""


@dataclass(frozen=True, kw_only=True)
class SubmitResult:
    """What became of a job on a cluster."""

    status: str
    """``succeeded``, ``failed``, ``cancelled``, ``unknown``, or ``submitted`` when detached."""
    jobs: tuple[str, ...]
    """The cluster's names of the jobs, in the order of the chain."""
    seconds: float
    folder: str
    """NeMo-Run's folder with the scripts and, where it fetches them, the logs."""
    log: str | None = None
    """Output of the ranks of the last job, on the cluster; None but for Slurm."""
    reason: str | None = None
    """Why the job was not taken, or how it ended."""
    failure: Failure | None = None
    """What its log says last, where that is known."""

    @property
    def succeeded(self) -> bool:
        """Whether the training ended well, or was handed over as asked."""
        return self.status in ("succeeded", "submitted")


def dry_submission(job: Job) -> Submission:
    """The requests of NeMo-Run's own dry run; nothing is submitted.

    Raises:
        MissingDependencyError: NeMo-Run is not installed.
        ConfigError: the executor cannot be made, or its script not be started where it lies.
    """
    with _quiet(), _experiment(job) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        requests = tuple(_text(item._dryrun_info) for item in experiment.jobs)
    return Submission(requests=requests, script=script_of(job))


def submit(
    job: Job, *, detach: bool = False, on_step: Callable[[Step], None] | None = None
) -> SubmitResult:
    """Hand the job over, and wait for its end unless ``detach``.

    Args:
        job: from :func:`~kha_megatron.recipes.launching.prepare`.
        on_step: called with each progress line of Megatron's; on Slurm only.

    Raises:
        MissingDependencyError: NeMo-Run is not installed.
        ConfigError: the executor cannot be made, its script not be started where it lies, or it
            cannot be left alone.
    """
    executor = _cluster(job).executor
    if detach and executor not in ("slurm", "skypilot", "lepton"):
        raise ConfigError(
            f"{executor} jobs end with this command: remove --detach, and leave it "
            "running in tmux or with nohup"
        )
    start = time.monotonic()
    refused = ended = None
    with _quiet(), _experiment(job) as experiment:
        try:
            experiment.run(detach=detach or executor == "slurm")
        except Exception as error:  # whatever the scheduler's client raises
            refused = f"{executor} did not take the job: {_line(error)}"
        taken = [item for item in experiment.jobs if item.handle]
        if executor == "slurm" and not refused and not detach:
            ended = follow(taken, on_step)
    # leaving the experiment is what waits for the others; asked again, some forget what is over
    facts: dict[str, Any] = {
        "jobs": tuple(number_of(item) if executor == "slurm" else item.handle for item in taken),
        "seconds": time.monotonic() - start,
        "folder": str(experiment._exp_dir),
    }
    if refused:
        return SubmitResult(status="failed", reason=refused, **facts)
    if ended is not None:
        return SubmitResult(**vars(ended), **facts)
    status = experiment.jobs[-1].state.name.lower()
    if status not in ("succeeded", "failed", "cancelled"):  # unfinished is no success
        status = "submitted" if detach else "unknown"
    log = log_of(taken[-1]) if executor == "slurm" else None
    return SubmitResult(status=status, log=log, **facts)


def _cluster(job: Job) -> Cluster:
    assert job.cluster is not None, "a job for this machine is launched, not submitted"
    return job.cluster


def _line(error: Exception) -> str:
    """The last line of an error that may hold a whole transcript."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """NeMo-Run talks on stdout, which is for results, and its shells would read the terminal."""
    stdin = sys.stdin
    with redirect_stdout(sys.stderr), open(os.devnull) as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = stdin


@contextmanager
def _experiment(job: Job) -> Iterator[Any]:
    """A NeMo-Run experiment with the chain's jobs, each after the one before."""
    cluster = _cluster(job)
    executor = executor_of(cluster, job.environment, nemo_run(), device=job.device)
    with experiment_of(job, executor) as experiment:
        before: list[str] = []
        for number in range(cluster.chain):
            name = TASK if cluster.chain == 1 else f"{TASK}-{number + 1}"
            before = [experiment.add(task_of(job), name=name, dependencies=before)]
        if cluster.executor == "slurm":
            check_scripts_folder(cluster.folder or experiment.jobs[0].executor.job_dir)
        yield experiment


def _text(info: Any) -> str:
    """The request as NeMo-Run's scheduler shows it."""
    if hasattr(info.request, "task"):  # SkyPilot: it asks for a function that 0.14 has not
        return json.dumps(info.request.task.to_yaml_config(), indent=2) + "\n"
    script = Path(info.request.executor.job_dir, "launch.sh")  # Kubeflow: what the pods start
    return f"{info!r}".strip() + "\n" + (script.read_text() if script.is_file() else "")
