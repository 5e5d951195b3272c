"""The state between two pieces of one computation: (top, mass, mean) instead of (log-mass, mean).

``log_mass = top + log(mass)`` with ``top`` a logit that occurred. A log-mass of 1e4 is rounded to
1e-3 in fp32, and every probability with it; differences from ``top`` are not.

Shape suffixes: X rows (batch x heads), L latents, D value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def exp_difference(a: Tensor, b: Tensor) -> Tensor:
    """exp(a - b) for a <= b, and 0 where a is -inf, also when b is."""
    return torch.exp(a - torch.where(torch.isneginf(b), 0.0, b))


def divide(a: Tensor, mass: Tensor) -> Tensor:
    """a / mass, and 0 where nothing has been seen (there a is 0 as well)."""
    return a / torch.where(mass == 0, 1.0, mass)


class Carry(NamedTuple):
    """What the sources so far amount to: ``sum_s exp(k_s - top)`` and their mean value."""

    top: Tensor  # (X, L), -inf if nothing has been seen
    mass: Tensor  # (X, L), 0 if nothing has been seen
    mean: Tensor  # (X, L, D)

    @classmethod
    def of(cls, log_mass: Tensor, mean: Tensor) -> Carry:
        """From a state (log-mass, mean)."""
        return cls(log_mass, (~torch.isneginf(log_mass)).to(log_mass.dtype), mean)

    def log_mass(self) -> Tensor:
        """top + log(mass), -inf if nothing has been seen."""
        return self.top + torch.log(self.mass)

    def merge(self, other: Carry) -> Carry:
        """This, followed by the other one."""
        top = torch.maximum(self.top, other.top)
        mass1 = self.mass * exp_difference(self.top, top)
        mass2 = other.mass * exp_difference(other.top, top)
        mass = mass1 + mass2
        mean = divide(mass1, mass)[..., None] * self.mean
        return Carry(top, mass, mean + divide(mass2, mass)[..., None] * other.mean)
