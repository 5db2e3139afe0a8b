"""Prove and measure everything that needs a GPU, in one command: ``make gpu-check``.

Stages, in this order:

  machine     GPU, driver, versions, and what is not there
  kernels     the fused kernels on the GPU against float64
  modules     Transformer Engine's layers against Megatron's own, gradients of shared matrices
  losses      short trainings in bf16 and FP8 from the same start, their losses compared
  benchmarks  the benchmarks of this folder, with few repetitions
  training    baseline, kha_mlp and kha_linear on real text, about ten minutes; only with --only

What the machine lacks is skipped and named. Nothing is fetched from a network. report.md,
report.json and a log of each process are left in one folder. The exit code is 1 if a stage that
proves correctness failed or ran out of time, 2 if there is no GPU; targets that benchmarks miss are
reported only.
"""

import argparse
import contextlib
import datetime
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import gpu_cases
import gpu_machine
from gpu_benchmarks import BENCHMARKS, Benchmark, missed_targets
from gpu_processes import Process, Task, run_all
from gpu_report import Report, Result, Status
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kha_megatron.cli.plots import read_history
from kha_megatron.errors import DataError
from kha_megatron.recipes import prepare
from kha_megatron.recipes.arguments import render

ROOT = Path(__file__).resolve().parents[1]
TOOLS = Path(__file__).resolve().parent

UNTIL = {"machine": 0.1, "kernels": 0.25, "modules": 0.4, "losses": 0.72, "benchmarks": 1.0}
"""The part of the whole time by which each stage must end; what one leaves, the next may use."""

TRAINING = "training"
LEAST_SECONDS = 25
"""A training that has less is not started: importing Megatron and CUDA take most of it."""

CASE_SECONDS = 150
"""Of one training: beyond it, it hangs."""

TRAINING_ARGUMENTS = {
    # the shape of the paper's MoE at a sixth of its width: about 0.1B parameters, 131M tokens
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


@dataclass
class Check:
    """One run of the check: where it writes, until when, and what it has found."""

    folder: Path
    dry: bool
    seconds: float
    jobs: int
    console: Console
    machine: dict[str, str] = field(default_factory=dict)
    has: dict[str, bool] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, stage: str, name: str, status: Status, detail: str = "", **more: object) -> None:
        """Keep a result, and say it."""
        result = Result(stage=stage, name=name, status=status, detail=detail, **more)
        self.results.append(result)
        colour = {"passed": "green", "measured": "green"}.get(status, "yellow")
        colour = "red" if status in ("failed", "stopped") else colour
        self.console.print(result.line, style=colour, markup=False, highlight=False)

    def ends(self, stage: str) -> float:
        """When the stage must end, by ``time.monotonic``."""
        return self.started + UNTIL.get(stage, 1.0) * self.seconds

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self.folder / "logs" / f"{name}.log"

    def run(
        self,
        stage: str,
        tasks: list[Task],
        on_end: Callable[[Process], object],
        *,
        at_once: int = 1,
        least: float = 0.0,
    ) -> list[Task]:
        """Run tasks until the stage's end, each with a line while it runs; those not started."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        lines: dict[str, TaskID] = {}
        with Progress(*columns, console=self.console, transient=True) as progress:

            def start(task: Task) -> None:
                left = self.ends(stage) - time.monotonic()
                words = f"{stage}: {task.name} (at most {min(left, task.limit):.0f} s)"
                lines[task.name] = progress.add_task(words)
                if not self.console.is_terminal:
                    self.console.print(words, markup=False, highlight=False)

            def end(process: Process) -> None:
                progress.remove_task(lines[process.task.name])
                on_end(process)

            return run_all(
                tasks,
                at_once=at_once,
                deadline=self.ends(stage),
                least=least,
                on_start=start,
                on_end=end,
            )


def machine(check: Check) -> None:
    """What is here; without a GPU there is nothing to check."""
    began = time.monotonic()
    check.machine, check.has = gpu_machine.examine()
    for name, found in check.machine.items():
        check.console.print(f"  {name}: {found}", markup=False, highlight=False)
    lacks = [words for name, words in gpu_cases.NEEDS.items() if not check.has.get(name)]
    detail = f"not here: {'; '.join(lacks)}" if lacks else "everything is here"
    check.add("machine", "what is installed", "passed", detail, seconds=time.monotonic() - began)


def kernels(check: Check) -> None:
    """The fused kernels on the GPU."""
    _pytest(check, "kernels", ["-m", "gpu", "tests/kernels"])


def modules(check: Check) -> None:
    """Layers, gradients and parameters of Transformer Engine with KHA."""
    _pytest(check, "modules", ["-m", "gpu or te", "tests/gpu"])


def _pytest(check: Check, stage: str, words: list[str]) -> None:
    """One pytest; what it skipped is named with its reason."""
    where = ROOT / words[-1]
    if not where.is_dir():
        check.add(stage, words[-1], "missing", f"{words[-1]} is not in this tree")
        return
    found = check.folder / f"{stage}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    command.append(f"--junitxml={found}")
    limit = max(0.0, check.ends(stage) - time.monotonic())
    task = Task(name=words[-1], command=command, log=check.log(stage), limit=limit, environment={})

    def end(process: Process) -> None:
        if process.timed_out:
            detail = f"not finished after {process.seconds:.0f} s; {process.task.log}"
            check.add(stage, task.name, "stopped", detail, seconds=process.seconds)
            return
        counts, reasons = _junit(found) if found.is_file() else ({}, {})
        detail = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        status: Status = "passed" if counts.get("passed") else "skipped"
        if process.code:  # 5, nothing was collected, among them
            status = "failed"
            detail = f"{detail or 'pytest'}: exit code {process.code}; {process.task.log}"
        check.add(stage, task.name, status, detail, seconds=process.seconds)
        for reason, count in reasons.items():
            check.add(stage, f"{count} of its tests", "skipped", reason)

    for task_left in check.run(stage, [task], end):
        check.add(stage, task_left.name, "stopped", "no time was left for it")


def _junit(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """How many tests passed, failed and were skipped, and why the last."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    reasons: dict[str, int] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            counts["skipped"] += 1
            reason = skipped.get("message", "no reason given")
            reasons[reason] = reasons.get(reason, 0) + 1
        elif case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        else:
            counts["passed"] += 1
    return counts, reasons


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


