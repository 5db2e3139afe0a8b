"""What Megatron prints at each ``--log-interval``: `` iteration 3/ 10 | ... | lm loss: 4.4E+00 |``.

The text around such lines, and the prefixes of launchers and ranks, are passed over.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kha_megatron.errors import DataError
from kha_megatron.history.tensorboard import LOSS, History

_LINE = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|(.*)")
_SAMPLES = "consumed samples"
_SKIPPED = "number of skipped iterations"
_MILLISECONDS = "elapsed time per iteration (ms)"


@dataclass(frozen=True)
class Step:
    """One of Megatron's progress lines."""

    iteration: int
    """Iterations done, counted from the first of the whole training."""

    total: int
    """Iterations that the training will have."""

    samples: int | None
    """Sequences consumed so far."""

    seconds: float | None
    """Mean duration of one iteration since the line before."""

    loss: float | None
    """Mean language-model loss since the line before; None where every iteration was skipped."""


def parse_line(line: str) -> tuple[int, int, dict[str, float]] | None:
    """Iteration, iterations of the whole training and the numbers that a line reports, by name.

    None for any other line.
    """
    if (match := _LINE.search(line)) is None:
        return None
    values = {}
    for field in match[3].split("|")[:-1]:  # what follows the last bar is another rank's output
        name, _, text = field.partition(": ")
        try:
            values[name.strip()] = float(text)
        except ValueError:
            continue  # a field of words
    if values.get(_SKIPPED):
        if values.get(LOSS) == 0:  # of no iteration: Megatron divides a sum of none by one
            del values[LOSS]
    else:
        values.setdefault(LOSS, math.nan)  # Megatron leaves out what is not at least 0
    return int(match[1]), int(match[2]), values


def parse_step(line: str) -> Step | None:
    """The progress that a line of the log reports, or None where it reports none."""
    if (found := parse_line(line)) is None:
        return None
    iteration, total, values = found
    samples, milliseconds = values.get(_SAMPLES), values.get(_MILLISECONDS)
    return Step(
        iteration,
        total,
        samples=None if samples is None else int(samples),
        seconds=None if milliseconds is None else milliseconds / 1000,
        loss=values.get(LOSS),
    )


def read_steps(log: Path) -> list[Step]:
    """All progress lines of a log, in order; a line still being written is left out."""
    with log.open("rb") as file:
        return [step for line in new_lines(file) if (step := parse_step(line))]


def new_lines(file: BinaryIO) -> Iterator[str]:
    """Complete lines from the file's position on; a line still being written is left for later."""
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), 1)
            return
        yield line.decode(errors="replace").rstrip()


def read_log(path: Path) -> History:
    """What Megatron printed, from a file that may hold other text too.

    A repeated iteration counts once, the last time. The second line after a start is a mean over
    two iterations: TensorBoard's files have the exact values.

    Raises:
        DataError: the file cannot be read, or holds no such line.
    """
    latest: dict[str, dict[int, float]] = {}
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as stream:
            for iteration, _, values in filter(None, map(parse_line, stream)):
                for name, value in values.items():
                    latest.setdefault(name, {})[iteration] = value
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not latest:
        raise DataError(
            f"{path} holds no line of Megatron's training log ('iteration 1/ 10 | ...')"
        )
    return {name: sorted(values.items()) for name, values in latest.items()}
