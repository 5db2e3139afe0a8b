"""Mean, confidence interval and noise floor over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

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
        if self.half_width is None:
            return 0
        if self.mean > self.half_width:
            return 1
        if self.mean < -self.half_width:
            return -1
        return 0


def estimate(values: Sequence[float]) -> Estimate:
    """Compute the mean over seeds and (for two or more seeds) its confidence interval."""
    seeds = len(values)
    half_width = None
    if seeds > 1:
        standard_error = stdev(values) / math.sqrt(seeds)
        half_width = t_quantile(seeds - 1) * standard_error
    return Estimate(mean=fmean(values), half_width=half_width, seeds=seeds)


def estimate_noise(differences: Sequence[float]) -> dict[str, float]:
    """Compute how much losses differ just because of rounding errors.

    Args:
        differences: ``null - reference``, one value per seed.
    """
    mean_square = fmean(difference**2 for difference in differences)
    return {
        "rms": math.sqrt(mean_square),
        "largest": max(abs(difference) for difference in differences),
        "seeds": len(differences),
    }


def t_quantile(degrees_of_freedom: int) -> float:
    """Two-sided 95% quantile of the t distribution, e.g. 12.71 for 1 degree of freedom."""
    low = 0.0
    high = math.pi / 2
    for _ in range(60):  # bisection to float64 precision
        middle = (low + high) / 2
        if _probability_within(middle, degrees_of_freedom) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees_of_freedom) * math.tan(low)


def _probability_within(angle: float, degrees_of_freedom: int) -> float:
    """Probability that a t-distributed variable lies within +-sqrt(n) * tan(angle).

    The angle is in radians, and n is the number of degrees of freedom. See Abramowitz and Stegun,
    equations 26.7.3 (odd n) and 26.7.4 (even n): with c = cos(angle), the series is
    c + 2/3 c^3 + (2 * 4) / (3 * 5) c^5 + ... or 1 + 1/2 c^2 + (1 * 3) / (2 * 4) c^4 + ...
    """
    is_odd = degrees_of_freedom % 2 == 1
    cosine = math.cos(angle)
    term = cosine if is_odd else 1.0
    first_numerator = 2 if is_odd else 1
    series = 0.0
    for numerator in range(first_numerator, degrees_of_freedom, 2):
        series += term
        term *= cosine**2 * numerator / (numerator + 1)
    series *= math.sin(angle)
    if not is_odd:
        return series
    return 2 / math.pi * (angle + series)


def select_last(losses: Losses) -> Losses:
    """Get the losses that count towards the final loss."""
    count = math.ceil(len(losses) * LAST_SHARE)
    return losses[-max(1, count) :]


def compute_final_loss(losses: Losses) -> float:
    """Average loss over the last 5% of the iterations."""
    known = [loss for loss in select_last(losses) if loss is not None]
    return fmean(known)


class LossBin(NamedTuple):
    """Average loss of consecutive iterations."""

    iteration: float  # in the middle of the bin
    loss: float | None


def average_bins(losses: Losses, points: int = 150) -> list[LossBin]:
    """Downsample a loss curve to up to ``points`` bins."""
    size = math.ceil(len(losses) / points)
    bins = []
    for start in range(0, len(losses), size):
        binned = losses[start : start + size]
        middle = start + (1 + len(binned)) / 2
        known = [loss for loss in binned if loss is not None]
        mean = fmean(known) if known else None
        bins.append(LossBin(middle, mean))
    return bins
