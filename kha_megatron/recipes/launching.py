"""Run a job on this machine with NeMo-Run and follow it to its end.

NeMo-Run exits with code 0 even if a job failed, so the outcome is read from its status.
"""

import os
import shlex
import shutil
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
from kha_megatron.errors import ConfigError, MissingDependencyError
from kha_megatron.recipes.log_lines import Step, parse_step, read_new_lines
from kha_megatron.recipes.logs import Failure, find_failure
from kha_megatron.recipes.prepare import Job, owned_output
from kha_megatron.recipes.processes import LAUNCH_VARIABLE, find_processes, guarded, interruptible

TASK = "train"
"""NeMo-Run's name of the task of an experiment, whose script is ``train.sh``."""

_FINISHED = ("SUCCEEDED", "FAILED", "CANCELLED", "UNKNOWN")
_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Command:
    """The process that NeMo-Run would start on this machine."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    """Additional variables. PATH is prepended to the caller's."""
    folder: Path
    """Working directory."""


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a run ended."""

    status: str
    """``succeeded``, ``failed``, ``cancelled`` or ``unknown``."""
    seconds: float
    """Wall-clock time of the ranks."""
    log: Path
    """Output of all ranks, each line prefixed with its rank."""
    rank_logs: Path
    """Directory with ``stdout.log`` and ``stderr.log`` of each rank."""
    last_step: Step | None
    failure: Failure | None
    """None if the run succeeded."""

    @property
    def succeeded(self) -> bool:
        """Whether every rank exited with code 0."""
        return self.status == "succeeded"


def dry_run(job: Job) -> Command:
    """Return the torchrun command that :func:`launch_job` would start; raise the same errors."""
    with create_experiment(job, _executor(job, launch_id="dry-run")) as experiment:
        experiment.dryrun(log=False)
        request = experiment.jobs[0]._dryrun_info.request
    (replica,) = request.role_params[TASK]
    *torchrun, _script = replica.args  # a script, gone by now, that executes job.command
    return Command(
        words=(*torchrun, *job.command),
        environment={k: v for k, v in replica.env.items() if k != LAUNCH_VARIABLE},
        folder=Path(replica.cwd or os.getcwd()),
    )


def launch_job(
    job: Job,
    *,
    on_step: Callable[[Step], None] | None = None,
    stop: threading.Event | None = None,
) -> LaunchResult:
    """Run a job on this machine to its end. Several threads may do so at the same time.

    Args:
        on_step: called in this thread with each progress line that Megatron logs.
        stop: ends the job like Ctrl-C, which only the main thread receives.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM, a closed terminal or ``stop``. All ranks have ended.
        MissingDependencyError: NeMo-Run is not installed.
        ConfigError: torchrun cannot be found, or NeMo-Run cannot use its home directory.
        OutputError: If another process uses the output directory.
    """
    launch_id = uuid.uuid4().hex
    executor, last_step = _executor(job, launch_id=launch_id), None
    # the guard is the inner context: leaving the experiment waits for the ranks
    with (
        owned_output(job),
        interruptible(),
        create_experiment(job, executor) as experiment,
        guarded(launch_id),
    ):
        start = time.monotonic()
        experiment.run()
        info = experiment.status(return_dict=True)[TASK]
        logs = Path(info["local_dir"], "nemo_run", info["job_id"])
        launcher, rank_logs = logs / TASK / "0", logs / "torchelastic" / TASK
        log = launcher / "combined.log"
        announce(f"{job.output or job.recipe.name}: log of all ranks: {log}")
        for step in _follow(experiment, launcher / "stdout.log", launch_id, stop):
            last_step = step
            if on_step is not None:
                on_step(step)
        status = _status(experiment, launch_id).lower()
        seconds = time.monotonic() - start
    return LaunchResult(
        status=status,
        seconds=seconds,
        log=log,
        rank_logs=rank_logs,
        last_step=last_step,
        failure=None if status == "succeeded" else find_failure(launcher, rank_logs),
    )


def import_nemo_run() -> ModuleType:
    """Import NeMo-Run.

    Raises:
        MissingDependencyError: it is not installed.
        ConfigError: it cannot be imported.
    """
    try:
        import nemo_run
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "nemo_run":
            raise MissingDependencyError("nemo-run", "launching a recipe", "launch") from error
        raise ConfigError(
            f"nemo-run cannot be imported ({error}). Run `pip install 'kha-megatron[launch]'`, "
            "which pins its dependencies."
        ) from error
    return nemo_run


@contextmanager
def create_experiment(job: Job, executor: Any, *, chain: int = 1) -> Iterator[Any]:
    """Create a NeMo-Run experiment, not yet started, with ``chain`` tasks that run in sequence.

    Raises:
        ConfigError: NeMo-Run's home directory has a path that a shell would split or expand.
    """
    run = import_nemo_run()
    with run.Experiment(
        job.recipe.name.replace("/", "-"),
        executor=executor,
        log_level="WARNING",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    ) as experiment:
        # the script is inline because NeMo-Run quotes Script(path=..., args=...) for a shell that
        # the local executor does not use
        script = run.Script(inline=job.script, entrypoint="bash")
        before: list[str] = []
        for number in range(1, chain + 1):
            name = TASK if chain == 1 else f"{TASK}-{number}"
            before = [experiment.add(script, name=name, dependencies=before)]
        folder = experiment.jobs[0].executor.job_dir
        if shlex.quote(folder) != folder:  # NeMo-Run writes it into commands without quotes
            raise ConfigError(
                f"NeMo-Run cannot start a script in {folder}. Set NEMORUN_HOME to a path without "
                "spaces and shell characters."
            )
        yield experiment


def _executor(job: Job, *, launch_id: str) -> Any:
    """Create NeMo-Run's executor for this machine."""
    binaries = str(Path(sys.executable).parent)
    path = f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"
    if shutil.which("torchrun", path=path) is None:
        raise ConfigError(
            f"torchrun is neither in {binaries} nor on PATH. Activate the environment in which "
            "PyTorch is installed."
        )
    return import_nemo_run().LocalExecutor(
        launcher="torchrun",
        ntasks_per_node=job.ranks,
        # NeMo-Run prepends PATH to the caller's
        env_vars={**job.environment, "PATH": binaries, LAUNCH_VARIABLE: launch_id},
    )


def _follow(experiment: Any, log: Path, launch_id: str, stop: threading.Event | None) -> Iterator[Step]:
    """Yield progress lines as they are written, until the run has finished."""
    with log.open("rb") as file:
        finished = False
        while not finished:
            finished = _status(experiment, launch_id) in _FINISHED  # before reading: no line is missed
            yield from filter(None, map(parse_step, read_new_lines(file)))
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
            if not finished:
                time.sleep(_POLL_SECONDS)


def _status(experiment: Any, launch_id: str) -> str:
    """Return the task's state; UNKNOWN if NeMo-Run lost track of a run that is over."""
    state = experiment.status(return_dict=True)[TASK]["status"].name
    if state not in (*_FINISHED, "RUNNING") and not find_processes(launch_id):
        return "UNKNOWN"
    return state
