"""Test and measure everything that needs a GPU: ``make gpu-check``.

Stages, in this order:

  first       the tests marked `first`: each kernel at the paper's head dim, and a layer with
              kernels. Stops at the first failure, in about a minute
  kernels     pytest -m gpu tests/kernels: every kernel against float64
  modules     pytest -m gpu tests/gpu: layers with kernels, and Transformer Engine's, against
              Megatron's own in torch
  losses      pytest -m gpu tests/gpu/test_losses.py: short trainings in bf16 and FP8, compared
  benchmarks  the benchmarks of this directory, with few repetitions

Tests skip what the machine lacks. Nothing is downloaded. The output directory gets report.md,
report.json and a log of each process. The exit code is 1 if a stage of tests failed or ran out of
time, and 2 if there is no GPU. Missed targets of benchmarks are only reported. A dry run collects
the tests and runs two benchmarks on the CPU.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import torch
from measuring import ROOT, markdown_table

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
_WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
# compiling a kernel takes a second, running it next to nothing
_PARALLEL = ["-n", str(_WORKERS)] if importlib.util.find_spec("xdist") else []
TESTS = {
    "first": [
        *(*_PARALLEL, "--maxfail", "1", "-m", "gpu and first"),
        *("tests/kernels/test_gpu.py", "tests/gpu/test_layers.py"),
    ],
    "kernels": [*_PARALLEL, "-m", "gpu", "tests/kernels"],
    "modules": ["-m", "gpu", "tests/gpu", "--ignore=tests/gpu/test_losses.py"],
    "losses": ["-m", "gpu", "tests/gpu/test_losses.py"],
}
UNTIL = {"first": 0.2, "kernels": 0.35, "modules": 0.5, "losses": 0.75, "benchmarks": 1.0}
"""The part of the total time by which each stage must end."""

_ONCE = ["--device", "cpu", "--repetitions", "1"]
_MOE = ["--shapes", "moe", "--variants", "baseline", "mlp", "mlp/kernels", "linear/folded"]
BENCHMARKS: dict[str, tuple[list[str], list[str] | None]] = {
    "kernels": (["--variants", "mlp", "linear", "--repetitions", "20"], _ONCE),
    "layer": ([*_MOE, "--precisions", "bf16", "--repetitions", "10"], _ONCE),
    "decode": (["--repetitions", "3", "--caches", "static"], None),
}
"""Options on a GPU and in a dry run on the CPU; None if that takes too long."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one test or benchmark."""

    stage: str
    name: str
    status: str
    """passed, failed, stopped (these two are errors), skipped, not reached, measured, missed."""
    detail: str = ""
    seconds: float | None = None
    table: str = ""


@dataclass
class Check:
    """One run with its output directory, its time limit and its results."""

    folder: Path
    dry: bool
    seconds: float
    results: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def left(self, stage: str) -> float:
        """Return the seconds until the stage must end."""
        return max(0.0, self.started + UNTIL[stage] * self.seconds - time.monotonic())

    def add(self, stage: str, name: str, status: str, detail: str = "", **more: object) -> None:
        """Add a result and print it."""
        self.results.append(Result(stage=stage, name=name, status=status, detail=detail, **more))
        print(f"{stage}: {name}: {status}: {detail}", file=sys.stderr, flush=True)

    def run(self, name: str, command: list[str], limit: float) -> tuple[int | None, float, Path]:
        """Run a command and return its exit code (None if stopped), seconds, and its log."""
        log = self.folder / f"{name}.log"
        print(f"{name}, at most {limit:.0f} s: {shlex.join(command)}", file=sys.stderr, flush=True)
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"KHA_GPU_SECONDS": str(limit)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # background jobs of a shell, and what they start, ignore interrupts
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            try:
                code = process.wait(limit + 30)  # the trainings stop by themselves before
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGINT)  # pytest then writes its report
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return code, time.monotonic() - start, log


def tests(check: Check, stage: str) -> None:
    """Run pytest and add failures, details by test, and the number of skips by reason."""
    found = check.folder / f"{stage}.xml"
    command = [*PYTEST, *TESTS[stage], f"--junitxml={found}", *["--collect-only"] * check.dry]
    code, seconds, log = check.run(stage, command, check.left(stage))
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(found).iter("testcase") if found.is_file() else ():
        details = {p.get("name"): p.get("value") for p in case.iter("property")}
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        word = "failed" if bad is not None else "skipped" if skipped is not None else "passed"
        counts[word] += 1
        if skipped is not None:
            reasons[skipped.get("message", "no reason given")] += 1
        if "detail" in details or bad is not None:
            why = details.get("detail") or (bad.get("message", "") if bad is not None else "")
            check.add(stage, case.get("name", ""), word, why, seconds=float(case.get("time", 0)))
    detail = ", ".join(f"{count} {word}" for word, count in counts.items())
    status = "failed" if code else "passed" if counts["passed"] or check.dry else "skipped"
    if code is None:
        status, detail = "stopped", f"not finished; {log}"
    check.add(stage, "pytest", status, detail or f"exit code {code}; {log}", seconds=seconds)
    for reason, count in reasons.items():
        check.add(stage, f"{count} of its tests", "skipped", reason)


