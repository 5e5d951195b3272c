"""Numbers that are not finite stay in their own sequence, from their token on.

A weight of zero keeps no NaN or infinity out of a sum: in a matrix product they reach tokens and
packed sequences that do not see them. The native kernels read only what a query sees, and Triton's
keep sequences apart, but not the tokens of a chunk. For the other backends a call whose output is
not finite is computed again, with zeros in the place of such inputs, and outputs that see none of
them are taken from there.

A CPU looks at the output first. A GPU is not waited for, and a graph has no branch: there a call is
computed once, with these zeros, and outputs that see such an input are NaN.

No gradient flows through outputs that see such an input. So the gradients of other sequences, and
those that earlier outputs give, stay what they are.

Shape suffixes: B batch, T tokens, N states (B, or the packed sequences), P slots of a window's
state, n sinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.ops.tensors import (
    Sequences,
    computation_dtype,
    count_sequences,
    on_cpu,
    sequence_bounds,
    sequence_ids,
    sequence_starts,
)

# Which outputs read a token's input, by the name of the input.
QUERIES = ("q", "latent_q", "sink_q")  # (B, T, ...): the token alone
SOURCES = ("k", "v", "latent_k", "log_decay", "x", "recurrence_gate", "input_gate")  # (B, T, ...)
# (N, ...): the whole sequence
STATES = ("log_mass", "mean", "memory", "normaliser", "initial_state")
TAIL = ("tail_k", "tail_v")  # (N, P, ...): queries whose window reaches so far back
PENDING = ("pending_k", "pending_v")  # (N, P, ...): the whole sequence
SINKS = ("sink_k", "sink_v")  # (N, n, ...): queries that see the sink
READ = {*QUERIES, *SOURCES, *STATES, *TAIL, *PENDING, *SINKS}
# Inputs in which -inf is allowed: it means no weight.
LOGITS = ("latent_k", "log_mass", "pending_k")

Given = Mapping[str, Tensor | None]


class View(NamedTuple):
    """What a query sees: the past of its sequence, or all of it if not causal."""

    sequences: Sequences
    window: int | None = None  # no more than that
    reverse: bool = False  # the future in the place of the past
    tail_mask: Tensor | None = None  # (N, P) bool
    pending_mask: Tensor | None = None  # (N, P) bool
    sink_mask: Tensor | None = None  # (N, n) bool
    sinks_seen: Tensor | None = None  # (B, T), number of sinks that a query sees

    @classmethod
    def of(cls, x: Any, causal: bool) -> View:
        """What a query sees in a call with these arguments (:mod:`latte.ops.arguments`)."""
        given = x._asdict()
        if "latent_k" in given:  # latents see sources before the window
            del given["window"]
        sequences = Sequences(x.key_mask, x.cu_seqlens, given.get("causal", causal))
        return cls(sequences, **{name: given[name] for name in cls._fields if name in given})


class Bad(NamedTuple):
    """Which inputs are not finite. Masked tokens do not count."""

    queries: Tensor  # (B, T)
    sources: Tensor  # (B, T)
    states: Tensor  # (N,)
    tail: Tensor  # (N, P)
    pending: Tensor  # (N, P)
    sinks: Tensor  # (N, n)

    @classmethod
    def of(cls, given: Given, view: View) -> Bad:
        """The inputs of a call that are not finite."""
        like = next(x for name, x in given.items() if name in SOURCES and x is not None)
        B, T = like.shape[:2]
        N = count_sequences(B, view.sequences.cu_seqlens)

        def bad(names: tuple[str, ...], shape: tuple[int, ...], mask: Tensor | None) -> Tensor:
            found = torch.zeros(shape, dtype=torch.bool, device=like.device)
            for name in names:
                x = given.get(name)
                if x is None or not x.numel():
                    continue
                entries = x.detach().reshape(*shape, -1)
                fine = entries.amax(-1) < math.inf  # False of NaN
                if name not in LOGITS:
                    fine = fine & (entries.amin(-1) > -math.inf)
                found = found | ~fine
            return found if mask is None else found & mask

        def slots(names: tuple[str, ...], mask: Tensor | None) -> Tensor:
            return bad(names, (N, 0) if mask is None else tuple(mask.shape), mask)

        return cls(
            bad(QUERIES, (B, T), None),
            bad(SOURCES, (B, T), view.sequences.key_mask),
            bad(STATES, (N,), None),
            slots(TAIL, view.tail_mask),
            slots(PENDING, view.pending_mask),
            slots(SINKS, view.sink_mask),
        )

    def cleaned(self, given: Given) -> list[Tensor | None]:
        """The inputs with zeros in the place of bad ones."""
        places = zip((QUERIES, SOURCES, STATES, TAIL, PENDING, SINKS), self, strict=True)
        bad = {name: place for names, place in places for name in names}
        return [None if x is None else _where(bad[name], 0.0, x) for name, x in given.items()]

    def reached(self, view: View) -> tuple[Tensor, Tensor]:
        """Which outputs (B, T) see a bad input, and which sequences (N,) hold one."""
        (B, T), (_, cu_seqlens, causal) = self.queries.shape, view.sequences
        place = torch.arange(T, device=self.queries.device)
        counted = F.pad(self.sources.long().cumsum(1), (1, 0))  # of the tokens before each
        if cu_seqlens is None:
            row, start = torch.arange(B, device=place.device)[:, None], torch.zeros_like(place)
            end, own_N = start + T, self.sources.any(1)
        else:
            bounds = sequence_bounds(cu_seqlens)
            row, start = sequence_ids(cu_seqlens, T), sequence_starts(cu_seqlens, T)
            end, own_N = bounds[1:][row], counted[0, bounds].diff() > 0
        low, high = start, end
        if view.reverse:
            low = place
        elif causal:
            high = place + 1
        before_N = self.states | self.pending.any(1)
        reached = self.queries
        if view.window is None:
            before_N = before_N | self.tail.any(1)
        else:
            reach = view.window - 1 if causal else view.window // 2
            low, high = torch.maximum(low, place - reach), torch.minimum(high, place + reach + 1)
            slots = F.pad(self.tail.flip(1).long().cumsum(1), (1, 0))  # the last ones first
            near = (view.window - 1 - (place - start)).clamp(0, self.tail.shape[1])
            reached = reached | (slots[row, near] > 0)
        reached = reached | (counted[:, high] > counted[:, low]) | before_N[row]
        if view.sinks_seen is not None:
            sinks = F.pad(self.sinks.long().cumsum(1), (1, 0))
            reached = reached | (sinks[row, view.sinks_seen] > 0)
        return reached, own_N | before_N


def isolating(op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A backend's op, in which numbers that are not finite stay in their own sequence.

    The op takes arguments and, for latents, whether it is causal. It gives the output and the final
    states.
    """

    def isolating_op(x: Any, *causal: bool) -> tuple[Tensor, ...]:
        given = {name: y for name, y in x._asdict().items() if name in READ}

        def run(*values: Any) -> tuple[Tensor, ...]:
            return op(x._replace(**dict(zip(given, values, strict=True))), *causal)

        return isolated(run, View.of(x, all(causal)), given)

    return isolating_op


