"""Test and measure what needs a GPU, within the time that one is available.

`run` answers the open questions in 13 minutes: several ranks on one GPU, whole training steps,
compiled decoding, tile sizes, and losses of models trained from scratch. `check` runs all other
tests that need a GPU, and `bench` measures the tables of benchmarks/. No stage starts that cannot
end in time. `--device cpu` runs the stages of `run` with tiny models on gloo, to test them.

OUTPUT/COMMIT-MACHINE/rows.jsonl gets each result as soon as there is one. The same command
continues where an earlier one stopped: what was measured or passed is not repeated. Results of
another commit or machine are kept apart. OUTPUT/results.tar.xz holds all results in one file. An
output directory that holds only this file continues as well.

Everything runs with the Python of this command, which should be the one that trains. If a component
is missing, the command stops unless ``--without`` accepts this. Exit codes: 1 if something failed,
2 if there is no GPU or a component is missing, 3 if time ran out. Missed targets are only reported.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from gpu_stages import (
    MINUTES,
    STAGES,
    Command,
    Setting,
    Stage,
    choose_backend,
    finished_trials,
)
from measuring import (
    ROOT,
    ROWS_VARIABLE,
    STAGE_VARIABLE,
    Report,
    append_row,
    describe_commit,
    describe_machine,
    markdown_table,
    read_rows,
)

from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.mcore.compat import cuda_versions, lacks_te_extension, version_of

COMPONENTS = {
    "te": "Transformer Engine with its compiled extension (extra `te`)",
    "triton": "Triton (`pip install triton`)",
    "flash-attn": "flash-attn (extra `flash`)",
    "apex": "NVIDIA's apex with fused_weight_gradient_mlp_cuda (from source: benchmarks/gpu.md)",
}
"""Packages that stages need, and how to install them."""

ROWS = "rows.jsonl"
MACHINE = "machine.json"
PACKED = "results.tar.xz"
NOT_PACKED = ("data", "checkpoints", "index")
"""Directories that are large and can be made again."""
WHOLE = "whole stage"
"""Name of the row that says how a stage ended."""
GRACE = 8.0
"""Seconds between an interrupt and the end of a stage's processes."""
PROGRESS_SECONDS = 15.0
MINUTES_ON_CPU = 60.0


