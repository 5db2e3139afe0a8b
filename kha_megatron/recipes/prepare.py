"""Turn a recipe into a job, and check it before it is started or submitted.

All checks work on the command line and the file system alone. This way, you notice mistakes right
away, not after hours in a queue.
"""

import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.ownership import has_files, owned
from kha_megatron.checkpoint.tracker import RELEASE, iteration_of, newest, select_iteration
from kha_megatron.data import CORPUS, check_data, check_same_tokenizer, lacks_data, lacks_vocabulary
from kha_megatron.errors import CheckpointError, ConfigError, OutputError, show_value
from kha_megatron.model.rules import check_arguments, check_attention, check_optimizer_package
from kha_megatron.model.run import Run
from kha_megatron.recipes.gpu import gpu_environment, read_compute_capability, required_connections
from kha_megatron.recipes.recipe import CHECKPOINTS, INDICES, Recipe

SUBMISSION = "submission.json"
"""File in the output directory that records the Slurm job IDs."""

_OTHER_CHECKPOINT_ARGUMENTS = (
    "kha_upcycle",
    "use_checkpoint_args",
    "--ckpt-step",
    "--non-persistent-ckpt-type",
)
"""Skip our checks of the checkpoint if any of these is set."""
_NODE_LOCAL_DIRECTORIES = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/run"))
"""Directories that nodes of a cluster do not share."""
_SCHEDULE_ARGUMENTS = ("lr", "min_lr", "lr_decay_style", "train_iters", "global_batch_size")
_REPLACES_SCHEDULE = re.compile(
    "--(override|use-checkpoint)-opt[-_]param-scheduler|--finetune|--no-load-optim"
)
"""Skip our check of the learning rate schedule if any of these is set."""

_MINUTES_PER_DAY = 24 * 60
_MAX_SAVING_MINUTES = 15
_MAX_SAVING_FRACTION = 0.1
"""How much of a time limit is reserved for saving a checkpoint: the smaller one of these two."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Options of a Slurm job."""

    time: str
    """Time limit, ``[DAYS-]HH:MM:SS``. The run saves a checkpoint and exits before it."""
    nodes: int = 1
    gpus: int = 8
    """Number of ranks per node."""
    image: str | None = None
    """Container image. If None, jobs use the current Python environment. In that case, it has to be
    on a shared file system."""
    mounts: tuple[str, ...] = ()
    """Container mounts, ``HOST_PATH:CONTAINER_PATH``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Extra environment variables for the ranks."""
    partition: str | None = None
    account: str | None = None
    retries: int = 0
    """How often to requeue a job after a failure or at its time limit. Preemptions do not count."""
    chain: int = 1
    """Number of jobs to run one after another. Each resumes from the previous checkpoint."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Other fields of NeMo-Run's ``SlurmExecutor`` (strings or JSON)."""

    def arguments(self) -> dict[str, Any]:
        """Return Megatron arguments that make the run save and exit in time.

        It exits before the time limit, and after SIGTERM, which Slurm sends before a preemption.

        Raises:
            ConfigError: If ``time`` is malformed.
        """
        limit_minutes = _parse_minutes(self.time)
        saving_minutes = math.ceil(limit_minutes * _MAX_SAVING_FRACTION)
        saving_minutes = min(_MAX_SAVING_MINUTES, saving_minutes)
        training_minutes = int(limit_minutes - saving_minutes)
        arguments: dict[str, Any] = {"exit_signal_handler": True}
        if training_minutes >= 1:
            arguments["exit_duration_in_mins"] = training_minutes
        return arguments


def _parse_minutes(time_limit: str) -> float:
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", time_limit)
    if match is None:
        raise ConfigError(f"--time must be HH:MM:SS or DAYS-HH:MM:SS, got {time_limit!r}.")
    days, hours, minutes, seconds = map(int, match.groups(default="0"))
    return days * _MINUTES_PER_DAY + hours * 60 + minutes + seconds / 60


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe that is ready to run. Create it with :func:`prepare_job`."""

    recipe: Recipe
    run: Run
    """The recipe's run with paths and overrides filled in."""
    command: tuple[str, ...]
    """Command to run on each rank: the Python interpreter and its arguments."""
    ranks: int
    environment: Mapping[str, str]
    output: Path | None
    device: str
    """``cuda`` or ``cpu``."""
    slurm: Slurm | None = None
    """None to run on this machine."""
    resume: bool = False
    """Whether the job loads an earlier checkpoint."""

    @property
    def script(self) -> str:
        """Shell script to run on each rank."""
        return f"exec {shlex.join(self.command)}\n"

    @property
    def stopped_at(self) -> int | None:
        """Iteration of the last checkpoint. None if the run is complete or has no checkpoint."""
        training = self.run.training
        if not training.save or not training.train_iters:
            return None
        checkpoint = newest(Path(training.save))
        if checkpoint is None:
            return None
        iteration = iteration_of(checkpoint)
        if not iteration or iteration >= training.train_iters:
            return None
        return iteration


