"""The equations of kept tokens, with every source's place written out, in O(T^2).

y_t is one softmax over the exact keys (window, sinks, kept) and the latents, and a latent's mean is
over the sources that are none of these. Autograd gives the gradients.

Shape suffixes: B batch, T queries, S sources (those of the state, then the tokens), N states, M
slots of a state, n sinks, H query heads, G key/value heads, L latents, K key width, D value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.arguments import KeptInputs
from latte.ops.kept import Kept, KeptLatents, KeptState, comparable, taken
from latte.ops.reference import masked_softmax, wide, window_logits
from latte.ops.state import LatteState, Sinks
from latte.ops.tensors import (
    Local,
    Sequences,
    computation_dtype,
    real_tokens,
    without_masked,
)


class Places(NamedTuple):
    """Where each source is at each query, and after the last one (row T)."""

    window: Tensor  # (B, G, T+1, S) bool
    kept: Tensor  # (B, G, T+1, S) bool
    latents: Tensor  # (B, G, T+1, S) bool
    sinks: Tensor  # (B, 1, T+1, n) bool: as sinks, not as keys of the window
    rank: Tensor  # (B, G, T+1, S): number of sources that have left, with a larger score
    query: Tensor  # (B, T) int64: positions
    source: Tensor  # (B, S, G) int64: positions, -1 for none
    scores: Tensor  # (B, S, G)
    seen: Tensor  # (B,) int64: valid tokens before the call
    after: Tensor  # (B,) int64: and with those of the call

    @classmethod
    def of(
        cls,
        kept: Kept,
        window: int,
        key_mask: Tensor | None,
        state: KeptState | None,
        sinks: Sinks | None,
    ) -> Places:
        """The places of rows that are not packed."""
        scores, (B, T, G) = comparable(kept.scores), kept.scores.shape
        real = real_tokens(scores, key_mask)
        seen = real.new_zeros(B, dtype=torch.long) if state is None else state.seen
        query = seen[:, None] + real.long().cumsum(1) - 1
        after = seen + real.sum(1)
        source = torch.where(real, query, -1)[..., None].expand(B, T, G)
        if state is not None:
            source = torch.cat([state.positions, source], 1)
            scores = torch.cat([comparable(state.scores), scores], 1)
        number = torch.arange(0 if sinks is None else sinks.mask.shape[1], device=seen.device)
        mask = real.new_zeros(B, 0) if sinks is None else sinks.mask
        is_sink = ((source[..., None] == number) & mask[:, None, None]).any(-1)  # (B, S, G)

        # The update before each query: the first position of its block.
        last = torch.cat([query, after[:, None] - 1], 1)
        update = last.div(kept.block, rounding_mode="floor") * kept.block
        s, t, u = source.mT[:, :, None], last[:, None, :, None], update[:, None, :, None]
        left = (s >= 0) & (s <= u - window)
        near = (s > u - window) & (s >= 0) & (s <= t)
        candidates = left & ~is_sink.mT[:, :, None]
        # Whether the first of two sources is the better one.
        r, at = scores.mT, source.mT
        better = r[..., :, None] > r[..., None, :]
        better |= (r[..., :, None] == r[..., None, :]) & (at[..., :, None] > at[..., None, :])
        rank = candidates.float() @ better.float()  # whole numbers
        chosen = candidates & (rank < kept.count) & ~r.isneginf()[:, :, None]
        gone = (number <= u - window) & mask[:, None, None]
        read = candidates & ~chosen
        return cls(near, chosen, read, gone, rank, query, source, scores, seen, after)


def _forgotten(places: Places, g_BTHL: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Total log-decay up to each query and the end (B, T+1, H, L), and up to when a source left.

    The second result is for the sources of the state and of the call, (B, S, H, L).
    """
    H, G = g_BTHL.shape[2], places.source.shape[2]
    R = H // G
    total = F.pad(g_BTHL.cumsum(1), (0, 0, 0, 0, 1, 0))  # before the first token it is 0
    at_query = torch.cat([total[:, 1:], total[:, -1:]], 1)
    # There is no decay at masked tokens: take the first place with this number of valid tokens.
    seen = places.seen[:, None, None]
    number = (places.source + window + 1 - seen).clamp(min=0)  # of the call's valid tokens
    number = torch.minimum(number, (places.after - places.seen)[:, None, None])
    counted = F.pad(places.query + 1 - places.seen[:, None], (1, 0))  # (B, T+1), rising
    place = (counted[:, None] < number.flatten(1)[..., None]).sum(-1).view(number.shape)
    everywhere = torch.ones_like(place, dtype=torch.bool)
    return at_query, taken(total.unflatten(2, (G, R)), place, everywhere).flatten(2, 3)


