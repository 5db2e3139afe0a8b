"""``kha-megatron eval``: lm-evaluation-harness on a Hugging Face model folder."""

import logging
import os
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from kha_megatron.checkpoint.staging import write_json
from kha_megatron.cli import console
from kha_megatron.cli.generate import check_model_folder, load, parse_device
from kha_megatron.cli.options import AsJSON, Device, ModelFolder
from kha_megatron.errors import (
    ConfigError,
    DataError,
    MissingDependencyError,
    OutputError,
    in_one_line,
)
from kha_megatron.versions import version_of

DType = Literal["auto", "float32", "bfloat16", "float16"]

BOOTSTRAP = 1000
"""Resamples behind the standard error of metrics that have no formula for it, perplexities."""

SEED = 1234
"""The harness's own, for few-shot examples and for sampling."""

_STDERR = "_stderr"


def evaluate(
    hf_dir: ModelFolder,
    tasks: Annotated[str, typer.Option(help="Names of tasks or groups, with commas between.")],
    include_path: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder with task files (YAML) of your own; repeat for more.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in each prompt.", show_default="the task's")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Documents of each task.", show_default="all")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests in one forward pass.")] = 1,
    device: Device = "auto",
    dtype: Annotated[DType, typer.Option(help="auto: as stored.")] = "auto",
    output: Annotated[
        Path | None, typer.Option(help="File for the report as JSON; a new one.")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Measure a model with lm-evaluation-harness.

    Works for kha models and for the stock architectures of transformers, so a trained model and
    its baseline are measured by the same code. Tasks of the harness load their data from the
    Hugging Face hub; tasks of your own may name local files and then need no network. Nothing in
    HF_DIR is executed, but a task file may name Python functions, which the harness runs: include
    only folders that you trust.

    Examples:
      kha-megatron eval out/hf --tasks hellaswag,arc_easy --batch-size 16
      kha-megatron eval out/hf --tasks mine --include-path my-tasks --limit 100 \\
        --output mine.json
    """
    require_harness()
    names = _task_names(tasks)
    if output is not None and output.exists():
        raise OutputError(f"{output} exists: name a new file")
    if output is not None and not output.parent.is_dir():
        raise OutputError(f"{output.parent} is no folder: make it first")
    check_model_folder(hf_dir)
    target = parse_device(device)
    with redirect_stdout(sys.stderr):  # the harness prints; stdout is for the report
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is meant here
        with console.log.status("Looking for task files"):
            loaded = _load_tasks(names, include_path or [])
        with console.log.status(f"Loading {hf_dir}"):
            tokenizer, model = load(hf_dir, target, dtype=dtype)
        results = _run(model, tokenizer, loaded, num_fewshot, limit, batch_size)
    report = {
        "model": str(hf_dir),
        "model_type": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(target),
        "settings": {"num_fewshot": num_fewshot, "limit": limit, "batch_size": batch_size},
        "versions": {name: version_of(name) for name in ("lm-eval", "transformers", "torch")},
        "tasks": _report(results),
    }
    if output is not None:
        write_json(output, report)
        console.log.print(f"report in {output}", markup=False)
    if as_json:
        console.print_json(report)
    else:
        console.out.print(_table(report))


def require_harness() -> None:
    """Name the extra before any work, rather than fail on an import in the middle of it.

    Raises:
        MissingDependencyError: lm-evaluation-harness is not installed.
    """
    if find_spec("lm_eval") is None:
        raise MissingDependencyError("lm-eval", "evaluating a model", "eval")


def _task_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"--tasks {text!r} holds an empty name: write --tasks a,b")
    return list(dict.fromkeys(names))


def _load_tasks(names: list[str], folders: list[Path]) -> dict[str, Any]:
    """The named tasks with their data, as ``lm_eval.evaluate`` takes them.

    The harness's own task files take long to read, so they are left out when the user's hold all
    that is needed.

    Raises:
        ConfigError: a name that no task has.
        DataError: a task file is wrong, or its data cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    paths = [str(folder) for folder in folders]
    for with_own in (False, True) if folders else (True,):
        manager = TaskManager(include_path=paths, include_defaults=with_own)
        unknown = [name for name in names if name not in manager.all_tasks]
        if unknown and with_own:
            raise ConfigError(
                f"no task is called {', '.join(unknown)}: `lm-eval ls tasks` lists the harness's, "
                "--include-path FOLDER adds yours"
            )
        if unknown:
            continue
        try:
            return manager.load(names)
        except Exception as error:  # whatever a task file, its functions or the hub can raise
            if with_own or isinstance(error, OSError):  # else it may build on one of the harness's
                raise DataError(
                    f"{', '.join(names)} cannot be loaded ({type(error).__name__}: "
                    f"{in_one_line(error)}): without a network only tasks whose data "
                    "lies in local files can be run"
                ) from error
    raise AssertionError("the last round returns or raises")


def _run(
    model: Any,
    tokenizer: Any,
    tasks: dict[str, Any],
    num_fewshot: int | None,
    limit: int | None,
    batch_size: int,
) -> dict[str, Any]:
    """The harness's own results; a second run gives the same.

    Raises:
        ConfigError: a task refuses these settings.
    """
    from lm_eval import evaluate as run_tasks
    from lm_eval.models.huggingface import HFLM
    from transformers import set_seed

    set_seed(SEED)
    for task in tasks["tasks"].values():
        shots = task.get_config("num_fewshot")
        if shots is None or (num_fewshot is not None and shots != 0):  # 0 is the task's own wish
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=SEED)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # forked pools, for a thousand resamples
    try:
        return run_tasks(
            HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size),
            tasks,
            limit=limit,
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
        )
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"lm-evaluation-harness: {in_one_line(error)}") from error


def _report(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics and their standard errors by task, and by group where there are groups.

    A metric is called ``acc``, or ``exact_match,strict-match`` when the task filters answers.
    """
    report: dict[str, dict[str, Any]] = {}
    for task, entries in {**results["results"], **results.get("groups", {})}.items():
        metrics: dict[str, float | None] = {}
        errors: dict[str, float | None] = {}
        for key, value in entries.items():
            name, separator, how = key.partition(",")
            if not separator:
                continue  # alias, sample_len and the like: no metrics
            number = value if isinstance(value, int | float) else None
            kind = errors if name.endswith(_STDERR) else metrics
            kind[name.removesuffix(_STDERR) + ("" if how == "none" else f",{how}")] = number
        report[task] = {
            "metrics": metrics,
            "stderr": errors,
            "documents": results["n-samples"].get(task, {}).get("effective"),
            "num_fewshot": results["n-shot"].get(task),
            "version": results["versions"].get(task),
        }
    return report


def _table(report: dict[str, Any]) -> Table:
    columns = ("task", "metric", "value", "stderr", "documents", "shots")
    title = escape(f"{report['model']} ({report['dtype']})")
    table = console.numbers(*columns, title=title, names=2)
    for task, entry in report["tasks"].items():
        for metric, value in entry["metrics"].items():
            cells = (value, entry["stderr"].get(metric), entry["documents"], entry["num_fewshot"])
            table.add_row(escape(task), escape(metric), *map(_cell, cells))
    return table


def _cell(value: float | int | None) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