def prepare_job(
    recipe: Recipe,
    *,
    data: Path | None = None,
    output: Path | None = None,
    overrides: Sequence[str] = (),
    ranks: int | None = None,
    device: str | None = None,
    resume: bool = False,
    slurm: Slurm | None = None,
    remote: bool = False,
    dry_run: bool = False,
) -> Job:
    """Build a job from a recipe, and check its arguments, data and directories.

    This does not start anything. See :func:`launch_job` and :func:`submit`.

    Args:
        data: Directory written by ``kha-megatron data prepare``.
        output: Directory for checkpoints and TensorBoard files. Unless ``resume`` is set, it must
            not contain any files yet.
        overrides: Megatron arguments that take precedence over the recipe's.
        ranks: Number of processes. Ignored if ``slurm`` is set.
        device: ``cuda`` or ``cpu``.
        resume: Resume from the last checkpoint in ``output``.
        remote: Set this if the ranks cannot access the local file system. Like a Slurm job, the job
            resumes from its own last checkpoint when it is restarted.
        dry_run: The job will not be started, so it does not need any data yet.

    Raises:
        ConfigError: If arguments are inconsistent, or a path on a remote machine is relative.
        DataError: If the dataset or tokenizer is missing.
        OutputError: If the output directory is not empty.
        CheckpointError: If ``resume`` is set and there is no complete checkpoint.
    """
    values: dict[str, Any] = {}
    if device:
        values["device"] = device
    if slurm is not None:
        _check_mounts(slurm)
        values |= slurm.arguments()
        ranks = slurm.nodes * slurm.gpus
    elif ranks is None:
        ranks = recipe.ranks
    may_restart = remote or slurm is not None
    lacks_local_files = remote or (slurm is not None and slurm.image is not None)
    if lacks_local_files:
        _check_is_absolute("--data", data)
        _check_is_absolute("--output", output)

    run = recipe.run_for(overrides, data=data, output=output, **values)
    run = fit_micro_batch(recipe, run, ranks)
    user_load = run.training.load  # before the defaults below fill it in
    _check_resuming(run, slurm, resume=resume, may_restart=may_restart)
    defaults = _default_arguments(
        run,
        data,
        output,
        loads_own_checkpoint=may_restart or resume,
        lacks_local_files=lacks_local_files,
    )
    run = run.with_defaults(**defaults).as_hybrid()
    for word in run.dropped:
        announce(f"Dropping {word} (recipe {recipe.name})")
    check_attention(run.arguments, run.kha)
    check_arguments(run.arguments, ranks, run.kha)
    if dry_run and lacks_data(run.arguments):
        announce("No training data given. To run this job, add --data DIR (or -- --mock-data).")
    else:
        check_data(run.arguments, read_files=not lacks_local_files)
    if not lacks_local_files:
        check_optimizer_package(run.training.optimizer)
        if not dry_run:
            check_shared_paths(slurm, run.words())
        loaded_directory = user_load
        if resume and not user_load:
            loaded_directory = run.training.save
        _check_directories(run, loaded_directory, output, resume=resume)
    python = "python" if lacks_local_files else sys.executable
    return Job(
        recipe=recipe,
        run=run,
        command=_command(recipe, run, python=python),
        ranks=ranks,
        environment=_environment(recipe, run, runs_here=not may_restart),
        output=output,
        device=run.training.device,
        slurm=slurm,
        resume=resume or user_load is not None,
    )


def _check_mounts(slurm: Slurm) -> None:
    for mount in slurm.mounts:
        if slurm.image is None:
            raise ConfigError(f"--mount {mount} has no effect without --container-image.")
        # an optional third part contains flags such as ro
        parts = mount.split(":")
        if len(parts) not in (2, 3) or not all(parts):
            raise ConfigError(f"--mount must have the format HOST:CONTAINER, got {mount!r}.")


