"""Which tokens a call with kept tokens keeps, as indices, and where tokens are laid out for it.

The choice depends on scores and masks alone. It is made first, without gradients: the N largest
scores up to each block come from a scan of merges. Tokens are laid out by their positions, in
blocks of C, behind those that the state holds.

Shape suffixes: B batch, T tokens, N states, S slots of the layout (the kept tokens of the state,
the blocks before the first query's, those of the queries), Z blocks of C queries, G key/value
heads, M slots of a state, J kept keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.arguments import KeptInputs
from latte.ops.kept import Kept, KeptLatents, KeptState, comparable
from latte.ops.state import Sinks
from latte.ops.tensors import (
    Sequences,
    count_sequences,
    sequence_bounds,
    sequence_ids,
    token_positions,
    without_masked,
)


class Layout(NamedTuple):
    """Where tokens are laid out.

    The first slots hold the state's kept tokens. Then positions follow in blocks of C: first the
    blocks that the window and an update reach before the first query, then the blocks of the
    queries. Each packed sequence has its own blocks.
    """

    front: int  # slots before the first query's block
    blocks: int  # Z
    C: int
    slot: Tensor | None  # (B or 1, T) of each token, S for masked ones; None: one after the other
    source: Tensor | None  # (B, S) which of the state's slots and the tokens it is, -1 for none
    old: int  # slots of the state, 0 without one
    T: int
    before: Tensor  # (N,) valid tokens of each sequence before the call
    counts: Tensor  # (N,) in the call
    start: Tensor  # (N,) first slot of the block in which the call begins
    ids: Tensor | None  # (T,) packed sequence of each token
    block_ids: Tensor | None  # (Z,) of each block

    @classmethod
    def of(cls, kept: Kept, window: int, sequences: Sequences, state: KeptState | None) -> Layout:
        """The layout of a call with T > 0."""
        (B, T, _), C, N = kept.scores.shape, kept.block, kept.count
        key_mask, cu_seqlens, _ = sequences
        device = kept.scores.device
        # Without a state no source is further away than T, and none leaves a larger window.
        reach = window if state is not None or window < T else T
        front = N + (-(-(reach - 1) // C) + 1) * C
        before = torch.zeros(count_sequences(B, cu_seqlens), dtype=torch.long, device=device)
        before = before if state is None else state.seen
        counts, ids, block_ids = torch.full_like(before, T), None, None
        if cu_seqlens is None:
            counts = counts if key_mask is None else key_mask.sum(1)
            Z = -(-T // C) if state is None else -(-(T + C - 1) // C)
            start = torch.full_like(before, front)
            if state is None and key_mask is None:
                return cls(front, Z, C, None, None, 0, T, before, counts, start, None, None)
        else:
            bounds, ids = sequence_bounds(cu_seqlens), sequence_ids(cu_seqlens, T)
            counts = bounds.diff()
            if key_mask is not None:
                counts = torch.zeros_like(counts).index_add(0, ids, key_mask[0].long())
            stop = (-(-counts // C)).cumsum(0)
            Z = (T + len(counts) * (C - 1)) // C
            block_ids = torch.searchsorted(stop, torch.arange(Z, device=device), right=True)
            block_ids = block_ids.clamp_max(len(counts) - 1)
            start = front + C * (stop + (-counts).div(C, rounding_mode="floor"))
        S, first = front + Z * C, start + before % C
        slot = token_positions(kept.scores, key_mask, cu_seqlens)
        slot = slot + (first[:, None] if ids is None else first[ids][None])
        slot = (slot if key_mask is None else torch.where(key_mask, slot, S)).expand(B, T)
        M = 0 if state is None else state.scores.shape[1]
        source = torch.full((B, S + 1), -1, device=device)
        source = source.scatter(1, slot, M + torch.arange(T, device=device).expand(B, T))
        if state is not None:
            old = torch.arange(M, device=device).expand(B, M)
            source = source.scatter(1, torch.where(old < N, old, first[:, None] + old - M), old)
        found = (slot, source[:, :-1], M, T, before, counts, start, ids, block_ids)
        return cls(front, Z, C, *found)

    @property
    def S(self) -> int:
        """Number of slots."""
        return self.front + self.blocks * self.C

    @property
    def end(self) -> Tensor:
        """(N,) the slot after the last token of each sequence."""
        return self.start + self.before % self.C + self.counts

    @property
    def final(self) -> Tensor:
        """(N,) the block of the last token so far; one block earlier if there is none at all."""
        return (self.end - 1 - self.front).div(self.C, rounding_mode="floor")

    @property
    def ends(self) -> Tensor | None:
        """(N,) the last block of each packed sequence, -1 for an empty one."""
        if self.block_ids is None:
            return None
        return torch.where(self.counts > 0, self.final, -1)

    @property
    def age(self) -> Tensor | None:
        """(Z,) number of earlier blocks of the same packed sequence."""
        if self.block_ids is None:
            return None
        z = torch.arange(self.blocks, device=self.start.device)
        return z - ((self.start - self.front) // self.C)[self.block_ids]

    @property
    def owners(self) -> Tensor | None:
        """(S,) packed sequence of each slot; in front there is none."""
        if self.block_ids is None:
            return None
        own = self.block_ids.repeat_interleave(self.C)
        return torch.cat([own.new_zeros(self.front), own])

    @property
    def update(self) -> Tensor:
        """(B, Z) position of each block's first query."""
        if (age := self.age) is not None:
            return (age * self.C)[None]
        z = torch.arange(self.blocks, device=self.start.device)
        return (self.before - self.before % self.C)[:, None] + z * self.C

    def laid(self, x_BTX: Tensor, old: Tensor | None = None, fill: float = 0.0) -> Tensor:
        """Tokens, behind the state's slots ``old``, at their slots, (B, S, ...)."""
        if self.source is None:
            T, ends = x_BTX.shape[1], [0] * (2 * x_BTX.ndim - 4)
            return F.pad(x_BTX, (*ends, self.front, self.S - self.front - T), value=fill)
        x_BTX = x_BTX if old is None else torch.cat([old.to(x_BTX.dtype), x_BTX], 1)
        row = torch.arange(x_BTX.shape[0], device=x_BTX.device)[:, None]
        found = x_BTX[row, self.source.clamp_min(0)]
        there = self.source >= 0
        return torch.where(there.view(*there.shape, *[1] * (x_BTX.ndim - 2)), found, fill)

    def sources(self, slots_NMG: Tensor) -> Tensor:
        """Which of the state's slots and the tokens these slots hold; any number for none."""
        if self.source is None:
            return (slots_NMG - self.front).clamp(0, self.T - 1)
        row = torch.arange(len(self.source), device=slots_NMG.device)[:, None, None]
        return self.source[row, slots_NMG].clamp_min(0)

    def queries(self, x_BTX: Tensor) -> Tensor:
        """Tokens in the blocks of the queries, (B, Z C, ...)."""
        if self.source is None:
            missing = self.S - self.front - x_BTX.shape[1]
            return F.pad(x_BTX, (*[0] * (2 * x_BTX.ndim - 4), 0, missing)) if missing else x_BTX
        return self._replace(source=self.source[:, self.front :] - self.old).laid(x_BTX)

    def back(self, y_BSX: Tensor) -> Tensor:
        """The inverse of :meth:`queries`; zeros at masked tokens."""
        if self.slot is None:
            return y_BSX[:, : self.T]
        row = torch.arange(y_BSX.shape[0], device=y_BSX.device)[:, None]
        at = self.slot - self.front
        return without_masked(self.slot < self.S, y_BSX[row, at.clamp_max(y_BSX.shape[1] - 1)])


