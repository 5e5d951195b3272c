"""Kept keys within the range of positions that a base was trained for, or within a shorter one.

A kept token may be further from a query than any two tokens were in the base's training. Rotated
keys and queries then have logits that mean nothing, and the whole text is lost. So far keys are
turned: at each position that is a multiple of ``every``, kept keys of tokens more than ``reach``
before it are rotated by ``every`` positions, as if they stood that much later. No distance is then
larger than ``reach + every``, the range. Neighbouring tokens, such as the digits of a number, are
turned together, except at few places. Texts within the range do not change.

Shape suffixes: B batch, K key width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.reference import rotate
from latte.ops.tensors import computation_dtype


class KeptRange(NamedTuple):
    """When kept keys are turned, and by how much.

    Attributes:
        reach: Number of positions that a key may be behind when it is not turned.
        every: Number of positions from one turn to the next, and by which keys are turned.
    """

    reach: int
    every: int

    @classmethod
    def of(cls, positions: int, window: int, block: int) -> KeptRange | None:
        """The range of a base trained for a number of positions; None if these are too few.

        The keys that a window of ``window`` and a block of ``block`` tokens see are never turned.
        """
        every = positions // 4 // block * block
        return (
            cls(positions - every, every) if every and positions - every >= window + block else None
        )

    @property
    def limit(self) -> int:
        """The number of positions of the range: the first position at which keys are turned."""
        return self.reach + self.every

    def due(self, position: Tensor, real: Tensor | None) -> Tensor:
        """Whether keys are turned before the token at each of these positions, if it is real."""
        due = (position % self.every == 0) & (position >= self.limit)
        return due if real is None else due & real

    def turned(
        self,
        keys: Tensor,
        positions: Tensor,
        at_B: Tensor,
        due_B: Tensor,
        turn: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The keys, turned if they are far and their row is due.

        Args:
            keys: Rotated keys, (B, ..., K).
            positions: Positions of their tokens, (B, ...); -1 in an empty place.
            at_B: Position at which the rows are.
            turn: Cosines and sines of the angles of ``every`` positions, (K/2,).
        """
        shape = (-1, *[1] * (positions.ndim - 1))
        far = (positions >= 0) & (at_B.view(shape) - positions > self.reach) & due_B.view(shape)
        cos, sin = (x.to(computation_dtype(keys.dtype)) for x in turn)
        return torch.where(far[..., None], rotate(keys, cos, sin), keys)
