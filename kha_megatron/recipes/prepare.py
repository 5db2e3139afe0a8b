"""Turn a recipe into a job: add its paths, and refuse what the ranks would refuse.

Only the command line and the file system are needed, so that a mistake costs no time in a queue.
"""

import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.tracker import judge
from kha_megatron.data import check_data, lacks_vocabulary
from kha_megatron.errors import CheckpointError, ConfigError, OutputError
from kha_megatron.model.layout import Layout
from kha_megatron.model.rules import check_arguments, check_attention
from kha_megatron.model.run import Run, as_arguments
from kha_megatron.recipes.recipe import Recipe

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_OTHER_CHECKPOINT = (
    *("kha_upcycle", "use_checkpoint_args"),
    *("--ckpt-step", "--non-persistent-ckpt-type"),
)
"""Arguments with which the ranks compare the mechanisms of the checkpoint themselves."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Resources and options of a Slurm job."""

    time: str
    """Time limit, ``[DAYS-]HH:MM:SS``. The run saves and exits before it."""
    nodes: int = 1
    gpus: int = 8
    """Ranks per node, one per GPU."""
    image: str | None = None
    """Container image of the ranks. None runs this machine's environment from a shared disk."""
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

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.gpus

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

    @property
    def title(self) -> str:
        """What a progress report calls the job."""
        return f"{self.recipe.name} on {self.ranks} ranks"

    @property
    def script(self) -> str:
        """The shell script that each rank executes."""
        return f"exec {shlex.join(self.command)}\n"


def prepare(
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
    """Check a run without starting anything.

    Args:
        recipe: what to train.
        data: directory made by ``kha-megatron data prepare``.
        output: directory for checkpoints and TensorBoard files; empty or new unless ``resume``.
        overrides: Megatron arguments that replace the recipe's.
        ranks: processes on this machine; None uses the recipe's number. ``slurm`` has its own.
        device: ``cuda`` or ``cpu``; None uses the recipe's.
        resume: continue from the last checkpoint in ``output``.
        slurm: run on Slurm, where a restarted job loads its own last checkpoint.
        remote: the ranks see other files, as in a container: paths must be absolute and are not
            checked. A restarted job loads its own last checkpoint.

    Raises:
        ConfigError: arguments that do not fit together, or a relative path for a container.
        DataError: dataset or tokenizer are missing.
        OutputError: the output directory is in use or cannot be written.
        CheckpointError: ``resume`` without a complete checkpoint.
    """
    values = {"device": device} if device else {}
    if slurm is not None:
        values |= slurm.arguments()
        ranks = slurm.ranks
        remote = slurm.image is not None
    for name, path in {"data": data, "output": output}.items():
        if remote and path is not None and not path.is_absolute():
            raise ConfigError(f"Expected --{name} as an absolute path in the image, got {path}.")
    run = recipe.run_for(overrides, data=data, output=output, **values)
    if lacks_vocabulary(run.arguments) and run.vocab_size:  # mock data with the recipe's tokens
        run = replace(run, given=as_arguments(vocab_size=run.vocab_size) | dict(run.given))
    if resume and run.files.save is None:
        raise ConfigError("Expected --output with --resume: the directory of the earlier run.")
    ranks = recipe.ranks if ranks is None else ranks
    check_attention(run.arguments, run.kha)
    check_arguments(run.arguments, ranks, run.kha)
    check_data(run.arguments, look=not remote)
    if not remote:
        _check_directories(run, output, resume=resume)
    if remote or slurm is not None:
        if run.files.load not in (None, run.files.save):
            raise ConfigError(
                f"Expected no --load {run.files.load}: a restarted job would load it again. Use "
                "--output with --resume, or --pretrained-checkpoint."
            )
        run = run.loading()  # Megatron starts from scratch if the directory is empty
    elif resume or run.training.kha_upcycle:
        run = run.loading()
    for word in run.dropped:
        announce(f"{recipe.name} leaves out its {word}")
    target = (recipe.entry,) if recipe.entry.endswith(".py") else ("-m", recipe.entry)
    return Job(
        recipe=recipe,
        command=("python" if remote else sys.executable, "-u", *target, *run.words()),
        ranks=ranks,
        environment=_environment(recipe, run, keep=slurm is None and not remote),
        output=output,
        device=run.training.device,
        slurm=slurm,
    )


def _check_directories(run: Run, output: Path | None, *, resume: bool) -> None:
    """Check that nothing is overwritten, and that a checkpoint to load is complete."""
    save = Path(run.files.save).absolute() if run.files.save else None
    load = Path(run.files.load).absolute() if run.files.load else save if resume else None
    if load:
        _check_checkpoint(load, run)
    for folder in dict.fromkeys(f for f in (output and output.absolute(), save) if f):
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"Expected --output as a directory, but {folder} is a file.")
        if folder.is_dir() and any(folder.iterdir()) and not (resume or folder == load):
            raise OutputError(f"{folder} is not empty. Choose another --output, or add --resume.")
        parent = next(p for p in (folder, *folder.parents) if p.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise OutputError(f"{parent} cannot be written. Choose another --output.")


def _check_checkpoint(folder: Path, run: Run) -> None:
    """Check that there is something to load (Megatron would start from random weights) and that
    it has the run's mechanisms."""
    verdict = judge(folder) if folder.is_dir() else None
    if verdict and verdict.newest:
        if not any(run.arguments.get(name) for name in _OTHER_CHECKPOINT):
            from kha_megatron.checkpoint.megatron import MegatronCheckpoint  # imports torch
            from kha_megatron.model.recorded import check_same_heads, kha_of

            checkpoint = MegatronCheckpoint.open(verdict.newest, verify=False)
            shapes = {key: info.shape for key, info in checkpoint.keys().items()}
            check_same_heads(verdict.newest, kha_of(checkpoint), shapes, run.arguments, run.kha)
        return
    # only torch_dist has our commit mark; for other formats Megatron's tracker file is trusted
    if not (verdict and verdict.named and run.training.ckpt_format != "torch_dist"):
        raise CheckpointError(
            f"{folder} holds no complete checkpoint. Start again in an empty --output, without "
            "--resume."
        )


def _environment(recipe: Recipe, run: Run, *, keep: bool) -> dict[str, str]:
    """Return the ranks' variables; with ``keep`` the caller's own values replace them."""
    wanted, layout = dict(recipe.environment), Layout.of(run.arguments, None)
    if run.training.use_torch_fsdp2 or run.training.use_megatron_fsdp:
        wanted.pop(_CONNECTIONS, None)  # Megatron refuses 1 with FSDP, and demands 1 below
    elif max(layout.tp, layout.cp) > 1:
        wanted = {_CONNECTIONS: "1"} | wanted
    return {n: os.environ.get(n, value) if keep else value for n, value in wanted.items()}
