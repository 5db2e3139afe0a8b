"""Loss spikes: how many, how high, how long until the loss is back.

The paper shows spikes in its Figures 1 and 2 and says that KHA has fewer; it gives no definition
and no count. Ours:

- The *level* at a value is the median of the last ``window`` values that are in no spike. The
  *noise* is the median of their distances from that median, times 1.4826, which makes it the
  standard deviation where noise is normal. Neither is moved by a few outliers.
- A *spike* begins at a value that is higher than the level by more than ``deviations`` times the
  noise and by more than ``margin`` (that is its *threshold*, the larger of both), or that is not
  finite. Where the loss still falls, the fall counts as noise, so that a spike must be higher.
- Its level stays as it was before. It ends with the first value less than half of the threshold
  above that level, so that a loss which swings about the threshold is one spike.
- Its *height* is its highest value minus the level; its *recovery* the number of iterations from
  its first value to the one that ends it. A spike that has not ended with the history has none: a
  loss that stays at a higher level is one spike without recovery.
- The first quarter of ``window`` values are never judged.

All counts are of logged values. Megatron's log lines hold means over ``--log-interval`` iterations,
in which a short spike is that much lower, and its TensorBoard files the values themselves.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from kha_megatron.errors import ConfigError

_TO_STANDARD_DEVIATION = 1.4826  # of normal noise, from its median absolute deviation


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What counts as a spike; see the module.

    Raises:
        ConfigError: a number is out of range.
    """

    window: int = 64
    """Logged values, 4 or more."""

    deviations: float = 6.0
    """In units of the noise."""

    margin: float = 0.1
    """In units of the loss, nats per token."""

    def __post_init__(self) -> None:
        if self.window < 4:
            raise ConfigError(f"a window of {self.window} values is too short: 4 or more")
        for name in ("deviations", "margin"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value}: give a number that is 0 or more")

    @property
    def first_judged(self) -> int:
        """How many values a history needs before one can be a spike."""
        return self.window // 4


@dataclass(frozen=True, kw_only=True)
class Spike:
    """One spike of a loss. ``start``, ``peak`` and ``end`` are iterations."""

    start: int
    """Its first value."""

    peak: int
    """Its highest value; a value that is not finite is higher than all."""

    end: int | None
    """The first value back at the level; None where the history ends before."""

    level: float
    """Loss before the spike."""

    height: float
    """Of the peak above the level; infinite where a loss was not finite."""

    @property
    def recovery(self) -> int | None:
        """Iterations from ``start`` to ``end``."""
        return None if self.end is None else self.end - self.start


def find_spikes(
    history: Iterable[tuple[int, float]], definition: Definition | None = None
) -> list[Spike]:
    """The spikes of a loss, in order.

    Args:
        history: iteration and loss, by increasing iteration. NaN and infinity are allowed.
        definition: None is the default :class:`Definition`.
    """
    return list(_spikes(iter(history), definition or Definition()))


def _spikes(values: Iterator[tuple[int, float]], definition: Definition) -> Iterator[Spike]:
    recent = _Recent(definition.window)
    for iteration, loss in values:
        threshold = _exceeded(recent, loss, definition)
        if threshold is None:
            if math.isfinite(loss):  # else before the first judged value
                recent.add(loss)
            continue
        level = recent.median()
        start = peak = iteration
        highest = _height(loss, level)
        end = None
        for iteration, loss in values:
            if math.isfinite(loss) and loss < level + threshold / 2:
                end = iteration
                recent.add(loss)
                break
            if _height(loss, level) > highest:
                peak, highest = iteration, _height(loss, level)
        yield Spike(start=start, peak=peak, end=end, level=level, height=highest)


def _exceeded(recent: "_Recent", loss: float, definition: Definition) -> float | None:
    """The threshold over the level, if the loss begins a spike."""
    if len(recent) < definition.first_judged:
        return None
    above = _height(loss, recent.median())
    if above <= definition.margin:  # the noise takes time to find
        return None
    threshold = max(definition.margin, definition.deviations * recent.noise())
    return threshold if above > threshold else None


def _height(loss: float, level: float) -> float:
    return loss - level if math.isfinite(loss) else math.inf


class _Recent:
    """The last values, also in order."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque()
        self.ordered: list[float] = []
        self.size = size

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        if len(self.values) == self.size:
            del self.ordered[bisect.bisect_left(self.ordered, self.values.popleft())]
        self.values.append(value)
        bisect.insort(self.ordered, value)

    def median(self) -> float:
        half = len(self.ordered) // 2
        return (self.ordered[half] + self.ordered[-half - 1]) / 2

    def noise(self) -> float:
        level = self.median()
        return _TO_STANDARD_DEVIATION * median(abs(value - level) for value in self.ordered)
