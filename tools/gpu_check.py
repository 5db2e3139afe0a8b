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
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import gpu_cases
import gpu_machine
from gpu_benchmarks import BENCHMARKS, Benchmark, missed_targets
from gpu_losses import TRAINING, losses, training
from gpu_processes import Process, Task
from gpu_report import WRONG, Report, Status
from gpu_run import UNTIL, Check
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
TOOLS = Path(__file__).resolve().parent


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


def benchmarks(check: Check) -> None:
    """The benchmarks, one after the other and nothing beside them."""
    stage = "benchmarks"
    here = []
    for benchmark in BENCHMARKS:
        lacking = [n for n in (benchmark.tool, "measuring.py") if not (TOOLS / n).is_file()]
        if lacking:
            check.add(stage, benchmark.tool, "missing", f"tools/{lacking[0]} is not here")
        elif check.dry and benchmark.dry is None:
            why = "too long for a dry run: its own tests run it on the CPU"
            check.add(stage, benchmark.tool, "skipped", why)
        else:
            here.append(benchmark)
    for i, benchmark in enumerate(here):
        left = check.ends(stage) - time.monotonic()
        _benchmark(check, benchmark, max(0.0, left / (len(here) - i)))


def _benchmark(check: Check, benchmark: Benchmark, limit: float) -> None:
    stage, numbers = "benchmarks", check.folder / f"{Path(benchmark.tool).stem}.json"
    words = (benchmark.dry or ()) if check.dry else benchmark.words
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
    # containers often set it; then each process compiles torch and Megatron anew, 8 s a time
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with _reported(check, given.json and given.json.absolute()):
        for name in ["machine", *(name for name in STAGES if name in given.only)]:
            if name == "machine" and check.machine:
                continue
            STAGES[name](check)
            if "GPU" not in check.machine and not check.dry:
                why = "PyTorch sees no CUDA device: use --dry-run for what a CPU can check"
                check.add("machine", "GPU", "missing", why)
                return 2
    return int(any(result.status in WRONG for result in check.results))


if __name__ == "__main__":
    sys.exit(main())
