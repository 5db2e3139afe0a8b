"""Loss spike detection.

The paper shows spikes in Figures 1 and 2 but does not define them. We use a running median with a
threshold, see ``kha-megatron spikes --help`` for details.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True)
class _SpikeStart:
    spike: Spike
    recovery_level: float
    """The spike ends when the loss falls below this."""


def find_spikes(
    history: Iterable[tuple[int, float]], definition: SpikeDefinition | None = None
) -> list[Spike]:
    """Find loss spikes in a sequence of (iteration, loss) pairs."""
    definition = definition or SpikeDefinition()
    recent_losses: deque[float] = deque(maxlen=definition.window)  # outside of spikes
    spikes = []
    spike: Spike | None = None  # that has not ended yet
    recovery_level = 0.0
    for iteration, loss in history:
        if spike is None:
            start = _find_start(iteration, loss, recent_losses, definition)
            if start is not None:
                spike = start.spike
                recovery_level = start.recovery_level
            elif math.isfinite(loss):
                recent_losses.append(loss)
        elif math.isfinite(loss) and loss < recovery_level:
            spikes.append(replace(spike, end=iteration))
            spike = None
            recent_losses.append(loss)
        else:
            height = _subtract_level(loss, spike.level)
            if height > spike.height:
                spike = replace(spike, peak=iteration, height=height)
    if spike is not None:
        spikes.append(spike)
    return spikes


def _find_start(
    iteration: int,
    loss: float,
    recent_losses: Sequence[float],
    definition: SpikeDefinition,
) -> _SpikeStart | None:
    """Return the spike that starts in an iteration, or None if its loss is normal."""
    if len(recent_losses) < definition.warmup:
        return None
    level = median(recent_losses)
    height = _subtract_level(loss, level)
    if height <= definition.margin:  # most losses, for which we do not need the noise
        return None
    noise = _estimate_noise(recent_losses, level)
    threshold = max(definition.margin, definition.deviations * noise)
    if height <= threshold:
        return None
    spike = Spike(
        start=iteration,
        peak=iteration,
        end=None,
        level=level,
        height=height,
    )
    return _SpikeStart(spike, recovery_level=level + threshold / 2)


def _subtract_level(loss: float, level: float) -> float:
    return loss - level if math.isfinite(loss) else math.inf


def _estimate_noise(losses: Iterable[float], level: float) -> float:
    # 1.4826 * MAD is a robust estimate of the standard deviation (for Gaussian noise)
    deviations = [abs(loss - level) for loss in losses]
    return 1.4826 * median(deviations)
