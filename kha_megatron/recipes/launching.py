"""Running a recipe with NeMo-Run: check, show the command, launch, follow, report.

NeMo-Run exits 0 whatever becomes of its jobs, so the outcome is read from the experiment's status.
"""

import os
import shlex
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.data.paths import check_data, lacks_vocabulary
from kha_megatron.errors import ConfigError, MissingDependencyError
from kha_megatron.history.log_lines import Step, new_lines, parse_step
from kha_megatron.model.layout import Layout
from kha_megatron.model.run import Run, say
from kha_megatron.recipes.checks import check_folders, check_layout
from kha_megatron.recipes.cluster import Cluster
from kha_megatron.recipes.logs import Failure, find_failure
from kha_megatron.recipes.processes import MARK, guarded, interruptible, marked
from kha_megatron.recipes.recipe import Recipe

TASK = "train"
"""What NeMo-Run calls the one task of an experiment, whose script is ``train.sh``."""

_LOG = "combined.log"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_FINISHED = ("SUCCEEDED", "FAILED", "CANCELLED", "UNKNOWN")
_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked run: what every rank executes, and how many ranks there are."""

    recipe: Recipe
    command: tuple[str, ...]
    """Words that each rank executes, the Python interpreter first."""

    ranks: int
    environment: Mapping[str, str]
    output: Path | None

    device: str
    """``cuda`` or ``cpu``."""

    cluster: Cluster | None = None
    """Where it runs; None is this machine."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The process that NeMo-Run would start on this machine."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables set for it on top of the caller's environment; PATH is set in front of the
    caller's."""

    folder: Path
    """Its working folder."""


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a run ended."""

    status: str
    """``succeeded``, ``failed``, ``cancelled`` or ``unknown``."""

    seconds: float
    """Wall-clock time from the start of the ranks to their end."""

    log: Path
    """Output of all ranks, each line with its rank; ``kha_megatron.history.log_lines.read_steps``
    reads it."""

    rank_logs: Path
    """Folder with one ``stdout.log`` and ``stderr.log`` for each rank."""

    last_step: Step | None
    """The last progress that Megatron reported."""

    failure: Failure | None
    """Which rank ended the run and why; None if it succeeded."""

    @property
    def succeeded(self) -> bool:
        """Whether every rank exited with code 0."""
        return self.status == "succeeded"


def prepare(
    recipe: Recipe,
    *,
    data: Path | None = None,
    output: Path | None = None,
    overrides: Sequence[str] = (),
    ranks: int | None = None,
    device: str | None = None,
    resume: bool = False,
    cluster: Cluster | None = None,
    again: bool = False,
) -> Job:
    """Put a run together and refuse what cannot work, without starting anything.

    Args:
        recipe: what to train.
        data: folder made by ``kha-megatron data prepare``.
        output: folder for checkpoints and TensorBoard files; empty or new unless ``resume``.
        overrides: Megatron arguments that replace the recipe's.
        ranks: processes on this machine; the recipe's number if None.
        device: ``cuda`` or ``cpu``; the recipe's if None.
        resume: continue from the last checkpoint in ``output``.
        cluster: where to run instead of this machine; it says how many ranks. Datasets and folders
            are looked at only where the ranks see this machine's files.
        again: something may start the job again, as a cluster does: it loads what its folder holds
            by then.

    Raises:
        ConfigError: parallel sizes, KHA names or arguments that cannot be honoured; a relative
            folder for ranks that do not see this machine's files.
        DataError: datasets or tokenizer are missing.
        OutputError: the output folder is in use or cannot be written.
        CheckpointError: ``resume`` without a complete checkpoint.
    """
    placed = {} if device is None else {"device": device}
    if cluster is not None:
        placed |= cluster.arguments()
        ranks = cluster.ranks
        _check_paths(cluster, data=data, output=output)
    run = recipe.run_for(overrides, data=data, output=output, **placed)
    if lacks_vocabulary(run.arguments) and run.vocab_size:  # as many tokens as the recipe's own
        run = replace(run, said=say(vocab_size=run.vocab_size) | dict(run.said))
    if resume and run.files.save is None:
        raise ConfigError("nothing to resume: give --output the folder of the earlier run")
    loading = run.loading()
    if resume:
        run = loading
    ranks = recipe.ranks if ranks is None else ranks
    check_layout(run, ranks)
    here = cluster is None or cluster.shares_files
    check_data(run.arguments, look=here)
    if here:
        check_folders(run, output, resume=resume)
    if run.training.kha_upcycle and run.files.load is None:
        run = loading  # where the run finds itself when it is started again
    if again or cluster is not None:  # Megatron starts anew in an empty folder
        if (other := run.files.load) not in (None, loading.files.save):
            raise ConfigError(
                f"--load {other}: a job that the cluster starts again would go back to it; go on "
                "in its own folder with --output and --resume, or begin from its weights with "
                "--pretrained-checkpoint"
            )
        run = loading
    for word in run.dropped:
        announce(f"{recipe.name} leaves out its {word}")
    target = (recipe.entry,) if recipe.entry.endswith(".py") else ("-m", recipe.entry)
    python = sys.executable if cluster is None else cluster.python
    return Job(
        recipe=recipe,
        command=(python, "-u", *target, *run.words()),
        ranks=ranks,
        environment=_environment(recipe, run, cluster),
        output=output,
        device=run.training.device,
        cluster=cluster,
    )


def _check_paths(cluster: Cluster, **folders: Path | None) -> None:
    """Where the ranks have other files, a path from this folder on would mean nothing to them."""
    for name, folder in folders.items():
        if not (folder is None or cluster.shares_files or folder.is_absolute()):
            raise ConfigError(
                f"--{name} {folder} is relative, and the ranks do not run in this folder: give the "
                "path as the ranks see it, from / on"
            )


def _environment(recipe: Recipe, run: Run, cluster: Cluster | None) -> dict[str, str]:
    """What the ranks need; on this machine the caller's own values win."""
    wanted, layout = dict(recipe.environment), Layout.of(run.arguments, None)
    if run.training.use_torch_fsdp2 or run.training.use_megatron_fsdp:
        wanted.pop(_CONNECTIONS, None)  # Megatron's check refuses 1 with them, and demands 1 below
    elif max(layout.tp, layout.cp) > 1:
        wanted = {_CONNECTIONS: "1"} | wanted
    if cluster is not None:
        return wanted
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def dry_run(job: Job) -> Command:
    """The torchrun command of NeMo-Run's own dry run; nothing is started.

    NeMo-Run hands torchrun a script file that does nothing but execute ``job.command``; the file
    is gone after a dry run, so its one command stands in its place here.

    Raises:
        MissingDependencyError: NeMo-Run is not installed.
        ConfigError: torchrun cannot be found, or NeMo-Run's home folder has an unusable name.
    """
    with _experiment(job, mark="dry-run") as experiment:
        experiment.dryrun(log=False)
        request = experiment.jobs[0]._dryrun_info.request
    (replica,) = request.role_params[TASK]
    *torchrun, _script = replica.args
    return Command(
        words=(*torchrun, *job.command),
        environment={k: v for k, v in replica.env.items() if k != MARK},
        folder=Path(replica.cwd or os.getcwd()),
    )