def _check_resuming(
    run: Run,
    slurm: Slurm | None,
    *,
    resume: bool,
    may_restart: bool,
) -> None:
    """Check that the job, and its restarts, load the checkpoint that the user wants to continue.

    Args:
        may_restart: Whether the job can be restarted without the user.

    Raises:
        ConfigError: If they would load no checkpoint, or the wrong one.
    """
    save = run.training.save
    load = run.training.load
    if resume and save is None:
        raise ConfigError("--resume requires --output with the directory of the earlier run.")
    if may_restart and load not in (None, save):
        raise ConfigError(
            f"--load {load} is not supported here, because a restarted job would load it again "
            "instead of its own last checkpoint. Use --resume."
        )
    step = run.arguments.get("--ckpt-step")
    if step and slurm is not None and (slurm.chain > 1 or slurm.retries):
        raise ConfigError(
            f"--ckpt-step {' '.join(step)} cannot be combined with --chain or --retries, "
            "because every job would start from that iteration and overwrite the checkpoints of "
            "the previous one. Submit one job with --ckpt-step first."
        )


def _default_arguments(
    run: Run,
    data: Path | None,
    output: Path | None,
    *,
    loads_own_checkpoint: bool,
    lacks_local_files: bool,
) -> dict[str, Any]:
    """Return arguments that are set unless the user has set them.

    Args:
        loads_own_checkpoint: Whether the job continues the last checkpoint in ``output``.
        lacks_local_files: Whether the ranks cannot access the local file system.
    """
    defaults: dict[str, Any] = {}
    if loads_own_checkpoint or run.training.kha_upcycle:  # no effect if the directory is empty
        defaults["load"] = run.training.save
    if data is not None and output is not None:
        has_place_for_indices = not lacks_local_files and _can_write_indices(data)
        if not has_place_for_indices:
            defaults["data_cache_path"] = str(output.absolute() / INDICES)
    if lacks_vocabulary(run.arguments):  # use the vocabulary size of the recipe's tokenizer
        defaults["vocab_size"] = run.vocab_size
    return defaults


def _command(recipe: Recipe, run: Run, *, python: str) -> tuple[str, ...]:
    """Return the command of each rank."""
    words = [python, "-u"]
    if not recipe.entry.endswith(".py"):
        words.append("-m")
    return (*words, recipe.entry, *run.words())


def fit_micro_batch(recipe: Recipe, run: Run, ranks: int) -> Run:
    """Reduce the recipe's micro batch size if each replica has fewer sequences than that.

    Recipes have the largest micro batch size that fits in the memory of their default number of
    GPUs. The global batch size does not depend on the number of GPUs. The user's own
    ``--micro-batch-size`` is not changed.
    """
    batch = run.batch
    argument = run.explicit.get("micro_batch_size")
    argument_of_recipe = recipe.run.explicit.get("micro_batch_size")
    is_from_recipe = argument is argument_of_recipe  # the user can pass an equal one
    if not is_from_recipe or batch is None or batch.global_batch_size is None:
        return run
    replicas = run.layout(ranks).dp
    if replicas == 0 or batch.global_batch_size % replicas:
        # refused later, because no micro batch size would help
        return run.updated(micro_batch_size=1)
    sequences = batch.global_batch_size // replicas
    size = math.gcd(sequences, batch.micro_batch_size)
    if size == batch.micro_batch_size:
        return run
    announce(
        f"Reducing --micro-batch-size from {batch.micro_batch_size} to {size}, because each of "
        f"{replicas} replicas gets {sequences} sequences of the global batch."
    )
    return run.updated(micro_batch_size=size)


def _check_is_absolute(flag: str, path: Path | None) -> None:
    if path is not None and not path.is_absolute():
        raise ConfigError(f"{flag} must be an absolute path in the container, got {path}.")


def check_shared_paths(slurm: Slurm | None, words: Iterable[str]) -> None:
    """Raise ConfigError if a job on several nodes uses a path that only exists on this machine.

    Args:
        words: Words of a command line. Only absolute paths are checked.
    """
    if slurm is None or slurm.nodes == 1 or slurm.image is not None:
        return
    for word in words:
        if not word.startswith("/"):
            continue
        path = Path(word)
        for directory in _NODE_LOCAL_DIRECTORIES:
            if path.is_relative_to(directory) or path.resolve().is_relative_to(directory):
                raise ConfigError(
                    f"{path} cannot be used with --nodes {slurm.nodes}, because every node has its "
                    f"own {directory}. Use a directory that all nodes share."
                )


