"""Where a job runs besides this machine: the choices common to NeMo-Run's executors, as data.

One table says what each executor calls the common settings; everything else that an executor knows
is reached by its own name through :attr:`Cluster.settings`.
"""

import difflib
import importlib.util
import json
import math
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, get_args, get_type_hints

from kha_megatron.errors import ConfigError

RENDEZVOUS = 29500
"""Port and id under which the nodes of one job find each other."""

WORKDIR = "/workdir"
"""Where Kubeflow's pods mount the claim with the job's files, unless ``--set`` says it."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One of NeMo-Run's executors in the terms of :class:`Cluster`."""

    executor: str
    """Its class in ``nemo_run``."""
    names: Mapping[str, tuple[str, ...]]
    """The fields that each setting of a :class:`Cluster` fills; what is not here it cannot have."""
    needs: tuple[str, ...] = ()
    """Settings that must be given."""
    module: str = "nemo_run"
    """What must be importable."""
    extra: str = "launch"
    """The extra of this package that brings it."""


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "docker": Kind(
            executor="DockerExecutor",
            names={
                "gpus": ("ntasks_per_node", "num_gpus"),
                "image": ("container_image",),
                "mounts": ("volumes",),
                "code": ("packager",),
            },
            needs=("image",),
        ),
        "slurm": Kind(
            executor="SlurmExecutor",
            names={
                "nodes": ("nodes",),
                "gpus": ("ntasks_per_node", "gpus_per_node"),
                "image": ("container_image",),
                "mounts": ("container_mounts",),
                "time": ("time",),
                "partition": ("partition",),
                "account": ("account",),
                "code": ("packager",),
                "retries": ("retries",),
            },
            needs=("time",),
        ),
        "kubeflow": Kind(
            executor="KubeflowExecutor",
            names={
                "nodes": ("num_nodes",),
                "gpus": ("nprocs_per_node", "gpus_per_node"),
                "image": ("image",),
            },
            needs=("image",),
            module="kubernetes",
            extra="kubeflow",
        ),
        "skypilot": Kind(
            executor="SkypilotExecutor",
            names={
                "nodes": ("num_nodes",),
                "gpus": ("gpus_per_node", "torchrun_nproc_per_node"),
                "image": ("container_image",),
                "code": ("packager",),
            },
            module="sky",
            extra="skypilot",
        ),
        "lepton": Kind(
            executor="LeptonExecutor",
            names={
                "nodes": ("nodes",),
                "gpus": ("nprocs_per_node", "gpus_per_node"),
                "image": ("container_image",),
                "code": ("packager",),
            },
            needs=("image",),
        ),
    }
)

EXECUTORS = ("local", *KINDS)


