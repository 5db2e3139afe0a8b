"""Which benchmarks ``make gpu-check`` runs, with which words, and what it reads from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COPY_RATIO = 1.6
"""KHA-MLP's forward kernel over a copy of the same bytes: at most."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A program of this folder that prints a table in Markdown and takes ``--json FILE``."""

    tool: str
    words: tuple[str, ...]
    """For a GPU: few repetitions, since all of them share a few minutes."""

    dry: tuple[str, ...] | None = None
    """For a dry run on the CPU; None where that takes too long, and its own tests must do."""


_ONCE = ("--device", "cpu", "--repetitions", "1")
_MOE = ("--shapes", "moe")
_SHORT = ("mlp/kernels", "linear/folded+kernels")

BENCHMARKS = (
    Benchmark(tool="bench_kernels.py", words=("--repetitions", "20"), dry=_ONCE),
    Benchmark(
        tool="bench_layer.py",
        words=(*_MOE, "--precisions", "bf16", "--repetitions", "10", "--microbatches", "2"),
        dry=(*_ONCE, "--variants", *_SHORT),
    ),
    Benchmark(tool="bench_fp8_linear.py", words=("--repetitions", "20"), dry=_ONCE),
    Benchmark(tool="bench_memory.py", words=_MOE),
    Benchmark(
        tool="bench_step.py",
        words=(*_MOE, "--repetitions", "1", "--steps", "10", "--variants", "baseline", *_SHORT),
    ),
    Benchmark(tool="bench_decode.py", words=("--repetitions", "3", "--caches", "static")),
)
"""In the order of their importance: what time does not allow is named."""


def missed_targets(report: Mapping[str, Any], table: str) -> list[str]:
    """Targets that a benchmark missed, in words.

    Args:
        report: its JSON.
        table: what it printed, whose rows say MISSED where it judges itself.
    """
    rows = [line.strip("| ") for line in table.splitlines() if "MISSED" in line]
    missed = [" ".join(row.split()) for row in rows]
    for result in report.get("results", ()):
        ratio = result.get("kernels_over", {}).get("copy")
        if not ratio or result.get("work") != "forward" or not result["case"].startswith("mlp"):
            continue
        if ratio["median"] > COPY_RATIO:
            words = f"{result['case']}: forward over a copy {ratio['median']:.2f}"
            missed.append(f"{words} MISSED (at most {COPY_RATIO})")
    return missed