def isolated(
    run: Callable[..., tuple[Tensor, ...]], view: View, given: Given
) -> tuple[Tensor, ...]:
    """``run`` of the inputs, in their order: output (B, T, ...) and final states (N, ...).

    Args:
        view: What a query sees of the inputs.
        given: Inputs by the names that are known here.
    """
    spoiled: list[Any]
    if all(x is None or type(x) in (Tensor, nn.Parameter) and on_cpu(x) for x in given.values()):
        out, *states = run(*given.values())
        if all(_is_finite(x) for x in (out, *states[-1:])):  # a log-mass may be -inf
            return out, *states
        bad = Bad.of(given, view)
        if not any(bool(place.any()) for place in bad):
            return out, *states  # too large, or a parameter that is not finite
        spoiled = [x.detach() for x in (out, *states)]
        out, *states = run(*bad.cleaned(given))
    else:
        bad = Bad.of(given, view)
        out, *states = run(*bad.cleaned(given))
        spoiled = [math.nan] * (1 + len(states))
    tokens, rows = bad.reached(view)
    parts = zip((tokens, *[rows] * len(states)), spoiled, (out, *states), strict=True)
    return tuple(_where(place, x, y) for place, x, y in parts)


def _is_finite(x: Tensor) -> bool:
    return math.isfinite(x.detach().sum(dtype=computation_dtype(x.dtype)))


def _where(place: Tensor, x: Tensor | float, y: Tensor) -> Tensor:
    """x at these places of y's first dimensions, else y."""
    return torch.where(place.view(*place.shape, *[1] * (y.ndim - place.ndim)), x, y)
