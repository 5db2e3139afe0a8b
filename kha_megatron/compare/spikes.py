"""Loss spike detection.

The paper shows spikes in Figures 1 and 2 but does not define them. We use a running median with a
threshold, see ``kha-megatron spikes --help`` for details.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True)
class SpikeDefinition:
    """Thresholds for :func:`find_spikes`."""

    window: int = 64  # number of previous values (at least 4) to compute level and noise from
    deviations: float = 6.0  # threshold in standard deviations of the noise
    margin: float = 0.1  # minimum threshold in nats

    @property
    def warmup(self) -> int:
        """No spikes are reported before this many values have been seen."""
        return self.window // 4


@dataclass(frozen=True, kw_only=True)
class Spike:
    start: int
    peak: int  # iteration with the highest (or first non-finite) loss
    end: int | None  # first iteration after the spike
    level: float  # loss before the spike
    height: float  # peak loss - level, can be inf

    @property
    def recovery(self) -> int | None:
        """Length of the spike in iterations. None if the loss does not recover."""
        return None if self.end is None else self.end - self.start


def find_spikes(
    history: Iterable[tuple[int, float]], definition: SpikeDefinition | None = None
) -> list[Spike]:
    """Find loss spikes in a sequence of (iteration, loss) pairs."""
    definition = definition or SpikeDefinition()
    recent: deque[float] = deque(maxlen=definition.window)
    remaining = iter(history)
    spikes = []
    for iteration, loss in remaining:
        level = median(recent) if len(recent) >= definition.warmup else math.inf
        height = loss - level if math.isfinite(loss) else math.inf
        threshold = definition.margin
        if height > threshold and level < math.inf:  # the noise is slow to compute
            # 1.4826 * MAD is a robust estimate of the standard deviation (for Gaussian noise)
            noise = 1.4826 * median(abs(value - level) for value in recent)
            threshold = max(threshold, definition.deviations * noise)
        if height <= threshold or level == math.inf:
            if math.isfinite(loss):
                recent.append(loss)
            continue
        start = peak = iteration
        end = None
        for iteration, loss in remaining:
            if math.isfinite(loss) and loss < level + threshold / 2:
                end = iteration
                recent.append(loss)
                break
            rise = loss - level if math.isfinite(loss) else math.inf
            if rise > height:
                peak = iteration
                height = rise
        spikes.append(Spike(start=start, peak=peak, end=end, level=level, height=height))
    return spikes
