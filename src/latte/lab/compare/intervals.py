"""Means over seeds, with 95% intervals and p-values by Student's t:

    mean +- t(n - 1) s / sqrt(n),   s^2 = sum (x - mean)^2 / (n - 1)

with t the two-sided quantile of Student's distribution. Where many means are compared,
:func:`holm` corrects their p-values for their number.
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

    @property
    def p(self) -> float | None:
        """P-value of the two-sided t-test that the expected value is 0 (None for one measurement).

        It is below 0.05 where the interval excludes 0.
        """
        if self.half_width is None:
            return None
        if self.half_width == 0:
            return float(self.value == 0)
        freedom = self.count - 1
        t = abs(self.value) / self.half_width * student_t(CONFIDENCE, freedom)
        return 1 - _within(t, freedom)

    def text(self, form: str = ".2f") -> str:
        """The value by a format specification, with half its interval if it has one."""
        value = format(self.value, form)
        if self.half_width is None:
            return value
        return f"{value} ± {self.half_width:{form.lstrip('+')}}"


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of at least one value, with its interval from two on."""
    count = len(values)
    if count < 2:
        return Mean(values[0], None, count)
    half = student_t(CONFIDENCE, count - 1) * stdev(values) / math.sqrt(count)
    return Mean(fmean(values), half, count)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected by Holm's method for how many they are, in the same order.

    If no difference exists, the probability that any corrected value is below 0.05 is at most 0.05.
    The i-th smallest of n is multiplied by n - i + 1. The result is at least the one of the next
    smaller p-value, and at most 1 (Holm, A simple sequentially rejective multiple test procedure,
    1979).
    """
    corrected = [0.0] * len(p_values)
    least = 0.0
    smallest_first = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for place, index in enumerate(smallest_first):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = least
    return corrected


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
