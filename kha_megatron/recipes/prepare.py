"""Turn a recipe into a job: build the command line of its ranks and check it.

The checks need only the command line and the file system, so that a mistake costs no time in a
queue.
"""

import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.ownership import has_files, owned
from kha_megatron.checkpoint.tracker import select_checkpoint
from kha_megatron.data import check_data, lacks_vocabulary
from kha_megatron.errors import CheckpointError, ConfigError, OutputError
from kha_megatron.model.rules import check_arguments, check_attention
from kha_megatron.model.run import Run
from kha_megatron.recipes.recipe import CHECKPOINTS, Recipe

SUBMISSION = "submission.json"
"""File in the output directory with the ids of the submitted Slurm jobs."""

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_OTHER_CHECKPOINT = (
    *("kha_upcycle", "use_checkpoint_args"),
    *("--ckpt-step", "--non-persistent-ckpt-type"),
)
"""Arguments with which only the ranks can compare the mechanisms of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Resources and options of a Slurm job."""

    time: str
    """Time limit, ``[DAYS-]HH:MM:SS``. The run saves a checkpoint and exits before it."""
    nodes: int = 1
    gpus: int = 8
    """Ranks per node."""
    image: str | None = None
    """Container image. None uses this machine's environment from a shared disk."""
    mounts: tuple[str, ...] = ()
    """``HOST_PATH:CONTAINER_PATH``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks in addition to the recipe's."""
    partition: str | None = None
    account: str | None = None
    retries: int = 0
    """How often Slurm requeues a failed job."""
    chain: int = 1
    """Jobs in a row; each continues from the checkpoint of the one before."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Fields of NeMo-Run's ``SlurmExecutor``, as text or JSON."""

    def arguments(self) -> dict[str, Any]:
        """Return the Megatron arguments that make the run save and exit before the time limit.

        A tenth of the limit, at most 15 minutes, is left for the checkpoint.

        Raises:
            ConfigError: ``time`` has another format.
        """
        found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", self.time)
        if found is None:
            raise ConfigError(f"Expected --time as HH:MM:SS or DAYS-HH:MM:SS, got {self.time!r}.")
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        limit = days * 1440 + hours * 60 + minutes + seconds / 60
        usable = limit - min(15, math.ceil(limit / 10))
        return {"exit_duration_in_mins": int(usable)} if usable >= 1 else {}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked run."""

    recipe: Recipe
    command: tuple[str, ...]
    """Words that each rank executes, the Python interpreter first."""
    ranks: int
    environment: Mapping[str, str]
    output: Path | None
    device: str
    """``cuda`` or ``cpu``."""
    slurm: Slurm | None = None
    """None runs on this machine."""
    resume: bool = False
    """Whether the job continues an earlier one in ``output``."""

    @property
    def title(self) -> str:
        """Title of the progress report."""
        return f"{self.recipe.name} on {self.ranks} ranks"

    @property
    def script(self) -> str:
        """The shell script that each rank executes."""
        return f"exec {shlex.join(self.command)}\n"


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
) -> Job:
    """Build and check a job without starting anything.

    Args:
        data: directory made by ``kha-megatron data prepare``.
        output: directory for checkpoints and TensorBoard files; empty or new unless ``resume``.
        overrides: Megatron arguments that replace the recipe's.
        ranks: processes on this machine. ``slurm`` has its own number.
        device: ``cuda`` or ``cpu``.
        resume: continue from the last checkpoint in ``output``.
        remote: run on machines with other files. As with ``slurm``, a restarted job loads its own
            last checkpoint.

    Raises:
        ConfigError: arguments that do not fit together, or a relative path for a container.
        DataError: dataset or tokenizer are missing.
        OutputError: the output directory is in use.
        CheckpointError: ``resume`` without a complete checkpoint.
    """
    values = {"device": device} if device else {}
    restarts = remote or slurm is not None
    if slurm is not None:
        values |= slurm.arguments()
        ranks, remote = slurm.nodes * slurm.gpus, slurm.image is not None
    ranks = recipe.ranks if ranks is None else ranks
    for name, path in {"data": data, "output": output}.items():
        if remote and path is not None and not path.is_absolute():
            raise ConfigError(f"Expected --{name} as an absolute path in the image, got {path}.")

    run = recipe.run_for(overrides, data=data, output=output, **values)
    save, load = run.training.save, run.training.load
    if resume and save is None:
        raise ConfigError("Expected --output with --resume: the directory of the earlier run.")
    if restarts and load not in (None, save):
        raise ConfigError(f"A restarted job would load --load {load} again. Use --resume.")
    step = run.arguments.get("--ckpt-step")
    if step and slurm is not None and (slurm.chain > 1 or slurm.retries):
        raise ConfigError(
            f"--ckpt-step {' '.join(step)} cannot be combined with --chain or --retries, "
            "because every job would start from that iteration and overwrite the checkpoints of "
            "the previous one. Submit one job with --ckpt-step first."
        )
    defaults: dict[str, Any] = {}
    if restarts or resume or run.training.kha_upcycle:  # an empty directory starts from scratch
        defaults["load"] = save
    if lacks_vocabulary(run.arguments):  # mock data has as many tokens as the recipe's tokenizer
        defaults["vocab_size"] = run.vocab_size
    run = run.with_defaults(**defaults)
    entry = (recipe.entry,) if recipe.entry.endswith(".py") else ("-m", recipe.entry)
    command = ("python" if remote else sys.executable, "-u", *entry, *run.words())

    for word in run.dropped:
        announce(f"{recipe.name} leaves out its {word}")
    check_attention(run.arguments, run.kha)
    check_arguments(run.arguments, ranks, run.kha)
    check_data(run.arguments, look=not remote)
    if not remote:
        _check_directories(run, load or (save if resume else None), output, resume=resume)
    return Job(
        recipe=recipe,
        command=command,
        ranks=ranks,
        environment=_environment(recipe, run, override=restarts),
        output=output,
        device=run.training.device,
        slurm=slurm,
        resume=resume or load is not None,
    )


def _check_directories(run: Run, load: str | None, output: Path | None, *, resume: bool) -> None:
    """Check that no directory is overwritten and that the checkpoint to load is complete."""
    source = Path(load).absolute() if load else None
    if source is not None:
        _check_checkpoint(source, run)
    targets = [output, Path(run.training.save) if run.training.save else None]
    for target in dict.fromkeys(path.absolute() for path in targets if path is not None):
        if has_files(target) and not (resume or target == source):
            raise OutputError(f"{target} is not empty. Choose another --output, or add --resume.")


@contextmanager
def owned_output(job: Job) -> Iterator[None]:
    """Own a job's output directory while the job runs or is being submitted.

    Raises:
        OutputError: If another process owns the directory, or used it after :func:`prepare_job`.
    """
    if job.output is None or (job.slurm is not None and job.slurm.image is not None):
        yield  # the directory may exist only inside the container
        return
    with owned(job.output):
        used = any((job.output / name).exists() for name in (CHECKPOINTS, SUBMISSION))
        if used and not job.resume:
            raise OutputError(
                f"Another launch has used {job.output} in the meantime. Choose another --output, "
                "or add --resume."
            )
        yield


def _check_checkpoint(directory: Path, run: Run) -> None:
    """Check that a directory has a complete checkpoint with the run's head mechanisms.

    Without a complete checkpoint, Megatron would start from random weights.
    """
    verdict = select_checkpoint(directory) if directory.is_dir() else None
    if verdict and verdict.newest:
        if not any(run.arguments.get(name) for name in _OTHER_CHECKPOINT):
            from kha_megatron.checkpoint.megatron import MegatronCheckpoint  # imports torch
            from kha_megatron.model.recorded import check_same_heads, read_kha_config

            checkpoint = MegatronCheckpoint.open(verdict.newest, verify=False)
            check_same_heads(verdict.newest, read_kha_config(checkpoint), run.kha)
    elif not (verdict and verdict.named and run.training.ckpt_format != "torch_dist"):
        # other formats than torch_dist have only Megatron's tracker file, which is trusted
        raise CheckpointError(
            f"{directory} holds no complete checkpoint. Start again in an empty --output, without "
            "--resume."
        )


def _environment(recipe: Recipe, run: Run, *, override: bool) -> dict[str, str]:
    """Return the ranks' variables. Unless ``override`` is set, the caller's own values win."""
    variables, layout = dict(recipe.environment), run.layout(None)
    if run.training.use_torch_fsdp2 or run.training.use_megatron_fsdp:
        variables.pop(_CONNECTIONS, None)  # Megatron refuses 1 with FSDP, and requires it below
    elif max(layout.tp, layout.cp) > 1:
        variables = {_CONNECTIONS: "1"} | variables
    return variables if override else {n: os.environ.get(n, v) for n, v in variables.items()}
