"""Build NeMo-Run's ``SlurmExecutor`` from the options of a Slurm job."""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kha_megatron.errors import ConfigError
from kha_megatron.recipes.batch_script import FIND_FIRST_NODE, run_ranks
from kha_megatron.recipes.launching import import_nemo_run
from kha_megatron.recipes.logs import LINE_PREFIX
from kha_megatron.recipes.prepare import Slurm

_RENDEZVOUS_PORT = "$((10000 + SLURM_JOB_ID % 20000))"
"""Shell expression. Jobs that share a node need different ports, below the ephemeral range."""
_RENDEZVOUS_ID = 29500
_RENDEZVOUS_SETTINGS = "is_host=1,read_timeout=600"
"""Settings of torchrun's rendezvous for several nodes.

``is_host``: every agent opens a store on its node and connects to that of the first node. Otherwise
torchrun compares addresses to find out whether it runs on the first node. ``read_timeout``: wait
for the first node for as long as torchrun waits for the others. The default is one minute.
"""
_SHUTDOWN_SECONDS = 3600
"""How long torchrun waits for the ranks to save a checkpoint after SIGTERM. The default is 30."""

_OPTION_BY_FIELD = {
    "account": "--account",
    "container_image": "--container-image",
    "container_mounts": "--mount",
    "nodes": "--nodes",
    "ntasks_per_node": "--nproc",
    "partition": "--partition",
    "retries": "--retries",
    "time": "--time",
    "torchrun_nproc_per_node": "--nproc",
}
"""Fields that have an option of their own."""
_MANAGED_FIELDS = (
    "array",
    "dependencies",
    "experiment_id",
    "het_group_indices",
    "heterogeneous",
    "job_details",
    "job_dir",
    "launcher",
    "memory_measure",
    "packager",
    "tunnel",
)
"""Fields that cannot be changed, because ranks would be started in another way."""
_CPU_OPTIONS = ("cpus_per_task", "cpus_per_gpu")
_MEMORY_OPTIONS = ("mem", "mem_per_cpu", "mem_per_gpu")


def create_executor(
    slurm: Slurm,
    environment: Mapping[str, str],
    *,
    device: str,
) -> Any:
    """Return the executor of a job.

    GPU jobs get whole nodes, unless the user sets ``exclusive`` or the number of CPUs. On clusters
    whose nodes are shared, they would otherwise get a single CPU core.

    Raises:
        MissingDependencyError: If NeMo-Run is not installed.
        ConfigError: If a field in ``slurm.settings`` is unknown or invalid.
    """
    run = import_nemo_run()
    settings = _parse_settings(slurm.settings, run.SlurmExecutor)
    user_srun_args = settings.pop("srun_args", None) or []
    executor_fields: dict[str, Any] = {
        "account": slurm.account,
        "partition": slurm.partition,
        "time": slurm.time,
        "nodes": slurm.nodes,
        "ntasks_per_node": slurm.gpus,
        "container_image": slurm.image,
        "container_mounts": list(slurm.mounts),
        "packager": run.Packager(),
        "tunnel": run.LocalTunnel(job_dir=""),  # use NeMo-Run's home directory
        "poll_estimated_start_time": False,  # would be printed on stdout
    }
    if slurm.account is None:  # otherwise part of the job name
        executor_fields["job_name_prefix"] = "kha-megatron."
    if slurm.chain > 1:  # start the next job even if the previous one failed
        executor_fields["dependency_type"] = "afterany"
    executor_fields |= settings
    executor_fields |= _choose_environment(slurm, environment, settings)
    executor_fields |= _choose_resources(slurm, executor_fields, device=device)
    if executor_fields.get("exclusive") is False:  # NeMo-Run would write --exclusive=False
        del executor_fields["exclusive"]
    srun_args = [*_choose_srun_args(executor_fields), *user_srun_args]
    if srun_args:
        executor_fields["srun_args"] = srun_args
    try:
        executor = run.SlurmExecutor(**executor_fields)
    except Exception as error:  # NeMo-Run does not define exception types
        raise ConfigError(f"Could not create a Slurm executor: {error}") from error
    add_protection(executor, slurm)
    return executor