def _largest(keys: Tensor, index: Tensor, count: int, nothing: float) -> tuple[Tensor, Tensor]:
    """The ``count`` largest keys, not below ``nothing``, and their index; of equals the first."""
    if (missing := count - keys.shape[-1]) > 0:
        keys, index = F.pad(keys, (0, missing), value=nothing), F.pad(index, (0, missing))
    keys, order = keys.sort(dim=-1, descending=True, stable=True)
    return keys[..., :count].clamp_min(nothing), index.gather(-1, order[..., :count])


# Sort key, by dtype, of a source that is no candidate. Sources that are never kept come after it.
NOTHING = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.float64)}


class ChoiceCall(NamedTuple):
    """The arguments of :func:`choose` as those of a kernel's op."""

    keys: Tensor  # (B, G, S), contiguous
    age: Tensor | None  # (Z,)
    blocks: int
    block: int
    window: int
    kept: int

    @classmethod
    def of(cls, keys_BGS: Tensor, layout: Layout, window: int, count: int) -> ChoiceCall:
        return cls(keys_BGS.contiguous(), layout.age, layout.blocks, layout.C, window, count)

    def buffers(self) -> tuple[Tensor, ...]:
        """Empty outputs of the op: the fields of a Choice."""
        B, G, _ = self.keys.shape
        kept, late = (B, G, self.blocks + 1, self.kept), (B, G, self.blocks, self.block)
        return tuple(
            self.keys.new_empty(shape, dtype=dtype)
            for shape in (kept, late)
            for dtype in (torch.int64, torch.bool)
        )


