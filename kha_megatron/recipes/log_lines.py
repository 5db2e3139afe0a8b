"""Read training metrics from Megatron's logs and TensorBoard files.

Every ``--log-interval`` iterations, Megatron logs a line such as::

     iteration 3/ 10 | ... | lm loss: 4.4E+00 |

Other lines are ignored, and so are the prefixes that launchers add.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kha_megatron.errors import DataError

History = dict[str, list[tuple[int, float]]]
"""``{metric: [(iteration, value), ...]}``"""

LOSS = "lm loss"
VALIDATION_LOSS = "lm loss validation"
SECONDS = "iteration-time"

_LINE = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|(.*)")
_SKIPPED = "number of skipped iterations"


@dataclass(frozen=True)
class Step:
    """A training step in Megatron's log. Loss and time are averages since the previous one."""

    iteration: int
    total: int
    """Number of iterations of the run."""
    samples: int | None
    """Samples consumed so far."""
    seconds: float | None
    """Seconds per iteration."""
    loss: float | None
    """None if all iterations were skipped."""


class LogLine(NamedTuple):
    """A line of Megatron's training log with all of its metrics."""

    iteration: int
    total: int
    """Number of iterations of the run."""
    metrics: dict[str, float]


def parse_line(line: str) -> LogLine | None:
    """Parse a line of Megatron's training log. Returns None for other lines."""
    match = _LINE.search(line)
    if match is None:
        return None
    iteration, total, metrics_text = match.groups()
    fields = metrics_text.split("|")[:-1]  # output of another rank may follow the last bar
    metrics = {}
    for field in fields:
        name, _, value = field.partition(": ")
        with suppress(ValueError):  # not a number
            metrics[name.strip()] = float(value)
    has_skipped = bool(metrics.get(_SKIPPED))
    if has_skipped and metrics.get(LOSS) == 0:  # all iterations were skipped
        del metrics[LOSS]
    if not has_skipped and LOSS not in metrics:  # Megatron does not log NaN or negative losses
        metrics[LOSS] = math.nan
    return LogLine(int(iteration), int(total), metrics)


def parse_step(line: str) -> Step | None:
    """Parse the step in a line of Megatron's training log. Returns None for other lines."""
    log_line = parse_line(line)
    if log_line is None:
        return None
    samples = log_line.metrics.get("consumed samples")
    milliseconds = log_line.metrics.get("elapsed time per iteration (ms)")
    return Step(
        iteration=log_line.iteration,
        total=log_line.total,
        samples=None if samples is None else int(samples),
        seconds=None if milliseconds is None else milliseconds / 1000,
        loss=log_line.metrics.get(LOSS),
    )


def parse_steps(lines: Iterable[str]) -> Iterator[Step]:
    for line in lines:
        step = parse_step(line)
        if step is not None:
            yield step


def read_steps(log: Path) -> list[Step]:
    """Read all training steps from Megatron's log."""
    with log.open("rb") as file:
        return list(parse_steps(read_new_lines(file)))


def compute_tokens_per_second(steps: Sequence[Step], seq_length: int) -> float | None:
    """Return the average throughput, excluding the first step. None if there are too few steps."""
    timed_steps = [step for step in steps if step.samples is not None and step.seconds]
    samples = 0
    seconds = 0.0
    for previous, step in pairwise(timed_steps):
        assert previous.samples is not None
        assert step.samples is not None
        assert step.seconds is not None
        samples += step.samples - previous.samples
        # the logged time is an average over all iterations since the previous step
        seconds += (step.iteration - previous.iteration) * step.seconds
    if seconds <= 0:
        return None
    return samples * seq_length / seconds


def read_new_lines(file: BinaryIO) -> Iterator[str]:
    """Yield lines from the current position on, as in ``tail -f``.

    If the last line is still being written, it is left for the next call.
    """
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), 1)
            return
        yield line.decode(errors="replace").rstrip()


def read_log(path: Path) -> History:
    """Read all metrics from a log file. If an iteration was logged twice, the last line wins.

    Note: Values are rounded, and averaged over ``--log-interval`` iterations. Use
    :func:`read_history` to get exact values.

    Raises:
        DataError: If the file contains no training log lines.
    """
    values_by_metric: dict[str, dict[int, float]] = {}
    with Path(path).open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            log_line = parse_line(line)
            if log_line is None:
                continue
            for name, value in log_line.metrics.items():
                values = values_by_metric.setdefault(name, {})
                values[log_line.iteration] = value
    if not values_by_metric:
        raise DataError(f"No training log lines ('iteration 1/ 10 | ...') found in {path}.")
    return _sort_by_iteration(values_by_metric)


def read_history(tensorboard_dir: Path) -> History:
    """Read all scalars from a TensorBoard directory, except Megatron's "vs samples" duplicates.

    If a run was resumed, the newest event file takes precedence. Within a file, we keep the first
    value of each step, because Megatron logs the test loss as validation loss at the very end.

    Raises:
        DataError: If the directory contains no TensorBoard event files.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = sorted(Path(tensorboard_dir).glob("events.out.tfevents.*"))  # sorted by start time
    if not files:
        raise DataError(
            f"No TensorBoard event files (events.out.tfevents.*) found in {tensorboard_dir}. Was "
            "the run started with --tensorboard-dir?"
        )
    values_by_metric: dict[str, dict[int, float]] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            if name.endswith(" vs samples"):
                continue
            values = values_by_metric.setdefault(name, {})
            values |= _first_values(events.Scalars(name))
    return _sort_by_iteration(values_by_metric)


def _first_values(events: Iterable[Any]) -> dict[int, float]:
    """Return the value that was logged first for each iteration."""
    values: dict[int, float] = {}
    for event in events:
        if event.step not in values:
            values[event.step] = event.value
    return values


def _sort_by_iteration(values_by_metric: dict[str, dict[int, float]]) -> History:
    return {name: sorted(values.items()) for name, values in values_by_metric.items()}
