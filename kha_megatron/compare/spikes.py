"""Loss spike detection.

The paper shows spikes in Figures 1 and 2 but does not define them. We use a running median with a
threshold, see ``kha-megatron spikes --help`` for details.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
    spikes = []
    spike: Spike | None = None
    recovered_below = 0.0
    for iteration, loss in history:
        if spike is not None:
            height = _subtract_level(loss, spike.level)
            if math.isfinite(loss) and loss < recovered_below:
                spikes.append(replace(spike, end=iteration))
                spike = None
                recent.append(loss)
            elif height > spike.height:
                spike = replace(spike, peak=iteration, height=height)
            continue
        if len(recent) >= definition.warmup:
            level = median(recent)
            height = _subtract_level(loss, level)
            threshold = definition.margin
            if height > threshold:  # the noise is slow to compute
                noise = _estimate_noise(recent, level)
                threshold = max(threshold, definition.deviations * noise)
            if height > threshold:
                spike = Spike(
                    start=iteration,
                    peak=iteration,
                    end=None,
                    level=level,
                    height=height,
                )
                recovered_below = level + threshold / 2
                continue
        if math.isfinite(loss):
            recent.append(loss)
    if spike is not None:
        spikes.append(spike)
    return spikes


def _subtract_level(loss: float, level: float) -> float:
    return loss - level if math.isfinite(loss) else math.inf


def _estimate_noise(losses: Iterable[float], level: float) -> float:
    # 1.4826 * MAD is a robust estimate of the standard deviation (for Gaussian noise)
    deviations = [abs(loss - level) for loss in losses]
    return 1.4826 * median(deviations)