def option(default: Any, text: str, *, flag: str | None = None) -> Any:
    """A field that is an option of ``kha-megatron launch`` as well.

    Args:
        text: what it is, for both.
        flag: its name on the command line, if it is not the field's.
    """
    made: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return field(**made, metadata={"text": text, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where, with how much, and for how long: each field says what it is in its text."""

    executor: str = option("local", f"Where it runs: {', '.join(EXECUTORS)}.")
    gpus: int | None = option(
        None, "Ranks on each machine, one a GPU; the recipe's, or 8 on a cluster.", flag="--nproc"
    )
    nodes: int = option(1, "Machines of the cluster.")
    image: str | None = option(
        None, "Image of the ranks; Slurm can do without.", flag="--container-image"
    )
    mounts: tuple[str, ...] = option(
        (), "HERE:THERE in the container. May be repeated.", flag="--mount"
    )
    environment: Mapping[str, str] = option(
        {}, "NAME=VALUE for the ranks, on top of the recipe's. May be repeated.", flag="--env"
    )
    code: str | None = option(
        None,
        "Ship `git` (the committed tree of the current repository) or a folder with the job; "
        "nothing where the image or the environment has it all.",
    )
    partition: str | None = option(None, "Slurm's.")
    account: str | None = option(None, "Slurm's, where the cluster asks for one.")
    time: str | None = option(
        None, "Slurm's limit, [DAYS-]HH:MM:SS; the run saves and ends before it."
    )
    retries: int = option(0, "Let Slurm requeue a failed job so often.")
    chain: int = option(1, "Slurm jobs in a row, each going on from the last.")
    fault_tolerant: bool = option(
        False, "Start ranks with NVIDIA's ft_launcher, which restarts those that hang or die."
    )
    host: str | None = option(None, "USER@HOST of Slurm's login node; this machine if not given.")
    folder: str | None = option(
        None, "Folder for the jobs' files on the host; without a host they are in NEMORUN_HOME."
    )
    settings: Mapping[str, str] = option(
        {},
        "NAME=VALUE of a field of NeMo-Run's executor, as text or JSON. May be repeated.",
        flag="--set",
    )

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise ConfigError(
                f"unknown executor {self.executor!r}: choose one of {', '.join(EXECUTORS)}"
            )
        for name, least in {"nodes": 1, "gpus": 1, "chain": 1, "retries": 0}.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{flag_of(name)} {value}: give a whole number from {least} up")
        kind = KINDS.get(self.executor)
        for item in fields(self):
            given = getattr(self, item.name)
            if given in (item.default, {}) or item.name in ("executor", "gpus"):
                continue
            if kind is None:
                raise ConfigError(
                    f"--executor local runs on this machine as it is, without "
                    f"{flag_of(item.name)}: remove it, or choose an executor of {', '.join(KINDS)}"
                )
            common = item.name in ("environment", "settings")
            # Slurm alone has the rest
            if not (common or item.name in kind.names or self.executor == "slurm"):
                raise ConfigError(
                    f"{self.executor} has no {flag_of(item.name)}: leave it out, or look for a "
                    f"field of NeMo-Run's {kind.executor} that --set can fill"
                )
        for name in kind.needs if kind else ():
            if getattr(self, name) is None:
                raise ConfigError(f"{self.executor} needs {flag_of(name)}")
        if self.executor == "skypilot" and self.code != "git":
            raise ConfigError("skypilot ships the committed tree with each job: give --code git")
        if self.host is not None and self.folder is None:
            raise ConfigError(f"--host {self.host} needs --folder, a path on the cluster")
        if self.host is None and self.folder is not None:
            raise ConfigError(
                f"--folder {self.folder} is for --host: jobs submitted from this machine keep "
                "their files in NEMORUN_HOME"
            )
        if self.chain > 1 and self.fault_tolerant:
            raise ConfigError(
                "--chain and --fault-tolerant both start a job again: remove one of them"
            )

    @property
    def per_node(self) -> int:
        """Ranks on each machine."""
        return self.gpus or 8

    @property
    def ranks(self) -> int:
        """Over all nodes."""
        return self.nodes * self.per_node

    @property
    def shares_files(self) -> bool:
        """Whether paths on this machine are those of the ranks, so that they can be checked."""
        return self.executor == "slurm" and self.image is None and self.host is None

    @property
    def python(self) -> str:
        """The interpreter on the nodes: this one where the files are shared, else the image's."""
        return sys.executable if self.shares_files else "python"

    def arguments(self) -> dict[str, Any]:
        """Megatron's arguments, by name, that belong to the place rather than to the recipe."""
        given: dict[str, Any] = {}
        if self.time is not None:
            # saved and ended in time, with a tenth of the limit to spare, at most 15 minutes
            minutes = _minutes(self.time)
            margin = min(15, math.ceil(minutes / 10))
            if minutes - margin >= 1:
                given["exit_duration_in_mins"] = int(minutes - margin)
        if self.fault_tolerant:
            given |= {"enable_ft_package": True, "calc_ft_timeouts": True}
        return given


def executor_of(
    cluster: Cluster, environment: Mapping[str, str], run: ModuleType, *, device: str
) -> Any:
    """NeMo-Run's executor for the cluster.

    Args:
        environment: the recipe's variables; the cluster's replace them.
        device: ``cuda``, or ``cpu``, for which no GPU is asked.
        run: the imported ``nemo_run``.

    Raises:
        ConfigError: what the executor needs is not installed, not given or not one of its fields.
    """
    kind = KINDS[cluster.executor]
    if importlib.util.find_spec(kind.module) is None:
        raise ConfigError(
            f"--executor {cluster.executor} needs {kind.module}, which is not installed: run "
            f"`pip install 'kha-megatron[{kind.extra}]'`"
        )
    values: dict[str, Any] = {}
    for name, theirs in kind.names.items():
        given: Any = cluster.per_node if name == "gpus" else getattr(cluster, name)
        if name == "code":
            given = _packager(cluster, run)
        if given is not None:
            given = list(given) if name == "mounts" else given
            values |= dict.fromkeys(theirs, given)
    if device == "cpu":
        values = {name: value for name, value in values.items() if "gpus" not in name}
    variables = {**environment, **cluster.environment}
    values["env_vars"] = _for_a_shell(variables) if cluster.executor == "slurm" else variables
    launcher = run.FaultTolerance if cluster.fault_tolerant else run.Torchrun
    values["launcher"] = launcher(rdzv_port=RENDEZVOUS, rdzv_id=RENDEZVOUS)
    if cluster.fault_tolerant:
        values["launcher"].max_restarts = 3
    if cluster.executor == "slurm":
        values |= _slurm(cluster, run, device)
        if cluster.image and variables:  # pyxis keeps an image's own values of all others
            values["container_env"] = list(variables)
    if cluster.executor == "kubeflow":
        values |= _kubeflow(cluster, variables)
    executor = getattr(run, kind.executor)
    values |= _settings(cluster, executor)
    missing = [
        item.name
        for item in fields(executor)
        if item.init
        and item.name not in values
        and item.default is MISSING
        and item.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"{cluster.executor} needs --set {missing[0]}=VALUE")
    try:
        return executor(**values)
    except Exception as error:  # each executor has its own, down to a missing kubeconfig
        raise ConfigError(f"NeMo-Run cannot use {cluster.executor} here: {error}") from error


def _slurm(cluster: Cluster, run: ModuleType, device: str) -> dict[str, Any]:
    if cluster.host is None:
        tunnel = run.LocalTunnel(job_dir="")  # NeMo-Run's own home, where it writes the scripts
    else:
        user, at, host = cluster.host.rpartition("@")
        if not at:
            raise ConfigError(f"--host {cluster.host}: give USER@HOST")
        tunnel = run.SSHTunnel(host=host, user=user, job_dir=cluster.folder)
    lines = []
    if cluster.shares_files:
        lines.append(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")
    if cluster.fault_tolerant:  # its script ends with 0 once it has given up
        lines.append("trap 'exit ${exitcode:-$?}' EXIT")
    values: dict[str, Any] = {
        "tunnel": tunnel,
        "setup_lines": "\n".join(lines) or None,
        "account": cluster.account,
        "poll_estimated_start_time": False,  # it would say so on stdout, again and again
    }
    if cluster.account is None:  # of which NeMo-Run would make the job's name
        values["job_name_prefix"] = "kha-megatron."
    if device == "cpu":  # torchrun is one task; from 22.05 on steps take nothing over from the job
        values["cpus_per_task"] = cluster.per_node
        values["srun_args"] = [f"--cpus-per-task={cluster.per_node}"]
    if cluster.chain > 1:  # the next one goes on however the one before ended
        values["dependency_type"] = "afterany"
    return values


def _kubeflow(cluster: Cluster, variables: Mapping[str, str]) -> dict[str, Any]:
    """NeMo-Run's script in the pod exports values as they stand, and links ``/nemo_run`` to the
    job's files: it finds none without a claim, nor where the claim itself is mounted there."""
    if "workdir_pvc" not in cluster.settings:
        raise ConfigError(
            "kubeflow needs --set workdir_pvc=CLAIM, a volume that all pods may write: the job's "
            "script comes to them on it"
        )
    for name, value in variables.items():
        if shlex.quote(value) != value:
            raise ConfigError(
                f"--env {name}={value}: NeMo-Run's Kubeflow script has it without quotes; give a "
                "value without spaces and shell characters, or set it in the image"
            )
    return {"workdir_pvc_path": WORKDIR}


def _packager(cluster: Cluster, run: ModuleType) -> Any:
    if cluster.code is None:
        return run.Packager()
    if cluster.code == "git":
        return run.GitArchivePackager(check_uncommitted_changes=True)
    folder = Path(cluster.code).absolute()
    if not folder.is_dir():
        raise ConfigError(f"--code {cluster.code}: give git or a folder")
    return run.PatternPackager(include_pattern=str(folder), relative_path=str(folder))


def _for_a_shell(variables: Mapping[str, str]) -> dict[str, str]:
    """NeMo-Run writes ``export NAME=value`` as it stands, and the name in capitals."""
    for name in variables:
        if name != name.upper():
            raise ConfigError(
                f"--env {name}: NeMo-Run's Slurm script would call it {name.upper()}; use a name "
                "in capitals"
            )
    return {name: shlex.quote(value) for name, value in variables.items()}


def _settings(cluster: Cluster, executor: type) -> dict[str, Any]:
    """``--set``: a field that is not text takes JSON."""
    known = {item.name for item in fields(executor) if item.init}
    hints = get_type_hints(executor)
    values = {}
    for name, text in cluster.settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see NeMo-Run's documentation"
            raise ConfigError(f"--set {name}: {executor.__name__} has no such field; {hint}")
        values[name] = _typed(name, text, hints[name])
    return values


def _typed(name: str, text: str, hint: Any) -> Any:
    kinds = {hint, *get_args(hint)}
    if str in kinds and not text.startswith("["):  # some take a list as well
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"--set {name}={text}: give {hint} as JSON") from None


def _minutes(text: str) -> float:
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if found is None:
        raise ConfigError(f"--time {text}: give HH:MM:SS or DAYS-HH:MM:SS")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return days * 1440 + hours * 60 + minutes + seconds / 60


def flag_of(name: str) -> str:
    """What the command line calls a field of :class:`Cluster`."""
    own = {item.name: item.metadata["flag"] for item in fields(Cluster)}
    return own[name] or f"--{name.replace('_', '-')}"
