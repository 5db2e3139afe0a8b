"""Test and measure what needs a GPU: ``make gpu-check`` and ``make gpu-bench``.

`check` runs the GPU tests within ten minutes. With two or more GPUs, the stage `parallelism`
compares sharded with unsharded training. With ``--device cpu``, only this stage runs, on gloo.
`bench` measures the tables of benchmarks/ within 25 minutes, the most informative rows first. Its
output directory holds each row as soon as it is measured, and a second start measures the rest.

Everything runs with the Python of this command, which should be the one that trains. If a component
is missing, the command stops unless ``--without`` accepts this. The output directory gets report.md
and a log of each stage. Exit codes: 1 if a test or contender failed, 2 if there is no GPU or a
component is missing, 3 if time ran out. Missed targets are only reported.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch
from measuring import ROOT, describe_machine, markdown_table

from kha_megatron.mcore.compat import cuda_versions, lacks_te_extension, version_of

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
BENCH = [sys.executable, str(ROOT / "tools/bench.py")]
COMPONENTS = {
    "te": "Transformer Engine with its compiled extension (extra `te`)",
    "triton": "Triton (`pip install triton`)",
    "flash-attn": "flash-attn (extra `flash`)",
    "apex": "NVIDIA's apex with fused_weight_gradient_mlp_cuda (from source: benchmarks/gpu.md)",
}
"""Packages that the tests need, and how to install them. The benchmarks need the first two."""


class Stage(NamedTuple):
    """One command of a run."""

    until: float
    """Minutes after the start of the run by which the stage must end."""
    what: str
    words: list[str]
    """Arguments of pytest or of ``bench.py``."""


_WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
# compiling a kernel takes a second, running it next to nothing
_PARALLEL = ["-n", str(_WORKERS)] if importlib.util.find_spec("xdist") else []
_FIRST = ["--maxfail", "1", "-m", "gpu and first"]
_GPU = ["-m", "gpu"]
_LOSSES = "tests/gpu/test_losses.py"
_OTHERS = ["tests/gpu", "tests/hf", f"--ignore={_LOSSES}"]
CHECKS = {
    "first": Stage(
        1.5,
        "each kernel at the paper's head dim, and a layer with kernels; stops at a failure",
        [*_PARALLEL, *_FIRST, "tests/kernels/test_gpu.py", "tests/gpu/test_layers.py"],
    ),
    "kernels": Stage(3, "every kernel against float64", [*_PARALLEL, *_GPU, "tests/kernels"]),
    "modules": Stage(5, "layers, attention backends and exported models", [*_GPU, *_OTHERS]),
    "parallelism": Stage(
        7,
        "training on two or more GPUs against one",
        [*_GPU, "tests/distributed"],
    ),
    "losses": Stage(10, "short trainings in bf16 and FP8, compared", [*_GPU, _LOSSES]),
}
GLOO = ["--whole", "-m", "not gpu", "tests/distributed/test_engine.py"]
GLOO += ["tests/distributed/test_mutations.py"]

_MOE = ["layer", "--shapes", "moe"]
_BF16 = ["--precisions", "bf16"]
_FP8 = ["--precisions", "tensorwise"]
_MAIN = ["--variants", "baseline", "mlp", "mlp/kernels", "linear"]
_REST = ["--variants", "gate", "gate/kernels"]
BENCHMARKS = {
    "layer-moe": Stage(4, "a layer of the paper's MoE in bf16", [*_MOE, *_BF16, *_MAIN]),
    "kernels-mlp": Stage(
        6,
        "kernels of KHA-MLP, torch, cuBLAS and a copy",
        ["kernels", "--variants", "mlp"],
    ),
    "layer-dense": Stage(
        9,
        "a dense layer in bf16",
        ["layer", "--shapes", "dense", *_BF16, *_MAIN],
    ),
    "decode": Stage(
        13,
        "decoding with transformers",
        ["decode", "--repetitions", "3", "--models", "mlp"],
    ),
    "layer-fp8": Stage(17, "the MoE layer in FP8", [*_MOE, *_FP8, *_MAIN]),
    "kernels-rest": Stage(20, "kernels of KHA-Gate", ["kernels", "--variants", "gate"]),
    "layer-rest": Stage(25, "other variants of the MoE layer", [*_MOE, *_BF16, *_REST]),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one test or benchmark."""

    stage: str
    name: str
    status: str
    """passed, failed, stopped, skipped, not run, not reached, measured or missed."""
    detail: str = ""
    seconds: float = 0
    table: str = ""


