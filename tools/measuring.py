"""Time several contenders in one run, and describe the machine.

A single figure says little, because clocks, neighbours and caches change it. All contenders of a
comparison therefore run in turn, many times, in another order each time. What counts are the ratios
within each turn.
"""

import contextlib
import datetime
import json
import math
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.errors import ConfigError
from kha_megatron.mcore.compat import version_of

FLUSHED_BYTES = 1 << 29
"""Written before each timed call on a GPU: larger than any cache."""
FLUSHES = 24
"""Times that this is written. On an H200 they take 3 ms, in which the kernels of the call are
queued, so that no gap between launches is timed. The launches of a backward pass can take 1 ms."""

ROOT = Path(__file__).resolve().parents[1]
Call = Callable[[], Any]
Report = dict[str, Any]
Reading = Callable[[], float]
"""Returns the seconds of a call."""
Clock = Callable[[Call], Reading]
"""Runs a call."""
Times = Mapping[str, list[float]]
"""Seconds of each call by contender."""
Cells = Iterator[tuple[str, Callable[[], Report]]]
"""The name of each comparison of a benchmark, and a function that returns its result."""
ROWS_VARIABLE = "KHA_GPU_ROWS"
STAGE_VARIABLE = "KHA_GPU_STAGE"
"""Environment variables with the file of :func:`publish` and the name of the stage."""
PACKAGES = ("torch", "triton", "transformer-engine", "megatron-core", "transformers")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Self:
        """Return the spread of one or more values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def text(self, digits: int) -> str:
        """Format as ``1.23 (1.20-1.31)``."""
        median = f"{self.median:.{digits}f}"
        low = f"{self.low:.{digits}f}"
        high = f"{self.high:.{digits}f}"
        return f"{median} ({low}-{high})"

    def verdict(self, limit: float) -> str:
        """Return whether the median keeps to the limit, and whether the quartiles agree."""
        word = "met" if self.median <= limit else "MISSED"
        undecided = ", undecided by the spread" if self.low <= limit < self.high else ""
        return f"{word} (at most {limit:g}){undecided}"


def interleaved(
    contenders: Mapping[str, Call],
    device: torch.device,
    *,
    repetitions: int,
    warm_up: int = 3,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each call of each contender; item ``i`` of all lists is turn ``i``.

    Args:
        contenders: the calls to time, by name.
        device: of the contenders' tensors. On a GPU its own clock is used, with a cold cache.
        repetitions: turns; each contender runs once per turn.
        warm_up: turns before these, which do not count.
        clock: how to time a call, if not so.
    """
    if clock is None:
        clock = _gpu_clock(device) if device.type == "cuda" else _cpu_clock
    shuffled = random.Random(0)
    names = list(contenders)
    readings: dict[str, list[Reading]] = {name: [] for name in names}
    for turn in range(warm_up + repetitions):
        shuffled.shuffle(names)
        for name in names:
            reading = clock(contenders[name])
            if turn >= warm_up:
                readings[name].append(reading)
    times = {}
    for name, readings_of_contender in readings.items():
        times[name] = [read() for read in readings_of_contender]
    return times


