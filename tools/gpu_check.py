"""Prove and measure everything that needs a GPU, in one command: ``make gpu-check``.

Stages, in this order:

  first       the tests marked `first`: each fused kernel at the paper's head dim, over three turns
              of its loop, and a layer through them. It ends at the first failure, in about a
              minute, before anything else has taken time
  kernels     pytest -m gpu tests/kernels: every form of the kernels against float64
  modules     pytest -m gpu tests/gpu: layers with kernels, and Transformer Engine's, against
              Megatron's own in plain torch
  losses      pytest -m gpu tests/gpu/test_losses.py: short trainings in bf16 and FP8, compared
  benchmarks  the benchmarks of this folder, with few repetitions

What the machine lacks is skipped and named. Nothing is fetched from a network. report.md,
report.json and a log of each process are left in one folder. The exit code is 1 if a stage that
proves correctness failed or ran out of time, 2 if there is no GPU; targets that benchmarks miss are
reported only. A dry run collects the tests and runs the benchmarks on the CPU, tiny.

Tests of kernels run in several processes where pytest-xdist is installed: compiling them takes a
second each, and running them next to nothing.
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

from measuring import ROOT, markdown_table

from kha_megatron.cli.doctor import examine, findings_of
from kha_megatron.cli.installation import Finding

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
_WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
_SIDE_BY_SIDE = ["-n", str(_WORKERS)] if importlib.util.find_spec("xdist") else []
TESTS = {
    "first": [
        *(*_SIDE_BY_SIDE, "--maxfail", "1", "-m", "gpu and first"),
        *("tests/kernels/test_gpu.py", "tests/gpu/test_layers.py"),
    ],
    "kernels": [*_SIDE_BY_SIDE, "-m", "gpu", "tests/kernels"],
    "modules": ["-m", "gpu", "tests/gpu", "--ignore=tests/gpu/test_losses.py"],
    "losses": ["-m", "gpu", "tests/gpu/test_losses.py"],
}
UNTIL = {"first": 0.2, "kernels": 0.35, "modules": 0.5, "losses": 0.75, "benchmarks": 1.0}
"""The part of the whole time by which each stage must end; what one leaves, the next may use."""

_ONCE = ["--device", "cpu", "--repetitions", "1"]
_MOE = ["--shapes", "moe"]
_SHORT = ["mlp/kernels", "linear/folded+kernels"]
BENCHMARKS: dict[str, tuple[list[str], list[str] | None]] = {
    "kernels": (["--variants", "mlp", "linear", "--repetitions", "20"], _ONCE),
    "layer": (
        [*_MOE, "--precisions", "bf16", "--repetitions", "10", "--microbatches", "2"],
        [*_ONCE, "--variants", *_SHORT],
    ),
    "memory": (_MOE, None),
    "step": (
        [*_MOE, "--repetitions", "1", "--steps", "10", "--variants", "baseline", *_SHORT],
        None,
    ),
    "decode": (["--repetitions", "3", "--caches", "static"], None),
}
"""In the order of their importance: words for a GPU, which all share a few minutes, and for a dry
run on the CPU; None where that takes too long, and their own tests must do."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one test, or one benchmark, ended."""

    stage: str
    name: str
    status: str
    """passed, failed, stopped (these two are faults); skipped, not reached, measured, missed."""
    detail: str = ""
    seconds: float | None = None
    table: str = ""


@dataclass
class Check:
    """One run: where it writes, until when, and what it has found."""

    folder: Path
    dry: bool
    seconds: float
    results: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def left(self, stage: str) -> float:
        """Seconds until the stage must end."""
        return max(0.0, self.started + UNTIL[stage] * self.seconds - time.monotonic())

    def add(self, stage: str, name: str, status: str, detail: str = "", **more: object) -> None:
        """Keep a result, and say it."""
        self.results.append(Result(stage=stage, name=name, status=status, detail=detail, **more))
        print(f"{stage}: {name}: {status}: {detail}", file=sys.stderr, flush=True)

    def run(self, name: str, command: list[str], limit: float) -> tuple[int | None, float, Path]:
        """Exit code (None if its time ran out), seconds, and where its output is."""
        log = self.folder / f"{name}.log"
        words = f"{name}, at most {limit:.0f} s: {shlex.join(command)}"
        print(words, file=sys.stderr, flush=True)
        start = time.monotonic()
        # containers often set it; then each process compiles torch and Megatron anew, 8 s a time
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=inherited | {"KHA_GPU_SECONDS": str(limit)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
            )
            try:
                # the losses end by themselves then, and want a moment to be written
                code = process.wait(limit + 30)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGINT)  # pytest then writes what it has found
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
            finally:
                with contextlib.suppress(ProcessLookupError):  # none is left
                    os.killpg(process.pid, signal.SIGKILL)
        return code, time.monotonic() - start, log