@dataclass
class Session:
    """A run with its output directory, its time limit and its results."""

    folder: Path
    scale: float = 1.0  # of the times of the stages
    results: list[Result] = field(default_factory=list)
    tests: Counter[str] = field(default_factory=Counter)  # numbers by outcome
    started: float = field(default_factory=time.monotonic)

    def left(self, stage: Stage) -> float:
        """Return the seconds until the stage must end."""
        return max(0.0, self.started + 60 * stage.until * self.scale - time.monotonic())

    def add(self, stage: str, name: str, status: str, detail: str = "", **more: object) -> None:
        self.results.append(
            Result(
                stage=stage,
                name=name,
                status=status,
                detail=detail,
                **more,
            )
        )
        print(f"{stage}: {name}: {status}: {detail}", file=sys.stderr, flush=True)

    def run(
        self,
        name: str,
        command: list[str],
        limit: float,
        grace: float = 0,
    ) -> tuple[int | None, float, Path]:
        """Run a command and return its exit code (None if stopped), seconds, and its log.

        The command is interrupted ``grace`` seconds after its limit.
        """
        log = self.folder / f"{name}.log"
        print(
            f"{name}, at most {limit:.0f} s: {shlex.join(command)}",
            file=sys.stderr,
            flush=True,
        )
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
                code = process.wait(limit + grace)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGINT)  # pytest then writes its report
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return code, time.monotonic() - start, log

    @property
    def exit_code(self) -> int:
        statuses = {result.status for result in self.results}
        if "failed" in statuses:
            return 1
        if "stopped" in statuses or "not reached" in statuses:
            return 3
        return 0

    def report(self) -> str:
        """Write report.md and return a summary."""
        doctor = subprocess.run(
            [sys.executable, "-m", "kha_megatron", "doctor"],
            capture_output=True,
            text=True,
            check=False,
        )
        summary = self._summary()
        parts = [f"`{shlex.join(['python', *sys.argv])}`: {summary}."]
        for stage in dict.fromkeys(result.stage for result in self.results):
            results = [result for result in self.results if result.stage == stage]
            rows = []
            for result in results:
                seconds = str(round(result.seconds) or "")
                rows.append([result.name, result.status, seconds, result.detail])
            parts.append(f"## {stage}")
            parts.append(markdown_table(["what", "result", "seconds", "detail"], rows))
            parts += [result.table for result in results if result.table]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        machine = describe_machine(torch.device(device))
        parts.append("## Machine")
        parts.append(f"```\n{json.dumps(machine)}\n\n{doctor.stdout}```")
        report = self.folder / "report.md"
        report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        return f"{summary}: {report}"

    def _summary(self) -> str:
        """Return the number of tests and benchmarks by outcome, and the seconds of the run."""
        counts = Counter(self.tests)
        for result in self.results:
            if result.status not in self.tests:
                counts[result.status] += 1
        summary = ", ".join(f"{count} {status}" for status, count in counts.items())
        return f"{summary} in {time.monotonic() - self.started:.0f} s"


def run_tests(session: Session, name: str, words: list[str]) -> None:
    """Run pytest and add failures, details by test, and the number of skips by reason."""
    report = session.folder / f"{name}.xml"
    report.unlink(missing_ok=True)  # of an earlier run
    command = [*PYTEST, *words, "-o", "junit_family=xunit1", f"--junitxml={report}"]
    limit = session.left(CHECKS[name])
    code, seconds, log = session.run(name, command, limit, grace=30)  # trainings stop before
    counts: Counter[str] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    cases = ElementTree.parse(report).iter("testcase") if report.is_file() else ()
    for case in cases:
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        messages = {child.tag: child.get("message", "") for child in case}
        failure = messages.get("failure", messages.get("error"))
        reason = messages.get("skipped")
        if failure is not None:
            status = "failed"
        elif reason is None:
            status = "passed"
        elif reason.startswith("NOT REACHED"):
            status = "not reached"
        else:
            status = "skipped"
        counts[status] += 1
        if reason is not None:
            reasons[status, reason] += 1
        if "detail" in properties or failure is not None:
            detail = properties.get("detail") or failure or ""
            session.add(name, case.get("name", ""), status, detail)
    session.tests += counts
    detail = ", ".join(f"{count} {status}" for status, count in counts.items())
    if code is None:
        status = "stopped"
        detail = f"not finished; {log}"
    elif code:
        status = "failed"
    elif counts["passed"]:
        status = "passed"
    else:
        status = "skipped"
    session.add(
        name,
        "pytest",
        status,
        detail or f"exit code {code}; {log}",
        seconds=seconds,
    )
    for (status, reason), count in reasons.items():
        session.add(name, f"{count} of its tests", status, reason)


