"""The stages of ``make gpu-check`` that train: short runs compared, and a small real training."""

import contextlib
import json
import shlex
import socket
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import gpu_cases
from gpu_processes import Process, Task
from gpu_report import Status
from gpu_run import Check

from kha_megatron.cli.plots import read_history
from kha_megatron.errors import DataError
from kha_megatron.model.words import render
from kha_megatron.recipes import prepare

TOOLS = Path(__file__).resolve().parent

TRAINING = "training"
LEAST_SECONDS = 25
"""A training that has less is not started: importing Megatron and CUDA take most of it."""

CASE_SECONDS = 150
"""Of one training: beyond it, it hangs."""

TRAINING_ARGUMENTS = {
    # the paper's MoE in small: 0.14B parameters of which 0.04B are active, 65.5M tokens
    "--num-layers": 12,
    "--hidden-size": 512,
    "--ffn-hidden-size": 384,
    "--moe-ffn-hidden-size": 384,
    "--num-experts": 16,
    "--num-attention-heads": 8,
    "--num-query-groups": 4,
    "--kv-channels": 128,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--micro-batch-size": 16,
    "--global-batch-size": 64,
    "--train-iters": 1000,
    "--lr": 2e-3,
    "--min-lr": 2e-4,
    "--tensor-model-parallel-size": 1,
    "--expert-model-parallel-size": 1,
    "--init-method-std": 0.02,
}
"""What is replaced in the quickstart recipe for one large GPU, bf16 and Transformer Engine."""


def losses(check: Check) -> None:
    """Short trainings through the entry point; each compared with the one it must follow."""
    stage = "losses"
    if check.dry:
        _check_arguments(check)
    data = None if check.dry else _text(check, stage)
    if data is None and not check.dry:
        return
    cases = {case.name: case for case in gpu_cases.CASES}
    tasks, curves = [], {}
    for case in gpu_cases.CASES:
        if why := gpu_cases.missing(case, check.has):
            check.add(stage, case.name, "skipped", why)
        elif check.dry and tasks:
            check.add(stage, case.name, "skipped", "a dry run trains the first that can run here")
        else:
            tasks.append(_training(check, case, data))
    left = check.ends(stage)

    def end(process: Process) -> None:
        name = process.task.name
        words = f"{stage}: {name}: ended after {process.seconds:.0f} s, judged when all have"
        check.console.print(words, markup=False, highlight=False)
        if process.timed_out and time.monotonic() > left:
            check.add(stage, name, "not reached", "ended with the stage's time")
        elif process.timed_out:
            detail = f"not finished after {process.seconds:.0f} s; {process.task.log}"
            check.add(stage, name, "failed", detail, seconds=process.seconds)
        elif process.code:
            detail = f"exit code {process.code}: {process.tail()}; {process.task.log}"
            check.add(stage, name, "failed", detail, seconds=process.seconds)
        else:
            with contextlib.suppress(DataError):  # no file: no losses
                history = read_history(check.folder / "losses" / name)
                curves[name] = [loss for _, loss in history.get("lm loss", [])], process.seconds
            curves.setdefault(name, ([], process.seconds))

    waiting = check.run(stage, tasks, end, at_once=check.jobs, least=LEAST_SECONDS)
    for name, (curve, seconds) in curves.items():
        _judge(check, cases[name], curve, seconds, curves)
    for task in waiting:
        check.add(stage, task.name, "not reached", "no time was left for it")


def _judge(
    check: Check,
    case: gpu_cases.Case,
    curve: list[float],
    seconds: float,
    curves: dict[str, tuple[list[float], float]],
) -> None:
    steps = int(gpu_cases.TINY["--train-iters"]) if check.dry else gpu_cases.STEPS
    reference = curves.get(case.like or "", (None, 0))[0] or None
    wrong = gpu_cases.faults(case, curve, reference, steps)
    figures = {"losses": curve}
    detail = "; ".join(wrong)
    if not wrong:
        detail = f"loss {curve[0]:.4f} at first, {gpu_cases.end(curve):.4f} at the end"
        if reference:
            first, last = gpu_cases.distance(curve, reference)
            figures |= {"like": case.like, "first": first, "end": last}
            limits = f"{case.bound.first if case.bound.first is not None else '-'}"
            detail += f"; {first:.4f} and {last:.4f} from {case.like}"
            detail += f" (bounds {limits} and {case.bound.end})"
        elif case.like:
            detail += f"; not compared: {case.like} did not finish"
    status: Status = "failed" if wrong else "passed"
    check.add("losses", case.name, status, detail, seconds=seconds, figures=figures)


