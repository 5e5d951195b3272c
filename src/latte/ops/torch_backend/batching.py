"""The division of a batch, packed or not, into segments that fit the cache and the allocator.

On a CPU, intermediates above about 32 MB are mapped and unmapped repeatedly. Page faults then take
most of the time. Therefore all ops here compute one segment at a time (some tokens of some
sequences) and pass the state to the next segment. Packed sequences of similar length are padded
into common batches.

Shape suffixes: B batch, T tokens, n sequences computed together, X rows (n sequences of H heads
each), L latents, D value width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.tensors import without_masked

# Tokens whose weights are formed at once. Measured on two cores: 32 beats 64 and 128.
CHUNK = 32
# Elements of the largest intermediate, 1 MB in fp32: a core's second-level cache.
AT_ONCE = 1 << 18


class Rows(NamedTuple):
    """Sequences computed together: rows of the batch, or packed sequences of similar length."""

    ids: slice | Tensor  # the states that they own
    length: int  # tokens of the longest
    tokens: Tensor | None  # (n, length) tokens of the packed row; None if not packed
    real: Tensor | None  # (n, length) bool where padded; None if nothing is

    def gather(self, x: Tensor, span: slice) -> Tensor:
        """Tokens ``span`` of these sequences: (B, T, ...) -> (n, span, ...)."""
        return self.view(x, span) if self.tokens is None else x[0][self.tokens[:, span]]

    def view(self, x: Tensor, span: slice) -> Tensor:
        """The same for rows that are not packed; x itself if that is all of it."""
        whole = isinstance(self.ids, slice) and self.ids.stop - self.ids.start == x.shape[0]
        if whole and span.stop - span.start == x.shape[1]:
            return x
        return x[self.ids, span]

    def gather_gradient(self, dx: Tensor, span: slice) -> Tensor:
        """Like :meth:`gather`. Padded positions get zero gradient."""
        values = self.gather(dx, span)
        return values if self.real is None else without_masked(self.real[:, span], values)

    def put(self, x: Tensor, span: slice, values: Tensor, add: bool = False) -> None:
        """Write (n, span, ...) to where it was gathered from, or add it; padding is dropped."""
        if self.tokens is None:
            here = self.view(x, span)
            here.add_(values) if add else here.copy_(values)
            return
        tokens = self.tokens[:, span]
        if self.real is not None:
            real = self.real[:, span]
            tokens, values = tokens[real], values[real]
        x[0, tokens] = (x[0, tokens] + values if add else values).to(x.dtype)

    def scattered(self, x: Tensor, values: Tensor) -> Tensor:
        """A copy of the packed row x with all tokens of these sequences written; differentiable."""
        assert self.tokens is not None
        tokens = self.tokens if self.real is None else self.tokens[self.real]
        values = values if self.real is None else values[self.real]
        return x.index_put((torch.zeros_like(tokens), tokens), values)

    def visible(self, key_mask: Tensor | None, span: slice) -> Tensor | None:
        """Whether a token is real and not masked, (n, span) bool; None if all are."""
        own = None if self.real is None else self.real[:, span]
        if key_mask is None:
            return own
        mask = self.gather(key_mask, span)
        return mask if own is None else mask & own


def rows_of(x: Tensor, width: int, segment: int, cu_seqlens: Tensor | None) -> Iterator[Rows]:
    """Groups of sequences of x (B, T, ...) with about ``AT_ONCE`` elements in a segment."""
    B, T = x.shape[:2]
    if cu_seqlens is None:
        together = max(1, AT_ONCE // (min(T, segment) * width))
        for first in range(0, B, together):
            yield Rows(slice(first, min(B, first + together)), T, None, None)
        return
    bounds = cu_seqlens.tolist()
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for n in range(len(bounds) - 1):
        length = bounds[n + 1] - bounds[n]
        if length:
            # At most a quarter of padding, and equally many segments.
            groups[math.ceil(math.log(length, 1.25)), -(-length // segment)].append(n)
    for members in groups.values():
        longest = max(bounds[n + 1] - bounds[n] for n in members)
        together = max(1, AT_ONCE // (min(longest, segment) * width))
        for first in range(0, len(members), together):
            yield _packed_rows(members[first : first + together], bounds, x.device)


def _packed_rows(members: list[int], bounds: list[int], device: torch.device) -> Rows:
    lengths = [bounds[n + 1] - bounds[n] for n in members]
    longest = max(lengths)
    starts_n1 = torch.tensor([bounds[n] for n in members], device=device)[:, None]
    offset_1t = torch.arange(longest, device=device)[None]
    real = offset_1t < torch.tensor(lengths, device=device)[:, None]
    index = torch.where(real, starts_n1 + offset_1t, starts_n1)
    padded = min(lengths) != longest
    return Rows(torch.tensor(members, device=device), longest, index, real if padded else None)


def spans(length: int, segment: int) -> list[slice]:
    """Consecutive segments of at most ``segment`` tokens."""
    return [slice(t, min(length, t + segment)) for t in range(0, length, segment)]


def exp_difference(a: Tensor, b: Tensor, lost: Tensor | None = None) -> Tensor:
    """exp(a + lost - b) for a + lost <= b, and 0 where a is -inf, also when b is."""
    gap = a - torch.where(torch.isneginf(b), 0.0, b)
    return torch.exp(gap if lost is None else gap + lost)


def divide(a: Tensor, mass: Tensor) -> Tensor:
    """a / mass, and 0 where nothing has been seen (there a is 0 as well)."""
    return a / torch.where(mass == 0, 1.0, mass)


class Carry(NamedTuple):
    """The state between two segments: ``sum_s exp(k_s - top)`` and the mean value of the sources.

    ``log_mass = top + log(mass)`` with ``top`` a logit that occurred. A log-mass of 1e4 is rounded
    to 1e-3 in fp32, and every probability with it; differences from ``top`` are not.
    """

    top: Tensor  # (X, L), -inf if nothing has been seen
    mass: Tensor  # (X, L), 0 if nothing has been seen
    mean: Tensor  # (X, L, D)

    @classmethod
    def of(cls, log_mass: Tensor, mean: Tensor) -> Carry:
        """From a state (log-mass, mean)."""
        return cls(log_mass, (~torch.isneginf(log_mass)).to(log_mass.dtype), mean)

    @classmethod
    def empty(cls, k_XSL: Tensor, v_XSD: Tensor) -> Carry:
        """The state before the first of these tokens, where there is none."""
        mass_XL = torch.zeros_like(k_XSL[:, 0])
        mean_XLD = mass_XL.new_zeros(*mass_XL.shape, v_XSD.shape[-1])
        return cls(torch.full_like(mass_XL, -torch.inf), mass_XL, mean_XLD)

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
