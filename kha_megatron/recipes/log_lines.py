"""Read a run's numbers from Megatron's log lines and TensorBoard files.

Megatron logs `` iteration 3/ 10 | ... | lm loss: 4.4E+00 |`` every ``--log-interval`` iterations.
Other text, and prefixes of launchers and ranks, are ignored.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kha_megatron.errors import DataError

History = dict[str, list[tuple[int, float]]]
"""Pairs of iteration and value, in order, by name."""

LOSS = "lm loss"
VALIDATION_LOSS = "lm loss validation"
SECONDS = "iteration-time"

_LINE = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|(.*)")
_SKIPPED = "number of skipped iterations"


@dataclass(frozen=True)
class Step:
    """One of Megatron's progress lines."""

    iteration: int
    total: int
    samples: int | None
    """Sequences consumed so far."""
    seconds: float | None
    """Mean duration of an iteration since the previous line."""
    loss: float | None
    """Mean language-model loss since the previous line; None if every iteration was skipped."""


def parse_line(line: str) -> tuple[int, int, dict[str, float]] | None:
    """Parse a progress line into iteration, total iterations and the named numbers.

    Return None for any other line.
    """
    if (match := _LINE.search(line)) is None:
        return None
    values = {}
    for field in match[3].split("|")[:-1]:  # another rank's output may follow the last bar
        name, _, text = field.partition(": ")
        try:
            values[name.strip()] = float(text)
        except ValueError:
            continue  # text
    if values.get(_SKIPPED):
        if values.get(LOSS) == 0:  # Megatron's mean over no iteration
            del values[LOSS]
    else:
        values.setdefault(LOSS, math.nan)  # Megatron omits a loss that is NaN or negative
    return int(match[1]), int(match[2]), values


def parse_step(line: str) -> Step | None:
    """Parse a progress line. Return None for any other line."""
    if (found := parse_line(line)) is None:
        return None
    iteration, total, values = found
    samples = values.get("consumed samples")
    milliseconds = values.get("elapsed time per iteration (ms)")
    return Step(
        iteration,
        total,
        samples=None if samples is None else int(samples),
        seconds=None if milliseconds is None else milliseconds / 1000,
        loss=values.get(LOSS),
    )


def read_steps(log: Path) -> list[Step]:
    """Read all complete progress lines of a log, in order."""
    with log.open("rb") as file:
        return list(filter(None, map(parse_step, read_new_lines(file))))


def read_new_lines(file: BinaryIO) -> Iterator[str]:
    """Yield complete lines from the file's position; leave an incomplete last line for later."""
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), 1)
            return
        yield line.decode(errors="replace").rstrip()


def read_log(path: Path) -> History:
    """Read the history of a run from its log.

    If an iteration is logged twice, the last line counts. The second line after a start is a mean
    over two iterations; TensorBoard files have the exact values.

    Raises:
        OSError: the file cannot be read.
        DataError: the file contains no progress line.
    """
    latest: dict[str, dict[int, float]] = {}
    with Path(path).open(encoding="utf-8", errors="replace") as stream:
        for iteration, _, values in filter(None, map(parse_line, stream)):
            for name, value in values.items():
                latest.setdefault(name, {})[iteration] = value
    if not latest:
        raise DataError(f"Expected lines such as 'iteration 1/ 10 | ...' in {path}, found none.")
    return {name: sorted(values.items()) for name, values in latest.items()}


def read_history(tensorboard_dir: Path) -> History:
    """Read all scalars of a ``--tensorboard-dir``, without the copies by samples.

    If several runs wrote a step (after a resume), the newest counts. If one run wrote a step twice,
    the first counts: Megatron finally writes the test loss under the name of the validation loss.

    Raises:
        DataError: the directory contains no TensorBoard event file.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = sorted(Path(tensorboard_dir).glob("events.out.tfevents.*"))  # in order of their start
    if not files:
        raise DataError(
            f"Expected TensorBoard files (events.out.tfevents.*) in {tensorboard_dir}, found none. "
            "Train with --tensorboard-dir."
        )
    merged: dict[str, dict[int, float]] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            if not name.endswith(" vs samples"):
                first = {event.step: event.value for event in reversed(events.Scalars(name))}
                merged.setdefault(name, {}).update(first)
    return {name: sorted(values.items()) for name, values in merged.items()}
