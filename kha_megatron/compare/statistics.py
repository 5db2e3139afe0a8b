"""Means over seeds with their confidence, and differences between paired seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
LAST_SHARE = 0.05
"""Share of the iterations over whose losses the final loss is the mean."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    half_width: float | None
    """The interval of 95 % confidence is ``mean`` plus and minus this; None with one seed."""

    seeds: int

    @property
    def side(self) -> int:
        """-1 or 1 where the whole interval lies below or above 0, else 0."""
        if self.half_width is None or abs(self.mean) <= self.half_width:
            return 0
        return 1 if self.mean > 0 else -1


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of one value per seed, with Student's interval: seeds are few, noise is near normal."""
    n = len(values)
    if n < 2:
        return Estimate(fmean(values), None, n)
    return Estimate(fmean(values), t_quantile(n - 1) * stdev(values) / math.sqrt(n), n)


def paired(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """Mean of ``values - reference``, seed by seed.

    Both of a pair saw the same data in the same order, so what the order does to a loss is in both
    and leaves their difference.
    """
    return estimate([a - b for a, b in zip(values, reference, strict=True)])


@dataclass(frozen=True)
class Floor:
    """How far a loss moves from one run to another that differs by rounding alone."""

    rms: float
    """Root of the mean square over seeds."""
    largest: float
    seeds: int


def floor(values: Sequence[float], reference: Sequence[float]) -> Floor:
    """Of null runs and what they are null runs of, seed by seed."""
    moved = [abs(a - b) for a, b in zip(values, reference, strict=True)]
    return Floor(math.sqrt(fmean(d * d for d in moved)), max(moved), len(moved))


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Where Student's t with ``freedom`` >= 1 degrees has ``confidence`` between minus and plus."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):  # halvings: more than a double's digits
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) tan(angle)), a finite sum (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


Losses = Sequence[float | None]
"""Of iterations 1, 2, ...; None where the record of one was lost."""


def last_share(losses: Losses) -> Losses:
    """The last 5 % of the iterations, at least one."""
    return losses[-max(1, math.ceil(len(losses) * LAST_SHARE)) :]


def final_loss(losses: Losses) -> float:
    """Mean of the last 5 % of the iterations, of which one at least is known."""
    return fmean(loss for loss in last_share(losses) if loss is not None)


def binned(losses: Losses, points: int = 150) -> list[tuple[float, float | None]]:
    """At most ``points`` means of neighbouring iterations, each at its middle, counted from 1.

    None where no loss of a bin is known.
    """
    size = math.ceil(len(losses) / points)
    parts = [(start, losses[start : start + size]) for start in range(0, len(losses), size)]
    return [
        (start + (1 + len(part)) / 2, fmean(known) if known else None)
        for start, part in parts
        for known in [[loss for loss in part if loss is not None]]
    ]