def _text(check: Check, stage: str) -> Path | None:
    """Real text: the source of this Python's standard library."""
    data = check.folder / "data"
    task = Task(
        name="preparing text",
        command=[
            *(sys.executable, "-m", "kha_megatron", "data", "prepare"),
            *("--vocab-size", "4096", "--out", str(data)),
        ],
        log=check.log("data"),
        limit=CASE_SECONDS,
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
    words = {"--tensorboard-dir": (str(check.folder / "losses" / case.name),)}
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


def benchmarks(check: Check) -> None:
    """The benchmarks, one after the other and nothing beside them."""
    stage = "benchmarks"
    here = []
    for benchmark in BENCHMARKS:
        lacking = [n for n in (benchmark.tool, "measuring.py") if not (TOOLS / n).is_file()]
        if lacking:
            check.add(stage, benchmark.tool, "missing", f"tools/{lacking[0]} is not here")
        else:
            here.append(benchmark)
    for i, benchmark in enumerate(here):
        left = check.ends(stage) - time.monotonic()
        _benchmark(check, benchmark, max(0.0, left / (len(here) - i)))


def _benchmark(check: Check, benchmark: Benchmark, limit: float) -> None:
    stage, numbers = "benchmarks", check.folder / f"{Path(benchmark.tool).stem}.json"
    words = benchmark.dry if check.dry else benchmark.words
    task = Task(
        name=benchmark.tool,
        command=[sys.executable, str(TOOLS / benchmark.tool), *words, "--json", str(numbers)],
        log=check.log(numbers.stem),
        limit=limit,
        environment={},
    )

    def end(process: Process) -> None:
        if process.timed_out:
            detail = f"not finished in its {limit:.0f} s; {process.task.log}"
            check.add(stage, task.name, "not reached", detail, seconds=process.seconds)
            return
        if not numbers.is_file():
            detail = f"exit code {process.code}: {process.tail()}; {process.task.log}"
            # a dry run measures nothing: that the tool runs is all that it can find out
            status: Status = "failed" if check.dry else "not reached"
            check.add(stage, task.name, status, detail, seconds=process.seconds)
            return
        text = process.task.log.read_text(encoding="utf-8", errors="replace")
        table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
        missed = [] if check.dry else missed_targets(json.loads(numbers.read_text()), table)
        broken = f"exit code {process.code}: see {process.task.log}" if process.code else ""
        detail = "; ".join(filter(None, [*missed, broken, f"figures in {numbers.name}"]))
        status = "missed" if missed or broken else "passed" if check.dry else "measured"
        check.add(stage, task.name, status, detail, seconds=process.seconds, table=table)

    for left in check.run(stage, [task], end):
        check.add(stage, left.name, "not reached", "no time was left for it")


def training(check: Check) -> None:
    """The small real training: `kha-megatron compare` at a size for one large GPU."""
    data = _text(check, TRAINING)
    if data is None:
        return
    words = {flag: (str(value),) for flag, value in TRAINING_ARGUMENTS.items()}
    words |= {"--bf16": ()}
    te = check.has.get("te") and not check.dry
    base = gpu_cases.TE if te else gpu_cases.LOCAL
    words |= {flag: () if value is True else (str(value),) for flag, value in base.items()}
    if te:
        words |= {"--moe-grouped-gemm": (), "--moe-permute-fusion": ()}
    if check.dry:
        words |= {"--train-iters": ("1",)}
    command = [
        *(sys.executable, "-m", "kha_megatron", "compare", "--recipe", "quickstart"),
        *("--variants", "baseline,kha_mlp,kha_linear", "--seeds", "1", "--nproc", "1"),
        *("--device", "cuda", "--data", str(data), "--output", str(check.folder / "compare")),
        *("--", *render(words)),
    ]
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


STAGES: dict[str, Callable[[Check], None]] = {
    "machine": machine,
    "kernels": kernels,
    "modules": modules,
    "losses": losses,
    "benchmarks": benchmarks,
    TRAINING: training,
}


def arguments() -> argparse.Namespace:
    """What the user asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="the same stages on the CPU, tiny; measures nothing")
    add("--minutes", type=float, help="for all stages (default: 8; 30 with --only training)")
    add("--only", help=f"stages with commas between them, of {', '.join(STAGES)}")
    add("--jobs", type=int, help="trainings at the same time (default: a quarter of the cores)")
    add("--output", type=Path, help="folder to make (default: gpu-check/DATE)")
    add("--json", type=Path, metavar="FILE", help="one more copy of report.json")
    given = parser.parse_args()
    given.only = (given.only or ",".join(UNTIL)).split(",")
    if unknown := [name for name in given.only if name not in STAGES]:
        parser.error(f"--only {unknown[0]}: choose from {', '.join(STAGES)}")
    given.minutes = given.minutes or (30 if TRAINING in given.only else 8)
    given.jobs = given.jobs or max(1, min(4, (os.cpu_count() or 1) // 4))
    now = datetime.datetime.now(datetime.UTC)
    given.output = given.output or Path("gpu-check", f"{now:%Y-%m-%d-%H%M%S}")
    if given.output.exists() and any(given.output.iterdir()):
        parser.error(f"--output {given.output} is not empty: name another")
    return given


@contextlib.contextmanager
def _reported(check: Check, copy: Path | None) -> Iterator[None]:
    """Whatever ends the check, what was found until then is written."""
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    try:
        yield
    finally:
        report = Report(
            command=shlex.join(["python", *sys.argv]),
            date=date,
            dry=check.dry,
            machine=check.machine,
            results=check.results,
            seconds=time.monotonic() - check.started,
        )
        report.write(check.folder, copy)
        words = f"{report.summary()} in {report.seconds:.0f} s: {check.folder / 'report.md'}"
        check.console.print(words, markup=False, highlight=False)


def main() -> int:
    """Run the stages; the exit code."""
    given = arguments()
    given.output.mkdir(parents=True, exist_ok=True)
    check = Check(
        folder=given.output.absolute(),
        dry=given.dry_run,
        seconds=60 * given.minutes,
        jobs=given.jobs,
        console=Console(stderr=True, soft_wrap=True),
    )
    os.chdir(ROOT)
    with _reported(check, given.json and given.json.absolute()):
        for name in ["machine", *(name for name in STAGES if name in given.only)]:
            if name == "machine" and check.machine:
                continue
            STAGES[name](check)
            if "GPU" not in check.machine and not check.dry:
                why = "PyTorch sees no CUDA device: use --dry-run for what a CPU can check"
                check.add("machine", "GPU", "missing", why)
                return 2
    return int(any(result.status in ("failed", "stopped") for result in check.results))


if __name__ == "__main__":
    sys.exit(main())