def benchmarks(check: Check) -> None:
    """Run the benchmarks one after another."""
    stage = "benchmarks"
    for i, (name, (words, dry)) in enumerate(BENCHMARKS.items()):
        if check.dry and dry is None:
            check.add(stage, name, "skipped", "takes too long for a dry run")
            continue
        if (limit := check.left(stage) / (len(BENCHMARKS) - i)) < 5:
            check.add(stage, name, "not reached", "no time was left")
            continue
        numbers = check.folder / f"{name}.json"
        command = [sys.executable, str(ROOT / "tools/bench.py"), name, "--json", str(numbers)]
        command += dry if check.dry and dry else words
        code, seconds, log = check.run(name, command, limit)
        text = log.read_text(encoding="utf-8", errors="replace")
        rows = [line for line in text.splitlines() if line.startswith("|")]
        missed = [" ".join(row.strip("| ").split()) for row in rows if "MISSED" in row]
        status = "missed" if missed else "passed" if check.dry else "measured"
        if code != 0:
            status = "failed" if check.dry else "missed" if numbers.is_file() else "not reached"
            missed.append(f"exit code {code}; {log}")
        detail = "; ".join(missed)
        check.add(stage, name, status, detail, seconds=seconds, table="\n".join(rows))


def report(check: Check) -> str:
    """Write report.json and report.md; return a summary."""
    doctor = [sys.executable, "-m", "kha_megatron", "doctor"]
    machine = subprocess.run(doctor, capture_output=True, text=True, check=False).stdout
    counts = Counter(result.status for result in check.results)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    seconds = time.monotonic() - check.started
    command = shlex.join(["python", *sys.argv])
    content = {"command": command, "seconds": seconds, "dry": check.dry, "machine": machine}
    content |= {"results": [asdict(result) for result in check.results]}
    (check.folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    mode = "Dry run on the CPU: nothing was measured" if check.dry else "On a GPU"
    parts = ["# GPU check", f"{mode}. `{command}`, {seconds:.0f} s: {summary}."]
    for stage in dict.fromkeys(result.stage for result in check.results):
        mine = [result for result in check.results if result.stage == stage]
        rows = [[r.name, r.status, f"{r.seconds or 0:.0f}", r.detail] for r in mine]
        parts += [f"## {stage}", markdown_table(["what", "result", "seconds", "detail"], rows)]
        parts += [f"### {result.name}\n\n{result.table}" for result in mine if result.table]
    parts += ["## Machine", f"```\n{machine}```"]
    (check.folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return f"{summary} in {seconds:.0f} s: {check.folder / 'report.md'}"


def main() -> int:
    """Run the stages and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="the same stages on the CPU; measures nothing")
    add("--minutes", type=float, default=8, help="for all stages (default: 8)")
    add("--only", default=",".join(UNTIL), help="comma-separated stages (default: %(default)s)")
    add("--output", type=Path, help="new directory (default: gpu-check/DATE)")
    given = parser.parse_args()
    stages = given.only.split(",")
    if unknown := [name for name in stages if name not in UNTIL]:
        parser.error(f"--only {unknown[0]}: choose from {', '.join(UNTIL)}")
    now = datetime.datetime.now(datetime.UTC)
    folder = (given.output or Path("gpu-check", f"{now:%Y-%m-%d-%H%M%S}")).absolute()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--output {folder} is not empty. Choose another directory.")
    if not torch.cuda.is_available() and not given.dry_run:
        print("error: PyTorch finds no CUDA device. Use --dry-run on a CPU.", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    check = Check(folder=folder, dry=given.dry_run, seconds=60 * given.minutes)
    try:
        for stage in (name for name in UNTIL if name in stages):
            benchmarks(check) if stage == "benchmarks" else tests(check, stage)
    finally:  # also after an interrupt
        print(report(check), file=sys.stderr)
    return int(any(result.status in ("failed", "stopped") for result in check.results))


if __name__ == "__main__":
    sys.exit(main())