class Choice(NamedTuple):
    """Which slots are kept from each update to the next; at first those kept before the call.

    Attributes:
        kept: Slots, (B, G, Z+1, N), the largest first.
        kept_there: Whether there is one, bool.
        late: Slots of sources that leave or are no longer kept at an update, (B, G, Z, C).
        late_there: Whether there is one, bool.
    """

    kept: Tensor
    kept_there: Tensor
    late: Tensor
    late_there: Tensor


def choose(keys_BGS: Tensor, layout: Layout, window: int, count: int) -> Choice:
    """The choice by sort keys, in O(T log T): merges of 1, 2, 4 ... blocks."""
    (B, G, _), Z, C, N = keys_BGS.shape, layout.blocks, layout.C, count
    nothing, device = NOTHING[keys_BGS.dtype], keys_BGS.device
    # The sources that leave at each update, the newest first.
    block = torch.arange(Z, device=device)
    slots = layout.front - window + C * block[:, None] - torch.arange(C, device=device)
    inside = slots >= N
    if layout.age is not None:
        inside = inside & (slots >= layout.front + C * (block - layout.age)[:, None])
    slots = slots.clamp_min(N)
    leaving, slots = keys_BGS[..., slots].masked_fill(~inside, nothing), slots.expand(B, G, Z, C)
    best, index = (
        torch.cat([x[..., None, :], y], 2)
        for x, y in zip(
            (keys_BGS[..., :N], torch.arange(N, device=device).expand(B, G, N)),
            _largest(leaving, slots, N, nothing),
            strict=True,
        )
    )
    step = 1
    while step <= Z:
        earlier = best[:, :, :-step]
        if layout.age is not None:
            earlier = earlier.masked_fill((layout.age[step - 1 :] < step)[:, None], nothing)
        merged = torch.cat([best[:, :, step:], earlier], -1)
        both = torch.cat([index[:, :, step:], index[:, :, :-step]], -1)
        merged, both = _largest(merged, both, N, nothing)
        best = torch.cat([best[:, :, :step], merged], 2)
        index = torch.cat([index[:, :, :step], both], 2)
        step *= 2
    earlier = best[:, :, :-1]
    if layout.age is not None:
        earlier = earlier.masked_fill((layout.age == 0)[:, None], nothing)
    # The N largest of the kept and the leaving sources are kept. The latents read the other C.
    order = torch.cat([leaving, earlier], -1).sort(dim=-1, descending=True, stable=True)
    late = torch.cat([slots, index[:, :, :-1]], -1).gather(-1, order.indices)[..., N:]
    return Choice(index, best > nothing, late, order.values[..., N:] != nothing)


