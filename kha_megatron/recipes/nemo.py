"""NeMo-Run integration: the ``nemo kha train`` command, and recipes as ``run.Partial``.

Registered in the ``nemo_run.cli`` entry point group. Be careful: NeMo-Run evaluates command-line
arguments as Python code, so never pass untrusted input.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any, Optional

import nemo_run as run

from kha_megatron.errors import KHAError
from kha_megatron.recipes import Slurm, get_recipe, prepare_job
from kha_megatron.recipes.launching import TASK
from kha_megatron.recipes.slurm_executor import add_protection


def run_rank(command: list[str]) -> None:
    """Replace the current process with ``python *command``. Runs on each rank."""
    os.execv(sys.executable, [sys.executable, *command])


def partial(
    recipe: str,
    executor: Any,
    *,
    data: str | None = None,
    output: str | None = None,
    megatron: str = "",
    resume: bool = False,
) -> Any:
    """Build a ``run.Partial`` for a recipe.

    Note: This also sets the launcher and the environment variables of ``executor``. Jobs of a
    SlurmExecutor get the same setup lines as those of ``kha-megatron launch``. They exit before
    their time limit, save before they are preempted, and are requeued ``executor.retries`` times.

    Args:
        executor: NeMo-Run executor. Its nodes and processes per node determine the ranks.
        data: Output directory of ``kha-megatron data prepare``, as seen by the ranks.
        output: Directory for checkpoints and TensorBoard files. Must be set for remote executors
            (the default is the relative path ``runs/RECIPE``).
        megatron: Megatron and ``--kha-*`` arguments, e.g. ``"--lr 1e-3 --kha-value mlp"``.
        resume: Resume from the last checkpoint in ``output``.
    """
    is_local = isinstance(executor, run.LocalExecutor)
    slurm = _slurm_options(executor) if isinstance(executor, run.SlurmExecutor) else None
    chosen = get_recipe(recipe)
    job = prepare_job(
        chosen,
        data=Path(data) if data else None,
        output=Path(output or f"runs/{chosen.name}"),
        overrides=shlex.split(megatron),
        ranks=executor.nnodes() * executor.nproc_per_node(),
        resume=resume,
        slurm=slurm,
        remote=not is_local,
    )
    if slurm is not None:
        add_protection(executor, slurm)
    executor.launcher = executor.launcher or run.Torchrun()
    executor.env_vars = {**job.environment, **executor.env_vars}
    if is_local:
        executor.env_vars.setdefault("PATH", str(Path(sys.executable).parent))  # for torchrun
    return run.Partial(run_rank, command=list(job.command[1:]))


def _slurm_options(executor: Any) -> Slurm:
    return Slurm(
        time=executor.time,
        nodes=executor.nnodes(),
        gpus=executor.nproc_per_node(),
        image=executor.container_image,
        retries=executor.retries,
    )


@run.cli.entrypoint(namespace="kha", type="experiment")
def train(
    ctx: run.cli.RunContext,
    recipe: str,
    data: Optional[str] = None,  # noqa: UP045  (NeMo-Run 0.11's parser knows no `str | None`)
    output: Optional[str] = None,  # noqa: UP045
    megatron: str = "",
    resume: bool = False,
) -> None:
    """Train a kha-megatron recipe with any NeMo-Run executor.

    See :func:`partial` for the arguments. Exits with code 1 if a rank fails, and 2 for invalid
    arguments.
    """
    try:
        executor = ctx.executor or run.LocalExecutor(ntasks_per_node=get_recipe(recipe).ranks)
        task = partial(
            recipe,
            executor,
            data=data,
            output=output,
            megatron=megatron,
            resume=resume,
        )
    except (KHAError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    name = get_recipe(recipe).name.replace("/", "-")
    with run.Experiment(name, executor=executor) as experiment:
        experiment.add(task, name=TASK)
        if ctx.dryrun:
            experiment.dryrun()
            return
        # ctx.launch would run the task in this process if no executor is given
        experiment.run(detach=ctx.detach, tail_logs=ctx.tail_logs)
    # the job has completed, because closing the experiment waits for it
    if not ctx.detach and experiment.jobs[0].state.name != "SUCCEEDED":
        raise SystemExit(1)