@dataclass
class Runner:
    """A run with its directory, its time limit and its device."""

    setting: Setting
    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def rows_file(self) -> Path:
        return self.setting.folder / ROWS

    def left(self) -> float:
        """Return the seconds until everything must have ended."""
        return self.started + self.seconds - time.monotonic()

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", file=sys.stderr, flush=True)

    def run(self, stage: Stage) -> None:
        """Run a stage, unless it is complete or cannot end in time."""
        device = self.setting.device
        if is_complete(stage, read_rows(self.rows_file)):
            self.say(f"{stage.name}: complete")
            return
        least = stage.least_seconds(device)
        if self.left() < least:
            self.finish(stage, "not reached", f"needs {least:.0f} s, {self.left():.0f} s left")
            return
        start = time.monotonic()
        limit = min(stage.limit(device), self.left())
        rows_before = len(read_rows(self.rows_file))
        backend = choose_backend(read_rows(self.rows_file))
        commands = stage.commands(replace(self.setting, backend=backend))
        code: int | None = 0
        for command in commands:
            if command.is_fallback and code == 0:
                continue
            if code != 0 and not command.is_fallback:
                break
            code = self.execute(stage, command, start + limit)
        self.add_finished_trials()
        rows = read_rows(self.rows_file)[rows_before:]
        counts = Counter(row["status"] for row in rows)
        results = ", ".join(f"{count} {status}" for status, count in counts.items())
        log = self.setting.folder / f"{stage.name}.log"
        if code is None:
            status = "stopped"
            detail = f"at its time limit of {limit:.0f} s"
        elif code == 0:
            status = "passed"
            detail = results
        else:
            status = "failed"
            detail = f"exit code {code}, {log.name}: {last_line(log)}"
        self.finish(stage, status, detail, time.monotonic() - start)

    def add_finished_trials(self) -> None:
        """Add a row for each training of ``kha-megatron compare`` that has finished since."""
        known = {row["name"] for row in read_rows(self.rows_file)}
        for row in finished_trials(self.setting.folder):
            if row["name"] not in known:
                append_row(self.rows_file, row)

    def finish(self, stage: Stage, status: str, detail: str, seconds: float = 0) -> None:
        """Record how a stage ended, and pack all results."""
        row = {"stage": stage.name, "name": WHOLE, "status": status, "detail": detail}
        append_row(self.rows_file, row | {"seconds": round(seconds, 1)})
        self.say(f"{stage.name}: {status} after {seconds:.0f} s: {detail}")
        write_report(self.setting.folder)
        pack(self.setting.folder.parent)

    def execute(self, stage: Stage, command: Command, deadline: float) -> int | None:
        """Run a command and return its exit code, or None if it was stopped at the deadline."""
        seconds = max(0.0, deadline - GRACE - time.monotonic())
        environment = os.environ | dict(command.environment)
        paths = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment[ROWS_VARIABLE] = str(self.rows_file)
        environment[STAGE_VARIABLE] = stage.name
        environment["KHA_GPU_SECONDS"] = str(seconds)
        self.say(f"{stage.name}: at most {seconds:.0f} s: {shlex.join(command.words)}")
        with (self.setting.folder / f"{stage.name}.log").open("ab") as log:
            process = subprocess.Popen(
                command.words,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # background jobs of a shell, and what they start, ignore interrupts
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            try:
                return self.wait(stage, process, deadline - GRACE)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def wait(self, stage: Stage, process: subprocess.Popen, deadline: float) -> int | None:
        """Wait for a process and report progress. Interrupt it at the deadline."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                os.killpg(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                return None
            try:
                return process.wait(min(left, PROGRESS_SECONDS))
            except subprocess.TimeoutExpired:
                rows = [row for row in read_rows(self.rows_file) if row["stage"] == stage.name]
                newest = f"{rows[-1]['name']}: {rows[-1]['status']}" if rows else "no result yet"
                self.say(f"{stage.name}: {len(rows)} results, {newest}")


def is_complete(stage: Stage, rows: list[Report]) -> bool:
    """Return whether a stage passed in an earlier run and need not be repeated."""
    statuses = []
    for row in rows:
        if row["stage"] == stage.name and row["name"] == WHOLE:
            statuses.append(row["status"])
    return bool(statuses) and statuses[-1] == "passed" and not stage.repeats


def newest_rows(folder: Path) -> list[Report]:
    """Return the last row of each name, since a test that failed may have been repeated."""
    rows = {}
    for row in read_rows(folder / ROWS):
        rows[row["stage"], row["name"]] = row
    return list(rows.values())


def exit_code(folder: Path, stages: list[Stage]) -> int:
    """Return the exit code for the newest results of these stages.

    A failure for which a fallback made up does not count.
    """
    names = {stage.name for stage in stages}
    rows = [row for row in newest_rows(folder) if row["stage"] in names]
    if any(row["name"] == WHOLE and row["status"] == "failed" for row in rows):
        return 1
    statuses = {row["status"] for row in rows}
    return 3 if {"stopped", "not reached"} & statuses else 0


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    filled = [line.strip() for line in lines if line.strip()]
    return filled[-1][:200] if filled else "no output"


def write_report(folder: Path) -> None:
    """Write report.md with a table for each stage."""
    machine = json.loads((folder / MACHINE).read_text())
    parts = [f"# {folder.name}"]
    rows = newest_rows(folder)
    for stage in dict.fromkeys(row["stage"] for row in rows):
        cells = []
        for row in rows:
            if row["stage"] == stage:
                seconds = str(row.get("seconds", ""))
                cells.append([row["name"], row["status"], seconds, row["detail"]])
        parts += [f"## {stage}", markdown_table(["what", "result", "seconds", "detail"], cells)]
    parts += ["## Machine", f"```\n{json.dumps(machine, indent=2)}\n```"]
    with staged_file(folder / "report.md") as staged:
        staged.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def pack(output: Path) -> None:
    """Pack all results of an output directory into one file."""

    def small(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if Path(entry.name).name in NOT_PACKED else entry

    with staged_file(output / PACKED) as staged, tarfile.open(staged, "w:xz") as archive:
        for folder in sorted(output.iterdir()):
            if (folder / ROWS).is_file():
                archive.add(folder, folder.name, filter=small)


def unpack(output: Path) -> None:
    """Restore the results of earlier runs of which only the packed file is left."""
    packed = output / PACKED
    if not packed.is_file() or any((folder / ROWS).is_file() for folder in output.iterdir()):
        return
    with tarfile.open(packed) as archive:
        archive.extractall(output, filter="data")


def results_folder(output: Path, commit: str, machine: Report) -> Path:
    """Return the directory for results of this commit, with its changes, on this machine."""
    changes = subprocess.run(
        ["git", "-C", str(ROOT), "diff", "HEAD"],
        capture_output=True,
        check=False,
    ).stdout
    if commit.endswith("-dirty"):
        commit += f"-{hashlib.sha256(changes).hexdigest()[:8]}"
    hardware = re.sub(r"[^A-Za-z0-9]+", "-", machine["hardware"]).strip("-")
    return output / f"{commit}-{hardware}"


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
    add("command", choices=list(STAGES))
    add("--dry-run", action="store_true", help="print the stages, their order and time limits")
    add("--minutes", type=float, help="for all stages (default: run 13, check 15, bench 25)")
    add("--only", metavar="STAGES", help="comma-separated")
    accepted = "comma-separated components that may be missing: " + ", ".join(COMPONENTS)
    add("--without", metavar="COMPONENTS", default="", help=accepted)
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: test the stages of run")
    add("--model", choices=["full", "tiny"], help="tiny on a CPU, full on a GPU")
    add("--output", type=Path, default=Path("gpu-results"), help="default: gpu-results")
    add("--commit", default=describe_commit(), help="of this source tree, if git does not know it")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    if on_cpu and args.command != "run":
        parser.error(f"{args.command} needs a GPU. Only `run` has a CPU version.")
    if args.model and (args.model == "tiny") != on_cpu:
        parser.error(f"--model {args.model} does not run with --device {args.device}.")
    if not args.commit:
        parser.error(f"{ROOT} is not a git repository. Pass its commit with --commit.")
    if args.minutes is None:
        args.minutes = MINUTES_ON_CPU if on_cpu else MINUTES[args.command]
    stages = {stage.name: stage for stage in STAGES[args.command]}
    chosen = args.only.split(",") if args.only else list(stages)
    without = args.without.split(",") if args.without else []
    for option, names, known in (
        ("--only", chosen, stages),
        ("--without", without, COMPONENTS),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            parser.error(f"{option} {unknown[0]}: choose from {', '.join(known)}")
    args.stages = [stage for name, stage in stages.items() if name in chosen]
    if args.dry_run or on_cpu:
        return args
    if not torch.cuda.is_available():
        parser.error(f"No CUDA device found: {cuda_versions()}.")
    found = find_components()
    print(f"{sys.executable}: {found}", file=sys.stderr)
    needed: set[str] = set()
    for stage in args.stages:
        needed.update(stage.needs)
    lacking = [name for name in COMPONENTS if name in needed and not found[name]]
    lacking = [name for name in lacking if name not in without]
    if lacking:
        parser.error(
            f"{sys.executable} lacks {'; '.join(COMPONENTS[name] for name in lacking)}. Install "
            "them, choose another environment with PYTHON=/path/to/python, or leave out what needs "
            f"them with --without {','.join([*without, *lacking])}."
        )
    return args


def main() -> int:
    args = arguments()
    if args.dry_run:
        cells = []
        for stage in args.stages:
            seconds = f"{stage.limit(args.device):.0f}"
            least = f"{stage.least_seconds(args.device):.0f}"
            cells.append([stage.name, seconds, least, stage.question])
        print(markdown_table(["stage", "seconds at most", "starts with", "what"], cells))
        return 0
    output = args.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    unpack(output)
    machine = describe_machine(torch.device(args.device))
    folder = results_folder(output, args.commit, machine)
    folder.mkdir(exist_ok=True)
    with staged_file(folder / MACHINE) as staged:
        staged.write_text(json.dumps(machine | {"commit": args.commit}, indent=2) + "\n")
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    setting = Setting(device=args.device, gpus=gpus, folder=folder)
    runner = Runner(setting, 60 * args.minutes)
    try:
        for stage in args.stages:
            runner.run(stage)
    except KeyboardInterrupt:
        return 130
    print(f"{output / PACKED}: {len(newest_rows(folder))} results", file=sys.stderr)
    return exit_code(folder, args.stages)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