def _check_arguments(check: Check) -> None:
    """A dry run's stand-in for training every case."""
    task = Task(
        name="the arguments of every case",
        command=[sys.executable, str(TOOLS / "gpu_arguments.py")],
        log=check.log("arguments"),
        limit=CASE_SECONDS,
        environment={},
    )

    def end(process: Process) -> None:
        try:
            refused = json.loads(process.tail())
        except ValueError:
            refused = {"all": process.tail()}
        wrong = "; ".join(f"{name}: {why}" for name, why in refused.items() if why)
        detail = wrong or f"Megatron takes {len(refused)} command lines"
        if not wrong and not check.has.get("te"):
            detail += ", those for Transformer Engine parsed only, since it is not installed"
        status: Status = "failed" if wrong or process.code else "passed"
        check.add("losses", task.name, status, detail, seconds=process.seconds)

    check.run("losses", [task], end)


def _text(check: Check, stage: str, words: Sequence[str] = ()) -> Path | None:
    """Real text, prepared; without ``words`` the source of this Python's standard library."""
    data = check.folder / f"{stage}-data"
    task = Task(
        name="preparing text",
        command=[
            *(sys.executable, "-m", "kha_megatron", "data", "prepare"),
            *("--vocab-size", "4096", "--out", str(data), *words),
        ],
        log=check.log(data.name),
        limit=CASE_SECONDS if not words else check.seconds,
        environment={},
    )
    ok = []

    def end(process: Process) -> None:
        if process.code or process.timed_out:
            detail = f"{process.tail()}; {process.task.log}"
            check.add(stage, task.name, "failed", detail, seconds=process.seconds)
        else:
            ok.append(process)

    if data.is_dir() or (not check.run(stage, [task], end) and ok):
        return data
    return None


def _training(check: Check, case: gpu_cases.Case, data: Path | None) -> Task:
    """The case as the launcher would start it, in one process."""
    folder = check.folder / "losses" / case.name
    words = {"--tensorboard-dir": (str(folder),)}
    # one each: runs at the same time would write one index file together
    words |= {"--data-cache-path": (str(folder / "cache"),)}
    if check.dry:
        tiny = gpu_cases.TINY | (gpu_cases.TINY_EXPERTS if case.moe else {})
        words |= {flag: (str(value),) for flag, value in tiny.items()}
        words |= {"--mock-data": (), "--vocab-size": ("128",), "--num-workers": ("0",)}
    job = prepare(
        case.recipe,
        data=data,
        overrides=render(words),
        device="cpu" if check.dry else "cuda",
        ranks=1,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    one |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Task(
        name=case.name,
        command=job.command,
        log=check.log(case.name),
        limit=CASE_SECONDS,
        environment=dict(job.environment) | one,
    )


def training(check: Check) -> None:
    """The small real training: `kha-megatron compare` at a size for one large GPU."""
    # all Python source that is here: the standard library alone is read through in 50 steps
    paths = sysconfig.get_paths()
    words = [word for name in ("stdlib", "purelib") for word in ("--from", paths[name])]
    words += ["--glob", "*.py", "--exclude", "__pycache__", "--exclude", "lib2to3"]
    data = Path("data") if check.dry else _text(check, TRAINING, words)
    if data is None:
        return
    command = comparison(data, check.folder / "compare", engine=bool(check.has.get("te")))
    check.console.print(shlex.join(command), markup=False, highlight=False)
    if check.dry:
        check.add(TRAINING, "compare", "skipped", "a dry run only writes the command")
        return
    task = Task(
        name="compare",
        command=command,
        log=check.log(TRAINING),
        limit=check.seconds,
        environment={},
    )

    def end(process: Process) -> None:
        detail = f"{check.folder / 'compare' / 'report.html'}"
        status: Status = "measured"
        if process.timed_out or process.code:
            status, detail = "failed", f"{process.tail()}; {process.task.log}"
        check.add(TRAINING, task.name, status, detail, seconds=process.seconds)

    check.run(TRAINING, [task], end)


def comparison(data: Path, output: Path, *, engine: bool) -> list[str]:
    """The command of the real training, on Transformer Engine or on Megatron's own layers."""
    base = gpu_cases.TE | gpu_cases.GROUPED if engine else gpu_cases.LOCAL
    flags = TRAINING_ARGUMENTS | {"--bf16": True} | base
    words = {flag: () if value is True else (str(value),) for flag, value in flags.items()}
    return [
        *(sys.executable, "-m", "kha_megatron", "compare", "--recipe", "quickstart"),
        *("--variants", "baseline,kha_mlp,kha_linear", "--seeds", "1", "--nproc", "1"),
        *("--device", "cuda", "--data", str(data), "--output", str(output)),
        *("--", *render(words)),
    ]