class Plan(NamedTuple):
    """Which sources each block of queries reads, and which tokens are held after the call.

    Places are rows of a table of all sources and groups, (B S G, ...).
    """

    layout: Layout
    window: int
    real: Tensor  # (B, S) bool: whether there is a source
    kept: Tensor  # (B, G, Z, J) places
    kept_there: Tensor  # bool
    late: Tensor  # (B, G, Z, C) places of what the latents read at an update
    late_there: Tensor  # bool
    begun: Tensor  # (B, G, Z) bool: whether the latents have read any source of the call
    sinks_seen: Tensor | None  # (B, Z, n) bool
    positions: Tensor  # (B, S, G), -1 for none
    scores: Tensor  # (B, S, G)
    after: Tensor  # (N, G, J) slots of what is kept after the call
    after_there: Tensor  # bool

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        kept: Kept,
        window: int,
        sequences: Sequences,
        state: KeptState | None,
        sinks: Sinks | None,
        choose: Callable[[Tensor, Layout, int, int], Choice] = choose,
    ) -> Plan:
        """The plan of a call with T > 0. Other backends have a :func:`choose` of their own."""
        layout = Layout.of(kept, window, sequences, state)
        scores, (B, T, G), ids = comparable(kept.scores), kept.scores.shape, layout.ids
        Z, N, S, device = layout.blocks, kept.count, layout.S, scores.device
        position = token_positions(scores, *sequences[:2])
        position = position if state is None else position + state.seen[:, None]
        if sequences.key_mask is not None:
            position = torch.where(sequences.key_mask, position, -1)
        position = position[..., None].expand(B, T, G)
        old_scores, old_positions = (
            (None, None) if state is None else (state.scores, state.positions)
        )
        scores = layout.laid(scores, old_scores, -torch.inf)
        positions = layout.laid(position, old_positions, -1)
        there = positions >= 0
        real, candidate, sinks_seen = there.any(2), there, None
        if sinks is not None:
            mask, n = sinks.mask, torch.arange(sinks.mask.shape[1], device=device)
            gone = n <= layout.update[..., None] - window
            if layout.block_ids is None:
                sinks_seen, mask = gone & mask[:, None], mask[:, None]
            else:
                sinks_seen, mask = gone & mask[layout.block_ids], mask[layout.owners][None]
            candidate = there & ~((positions[..., None] == n) & mask[:, :, None]).any(-1)

        # Sort keys: scores, then sources that are no candidates, then those that are never kept.
        nothing = NOTHING[scores.dtype]
        keys = torch.where(scores.isneginf(), scores, scores.clamp_min(nothing / 2))
        keys = torch.where(candidate, keys, nothing).mT  # (B, G, S)
        index, there_after, late, late_there = choose(keys, layout, window, N)
        block = torch.arange(Z, device=device)
        final = layout.final[:, None, None] if ids is None else layout.final[layout.block_ids]
        late_there = late_there & (block <= final)[..., None]
        begun = late_there.any(-1).long().cumsum(2)
        if layout.age is not None:
            begun = begun - F.pad(begun, (1, 0))[..., block - layout.age]

        # What is kept after the call: the last choice.
        if ids is None:
            last = (layout.final + 1).view(-1, 1, 1, 1).expand(B, G, 1, N)
            after, after_there = (x.gather(2, last)[:, :, 0] for x in (index, there_after))
        else:
            last = (layout.final + 1).clamp_min(0)
            after, after_there = (x[0, :, last].transpose(0, 1) for x in (index, there_after))
            after_there = after_there & (layout.counts > 0)[:, None, None]

        rows = torch.arange(B, device=device).view(-1, 1, 1, 1) * S
        group = torch.arange(G, device=device).view(-1, 1, 1)
        kept_there = there_after[:, :, 1:]
        chosen, late = (  # the first slot of the row where there is none
            (rows + x.masked_fill(~there, 0)) * G + group
            for x, there in ((index[:, :, 1:], kept_there), (late, late_there))
        )
        found = (chosen, kept_there, late, late_there, begun > 0, sinks_seen)
        return cls(layout, window, real, *found, positions, scores, after, after_there)

    def held(self) -> tuple[Tensor, Tensor]:
        """(N, M, G) slots of the tokens held after the call, and whether there is one (bool).

        After the kept tokens these are the last ones that have not left the window.
        """
        layout, (G, J), ids = self.layout, self.after.shape[1:], self.layout.ids
        P = self.window + layout.C - 1
        recent = layout.end[:, None] - P + torch.arange(P, device=self.after.device)
        low = (layout.front + layout.C * layout.final - self.window + 1).clamp_min(J)
        low = low if ids is None else torch.maximum(low, layout.start)
        at = recent.clamp(0, layout.S - 1)
        there = (recent >= low[:, None]) & (
            self.real.gather(1, at) if ids is None else self.real[0, at]
        )
        every = (self.after, at), (self.after_there, there)
        slots, found = (torch.cat([x.mT, y[..., None].expand(-1, -1, G)], 1) for x, y in every)
        return slots, found

    def heard(self, latents: KeptLatents | None) -> Tensor:
        """(B, G, Z) bool: whether the latents have read any source, of the call or before it."""
        if latents is None or latents.log_mass is None:
            return self.begun
        earlier = ~latents.log_mass.unflatten(1, (self.begun.shape[1], -1)).isneginf()
        return self.begun | earlier.flatten(2).any(2, keepdim=True)


def plan_of(x: KeptInputs) -> Plan:
    """The plan of a call with T > 0."""
    return Plan.of(x.kept, x.window, x.sequences, x.state, x.sinks)
