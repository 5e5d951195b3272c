"""Means over seeds, and 95% intervals by Student's t:

    mean +- t(n - 1) s / sqrt(n),   s^2 = sum (x - mean)^2 / (n - 1)

with t the two-sided quantile of Student's distribution.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over `count` measurements and half the width of its interval (None for one)."""

    value: float
    half_width: float | None
    count: int

    @property
    def sign(self) -> int:
        """+1 or -1 if the interval lies on one side of zero, else 0."""
        if self.half_width is None or abs(self.value) <= self.half_width:
            return 0
        return 1 if self.value > 0 else -1

    def text(self, form: str = ".2f") -> str:
        """The value by a format specification, with half its interval if it has one."""
        value = format(self.value, form)
        if self.half_width is None:
            return value
        return f"{value} ± {self.half_width:{form.lstrip('+')}}"


def mean_of(values: Sequence[float], confidence: float = CONFIDENCE) -> Mean:
    """The mean of at least one value, with its interval from two on."""
    count = len(values)
    if count < 2:
        return Mean(values[0], None, count)
    half = student_t(confidence, count - 1) * stdev(values) / math.sqrt(count)
    return Mean(fmean(values), half, count)


def student_t(confidence: float, freedom: int) -> float:
    """t with P(|X| <= t) = confidence, X of Student's distribution, by bisection."""
    unit = 1e-12
    steps = range(10**18)
    return unit * bisect_left(steps, confidence, key=lambda n: _within(unit * n, freedom))


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