def launch(
    job: Job,
    *,
    on_step: Callable[[Step], None] | None = None,
    stop: threading.Event | None = None,
) -> LaunchResult:
    """Run a job on this machine to its end.

    Several may run at a time, each in a thread of its own.

    Args:
        job: from :func:`prepare`.
        on_step: called in this thread with each progress line of Megatron's, soon after it.
        stop: ends the job as Ctrl-C does, which only the main thread hears.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM, a closed terminal or ``stop``; every rank has been
            stopped.
        MissingDependencyError: NeMo-Run is not installed.
        ConfigError: torchrun cannot be found, or NeMo-Run's home folder has an unusable name.
    """
    mark = uuid.uuid4().hex
    last_step = None
    # the guard is inside: leaving the experiment waits for the ranks
    with interruptible(), _experiment(job, mark=mark) as experiment, guarded(mark):
        start = time.monotonic()
        experiment.run()
        info = experiment.status(return_dict=True)[TASK]
        logs = Path(info["local_dir"], "nemo_run", info["job_id"])
        launcher, rank_logs = logs / TASK / "0", logs / "torchelastic" / TASK
        announce(f"{job.output or job.recipe.name}: log of all ranks: {launcher / _LOG}")
        for step in _follow(experiment, launcher / "stdout.log", mark, stop):
            last_step = step
            if on_step is not None:
                on_step(step)
        status = _status(experiment, mark).lower()
        seconds = time.monotonic() - start
    return LaunchResult(
        status=status,
        seconds=seconds,
        log=launcher / _LOG,
        rank_logs=rank_logs,
        last_step=last_step,
        failure=None if status == "succeeded" else find_failure(launcher, rank_logs),
    )


