"""Run jobs on the local machine with NeMo-Run."""

import os
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError, MissingDependencyError, install_command
from kha_megatron.recipes.log_lines import Step, parse_steps, read_new_lines
from kha_megatron.recipes.logs import Failure, find_failure
from kha_megatron.recipes.prepare import Job, owned_output
from kha_megatron.recipes.processes import (
    LAUNCH_VARIABLE,
    find_processes,
    interruptible,
    terminating_on_exit,
)

TASK = "train"
"""Name of the NeMo-Run task. Its script is called ``train.sh``."""

_FINAL_STATES = ("SUCCEEDED", "FAILED", "CANCELLED", "UNKNOWN")
_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Command:
    """Command line and environment of a local run. See :func:`dry_run`."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    """Environment variables to set. ``PATH`` is prepended to the current value."""
    folder: Path
    """Working directory."""


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a job ended."""

    status: str
    """``succeeded``, ``failed``, ``cancelled`` or ``unknown``."""
    seconds: float
    log: Path
    """Combined log of all ranks. Each line is prefixed with its rank."""
    rank_logs: Path
    """Directory with separate ``stdout.log`` and ``stderr.log`` files per rank."""
    last_step: Step | None
    failure: Failure | None
    """Which rank failed and why. None if the job succeeded."""
    stopped_at: int | None = None
    """Iteration to resume from, if the run ended early, e.g. by ``--exit-duration-in-mins``."""

    @property
    def succeeded(self) -> bool:
        return self.status == "succeeded"


def dry_run(job: Job) -> Command:
    """Return the torchrun command that :func:`launch_job` would run."""
    executor = _create_executor(job, launch_id="dry-run")
    with create_experiment(job, executor) as experiment:
        experiment.dryrun(log=False)
        request = experiment.jobs[0]._dryrun_info.request
    (process,) = request.role_params[TASK]
    *torchrun, _script = process.args  # replace NeMo-Run's temporary script by its command
    environment = dict(process.env)
    environment.pop(LAUNCH_VARIABLE, None)
    return Command(
        words=(*torchrun, *job.command),
        environment=environment,
        folder=Path(process.cwd or os.getcwd()),
    )


def launch_job(
    job: Job,
    *,
    on_step: Callable[[Step], None] | None = None,
    stop: threading.Event | None = None,
) -> LaunchResult:
    """Run a job on this machine and wait for it. Can be called from several threads.

    Args:
        on_step: Called for each training step that Megatron logs.
        stop: Set this event to terminate the job, e.g. from another thread.

    Raises:
        KeyboardInterrupt: On Ctrl-C, SIGTERM, SIGHUP or ``stop``, after all ranks have exited.
        MissingDependencyError: If NeMo-Run is not installed.
        FileNotFoundError: If torchrun is not installed.
        ConfigError: If NeMo-Run's home directory cannot be used.
        OutputError: If another process uses the output directory.
    """
    launch_id = uuid.uuid4().hex
    executor = _create_executor(job, launch_id=launch_id)
    last_step = None
    # exit the guard first, because the experiment waits for the ranks when it is closed
    with (
        owned_output(job),
        interruptible(),
        create_experiment(job, executor) as experiment,
        terminating_on_exit(launch_id),
    ):
        start = time.monotonic()
        experiment.run()
        task_status = experiment.status(return_dict=True)[TASK]
        logs = Path(task_status["local_dir"], "nemo_run", task_status["job_id"])
        torchrun_logs = logs / TASK / "0"  # index of the replica, of which there is one
        rank_logs = logs / "torchelastic" / TASK
        log = torchrun_logs / "combined.log"
        announce(f"Writing the log of all ranks of {job.output or job.recipe.name} to {log}")
        for step in _follow_steps(experiment, torchrun_logs / "stdout.log", launch_id, stop):
            last_step = step
            if on_step is not None:
                on_step(step)
        status = _read_state(experiment, launch_id).lower()
        seconds = time.monotonic() - start
    return LaunchResult(
        status=status,
        seconds=seconds,
        log=log,
        rank_logs=rank_logs,
        last_step=last_step,
        failure=None if status == "succeeded" else find_failure(torchrun_logs, rank_logs),
        stopped_at=job.stopped_at,
    )


def import_nemo_run() -> ModuleType:
    """Import NeMo-Run, or explain how to install it (it is an optional dependency)."""
    try:
        import nemo_run
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "nemo_run":
            raise MissingDependencyError("nemo-run", "launching a recipe", "launch") from error
        raise ConfigError(
            f"Could not import nemo-run: {error}. Run {install_command('launch')} to install "
            "compatible versions of its dependencies."
        ) from error
    return nemo_run


@contextmanager
def create_experiment(job: Job, executor: Any, *, chain: int = 1) -> Iterator[Any]:
    """Create a NeMo-Run experiment of ``chain`` consecutive tasks. Does not start it."""
    run = import_nemo_run()
    with run.Experiment(
        job.recipe.name.replace("/", "-"),
        executor=executor,
        log_level="WARNING",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    ) as experiment:
        # Script(path=..., args=...) would be quoted for a shell, which the local executor lacks
        script = run.Script(inline=job.script, entrypoint="bash")
        dependencies: list[str] = []
        for number in range(1, chain + 1):
            name = TASK if chain == 1 else f"{TASK}-{number}"
            task_id = experiment.add(script, name=name, dependencies=dependencies)
            dependencies = [task_id]
        folder = experiment.jobs[0].executor.job_dir
        if shlex.quote(folder) != folder:
            raise ConfigError(
                f"NeMo-Run does not quote paths such as {folder}. Set NEMORUN_HOME to a directory "
                "without spaces or special characters."
            )
        yield experiment


def _create_executor(job: Job, *, launch_id: str) -> Any:
    binaries = str(Path(sys.executable).parent)
    return import_nemo_run().LocalExecutor(
        launcher="torchrun",
        ntasks_per_node=job.ranks,
        env_vars={**job.environment, "PATH": binaries, LAUNCH_VARIABLE: launch_id},
    )


def _follow_steps(
    experiment: Any,
    log: Path,
    launch_id: str,
    stop: threading.Event | None,
) -> Iterator[Step]:
    """Yield training steps as they are logged, until the task has finished."""
    with log.open("rb") as file:
        is_finished = False
        while not is_finished:
            # query the state before reading, so that no line is missed
            is_finished = _read_state(experiment, launch_id) in _FINAL_STATES
            yield from parse_steps(read_new_lines(file))
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
            if not is_finished:
                time.sleep(_POLL_SECONDS)


def _read_state(experiment: Any, launch_id: str) -> str:
    """Return the state of the task, e.g. RUNNING or SUCCEEDED.

    We cannot rely on NeMo-Run's exit code because it is 0 even for failed jobs. If all processes
    are gone but there is no final state, the state is UNKNOWN.
    """
    state = experiment.status(return_dict=True)[TASK]["status"].name
    if state not in (*_FINAL_STATES, "RUNNING") and not find_processes(launch_id):
        return "UNKNOWN"
    return state