def _can_write_indices(directory: Path) -> bool:
    """Whether Megatron can write its indices of the samples next to the data."""
    indices = directory / CORPUS / "cache" / "GPTDataset_indices"
    for path in (indices, *indices.parents):
        if path.exists():
            return os.access(path, os.W_OK | os.X_OK)
    return False


def _check_directories(
    run: Run,
    load: str | None,
    output: Path | None,
    *,
    resume: bool,
) -> None:
    """Check that we do not overwrite an earlier run or load an incomplete checkpoint."""
    loaded_directory = None
    if load:
        loaded_directory = Path(load).absolute()
        _check_checkpoint(loaded_directory, run)
    if resume:
        return
    targets = []
    if output is not None:
        targets.append(output.absolute())
    if run.training.save:
        targets.append(Path(run.training.save).absolute())
    for target in targets:
        if target != loaded_directory and has_files(target):
            raise OutputError(f"{target} is not empty. Choose another --output, or add --resume.")


@contextmanager
def owned_output(job: Job) -> Iterator[None]:
    """Lock the output directory of a job while it is running or being submitted.

    Raises:
        OutputError: If another process holds the lock, or has used the directory since
            :func:`prepare_job`.
    """
    if job.output is None or (job.slurm is not None and job.slurm.image is not None):
        yield  # the directory may exist only inside the container
        return
    with owned(job.output):
        is_used = any((job.output / name).exists() for name in (CHECKPOINTS, SUBMISSION))
        if is_used and not job.resume:
            raise OutputError(
                f"Another launch has used {job.output} in the meantime. Choose another --output, "
                "or add --resume."
            )
        yield


def _check_checkpoint(directory: Path, run: Run) -> None:
    """Check that there is a complete checkpoint that ``run`` can continue.

    Megatron itself would silently start from random weights if there is no complete checkpoint.
    """
    selection = select_iteration(directory) if directory.is_dir() else None
    if selection is not None and selection.newest is not None:
        loads_other_checkpoint = any(
            run.arguments.get(name) for name in _OTHER_CHECKPOINT_ARGUMENTS
        )
        if not loads_other_checkpoint:
            _check_same_run(selection.newest, run)
        return
    # for other formats than torch_dist, Megatron's tracker file has to be trusted
    is_in_tracker = selection is not None and selection.named is not None
    if not is_in_tracker or run.training.ckpt_format == "torch_dist":
        raise CheckpointError(
            f"There is no complete checkpoint in {directory}. To start a new run, use an empty "
            "--output without --resume."
        )


def _check_same_run(path: Path, run: Run) -> None:
    """Check that a checkpoint has the heads, tensors, tokenizer and schedule of ``run``."""
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint  # imports torch
    from kha_megatron.model import recorded

    checkpoint = MegatronCheckpoint.open(path, verify=False)
    recorded.check_same_heads(path, recorded.read_kha_config(checkpoint), run.kha)
    recorded.check_same_tensors(path, checkpoint.args, run.arguments)
    check_same_tokenizer(path, checkpoint.args, run.arguments)
    replaces_schedule = any(_REPLACES_SCHEDULE.fullmatch(name) for name in run.arguments)
    if path.name != RELEASE and not replaces_schedule:
        _check_schedule(path, checkpoint.args, run)


def _check_schedule(path: Path, saved: Mapping[str, Any], run: Run) -> None:
    if saved.get("no_save_optim"):
        return
    for name in _SCHEDULE_ARGUMENTS:
        saved_value = saved.get(name)
        value = run.arguments.get(name)
        if saved_value is None or value is None or saved_value == value:
            continue
        raise CheckpointError(
            f"{run.explicit[name].flag} is {value}, but {path} was saved with "
            f"{show_value(saved_value)}. Add --override-opt-param-scheduler to use the new value, "
            "or --use-checkpoint-opt-param-scheduler to keep the one in the checkpoint."
        )


def _environment(recipe: Recipe, run: Run, *, runs_here: bool) -> dict[str, str]:
    """Return the environment variables for the ranks.

    Args:
        runs_here: Whether the job runs on this machine. Variables that are already set in the
            current process then take precedence over the recipe's.
    """
    if run.training.device == "cuda":
        # jobs on other machines are prepared without their GPUs
        compute_capability = read_compute_capability() if runs_here else None
        defaults = gpu_environment(run, compute_capability)
    else:
        defaults = required_connections(run, None)
    variables = {**defaults, **recipe.environment}
    if runs_here:
        for name in variables.keys() & os.environ.keys():
            variables[name] = os.environ[name]
    return variables
