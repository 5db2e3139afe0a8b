"""Means over seeds with confidence intervals, and differences between paired seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
LAST_SHARE = 0.05
"""Share of the iterations whose mean loss is the final loss."""

Losses = Sequence[float | None]
"""Losses of iterations 1, 2, ...; None where the record was lost."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    half_width: float | None
    """Half of the 95 % confidence interval; None with one seed."""
    seeds: int

    @property
    def side(self) -> int:
        """-1 or 1 if the whole interval is below or above 0, else 0."""
        if self.half_width is None or abs(self.mean) <= self.half_width:
            return 0
        return 1 if self.mean > 0 else -1


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per seed with Student's t interval."""
    n = len(values)
    if n < 2:
        return Estimate(fmean(values), None, n)
    return Estimate(fmean(values), t_quantile(n - 1) * stdev(values) / math.sqrt(n), n)


@dataclass(frozen=True)
class Floor:
    """How far the loss moves between runs that differ by rounding alone."""

    rms: float
    largest: float
    seeds: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Floor":
        """Summarise the differences between null runs and the reference, one per seed."""
        rms = math.sqrt(fmean(d * d for d in differences))
        return cls(rms, max(map(abs, differences)), len(differences))


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return t with P(|T| < t) = ``confidence`` for Student's T with ``freedom`` >= 1 degrees."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # bisection to the precision of a double
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return P(|T| < sqrt(freedom) tan(angle)) (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def last_share(losses: Losses) -> Losses:
    """Return the last 5 % of the iterations, at least one."""
    return losses[-max(1, math.ceil(len(losses) * LAST_SHARE)) :]


def final_loss(losses: Losses) -> float:
    """Return the mean of the known losses of the last 5 % of the iterations."""
    return fmean(loss for loss in last_share(losses) if loss is not None)


def binned(losses: Losses, points: int = 150) -> list[tuple[float, float | None]]:
    """Average neighbouring iterations into at most ``points`` bins of (middle, mean)."""
    size = math.ceil(len(losses) / points)
    bins = []
    for start in range(0, len(losses), size):
        part = losses[start : start + size]
        known = [loss for loss in part if loss is not None]
        bins.append((start + (1 + len(part)) / 2, fmean(known) if known else None))
    return bins
