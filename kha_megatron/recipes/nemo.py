"""The recipes under NeMo-Run's own command line: ``nemo kha train``.

Found through the entry-point group ``nemo_run.cli``. NeMo-Run's parser evaluates what it is given:
keep text that you do not trust away from it, and use ``kha-megatron launch`` there.
"""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Optional

import nemo_run as run

from kha_megatron.errors import KHAError
from kha_megatron.recipes import check_words, get_recipe, prepare
from kha_megatron.recipes.launching import TASK, experiment_name, task_of


@run.cli.entrypoint(namespace="kha", type="experiment")
def train(
    ctx: run.cli.RunContext,
    recipe: str,
    data: Optional[str] = None,  # noqa: UP045  (NeMo-Run 0.11's parser knows no `str | None`)
    output: Optional[str] = None,  # noqa: UP045
    megatron: str = "",
    resume: bool = False,
) -> None:
    """Train a recipe of kha-megatron on any of NeMo-Run's executors.

    Ends with code 1 if a rank fails, and with 2 if the input is refused.

    Args:
        recipe: a name of ``kha-megatron recipes list``.
        data: folder made by ``kha-megatron data prepare``.
        output: folder for checkpoints and TensorBoard files; ``runs/RECIPE`` if not given.
        megatron: Megatron's and ``--kha-*`` arguments, as for a shell.
        resume: continue from the last checkpoint in ``output``.
    """
    executor = ctx.executor or run.LocalExecutor()
    try:
        chosen = get_recipe(recipe)
        if ctx.executor is None:
            executor.ntasks_per_node = chosen.ranks
        if executor.launcher is None:
            executor.launcher = run.Torchrun()
        words = shlex.split(megatron)
        check_words(chosen, words)
        job = prepare(
            chosen,
            data=Path(data) if data else None,
            output=Path(output) if output else Path("runs", chosen.name),
            overrides=words,
            ranks=executor.nnodes() * executor.nproc_per_node(),
            resume=resume,
            again=not isinstance(executor, run.LocalExecutor),
        )
    except (KHAError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    executor.env_vars = {**job.environment, **executor.env_vars}
    if isinstance(executor, run.LocalExecutor):  # torchrun lies beside Python
        executor.env_vars.setdefault("PATH", str(Path(sys.executable).parent))
    else:
        job = replace(job, command=("python", *job.command[1:]))
    with run.Experiment(experiment_name(chosen), executor=executor) as experiment:
        experiment.add(task_of(job), name=TASK)
        if ctx.dryrun:
            experiment.dryrun()
            return
        # not ctx.launch: without an executor it runs the task in this process, without its ranks
        experiment.run(detach=ctx.detach, tail_logs=ctx.tail_logs)
    # leaving the experiment is what waited for the job
    if not ctx.detach and experiment.jobs[0].state.name != "SUCCEEDED":
        raise SystemExit(1)
