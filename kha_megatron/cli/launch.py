"""``kha-megatron launch``: train a recipe locally or on Slurm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from kha_megatron.announcements import announce
from kha_megatron.cli.following import run_job
from kha_megatron.cli.options import (
    AsJSON,
    DataFolder,
    GPUMemory,
    HeadsFrom,
    MegatronArguments,
    RecipeName,
    TrainingDevice,
    parse_size,
)
from kha_megatron.errors import ConfigError
from kha_megatron.plan.estimate import estimate_run
from kha_megatron.recipes import Job, Slurm, get_recipe, prepare_job
from kha_megatron.recipes.megatron_check import check_with_megatron


def launch(
    recipe: RecipeName,
    megatron: MegatronArguments = None,
    data: DataFolder = None,
    output: Annotated[
        Path | None, typer.Option(help="Output directory (default: runs/RECIPE).")
    ] = None,
    device: TrainingDevice = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node (default: set by recipe, 8 on Slurm).")
    ] = None,
    gpu_memory: GPUMemory = "80GB",
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last checkpoint in --output.")
    ] = False,
    executor: Annotated[
        Literal["local", "slurm"],
        typer.Option(help="Where to train: on this machine or as a Slurm job."),
    ] = "local",
    time: Annotated[
        str | None, typer.Option(help="Slurm: time limit as [DAYS-]HH:MM:SS (required).")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Slurm: number of nodes.")] = 1,
    container_image: Annotated[str | None, typer.Option(help="Slurm: container image.")] = None,
    mount: Annotated[
        list[str] | None, typer.Option(help="Slurm: container mount HOST:CONTAINER. Repeatable.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="Slurm: environment variable NAME=VALUE. Repeatable.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm: partition to submit to.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm: account to charge.")] = None,
    retries: Annotated[
        int,
        typer.Option(
            min=0,
            help="Slurm: number of requeues after a failure or when the time limit is reached.",
        ),
    ] = 0,
    chain: Annotated[
        int, typer.Option(min=1, help="Slurm: number of jobs, each resuming the previous one.")
    ] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Slurm: field NAME=VALUE of NeMo-Run's SlurmExecutor (text or JSON). Repeatable.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Slurm: submit and exit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job and exit.")] = False,
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Train a recipe with NeMo-Run on this machine or on Slurm.

    The command waits for the job to finish, unless you pass --detach. Slurm jobs save a checkpoint
    shortly before their time limit, and before they are preempted. If Slurm restarts a job, it
    resumes from its last checkpoint. Dry runs and submissions check the arguments with Megatron's
    own parser, if it is installed. If a GPU job probably needs more than --gpu-memory, a warning is
    printed (see `kha-megatron plan`). For executors other than Slurm, see `nemo kha train`.

    Exit codes: 0 if the job succeeded (or was submitted with --detach), 1 if it failed, 2 for
    invalid arguments, 130 if you interrupted the command.

    Examples:
      kha-megatron data prepare --from src --glob '*.py' --out data/mine
      kha-megatron launch quickstart --data data/mine --output runs/first
      kha-megatron launch quickstart --data data/mine --dry-run -- --train-iters 50
      kha-megatron launch examples/qwen3_235b.py:KHA_MLP --nproc 256 --dry-run
      kha-megatron launch table2/mlp-v --data /data/mine --executor slurm \\
        --nodes 4 --account acme --time 04:00:00 --chain 6 --dry-run
    """
    slurm_options = Slurm(
        time=time or "",
        nodes=nodes,
        gpus=nproc or 8,
        image=container_image,
        mounts=tuple(mount or ()),
        environment=_parse_pairs("--env", env),
        partition=partition,
        account=account,
        retries=retries,
        chain=chain,
        settings=_parse_pairs("--set", set_),
    )
    uses_slurm = executor == "slurm"
    # --nproc also exists for local runs, so it may differ from the default
    default_options = Slurm(time="", gpus=slurm_options.gpus)
    has_slurm_options = detach or slurm_options != default_options
    if has_slurm_options and not uses_slurm:
        raise ConfigError("Slurm options require --executor slurm. See --help for these options.")
    bytes_per_gpu = parse_size("--gpu-memory", gpu_memory)
    chosen_recipe = get_recipe(recipe)
    job = prepare_job(
        chosen_recipe,
        data=data,
        output=output or Path("runs", chosen_recipe.name),
        overrides=megatron or [],
        ranks=nproc,
        device=device,
        resume=resume,
        slurm=slurm_options if uses_slurm else None,
        dry_run=dry_run,
    )
    if dry_run or uses_slurm:  # a local run reports mistakes right away
        check_with_megatron(job)
    if job.device == "cuda":
        _check_memory(job, bytes_per_gpu)
    run_job(job, dry_run=dry_run, detach=detach, as_json=as_json)


def _check_memory(job: Job, bytes_per_gpu: int) -> None:
    """Log a warning if a rank probably needs more memory than a GPU has.

    The estimate is not exact, so the job is not refused.
    """
    try:
        estimate = estimate_run(job.run, job.ranks)
    except ConfigError as error:
        announce(f"Skipping the check of the GPU memory. {error}")
        return
    if not estimate.fits(bytes_per_gpu):
        announce(f"WARNING: {estimate.explain_fit(bytes_per_gpu)}")


def _parse_pairs(flag: str, pairs: Sequence[str] | None) -> dict[str, str]:
    """Parse a repeated ``NAME=VALUE`` option."""
    value_by_name = {}
    for pair in pairs or ():
        name, equals_sign, value = pair.partition("=")
        if not name or not equals_sign:
            raise ConfigError(f"{flag} must have the format NAME=VALUE, got {pair!r}.")
        value_by_name[name] = value
    return value_by_name
