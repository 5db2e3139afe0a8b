"""Mean, confidence interval and noise floor over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
LAST_SHARE = 0.05
"""The final loss is the average over this fraction of the iterations."""

Losses = Sequence[float | None]
"""Losses starting from iteration 1. Missing values are None."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% confidence interval (``mean ± half_width``)."""

    mean: float
    half_width: float | None
    seeds: int

    @property
    def sign(self) -> int:
        """1 or -1 if the mean is significantly different from 0, else 0."""
        if self.half_width is None or abs(self.mean) <= self.half_width:
            return 0
        return 1 if self.mean > 0 else -1


def estimate(values: Sequence[float]) -> Estimate:
    """Compute the mean over seeds and (for two or more seeds) its confidence interval."""
    n = len(values)
    if n < 2:
        return Estimate(fmean(values), None, n)
    return Estimate(fmean(values), t_quantile(n - 1) * stdev(values) / math.sqrt(n), n)


def estimate_noise(differences: Sequence[float]) -> dict[str, float]:
    """Compute how much losses differ just because of rounding errors.

    Args:
        differences: ``null - reference``, one value per seed.
    """
    rms = math.sqrt(fmean(d * d for d in differences))
    return {"rms": rms, "largest": max(map(abs, differences)), "seeds": len(differences)}


def t_quantile(freedom: int) -> float:
    """Two-sided 95% quantile of the t distribution, e.g. 12.71 for 1 degree of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # bisection to float64 precision
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Probability that a t-distributed variable lies within +-sqrt(freedom) * tan(angle).

    The angle is in radians. See Abramowitz and Stegun, equations 26.7.3 and 26.7.4.
    """
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def select_last(losses: Losses) -> Losses:
    """Get the losses that count towards the final loss."""
    return losses[-max(1, math.ceil(len(losses) * LAST_SHARE)) :]


def compute_final_loss(losses: Losses) -> float:
    """Average loss over the last 5% of the iterations."""
    return fmean(loss for loss in select_last(losses) if loss is not None)


def average_bins(losses: Losses, points: int = 150) -> list[tuple[float, float | None]]:
    """Downsample a loss curve. Returns (iteration, mean) for up to ``points`` bins."""
    size = math.ceil(len(losses) / points)
    bins = []
    for start in range(0, len(losses), size):
        part = losses[start : start + size]
        known = [loss for loss in part if loss is not None]
        bins.append((start + (1 + len(part)) / 2, fmean(known) if known else None))
    return bins
