"""Timing several ways of doing one thing in one run, and saying on what machine.

Shared by the benchmarks of this folder. A figure by itself says little: clocks, neighbours and
caches move it. So all contenders of a comparison run in turn, many times, in another order each
time; what counts are the ratios within each turn, their median and their spread.
"""

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.mcore.compat import version_of

FLUSHED_BYTES = 1 << 29
"""Written before each timed call on a GPU: beyond any cache, and long enough (about 0.1 ms) for the
call's kernels to be queued meanwhile, so that no gap between launches is timed."""

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformer-engine", "megatron-core", "transformers")


@dataclass(frozen=True)
class Spread:
    """The middle of repeated measurements, and the quarters around it."""

    median: float
    low: float
    """A quarter of them are below."""
    high: float
    """A quarter of them are above."""
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Self:
        """Of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def text(self, digits: int) -> str:
        """``1.23 (1.20-1.31)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def interleaved(
    contenders: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    repetitions: int,
    warm_up: int = 3,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Seconds of each call of each contender, the repetitions of all in the same order of turns.

    Args:
        contenders: what to time, by name. Each is called ``warm_up + repetitions`` times.
        device: of the contenders' tensors; on a GPU, time is the device's own, the cache cold.
        repetitions: turns; in each, every contender runs once.
        warm_up: turns before these: compilers, allocators and clocks settle.
        seed: of the order within each turn.
    """
    clock = _gpu_clock(device) if device.type == "cuda" else _cpu_clock
    shuffled = random.Random(seed)
    names = list(contenders)
    readings: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    for turn in range(warm_up + repetitions):
        shuffled.shuffle(names)
        for name in names:
            reading = clock(contenders[name])
            if turn >= warm_up:
                readings[name].append(reading)
    return {name: [read() for read in values] for name, values in readings.items()}


def ratios(times: list[float], baseline: list[float]) -> Spread:
    """``times / baseline``, turn by turn."""
    return Spread.of([a / b for a, b in zip(times, baseline, strict=True)])


def _cpu_clock(call: Callable[[], Any]) -> Callable[[], float]:
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return lambda: seconds


def _gpu_clock(device: torch.device) -> Callable[[Callable[[], Any]], Callable[[], float]]:
    scratch = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def clock(call: Callable[[], Any]) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        start.record()
        call()
        end.record()

        def read() -> float:
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        return read

    return clock


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What a figure must be read with: hardware, versions, commit, date (UTC), other load."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return found


def machine_line(machine: Mapping[str, Any]) -> str:
    """What :func:`describe_machine` found, in one line for a table's heading."""
    gpu = machine.get("gpu")
    hardware = gpu["name"] if gpu else f"{machine['processor']}, {machine['cores']} cores, no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['date']}, {hardware}, load {machine['load']}, {versions}"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; a cell is one line whatever is in it."""
    lines = [header, ["---"] * len(header)]
    lines += [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def publish(
    table: str, machine: Mapping[str, Any], arguments: argparse.Namespace, results: Any
) -> None:
    """Print the table under its machine; ``arguments.json`` names a file that gets it all."""
    print(machine_line(machine), "", table, sep="\n")
    if arguments.json is None:
        return

    def plain(value: Any) -> Any:
        return asdict(value) if isinstance(value, Spread) else str(value)

    report = {"machine": machine, "arguments": vars(arguments), "results": results}
    with staged_file(arguments.json) as staged:
        staged.write_text(json.dumps(report, indent=2, default=plain) + "\n")


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
