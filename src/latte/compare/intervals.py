"""Means with confidence intervals by Student's t, for few measurements.

    mean +- t(n - 1) s / sqrt(n),   s^2 = sum (x - mean)^2 / (n - 1)

with t the two-sided quantile of Student's distribution. A paired difference is the same formula
on the differences: what both sides share (here the seed's data order) cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over `count` measurements and half the width of its interval (None for one)."""

    value: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.value - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.value + self.half_width

    @property
    def sign(self) -> int:
        """+1 or -1 if the interval lies on one side of zero, else 0."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)


def mean_of(values: Sequence[float], confidence: float = CONFIDENCE) -> Mean:
    """The mean of at least one value, with its interval from two on."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Mean(mean, None, count)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Mean(mean, student_t(confidence, count - 1) * math.sqrt(variance / count), count)


def student_t(confidence: float, freedom: int) -> float:
    """t with P(|X| <= t) = confidence, X of Student's distribution, by bisection."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|X| <= t) for whole degrees of freedom: a finite sum in theta = atan(t / sqrt(freedom))
    (Abramowitz and Stegun 26.7.3-4).
    """
    theta = math.atan(t / math.sqrt(freedom))
    sine, squared = math.sin(theta), math.cos(theta) ** 2
    odd = freedom % 2 == 1
    term, total = (math.cos(theta), 0.0) if odd else (1.0, 0.0)
    for k in range(1 if odd else 0, freedom - 1, 2):
        total += term
        term *= squared * (k + 1) / (k + 2)
    return (2 / math.pi) * (theta + sine * total) if odd else sine * total