def covered_time(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals ``(start, end)``.

    Kernels on several streams overlap. The sum of their times would count such moments repeatedly.
    """
    total = 0.0
    covered_until = -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


def kernel_intervals(call: Call) -> list[tuple[float, float]]:
    """Return start and end of the GPU's kernels and copies in a call, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    intervals = []
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            intervals.append((event.time_range.start, event.time_range.end))
    return intervals


def kernel_clock(call: Call) -> Reading:
    """Time the moments of a call in which the GPU runs a kernel or a copy."""
    microseconds = covered_time(kernel_intervals(call))
    return lambda: microseconds / 1e6


def spreads(times: Times, convert: Callable[[float], float]) -> dict[str, Spread]:
    """Return the spread of the converted times of each contender."""
    converted = {}
    for name, values in times.items():
        converted[name] = Spread.of([convert(value) for value in values])
    return converted


def ratios(times: list[float], baseline: list[float]) -> Spread:
    """Return the spread of ``times / baseline``, turn by turn."""
    return Spread.of([a / b for a, b in zip(times, baseline, strict=True)])


def _cpu_clock(call: Call) -> Reading:
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return lambda: seconds


def _gpu_clock(device: torch.device) -> Clock:
    scratch = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def clock(call: Call) -> Reading:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        for _ in range(FLUSHES):
            scratch.zero_()
        start.record()
        call()
        end.record()

        def read() -> float:
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        return read

    return clock


def describe_machine(device: torch.device) -> Report:
    """Return what is needed to judge a figure: hardware, versions, commit, date (UTC), load."""
    now = datetime.datetime.now(datetime.UTC)
    cores = len(os.sched_getaffinity(0))
    versions = {name: version_of(name) for name in PACKAGES}
    machine: Report = {
        "date": now.isoformat(timespec="seconds"),
        "commit": describe_commit(),
        "hardware": f"{_processor()}, {cores} cores, no GPU",
        "load": round(os.getloadavg()[0], 1),
        "versions": {name: version for name, version in versions.items() if version},
    }
    if device.type == "cuda":
        machine["hardware"] = torch.cuda.get_device_properties(device).name
        machine["cuda"] = torch.version.cuda
        query = ("--query-gpu=driver_version", "--format=csv,noheader")
        machine["driver"] = _output("nvidia-smi", *query)
    return machine


def describe_commit() -> str | None:
    """Return the commit of this directory. A bundle of ``gpu_bundle.sh`` has a file with it."""
    file = ROOT / "COMMIT"
    if file.is_file():
        return file.read_text().strip()
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")


def machine_line(machine: Report) -> str:
    """Return the most important entries of :func:`describe_machine` in one line."""
    entries = [machine["date"], machine["hardware"], f"load {machine['load']}"]
    for name, version in machine["versions"].items():
        entries.append(f"{name} {version}")
    return ", ".join(entries)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown. Line breaks in cells become spaces."""
    separator = ["---"] * len(header)
    lines = [markdown_row(row) for row in (header, separator, *rows)]
    return "\n".join(lines)


def markdown_row(cells: list[str]) -> str:
    """Return a row of a table in Markdown."""
    escaped = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def read_report(file: Path, like: Report) -> Report:
    """Return a report of ``write_report`` without the results in which a contender failed.

    Raises:
        ConfigError: the report has other arguments, or another machine, commit or version.
    """
    report = json.loads(file.read_text())
    for section, ignored in (("machine", {"date", "load"}), ("arguments", set())):
        values = report[section]
        expected = json.loads(json.dumps(like[section], default=_plain))
        for key in sorted((expected.keys() | values.keys()) - ignored):
            if values.get(key) != expected.get(key):
                raise ConfigError(
                    f"Cannot resume {file}: its {key} is {values.get(key)}, expected "
                    f"{expected.get(key)}. Choose another file."
                )
    results = [result for result in report["results"] if not result.get("failed")]
    complete = report["complete"] and results == report["results"]
    return report | {"results": results, "complete": complete}


def write_report(file: Path | None, content: Report) -> None:
    """Write ``content`` as JSON, if there is a file to write."""
    if file:
        with staged_file(file) as staged:
            staged.write_text(json.dumps(content, indent=2, default=_plain) + "\n")


def publish(name: str, status: str, detail: str = "", **values: Any) -> None:
    """Append a result to the file that ``tools/gpu.py run`` names, if it started this process.

    The result is on the disk when this function returns, so that no later failure can lose it.

    Args:
        name: of the test or benchmark within its stage.
        status: ``passed``, ``failed``, ``skipped``, ``not reached``, ``measured`` or ``missed``.
        detail: figures, or the reason of a failure.
        values: anything else that JSON can hold.
    """
    file = os.environ.get(ROWS_VARIABLE)
    if file:
        stage = os.environ[STAGE_VARIABLE]
        row = {"stage": stage, "name": name, "status": status, "detail": detail, **values}
        append_row(Path(file), row)


def append_row(file: Path, row: Report) -> None:
    """Append one line of JSON and wait until it is on the disk."""
    line = json.dumps(row, default=_plain) + "\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(file: Path) -> list[Report]:
    """Return the rows of :func:`append_row`, without a last line that was not fully written."""
    if not file.is_file():
        return []
    rows = []
    for line in file.read_text().split("\n")[:-1]:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Spread) else str(value)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().partition("\n")[0]
