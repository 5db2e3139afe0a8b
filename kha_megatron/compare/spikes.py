"""Find loss spikes. ``kha-megatron spikes --help`` defines a spike, its height and its recovery.

The paper shows spikes (Figures 1 and 2) but does not define them.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from kha_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Parameters of a spike. Raises ConfigError if a value is out of range."""

    window: int = 64
    """Number of logged values outside of spikes whose median is the level; at least 4."""
    deviations: float = 6.0
    """Threshold above the level in units of the noise."""
    margin: float = 0.1
    """Least threshold in nats per token."""

    def __post_init__(self) -> None:
        finite = all(0 <= x < math.inf for x in (self.deviations, self.margin))
        if self.window < 4 or not finite:
            raise ConfigError(f"Expected window >= 4, deviations >= 0 and margin >= 0, got {self}.")

    @property
    def first_judged(self) -> int:
        """Index of the first value that can be a spike."""
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
        definition: defaults to ``Definition()``.
    """
    definition = definition or Definition()
    recent: deque[float] = deque(maxlen=definition.window)
    values, found = iter(history), []
    for iteration, loss in values:
        level = median(recent) if len(recent) >= definition.first_judged else math.inf
        height = loss - level if math.isfinite(loss) else math.inf
        threshold = definition.margin
        if height > threshold and level < math.inf:  # the noise is slow to compute
            # 1.4826 times the median absolute deviation is the standard deviation of normal noise
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