def find_torchrun() -> str | None:
    """The torchrun that starts the ranks: this environment's, or else the one on PATH."""
    return shutil.which("torchrun", path=f"{_binaries()}{os.pathsep}{os.environ.get('PATH', '')}")


def _binaries() -> str:
    """Where this environment's commands are, whether or not it has been activated."""
    return str(Path(sys.executable).parent)


def experiment_name(recipe: Recipe) -> str:
    """The recipe's name as NeMo-Run can make a folder of it."""
    return recipe.name.replace("/", "-")


def nemo_run() -> ModuleType:
    """The package, imported.

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
            f"nemo-run is installed but cannot be imported ({error}): "
            "run `pip install 'kha-megatron[launch]'`, which pins what it needs"
        ) from error
    return nemo_run


def script_of(job: Job) -> str:
    """The shell command that each rank executes."""
    return f"exec {shlex.join(job.command)}\n"


def task_of(job: Job) -> Any:
    """The job as NeMo-Run's task.

    Inline, and not ``Script(path=..., args=...)``: NeMo-Run passes the arguments of a path through
    shells, or not, by executor. On this machine it quotes them for a shell and then uses none, so
    that one with a space or a bracket would reach Megatron with its quotes.
    """
    return nemo_run().Script(inline=script_of(job), entrypoint="bash")


def experiment_of(job: Job, executor: Any) -> Any:
    """NeMo-Run's experiment for the job, without tasks; it says as little as it can."""
    return nemo_run().Experiment(
        experiment_name(job.recipe),
        executor=executor,
        log_level="WARNING",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    )


def check_scripts_folder(folder: str) -> None:
    """NeMo-Run writes the path of its scripts into shell commands without quotes.

    Args:
        folder: where they lie on the machine that starts them.

    Raises:
        ConfigError: a shell would not read the path as it is.
    """
    if shlex.quote(folder) != folder:
        raise ConfigError(
            f"NeMo-Run cannot start a script in {folder}: set NEMORUN_HOME, or --folder of a "
            "--host, to a folder whose path has no spaces or shell characters"
        )


@contextmanager
def _experiment(job: Job, *, mark: str) -> Iterator[Any]:
    """A NeMo-Run experiment with the job as its only task, not yet started."""
    if find_torchrun() is None:
        raise ConfigError(
            f"torchrun is neither in {_binaries()} nor on PATH: run kha-megatron from the "
            "environment in which PyTorch is installed"
        )
    executor = nemo_run().LocalExecutor(
        launcher="torchrun",
        ntasks_per_node=job.ranks,
        # the scheduler puts PATH in front of the caller's
        env_vars={**job.environment, "PATH": _binaries(), MARK: mark},
    )
    with experiment_of(job, executor) as experiment:
        experiment.add(task_of(job), name=TASK)
        check_scripts_folder(experiment.jobs[0].executor.job_dir)
        yield experiment


def _follow(experiment: Any, log: Path, mark: str, stop: threading.Event | None) -> Iterator[Step]:
    """Progress lines as they are written, until the run has finished."""
    with log.open("rb") as file:
        finished = False
        while not finished:
            finished = _status(experiment, mark) in _FINISHED  # before reading: nothing is missed
            yield from (step for line in new_lines(file) if (step := parse_step(line)))
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
            if not finished:
                time.sleep(_POLL_SECONDS)


def _status(experiment: Any, mark: str) -> str:
    """Name of the task's state; UNKNOWN if NeMo-Run lost sight of a run that is over."""
    state = experiment.status(return_dict=True)[TASK]["status"].name
    if state not in (*_FINISHED, "RUNNING") and not marked(mark):
        return "UNKNOWN"
    return state