def _choose_environment(
    slurm: Slurm,
    environment: Mapping[str, str],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fields of the executor that set environment variables of the ranks.

    Variables of ``--env`` take precedence over those of ``--set env_vars``, and both over those of
    the recipe. The user's ``setup_lines`` come first, since e.g. ``module load`` changes the PATH.
    """
    variables = {**environment, **settings.get("env_vars", {}), **slurm.environment}
    _check_variables(variables)
    setup_lines = []
    if settings.get("setup_lines"):
        setup_lines.append(settings["setup_lines"])
    # NeMo-Run does not quote values in `export NAME=value`, and changes names to upper case
    env_vars = {}
    for name, value in variables.items():
        quoted = shlex.quote(value)
        if name.isupper():
            env_vars[name] = quoted
        else:
            setup_lines.append(f"export {name}={quoted}")
    executor_fields: dict[str, Any] = {"env_vars": env_vars}
    if slurm.image is None:
        binaries = shlex.quote(str(Path(sys.executable).parent))
        setup_lines.append(f"export PATH={binaries}:$PATH")
    elif variables:  # by default, variables of the container image take precedence
        container_env = settings.get("container_env") or []
        executor_fields["container_env"] = [*container_env, *variables]
    executor_fields["setup_lines"] = "\n".join(setup_lines)
    return executor_fields


def add_protection(executor: Any, slurm: Slurm) -> None:
    """Let jobs share nodes, find the first node, and save before they are preempted.

    Sets the launcher of ``executor``, and adds environment variables and setup lines.
    """
    variables = {
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": shlex.quote(LINE_PREFIX),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_SECONDS),
    }
    setup_lines = [executor.setup_lines]
    if slurm.nodes > 1:
        variables["PET_RDZV_CONF"] = _RENDEZVOUS_SETTINGS  # default of --rdzv-conf
        setup_lines.append(FIND_FIRST_NODE)
    setup_lines.append(run_ranks(slurm))
    executor.setup_lines = "\n".join(filter(None, setup_lines))
    executor.env_vars = variables | executor.env_vars
    if slurm.image is not None:
        executor.container_env = [*(executor.container_env or ()), *variables]
    executor.launcher = import_nemo_run().Torchrun(
        rdzv_port=_RENDEZVOUS_PORT, rdzv_id=_RENDEZVOUS_ID
    )
    executor.retries = 0  # see run_ranks


def _choose_resources(
    slurm: Slurm,
    executor_fields: Mapping[str, Any],
    *,
    device: str,
) -> dict[str, Any]:
    """Return the CPUs, GPUs and memory that are not in ``executor_fields``."""
    options = _sbatch_options(executor_fields)
    resources: dict[str, Any] = {}
    if device == "cpu":
        if "cpus_per_task" not in options:
            resources["cpus_per_task"] = slurm.gpus
        return resources
    if "gpus_per_node" not in options:
        resources["gpus_per_node"] = slurm.gpus
    chooses_cpus = any(name in options for name in _CPU_OPTIONS)
    exclusive = options.get("exclusive", not chooses_cpus)
    if exclusive is True:  # may also be "user" or "mcs"
        resources["exclusive"] = True
        if not any(name in options for name in _MEMORY_OPTIONS):
            resources["mem"] = "0"  # all memory of the node
    return resources


def _choose_srun_args(executor_fields: Mapping[str, Any]) -> list[str]:
    """Return the arguments of ``srun`` that it does not inherit from ``sbatch``."""
    options = _sbatch_options(executor_fields)
    srun_args = []
    cpus_per_task = options.get("cpus_per_task")
    if cpus_per_task:  # since Slurm 22.05, srun does not inherit it
        srun_args.append(f"--cpus-per-task={cpus_per_task}")
    elif options.get("exclusive") is True:
        # all ranks of a node belong to one task, which must not be bound to one core
        srun_args.append("--cpu-bind=none")
    if options.get("mem") == "0":
        srun_args.append("--mem=0")
    return srun_args


def _sbatch_options(executor_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of the executor and additional parameters, as ``{"cpus_per_task": ...}``."""
    options = dict(executor_fields)
    additional = executor_fields.get("additional_parameters") or {}
    for name, value in additional.items():
        options[name.replace("-", "_")] = value
    return options


def _check_variables(variables: Mapping[str, Any]) -> None:
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(f"{name!r} is not a valid name of an environment variable.")
        if not isinstance(value, str):
            raise ConfigError(f"The environment variable {name} must be a string, got {value!r}.")


def _parse_settings(settings: Mapping[str, str], executor: type) -> dict[str, Any]:
    """Parse the values of ``--set``. Refuse fields that cannot be set."""
    hints = get_type_hints(executor)
    init_fields = {field.name for field in fields(executor) if field.init}
    parsed = {}
    for name, text in settings.items():
        if name in _OPTION_BY_FIELD:
            raise ConfigError(f"--set {name} is not supported. Use {_OPTION_BY_FIELD[name]}.")
        if name in _MANAGED_FIELDS or (name in hints and name not in init_fields):
            raise ConfigError(f"--set {name} is not supported, because launch sets this field.")
        if name not in init_fields:
            additional = json.dumps({name: text})
            setting = shlex.quote(f"additional_parameters={additional}")
            raise ConfigError(
                f"NeMo-Run's SlurmExecutor has no field {name!r}. To pass an option to sbatch, use "
                f"--set {setting}."
            )
        parsed[name] = _parse_setting(name, text, hints[name])
    return parsed


def _parse_setting(name: str, text: str, hint: Any) -> Any:
    """Parse a value of ``--set``, which is JSON unless the field is a string.

    Args:
        hint: Type hint of the field, e.g. ``Optional[list[str]]``.
    """
    types = _types_of_hint(hint)
    is_null = text == "null" and type(None) in types
    is_boolean = text in ("true", "false") and bool in types
    if str in types and not is_null and not is_boolean:
        return text
    try:
        value = json.loads(text)
        is_valid = type(value) in types
    except ValueError:
        is_valid = False
    if not is_valid:
        type_names = [each.__name__ for each in types if each is not type(None)]
        raise ConfigError(
            f"--set {name}={text}: the value must be valid JSON of type {' or '.join(type_names)}."
        )
    return value


def _types_of_hint(hint: Any) -> list[Any]:
    """Return the classes of the values that a type hint allows, e.g. list and NoneType."""
    alternatives: tuple[Any, ...] = (hint,)
    if get_origin(hint) in (Union, UnionType):
        alternatives = get_args(hint)
    return [get_origin(alternative) or alternative for alternative in alternatives]
