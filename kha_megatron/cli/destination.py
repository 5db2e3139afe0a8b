"""Where a run is started: the options of ``launch`` that make a :class:`Cluster`."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from kha_megatron.errors import ConfigError
from kha_megatron.recipes import EXECUTORS, Cluster


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The options under the names of :class:`kha_megatron.recipes.Cluster`'s fields."""

    executor: Annotated[str, typer.Option(help=f"Where it runs: {', '.join(EXECUTORS)}.")] = "local"
    gpus: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            help="Ranks on each machine; the recipe's, or 8 on a cluster, if not given.",
        ),
    ] = None
    nodes: Annotated[int | None, typer.Option(help="Machines of the cluster.")] = None
    image: Annotated[str | None, typer.Option("--container-image", help="Image of the ranks.")] = (
        None
    )
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", help="HERE:THERE in the container. May be repeated."),
    ] = None
    environment: Annotated[
        list[str] | None,
        typer.Option("--env", help="NAME=VALUE for the ranks. May be repeated."),
    ] = None
    code: Annotated[
        str | None, typer.Option(help="Ship `git` (the committed tree) or a folder with the job.")
    ] = None
    partition: Annotated[str | None, typer.Option(help="Slurm's.")] = None
    account: Annotated[str | None, typer.Option(help="Slurm's.")] = None
    time: Annotated[
        str | None,
        typer.Option(help="Slurm's limit, HH:MM:SS; the run saves and ends before it."),
    ] = None
    retries: Annotated[int, typer.Option(min=0, help="Start a failed job again so often.")] = 0
    chain: Annotated[
        int, typer.Option(min=1, help="Slurm jobs in a row, each going on from the last.")
    ] = 1
    fault_tolerant: Annotated[
        bool, typer.Option("--fault-tolerant", help="Start ranks with NVIDIA's ft_launcher.")
    ] = False
    host: Annotated[
        str | None, typer.Option(help="USER@HOST of Slurm's login node; this machine if not given.")
    ] = None
    folder: Annotated[
        str | None, typer.Option(help="Folder for the jobs' files on the Slurm cluster.")
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of a field of NeMo-Run's executor; repeatable."),
    ] = None

    def cluster(self) -> Cluster | None:
        """The cluster that the options name; None for this machine.

        Raises:
            ConfigError: an option that the executor does not have, or needs.
        """
        given: dict[str, Any] = {
            item.name: value
            for item in fields(self)
            if item.name != "executor"
            and (value := getattr(self, item.name))
            and value != item.default
        }
        if self.executor == "local":
            if beyond := [name for name in given if name != "gpus"]:
                raise ConfigError(
                    f"--executor local runs on this machine as it is, without {beyond[0]}: remove "
                    f"it, or choose an executor of {', '.join(EXECUTORS[1:])}"
                )
            return None
        if "mounts" in given:
            given["mounts"] = tuple(given["mounts"])
        for name, flag in (("environment", "--env"), ("settings", "--set")):
            if name in given:
                given[name] = dict(_pair(flag, word) for word in given[name])
        return Cluster(executor=self.executor, **given)


def _pair(flag: str, word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not name or not equals:
        raise ConfigError(f"{flag} {word}: give NAME=VALUE")
    return name, value