def run_benchmark(session: Session, name: str) -> None:
    """Run ``bench.py`` until the stage must end, and add its table."""
    limit = session.left(BENCHMARKS[name])
    if limit < 5:
        session.add(name, "bench.py", "not reached", "no time was left")
        return
    file = session.folder / f"{name}.json"
    command = [*BENCH, *BENCHMARKS[name].words, "--json", str(file), "--resume"]
    code, seconds, log = session.run(name, command, limit)
    report = json.loads(file.read_text()) if file.is_file() else {"results": []}
    rows = []
    for result in report["results"]:
        rows += result["rows"]
    details = [" ".join(row) for row in rows if "MISSED" in " ".join(row)]
    status = "missed" if details else "measured"
    if code is None:
        status = "not reached"
    elif code != 0:
        status = "failed"
    if code != 0:
        details.append(f"{len(rows)} rows, exit code {code}; {log}")
    table = markdown_table(report["header"], rows) if rows else ""
    session.add(
        name,
        "bench.py",
        status,
        "; ".join(details),
        seconds=seconds,
        table=table,
    )


def find_components() -> dict[str, str | None]:
    """Return the version of each of ``COMPONENTS`` that this environment has, or None."""
    components = {name: version_of(name) for name in COMPONENTS}
    components["te"] = None if lacks_te_extension() else version_of("transformer-engine")
    apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda")
    components["apex"] = "found" if apex else None
    return components


def arguments() -> argparse.Namespace:
    """Parse the options. Exit with code 2 if the machine lacks a GPU or a component."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("command", choices=["check", "bench"])
    add(
        "--dry-run",
        action="store_true",
        help="print the stages, their order and times",
    )
    add(
        "--minutes",
        type=float,
        help="for all stages (default: check 10, bench 25)",
    )
    add("--only", metavar="STAGES", help="comma-separated")
    words = "comma-separated components that may be missing: "
    add(
        "--without",
        metavar="COMPONENTS",
        default="",
        help=words + ", ".join(COMPONENTS),
    )
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: see above")
    add("--output", type=Path, help="default: gpu-check/DATE or gpu-bench/COMMIT")
    args = parser.parse_args()
    args.stages = CHECKS if args.command == "check" else BENCHMARKS
    whole = max(stage.until for stage in args.stages.values())
    args.scale = (args.minutes or whole) / whole
    args.only = args.only.split(",") if args.only else list(args.stages)
    without = args.without.split(",") if args.without else []
    for option, chosen, known in (
        ("--only", args.only, args.stages),
        ("--without", without, COMPONENTS),
    ):
        if unknown := [word for word in chosen if word not in known]:
            parser.error(f"{option} {unknown[0]}: choose from {', '.join(known)}")
    if args.dry_run or (args.device == "cpu" and args.command == "check"):
        return args
    if not torch.cuda.is_available():
        parser.error(f"No CUDA device found: {cuda_versions()}.")
    found = find_components()
    print(f"{sys.executable}: {found}", file=sys.stderr)
    needed = list(COMPONENTS)[: None if args.command == "check" else 2]
    if lacking := [name for name in needed if not found[name] and name not in without]:
        parser.error(
            f"{sys.executable} lacks {'; '.join(COMPONENTS[name] for name in lacking)}. Install "
            "them, choose another environment with PYTHON=/path/to/python, or leave out what needs "
            f"them with --without {','.join([*without, *lacking])}."
        )
    return args


def main() -> int:
    args = arguments()
    stages = {name: stage for name, stage in args.stages.items() if name in args.only}
    if args.dry_run:
        rows = [
            [name, f"{until * args.scale:g}", what, shlex.join(words)]
            for name, (until, what, words) in stages.items()
        ]
        print(markdown_table(["stage", "ends by minute", "what", "arguments"], rows))
        return 0
    default = f"gpu-check/{datetime.datetime.now(datetime.UTC):%Y-%m-%d-%H%M%S}"
    if args.command == "bench":  # so that a second start finds the results of this commit
        default = f"gpu-bench/{describe_machine(torch.device('cpu'))['commit']}"
    session = Session((args.output or Path(default)).absolute(), args.scale)
    session.folder.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    try:
        for name, stage in stages.items():
            if args.command == "bench":
                run_benchmark(session, name)
            elif gpus > (name == "parallelism"):
                run_tests(session, name, stage.words)
            elif gpus == 0 and name == "parallelism":
                run_tests(session, name, GLOO)
            else:
                session.add(name, "pytest", "not run", f"needs more GPUs than {gpus}")
    except KeyboardInterrupt:
        return 130
    finally:
        print(session.report(), file=sys.stderr)
    return session.exit_code


if __name__ == "__main__":
    sys.exit(main())
