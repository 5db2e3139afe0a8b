"""Find loss spikes. The paper shows spikes (Figures 1 and 2) but does not define them; we do:

- The *level* at a value is the median of the last ``window`` values outside of spikes. The *noise*
  is their median absolute deviation times 1.4826, the standard deviation of normal noise.
- A *spike* starts at a value that is not finite, or that exceeds the level by more than the
  *threshold*: ``deviations`` times the noise, and at least ``margin``.
- It ends at the first value less than half of the threshold above the level at its start.
- Its *height* is its highest value minus the level. Its *recovery* is the number of iterations from
  its start to its end. A loss that stays high is one spike without recovery.
- The first quarter of ``window`` values are not judged.

Megatron's log lines hold means over ``--log-interval`` iterations, in which short spikes are lower.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from kha_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Parameters of a spike; see the module.

    Raises:
        ConfigError: a value is out of range.
    """

    window: int = 64
    """Logged values, at least 4."""
    deviations: float = 6.0
    """In units of the noise."""
    margin: float = 0.1
    """In units of the loss, nats per token."""

    def __post_init__(self) -> None:
        finite = all(0 <= value < math.inf for value in (self.deviations, self.margin))
        if self.window < 4 or not finite:
            raise ConfigError(
                f"expected a window of 4 or more, and deviations and a margin of 0 or more; "
                f"got {self}"
            )

    @property
    def first_judged(self) -> int:
        """Number of values before the first one that can be a spike."""
        return self.window // 4


@dataclass(frozen=True, kw_only=True)
class Spike:
    """One spike of a loss. ``start``, ``peak`` and ``end`` are iterations."""

    start: int
    peak: int
    """Iteration of the highest value; a value that is not finite is higher than all others."""
    end: int | None
    """First iteration back at the level; None if the history ends before."""
    level: float
    """Loss before the spike."""
    height: float
    """Peak minus level; infinite if a loss was not finite."""

    @property
    def recovery(self) -> int | None:
        """Iterations from ``start`` to ``end``."""
        return None if self.end is None else self.end - self.start


def find_spikes(
    history: Iterable[tuple[int, float]], definition: Definition | None = None
) -> list[Spike]:
    """Return the spikes of a loss in order.

    Args:
        history: iteration and loss, by increasing iteration. NaN and infinity are allowed.
        definition: None for the default :class:`Definition`.
    """
    definition = definition or Definition()
    recent: deque[float] = deque(maxlen=definition.window)
    values, found = iter(history), []
    for iteration, loss in values:
        level = median(recent) if len(recent) >= definition.first_judged else math.inf
        height = loss - level if math.isfinite(loss) else math.inf
        threshold = definition.margin
        if height > threshold and level < math.inf:  # the noise takes time to compute
            noise = 1.4826 * median(abs(value - level) for value in recent)
            threshold = max(threshold, definition.deviations * noise)
        if height <= threshold or level == math.inf:
            if math.isfinite(loss):
                recent.append(loss)
            continue
        start = peak = iteration
        end = None
        for iteration, loss in values:
            if math.isfinite(loss) and loss < level + threshold / 2:
                end = iteration
                recent.append(loss)
                break
            if (above := loss - level if math.isfinite(loss) else math.inf) > height:
                peak, height = iteration, above
        found.append(Spike(start=start, peak=peak, end=end, level=level, height=height))
    return found