def kept_weights(
    q_BTHK: Tensor,
    keys_BSGK: Tensor,
    local: Local,
    places: Places,
    sinks: Sinks | None,
    latents: KeptLatents | None,
    latent_k_BSHL: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """p(s|t) of all sources (B, H, T, S), of the sinks (B, H, T, n), and of the state (B, H, T, L).

    ``latent_k`` are the latents' logits without the decays up to the queries: all sources share
    these.
    """
    (_, T, H, _), S = q_BTHK.shape, keys_BSGK.shape[1]
    R = H // keys_BSGK.shape[2]

    def heads(x_BGTS: Tensor) -> Tensor:
        return x_BGTS[:, :, :T].repeat_interleave(R, 1)

    logits, seen = _exact(q_BTHK, keys_BSGK, local, places, sinks)
    L = 0
    if latents is not None and latent_k_BSHL is not None:
        (latent_q,), L = wide(latents.q), latents.k.shape[-1]
        logits.append((latent_q[..., 1:] - latent_q[..., :1]).transpose(1, 2))
        begun = places.latents.any(-1)
        if latents.log_mass is not None:
            earlier = ~latents.log_mass.unflatten(1, (-1, R)).isneginf()
            begun = begun | earlier.flatten(2).any(2)[..., None]
        seen.append(heads(begun[..., None]).expand(-1, -1, -1, L))
    p = masked_softmax(torch.cat(logits, -1), torch.cat(seen, -1))
    weights, of_sinks, of_latents = p.split([S, p.shape[-1] - S - L, L], -1)
    of_state = [torch.zeros_like(weights[..., :1])] * L
    for latent in range(L):
        assert latents is not None and latent_k_BSHL is not None
        share = of_latents[..., latent, None]
        within = _within(latents, latent_k_BSHL, latent, heads(places.latents))
        weights = weights + share * within[..., 1:]
        of_state[latent] = share * within[..., :1]
    return weights, of_sinks, torch.cat([weights[..., :0], *of_state], -1)


def _exact(
    q_BTHK: Tensor, keys_BSGK: Tensor, local: Local, places: Places, sinks: Sinks | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The logits of all sources (B, H, T, S) and sinks (B, H, T, n), and which of them are seen."""
    _, T, H, _ = q_BTHK.shape
    near = (places.window | places.kept)[:, :, :T]
    logits = [window_logits(q_BTHK, keys_BSGK, local)]
    seen = [near.repeat_interleave(H // keys_BSGK.shape[2], 1)]
    if sinks is not None:
        far_q, far_k = wide(sinks.q, sinks.keys)
        logits.append(window_logits(far_q, far_k, local))
        seen.append(places.sinks[:, :, :T].expand(-1, H, -1, -1))
    return logits, seen


def log_mass(x: KeptInputs) -> Tensor:
    """The logsumexp of the logits of all exact keys, (B, T, H); for sequences without a past."""
    if x.sequences.cu_seqlens is not None:
        return torch.cat([log_mass(each) for each in _alone(x)], 1)
    key_mask = x.sequences.key_mask
    places = Places.of(x.kept, x.window, key_mask, None, x.sinks)
    q, k = wide(without_masked(key_mask, x.q), without_masked(key_mask, x.k))
    logits, seen = (torch.cat(parts, -1) for parts in _exact(q, k, x.local, places, x.sinks))
    lowest = torch.finfo(logits.dtype).min / 2
    return logits.masked_fill(~seen, lowest).logsumexp(-1).transpose(1, 2)


def _within(latents: KeptLatents, k_BSHL: Tensor, latent: int, read_BHTS: Tensor) -> Tensor:
    """p(s|l,t) for one latent, with the earlier state in column 0, (B, H, T, 1+S)."""
    logits = k_BSHL[..., latent].transpose(1, 2)[:, :, None].expand(read_BHTS.shape)
    if latents.log_mass is None:
        return F.pad(masked_softmax(logits, read_BHTS), (1, 0))
    first = latents.log_mass[..., latent, None, None].expand(-1, -1, logits.shape[2], 1)
    return masked_softmax(torch.cat([first, logits], -1), F.pad(read_BHTS, (1, 0), value=True))


class Rows(NamedTuple):
    """A call on rows that are not packed. The state's sources come before the call's."""

    places: Places
    keys: Tensor
    values: Tensor
    latent_k: Tensor | None  # as they came
    at_query: Tensor | None  # total log-decays at queries and the end
    lost: Tensor | None  # (B, S, H, L): what is to be added to the totals for a source's decay

    @classmethod
    def of(cls, places: Places, x: KeptInputs) -> Rows:
        """The sources, with zeros in the place of those that are masked."""
        k, v, window, state, latents = x.k, x.v, x.window, x.state, x.latents
        latent_k = None if latents is None else latents.k
        at_query = lost = None
        if latents is not None and latents.log_decay is not None:
            at_query, left = _forgotten(places, latents.log_decay, window)
            lost = -left
            if state is not None and state.log_decay is not None:
                lost = lost + F.pad(state.log_decay, (0, 0, 0, 0, 0, k.shape[1]))
        elif state is not None and state.log_decay is not None:
            lost = F.pad(state.log_decay, (0, 0, 0, 0, 0, k.shape[1]))
        if state is not None:
            k, v = torch.cat([state.keys, k], 1), torch.cat([state.values, v], 1)
            if latent_k is not None and state.latent_keys is not None:
                latent_k = torch.cat([state.latent_keys, latent_k], 1)
        return cls(places, k, v, latent_k, at_query, lost)


def plan_of(x: KeptInputs) -> None:
    """No plan: the places of sources are found where they are used."""


def attention(_: None, x: KeptInputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output, and with latents their log-mass and mean after the call."""
    q_BTHK, k_BTGK, v_BTGD, kept, local, sequences, state, sinks, latents = x
    if sequences.cu_seqlens is not None:
        found: Any = zip(*(attention(None, each) for each in _alone(x)), strict=True)
        outs, *states = found
        joined: Any = (None if y[0] is None else torch.cat(y) for y in states)
        return torch.cat(outs, 1), *joined
    key_mask, dtype = sequences.key_mask, v_BTGD.dtype
    if state is None and not q_BTHK.shape[1]:  # an empty sequence of packed ones
        out = v_BTGD.new_zeros(*q_BTHK.shape[:3], v_BTGD.shape[-1])
        if latents is None:
            return out, None, None
        H, L = latents.k.shape[2:]
        wider: Any = {"device": out.device, "dtype": computation_dtype(dtype)}
        A, mean = LatteState.empty(1, H, L, out.shape[-1], **wider)
        return out, A, mean
    places = Places.of(kept, x.window, key_mask, state, sinks)
    empty = (places.source < 0)[..., None]  # (B, S, G, 1)
    rows = Rows.of(places, x)
    # Masked queries have no output, and give no gradient.
    q_BTHK = without_masked(key_mask, q_BTHK)
    if sinks is not None:
        far_k, far_v = (without_masked(sinks.mask, x) for x in (sinks.keys, sinks.values))
        sinks = Sinks(without_masked(key_mask, sinks.q), far_k, far_v, sinks.mask)
    latents = latents and latents._replace(q=without_masked(key_mask, latents.q))
    q, keys, values = wide(q_BTHK, *(y.masked_fill(empty, 0.0) for y in (rows.keys, rows.values)))
    latent_k = None
    if rows.latent_k is not None:
        repeated = empty.repeat_interleave(q.shape[2] // keys.shape[2], 2)
        latent_k = wide(rows.latent_k)[0].masked_fill(repeated, 0.0)
        latent_k = latent_k if rows.lost is None else latent_k + rows.lost
    weights, weights_of_sinks, before = kept_weights(
        q, keys, local, places, sinks, latents, latent_k
    )
    H, T = q.shape[2], q.shape[1]
    R = H // values.shape[2]
    out = torch.einsum("bhts,bshd->bthd", weights, values.repeat_interleave(R, 2))
    if sinks is not None:
        sink_v = wide(sinks.values)[0].repeat_interleave(R, 2)
        out = out + torch.einsum("bhtn,bnhd->bthd", weights_of_sinks, sink_v)
    if latents is not None and latents.mean is not None:
        out = out + torch.einsum("bhtl,bhld->bthd", before, latents.mean)
    out = without_masked(key_mask, out).to(dtype)
    if latents is None or latent_k is None:
        return out, None, None
    # The latents after the last token.
    read = places.latents[:, :, T:].repeat_interleave(R, 1).transpose(2, 3)  # (B, H, S, 1)
    logits = latent_k.transpose(1, 2)
    logits = logits if rows.at_query is None else logits + rows.at_query[:, -1, :, None]
    logits, v = logits.masked_fill(~read, -torch.inf), values.repeat_interleave(R, 2)
    if latents.log_mass is not None and latents.mean is not None:
        first = latents.log_mass
        first = first if rows.at_query is None else first + rows.at_query[:, -1]
        logits = torch.cat([first[:, :, None], logits], 2)
    top = logits.detach().amax(2) if logits.shape[2] else logits.new_zeros(logits[:, :, 0].shape)
    top = torch.where(top.isneginf(), 0.0, top)
    mass = torch.exp(logits - top[:, :, None]).sum(2)
    empty = mass == 0
    log_mass = torch.where(empty, -torch.inf, top + torch.where(empty, 1.0, mass).log())
    share = masked_softmax(logits.mT, ~logits.mT.isneginf())
    mean = share[..., -v.shape[1] :] @ v.transpose(1, 2)
    if latents.mean is not None:
        mean = mean + share[..., :1] * latents.mean
    return out, log_mass, mean


def state_after(_: None, x: KeptInputs) -> KeptState:
    """The tokens that are held after the call."""
    kept, window, latents = x.kept, x.window, x.latents
    if x.sequences.cu_seqlens is not None:
        parts: Any = zip(*(state_after(None, each) for each in _alone(x)), strict=True)
        joined: Any = (None if y[0] is None else torch.cat(y) for y in parts)
        return KeptState(*joined)
    if x.state is None and not x.k.shape[1]:
        latent_k, g = (None, None) if latents is None else (latents.k, latents.log_decay)
        return KeptState.empty(x.k, x.v, kept, window, x.k.shape[0], latent_k, g)
    places = Places.of(kept, window, x.sequences.key_mask, x.state, x.sinks)
    rows = Rows.of(places, x)
    chosen, near, rank = (y[:, :, -1] for y in (places.kept, places.window, places.rank))
    update = (places.after - 1).div(kept.block, rounding_mode="floor") * kept.block
    device = x.k.device
    # Which source is at each slot: the kept ones by rank, the last ones by position.
    slot = torch.arange(kept.count, device=device)[:, None]
    by_rank = chosen[:, :, None] & (rank[:, :, None] == slot)
    P = window + kept.block - 1
    position = places.after[:, None] - P + torch.arange(P, device=device)
    position = torch.where(position > (update - window)[:, None], position, -2)
    by_position = near[:, :, None] & (places.source.mT[:, :, None] == position[:, None, :, None])
    match = torch.cat([by_rank, by_position], 2)  # (B, G, M, S)
    there = match.any(-1).mT
    index = match.long().argmax(-1).mT
    keys, values = (taken(y, index, there) for y in (rows.keys, rows.values))
    scores = taken(places.scores, index, there, -torch.inf)
    positions = taken(places.source, index, there, -1)

    def of_heads(x_BSHL: Tensor | None) -> Tensor | None:
        if x_BSHL is None:
            return None
        G = there.shape[2]
        return taken(x_BSHL.unflatten(2, (G, -1)), index, there).flatten(2, 3)

    lost = rows.lost
    if lost is not None and rows.at_query is not None:
        lost = lost + rows.at_query[:, -1:]
    late = of_heads(rows.latent_k), of_heads(lost)
    return KeptState(keys, values, scores, positions, places.after, *late)


def _alone(x: KeptInputs) -> Iterator[KeptInputs]:
    """Each packed sequence as a row."""
    key_mask, cu_seqlens, _ = x.sequences
    assert cu_seqlens is not None
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        own = slice(start, stop)
        sinks, latents = x.sinks, x.latents
        if sinks is not None:
            sinks = Sinks(sinks.q[:, own], *(each[n : n + 1] for each in sinks[1:4]))  # type: ignore[misc]
        if latents is not None:
            g = None if latents.log_decay is None else latents.log_decay[:, own]
            latents = KeptLatents(latents.q[:, own], latents.k[:, own], g, None, None)
        sequences = Sequences(None if key_mask is None else key_mask[:, own], None)
        kept = x.kept._replace(scores=x.kept.scores[:, own])
        tokens = x.q[:, own], x.k[:, own], x.v[:, own]
        yield KeptInputs(*tokens, kept, x.local, sequences, None, sinks, latents)