def _heed_interrupts() -> None:
    """In a shell's background job they are ignored, also by what that starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def tests(check: Check, stage: str) -> None:
    """One pytest: failures, figures by name, and how many were skipped for which reason."""
    found = check.folder / f"{stage}.xml"
    command = [*PYTEST, *TESTS[stage], f"--junitxml={found}", *["--collect-only"] * check.dry]
    code, seconds, log = check.run(stage, command, check.left(stage))
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(found).iter("testcase") if found.is_file() else ():
        said = {p.get("name"): p.get("value") for p in case.iter("property")}
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        word = "failed" if bad is not None else "skipped" if skipped is not None else "passed"
        counts[word] += 1
        if skipped is not None:
            reasons[skipped.get("message", "no reason given")] += 1
        if "detail" in said or bad is not None:
            why = said.get("detail") or (bad.get("message", "") if bad is not None else "")
            check.add(stage, case.get("name", ""), word, why, seconds=float(case.get("time", 0)))
    detail = ", ".join(f"{count} {word}" for word, count in counts.items())
    status = "failed" if code else "passed" if counts["passed"] or check.dry else "skipped"
    if code is None:
        status, detail = "stopped", f"not finished; {log}"
    check.add(stage, "pytest", status, detail or f"exit code {code}; {log}", seconds=seconds)
    for reason, count in reasons.items():
        check.add(stage, f"{count} of its tests", "skipped", reason)


def benchmarks(check: Check) -> None:
    """The benchmarks, one after the other and nothing beside them."""
    stage = "benchmarks"
    for i, (name, (words, dry)) in enumerate(BENCHMARKS.items()):
        if check.dry and dry is None:
            check.add(stage, name, "skipped", "too long for a dry run: its own tests run it")
            continue
        if (limit := check.left(stage) / (len(BENCHMARKS) - i)) < 5:
            check.add(stage, name, "not reached", "no time was left for it")
            continue
        numbers = check.folder / f"{name}.json"
        command = [sys.executable, str(ROOT / "tools/bench.py"), name]
        command += [*(dry if check.dry and dry else words), "--json", str(numbers)]
        code, seconds, log = check.run(name, command, limit)
        text = log.read_text(encoding="utf-8", errors="replace")
        rows = [line for line in text.splitlines() if line.startswith("|")]
        missed = [" ".join(row.strip("| ").split()) for row in rows if "MISSED" in row]
        if not numbers.is_file():
            status = "failed" if check.dry else "not reached"
            missed = [f"exit code {code}; {log}"]
        else:
            status = "missed" if missed or code else "passed" if check.dry else "measured"
        detail = "; ".join([*missed, *([f"exit code {code}; {log}"] if code and rows else [])])
        check.add(stage, name, status, detail, seconds=seconds, table="\n".join(rows))


def report(check: Check, machine: dict[str, str]) -> str:
    """``report.json`` and ``report.md``; how many results of each kind there are, in words."""
    counts = Counter(result.status for result in check.results)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    seconds = time.monotonic() - check.started
    command = shlex.join(["python", *sys.argv])
    what = {"command": command, "date": date, "seconds": seconds, "dry": check.dry}
    results = [asdict(result) for result in check.results]
    content = what | {"machine": machine, "results": results}
    (check.folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    mode = "Dry run on the CPU: nothing below was measured" if check.dry else "On a GPU"
    parts = ["# GPU check", f"{mode}. `{command}`, {date}, {seconds:.0f} s: {summary}."]
    parts.append(markdown_table(["component", "found"], [list(item) for item in machine.items()]))
    for stage in dict.fromkeys(result.stage for result in check.results):
        mine = [result for result in check.results if result.stage == stage]
        rows = [[r.name, r.status, f"{r.seconds or 0:.0f}", r.detail] for r in mine]
        parts += [f"## {stage}", markdown_table(["what", "result", "seconds", "detail"], rows)]
        parts += [f"### {result.name}\n\n{result.table}" for result in mine if result.table]
    (check.folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return f"{summary} in {seconds:.0f} s: {check.folder / 'report.md'}"


def arguments() -> argparse.Namespace:
    """What the user asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="the same stages on the CPU; measures nothing")
    add("--minutes", type=float, default=8, help="for all stages (default: 8)")
    add("--only", help=f"stages with commas between them, of {', '.join(UNTIL)}")
    add("--output", type=Path, help="folder to make (default: gpu-check/DATE)")
    given = parser.parse_args()
    given.only = given.only.split(",") if given.only else list(UNTIL)
    if unknown := [name for name in given.only if name not in UNTIL]:
        parser.error(f"--only {unknown[0]}: choose from {', '.join(UNTIL)}")
    now = datetime.datetime.now(datetime.UTC)
    given.output = (given.output or Path("gpu-check", f"{now:%Y-%m-%d-%H%M%S}")).absolute()
    if given.output.exists() and any(given.output.iterdir()):
        parser.error(f"--output {given.output} is not empty: name another")
    return given


def main() -> int:
    """Run the stages; the exit code."""
    given = arguments()
    here = {finding.name: finding for finding in findings_of("torch", deep=True)}
    if here["CUDA device"].status != "ok" and not given.dry_run:
        print(
            "error: PyTorch sees no CUDA device: use --dry-run for what a CPU can check",
            file=sys.stderr,
        )
        return 2
    given.output.mkdir(parents=True, exist_ok=True)
    check = Check(folder=given.output, dry=given.dry_run, seconds=60 * given.minutes)
    findings: dict[str, Finding] = {}
    try:
        for stage in (name for name in UNTIL if name in given.only):
            benchmarks(check) if stage == "benchmarks" else tests(check, stage)
            # some ten seconds, for which a wrong result need not wait
            findings = findings or {finding.name: finding for finding in examine(deep=True)}
    finally:  # whatever ends it, what was found until then is written
        machine = {name: f"{f.status} {f.found}; {f.effect}" for name, f in findings.items()}
        print(report(check, machine), file=sys.stderr)
    return int(any(result.status in ("failed", "stopped") for result in check.results))


if __name__ == "__main__":
    sys.exit(main())
