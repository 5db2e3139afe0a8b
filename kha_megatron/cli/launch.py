"""``kha-megatron launch``: train a recipe with NeMo-Run and follow it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from kha_megatron.cli.following import run_on_slurm, run_on_this_machine
from kha_megatron.cli.options import (
    AsJSON,
    DataFolder,
    MegatronArguments,
    RecipeName,
    TrainingDevice,
)
from kha_megatron.errors import ConfigError
from kha_megatron.recipes import Slurm, get_recipe, prepare_job


def launch(
    recipe: RecipeName,
    megatron: MegatronArguments = None,
    data: DataFolder = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for checkpoints and TensorBoard files; default runs/RECIPE."),
    ] = None,
    device: TrainingDevice = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks per machine; default: the recipe's, 8 on Slurm."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in --output.")
    ] = False,
    executor: Annotated[
        Literal["local", "slurm"], typer.Option(help="Run on this machine or on Slurm.")
    ] = "local",
    time: Annotated[
        str | None,
        typer.Option(help="Slurm: time limit, [DAYS-]HH:MM:SS. The run saves and exits before it."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Slurm: number of nodes.")] = 1,
    container_image: Annotated[
        str | None, typer.Option(help="Slurm: container image of the ranks.")
    ] = None,
    mount: Annotated[
        list[str] | None, typer.Option(help="Slurm: HOST:CONTAINER path. May be repeated.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="Slurm: NAME=VALUE for the ranks. May be repeated.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition to submit to.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account to charge.")] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="Slurm: how often to requeue a failed job.")
    ] = 0,
    chain: Annotated[
        int, typer.Option(min=1, help="Slurm: jobs in a row, each resuming from the one before.")
    ] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Slurm: NAME=VALUE of a field of NeMo-Run's SlurmExecutor, as text or JSON. "
            "May be repeated.",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Slurm: submit the job and return.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the exact command and environment; start nothing."),
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Train a recipe with NeMo-Run on this machine or on Slurm, and follow it.

    Exit codes: 0 if the job succeeded (or was submitted with --detach), 1 if it
    failed, 2 for invalid input, 130 if interrupted. A job that Slurm restarts
    resumes from its last checkpoint. For other executors use `nemo kha train`.

    Examples:
      kha-megatron data prepare --from src --glob '*.py' --out data/mine
      kha-megatron launch quickstart --data data/mine --output runs/first
      kha-megatron launch quickstart --data data/mine --dry-run -- --train-iters 50
      kha-megatron launch table2/mlp-v --data /data/mine --executor slurm \\
        --nodes 4 --account acme --time 04:00:00 --chain 6 --dry-run
    """
    options = Slurm(
        time=time or "",
        nodes=nodes,
        gpus=nproc or 8,
        image=container_image,
        mounts=tuple(mount or ()),
        environment=_pairs("--env", env),
        partition=partition,
        account=account,
        retries=retries,
        chain=chain,
        settings=_pairs("--set", set_),
    )
    slurm = options if executor == "slurm" else None
    if slurm is None and (detach or options != Slurm(time="", gpus=options.gpus)):
        raise ConfigError("Expected --executor slurm with options for Slurm; see --help.")
    chosen = get_recipe(recipe)
    job = prepare_job(
        chosen,
        data=data,
        output=output or Path("runs", recipe),
        overrides=megatron or [],
        ranks=nproc,
        device=device,
        resume=resume,
        slurm=slurm,
    )
    if slurm is None:
        run_on_this_machine(job, dry_run=dry_run, as_json=as_json)
    else:
        run_on_slurm(job, dry_run=dry_run, detach=detach, as_json=as_json)


def _pairs(flag: str, words: Sequence[str] | None) -> dict[str, str]:
    """Parse the values of a repeated ``NAME=VALUE`` option."""
    for word in words or ():
        if word.find("=") < 1:
            raise ConfigError(f"Expected {flag} NAME=VALUE, got {word}.")
    return dict(word.split("=", 1) for word in words or ())
