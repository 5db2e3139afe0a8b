"""Recipes for NeMo-Run's own command (``nemo kha train``) and Python API.

``nemo`` finds this module through the entry-point group ``nemo_run.cli``. NeMo-Run evaluates the
arguments of its command as Python: pass untrusted text only to ``kha-megatron launch``.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any, Optional

import nemo_run as run

from kha_megatron.errors import KHAError
from kha_megatron.recipes import get_recipe, prepare_job
from kha_megatron.recipes.launching import TASK


def run_rank(command: list[str]) -> None:
    """Replace this process by Python with the given arguments. NeMo-Run calls this on each rank."""
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
    """Return a recipe as ``run.Partial``, and set the executor's launcher and environment.

    Args:
        executor: one of NeMo-Run's executors; it determines the number of ranks.
        data: directory made by ``kha-megatron data prepare``, with its path on the ranks.
        output: directory for checkpoints and TensorBoard files. The default, ``runs/RECIPE``, is
            only valid on this machine.
        megatron: Megatron's and ``--kha-*`` arguments, quoted as for a shell.
        resume: continue from the last checkpoint in ``output``.

    Raises:
        KHAError: see :func:`kha_megatron.recipes.prepare_job`.
    """
    local = isinstance(executor, run.LocalExecutor)
    job = prepare_job(
        get_recipe(recipe),
        data=Path(data) if data else None,
        output=Path(output or f"runs/{recipe}"),
        overrides=shlex.split(megatron),
        ranks=executor.nnodes() * executor.nproc_per_node(),
        resume=resume,
        remote=not local,
    )
    executor.launcher = executor.launcher or run.Torchrun()
    executor.env_vars = {**job.environment, **executor.env_vars}
    if local:
        executor.env_vars.setdefault("PATH", str(Path(sys.executable).parent))  # of torchrun
    return run.Partial(run_rank, command=list(job.command[1:]))


@run.cli.entrypoint(namespace="kha", type="experiment")
def train(
    ctx: run.cli.RunContext,
    recipe: str,
    data: Optional[str] = None,  # noqa: UP045  (NeMo-Run 0.11's parser knows no `str | None`)
    output: Optional[str] = None,  # noqa: UP045
    megatron: str = "",
    resume: bool = False,
) -> None:
    """Train a recipe of kha-megatron on any of NeMo-Run's executors; see :func:`partial`.

    Exits with code 1 if a rank fails, and with 2 for invalid input.
    """
    try:
        executor = ctx.executor or run.LocalExecutor(ntasks_per_node=get_recipe(recipe).ranks)
        task = partial(recipe, executor, data=data, output=output, megatron=megatron, resume=resume)
    except (KHAError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    with run.Experiment(recipe.replace("/", "-"), executor=executor) as experiment:
        experiment.add(task, name=TASK)
        if ctx.dryrun:
            experiment.dryrun()
            return
        # not ctx.launch: without an executor it runs the task in this process, without its ranks
        experiment.run(detach=ctx.detach, tail_logs=ctx.tail_logs)
    # leaving the experiment waits for the job
    if not ctx.detach and experiment.jobs[0].state.name != "SUCCEEDED":
        raise SystemExit(1)
