"""Detect loss spikes. See ``kha-megatron spikes --help`` for the definition of a spike, because the
paper only shows examples (Figures 1 and 2).
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from kha_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SpikeDefinition:
    """Parameters of spike detection."""

    window: int = 64  # number of values outside of spikes from which level and noise are computed
    deviations: float = 6.0  # threshold above the level, as a multiple of the noise
    margin: float = 0.1  # minimum threshold in nats per token

    def __post_init__(self) -> None:
        finite = all(0 <= x < math.inf for x in (self.deviations, self.margin))
        if self.window < 4 or not finite:
            raise ConfigError(f"window must be at least 4 and no value negative, got {self}.")

    @property
    def warmup(self) -> int:
        """Number of initial values that cannot start a spike."""
        return self.window // 4


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A loss spike. ``start``, ``peak`` and ``end`` are iterations."""

    start: int
    peak: int  # where the loss is highest, or first not finite
    end: int | None  # first iteration at which the loss has recovered
    level: float  # loss before the spike
    height: float  # difference between peak and level, infinite for non-finite losses

    @property
    def recovery(self) -> int | None:
        """Number of iterations until the loss has recovered."""
        return None if self.end is None else self.end - self.start


def find_spikes(
    history: Iterable[tuple[int, float]], definition: SpikeDefinition | None = None
) -> list[Spike]:
    """Find all spikes in ``history``, which contains pairs of iteration and loss."""
    definition = definition or SpikeDefinition()
    recent: deque[float] = deque(maxlen=definition.window)
    values, found = iter(history), []
    for iteration, loss in values:
        level = median(recent) if len(recent) >= definition.warmup else math.inf
        height = loss - level if math.isfinite(loss) else math.inf
        threshold = definition.margin
        if height > threshold and level < math.inf:  # avoid computing the noise for each value
            # for normal noise, 1.4826 times the median absolute deviation is the standard deviation
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
