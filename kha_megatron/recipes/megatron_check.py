"""Check the arguments of a job with Megatron's own parser before it waits in a queue."""

import os
import subprocess
import sys
from importlib.util import find_spec

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.recipes.prepare import Job

_CHECK = "kha_megatron.training.check"
_TRAINING = "kha_megatron.training"


def check_with_megatron(job: Job) -> None:
    """Parse and validate the arguments of a job with Megatron, in another process.

    This takes several seconds. Does nothing if Megatron is not installed on this machine. In a
    container, Megatron may have another version, so we only log a warning.

    Raises:
        ConfigError: If Megatron would refuse the arguments.
    """
    if job.recipe.entry != _TRAINING:
        return
    if not _has_megatron():
        announce("Megatron is not installed here. Its arguments are checked when the job starts.")
        return
    first_argument = job.command.index(_TRAINING) + 1
    words = list(job.command[first_argument:])
    environment = {**os.environ, **job.environment, "WORLD_SIZE": str(job.ranks)}
    exit_code, output = _run_check(words, environment)
    lines = output.strip().splitlines()
    if exit_code == 0 or not lines:
        return
    mistake = lines[-1].removeprefix("error: ")
    is_in_container = job.slurm is not None and job.slurm.image is not None
    if exit_code == 2 and not is_in_container:
        raise ConfigError(mistake)
    announce(f"WARNING: Megatron's check of the arguments failed: {mistake}")


def _has_megatron() -> bool:
    # find_spec raises ModuleNotFoundError if the parent of a module is missing
    modules = ("torch", "megatron", "megatron.training")
    return all(find_spec(module) is not None for module in modules)


def _run_check(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Return the exit code and the standard error of the check."""
    check = subprocess.run(
        [sys.executable, "-m", _CHECK, *words],
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return check.returncode, check.stderr
