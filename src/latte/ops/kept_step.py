"""One token of decoding with kept tokens, in buffers that are written in place.

As the steps of :mod:`latte.ops.step`, it checks nothing and has no gradients. Shapes never change
and nothing waits for the host. At padding a row's buffers stay as they are.

An update is due before the first query of each block of C tokens. It is done where ``seen`` is a
multiple of C: sources leave the window, some of them are kept, and the latents read the rest. Its
result does not depend on the order in which kept tokens stand in the buffers.

Shape suffixes: B batch, H query heads, G key/value heads, L latents, K key width, D value width,
N kept tokens, R slots of the ring, M = N + R, X = C + N candidates of an update, n sinks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.ops.kept import KeptLatents, KeptState, comparable, risen
from latte.ops.mxint8 import pack, unpack
from latte.ops.step import StepSinks, TokenRotary, in_dtype, native, rotated, take_sinks
from latte.ops.tensors import computation_dtype, number


class KeptBuffers(NamedTuple):
    """The tokens that a layer holds exactly. All are contiguous.

    There are M = count + R slots, with R = window + block - 1. The kept tokens are in the first
    ones, in any order. The others are a ring: token s is in slot count + s % R.

    Attributes:
        keys: Keys, (B, G, M, K). With values and latent keys of packed states, rows of 8 bits.
        values: Values, (B, G, M, D).
        scores: Scores, (B, G, M), in fp32 (fp64 for fp64 inputs); -inf in an empty place.
        positions: Positions in the sequence, (B, G, M) int64; -1 in an empty place.
        latent_keys: Latent keys, (B, H, M, L); None without latents.
        log_decay: Sum of the latents' log-decays since the token left the window, (B, H, M, L), in
            the dtype of the scores; None without decay.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    positions: Tensor
    latent_keys: Tensor | None = None
    log_decay: Tensor | None = None

    @classmethod
    def of(cls, state: KeptState, count: int, window: int, block: int) -> KeptBuffers:
        """Buffers with a copy of a state."""
        R = window + block - 1
        slots_R = torch.arange(R, device=state.seen.device)
        # The last tokens of a state are in the order of their age, the oldest (age R) first.
        order_BR = count + (slots_R - state.seen[:, None]) % R

        def buffer(x_BMGX: Tensor | None) -> Tensor | None:
            if x_BMGX is None:
                return None
            row = torch.arange(len(x_BMGX), device=x_BMGX.device)[:, None]
            x_BMGX = torch.cat([x_BMGX[:, :count], x_BMGX[row, order_BR]], 1)
            return x_BMGX.transpose(1, 2).contiguous()

        found: Any = [buffer(x) for x in (*state[:4], state.latent_keys, state.log_decay)]
        return cls(*found)

    def state(self, seen: Tensor, count: int, window: int, block: int) -> KeptState:
        """A copy of the state in the buffers, after ``seen`` (B,) tokens."""
        R, (B, G, _) = window + block - 1, self.positions.shape
        by_age_BR = count + (seen[:, None] + torch.arange(R, device=seen.device)) % R
        kept_BGN, _ = _ranked(self.scores[:, :, :count], self.positions[:, :, :count])
        index_BGM = torch.cat([kept_BGN, by_age_BR[:, None].expand(B, G, R)], 2)
        there_BGM = self.positions.gather(2, index_BGM) >= 0

        def held(x: Tensor | None, fill: float = 0.0) -> Tensor | None:
            if x is None:
                return None
            found, there = _at(x, index_BGM), _of_heads(there_BGM, x)
            return torch.where(there, found, fill).to(x.dtype).transpose(1, 2).contiguous()

        exact = held(self.keys), held(self.values), held(self.scores, -torch.inf)
        late = held(self.latent_keys), held(self.log_decay)
        found: Any = (*exact, held(self.positions, -1), seen.clone(), *late)
        return KeptState(*found)


def kept_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    held: KeptBuffers,
    seen: Tensor,
    real: Tensor | None = None,
    *,
    count: int,
    window: int,
    block: int,
    scale: float,
    softcap: float | None = None,
    rotary: TokenRotary | None = None,
    sinks: StepSinks | None = None,
    latents: KeptLatents | tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor] | None = None,
    rise: float = 0.0,
    update: bool | None = None,
) -> Tensor:
    """Softmax attention over window, sinks, kept tokens and latents (:mod:`latte.ops.kept`).

    Args:
        q, k, v: Queries (B, H, K), keys (B, G, K) and values (B, G, D) of one token per row.
        score: Score of the token, (B, G), floating point.
        held: Tokens that are held exactly, overwritten.
        seen: Number of valid tokens before this one, (B,) int64. The caller advances it.
        real: Whether each row's token is a real one, (B,) bool; None: all are.
        count, window, block: Numbers of kept tokens, of the window's, and from one update to the
            next.
        scale, softcap: Scale and soft cap of the exact keys' logits.
        rotary: Table that rotates ``q`` and ``k`` first, as for
            :func:`latte.ops.step.macchiato_step`.
        sinks: Tokens that stay visible, overwritten. A sink is an ordinary key until an update at
            which it leaves the window. It is never kept, and the latents do not read it.
        latents: Query logits (B, H, L+1), key logits (B, H, L), log-decays (B, H, L) or (H, L) or
            None, log-mass (B, H, L) and mean (B, H, L, D), both overwritten; None: no latents.
        rise: What is added to the score for each token before this one.
        update: Whether an update is due in any row; None: not known on the host.

    Returns:
        Output y, (B, H, D), in the dtype of v.
    """
    if native(None if latents is None else latents[4], q, k, v, *plain_factors(held, sinks)):
        latent_q, latent_k, log_decay, *state = latents or (None,) * 5
        more = native_arguments(
            *(held, seen, real, count, window, block, scale, softcap, rotary, sinks, rise)
        )
        return torch.ops.latte.cpu_kept_step(
            latent_q, latent_k, q, k, v, score, *state, log_decay, *more
        )
    dtype, (B, H, K), (G, D) = computation_dtype(v.dtype), q.shape, v.shape[1:]
    numbers = count, window, block
    if latents is not None:
        latents = KeptLatents(*latents)
        _forget(held, latents, seen, real, window)
    if update is not False:
        n = 0 if sinks is None else sinks.keys.shape[2]
        _update(held, seen, real, *numbers, n, latents)
    q_far = None if sinks is None else rotated(q, sinks.rotary or rotary)
    if rotary is not None:
        q, k = rotated(torch.cat([q, k], 1), rotary).split([H, G], 1)
    score = risen(score, seen, rise) if rise else score
    _put(held, seen, real, *numbers, k, v, score, None if latents is None else latents.k)

    def logits_of(q: Tensor, keys: Tensor) -> Tensor:
        q = in_dtype(q, dtype)
        q = (q * number(scale, q)).view(B * G, H // G, K)
        return torch.bmm(q, _plain(keys, dtype).view(B * G, -1, K).transpose(1, 2))

    logits, visible = logits_of(q, held.keys), held.positions >= 0
    values = [_plain(held.values, dtype)]
    if q_far is not None and sinks is not None:
        take_sinks(sinks, k, v, real)
        logits = torch.cat([logits, logits_of(q_far, sinks.keys)], -1)
        slots_n = torch.arange(sinks.keys.shape[2], device=seen.device)
        gone = slots_n <= (seen - seen % block - window)[:, None]
        visible = torch.cat([visible, gone[:, None].expand(B, G, -1)], 2)
        values.append(in_dtype(sinks.values, dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits, visible = logits.view(B, G, H // G, -1), visible[:, :, None]
    sizes = [x.shape[2] for x in values]
    if latents is not None:
        own, mean = in_dtype(latents.q, dtype), latents.mean
        assert mean is not None and latents.log_mass is not None
        own = (own[..., 1:] - own[..., :1]).view(B, G, H // G, -1)
        logits = torch.cat([logits, own], -1)
        # Latents that have read no source have no weight.
        begun = ~torch.isneginf(latents.log_mass.view(B, G, 1, -1)).all(-1, keepdim=True)
        visible = torch.cat([visible, begun.expand(B, G, 1, own.shape[-1])], -1)
        sizes.append(own.shape[-1])
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    if real is not None:  # where nothing is seen, the softmax is NaN
        weights = weights.masked_fill(~visible, 0.0)
    parts = weights.split(sizes, -1)
    out = torch.matmul(parts[0], values[0])
    if sinks is not None:
        out = out + torch.matmul(parts[1], values[1])
    out = out.view(B, H, D)
    if latents is not None and latents.mean is not None:
        p_BH1L = parts[-1].reshape(B, H, 1, -1)
        out = out + torch.matmul(p_BH1L, latents.mean).squeeze(2)
    return in_dtype(out, v.dtype)


def plain_factors(held: KeptBuffers, sinks: StepSinks | None) -> tuple[Tensor, ...]:
    """Keys and values that are not packed: of a native step they have the dtype of its inputs."""
    plain = () if held.keys.dtype == torch.uint8 else held[:2]
    return plain if sinks is None else (*plain, *sinks[:2])


def native_arguments(
    held: KeptBuffers,
    seen: Tensor,
    real: Tensor | None,
    count: int,
    window: int,
    block: int,
    scale: float,
    softcap: float | None,
    rotary: TokenRotary | None,
    sinks: StepSinks | None,
    rise: float = 0.0,
) -> tuple[Any, ...]:
    """The arguments of the native op that a token does not change, of :func:`kept_step`'s."""
    table, far = rotary or (None, None), (None,) * 4
    if sinks is not None:
        far = *sinks[:2], *(sinks.rotary or table)
    return *held, seen, *table, real, scale, softcap or 0.0, count, window, block, rise, *far


def _at(x_BHMX: Tensor, index_BGM: Tensor) -> Tensor:
    """The slots of these numbers, (B, H, M, ...): heads of a group have one index."""
    index = _of_heads(index_BGM, x_BHMX)
    return x_BHMX.gather(2, index.expand(*index.shape[:3], *x_BHMX.shape[3:]))


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers, or those of packed rows, in a dtype."""
    return unpack(x, dtype) if x.dtype == torch.uint8 else in_dtype(x, dtype)


def _of_heads(x_BGM: Tensor, like_BHMX: Tensor) -> Tensor:
    """A tensor of groups, repeated for the heads of each group, (B, H, M, 1 ...)."""
    R = like_BHMX.shape[1] // x_BGM.shape[1]
    x_BHM = x_BGM if R == 1 else x_BGM.repeat_interleave(R, 1)
    return x_BHM.view(*x_BHM.shape, *[1] * (like_BHMX.ndim - 3))


def _ranked(scores: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Order (B, G, ...) and scores: the largest first, of equal ones the later."""
    later = positions.argsort(-1, descending=True)
    scores, order = scores.gather(-1, later).sort(dim=-1, descending=True, stable=True)
    return later.gather(-1, order), scores


def _forget(
    held: KeptBuffers, latents: KeptLatents, seen: Tensor, real: Tensor | None, window: int
) -> None:
    """Applies a token's decay to the latents, and to the sources that have left the window."""
    if latents.log_decay is None or latents.log_mass is None:
        return
    assert held.log_decay is not None
    log_mass = latents.log_mass
    decay_BHL = in_dtype(latents.log_decay, log_mass.dtype).expand(log_mass.shape)
    if real is not None:
        decay_BHL = torch.where(real[:, None, None], decay_BHL, 0.0)
    log_mass.add_(decay_BHL)
    left = (held.positions >= 0) & (held.positions < (seen - window)[:, None, None])
    late = torch.where(_of_heads(left, held.log_decay), decay_BHL[:, :, None], 0.0)
    held.log_decay.add_(late)


def _update(
    held: KeptBuffers,
    seen: Tensor,
    real: Tensor | None,
    count: int,
    window: int,
    block: int,
    number_of_sinks: int,
    latents: KeptLatents | None,
) -> None:
    """Sources leave the window where an update is due, in place."""
    B, G, R = *held.positions.shape[:2], window + block - 1
    due = seen % block == 0
    due = (due if real is None else due & real)[:, None, None]
    last_B1 = (seen - window)[:, None]  # position of the last source that leaves
    leaving_BC = count + (last_B1 - torch.arange(block, device=seen.device)) % R
    old_N = torch.arange(count, device=seen.device)
    index_BGX = torch.cat([leaving_BC, old_N.expand(B, count)], 1)[:, None].expand(B, G, -1)
    positions = held.positions.gather(2, index_BGX)
    leaves = due & (positions[..., :block] <= last_B1[:, None])
    leaves = leaves & (positions[..., :block] >= number_of_sinks)
    candidate = torch.cat([leaves, positions[..., block:] >= 0], 2)
    scores = held.scores.gather(2, index_BGX).masked_fill(~candidate, -torch.inf)
    order, scores = _ranked(scores, positions)
    order, stays = order[..., :count], scores[..., :count] > -torch.inf
    if latents is not None:
        read = candidate & ~torch.zeros_like(candidate).scatter(2, order, stays)
        _read(held, index_BGX, read, latents)
    # At padding and between updates the kept tokens stay in their slots.
    chosen, stays = torch.where(due, index_BGX.gather(2, order), old_N), stays | ~due
    for x in held:
        if x is not None:
            x[:, :, :count] = _at(x, chosen)
    held.positions[:, :, :count].masked_fill_(~stays, -1)
    held.scores[:, :, :count].masked_fill_(~stays, -torch.inf)
    ring = held.positions[:, :, count:]
    gone = due & (ring <= last_B1[:, None])
    ring.masked_fill_(gone, -1)
    held.scores[:, :, count:].masked_fill_(gone, -torch.inf)
    # A weight of 0 times a number that is not finite would be NaN.
    held.values.masked_fill_((held.positions < 0)[..., None], 0.0)


def _read(held: KeptBuffers, index_BGX: Tensor, read_BGX: Tensor, latents: KeptLatents) -> None:
    """The latents read the sources of these slots that are to be read, in place."""
    A, mean = latents.log_mass, latents.mean
    assert held.latent_keys is not None and A is not None and mean is not None
    (B, H, L, D), G = mean.shape, index_BGX.shape[1]
    k_BHXL = _plain(_at(held.latent_keys, index_BGX), A.dtype)
    if held.log_decay is not None:
        k_BHXL = k_BHXL + _at(held.log_decay, index_BGX)
    k_BHXL = torch.where(_of_heads(read_BGX, k_BHXL), k_BHXL, -torch.inf)
    v_BGXD = _plain(_at(held.values, index_BGX), A.dtype)
    v_BGXD = torch.where(read_BGX[..., None], v_BGXD, 0.0)
    top = torch.maximum(A, k_BHXL.amax(2))
    top = torch.where(torch.isneginf(top), 0.0, top)
    first, e_BHXL = torch.exp(A - top), torch.exp(k_BHXL - top[:, :, None])
    total = first + e_BHXL.sum(2)
    none = total == 0
    total = torch.where(none, 1.0, total)
    A.copy_(torch.where(none, -torch.inf, top + total.log()))
    weights = e_BHXL.transpose(2, 3).reshape(B, G, -1, e_BHXL.shape[2])
    new = torch.matmul(weights, v_BGXD).view(B, H, L, D)
    mean.copy_(torch.addcmul(new, mean, first[..., None]) / total[..., None])


def _put(
    held: KeptBuffers,
    seen: Tensor,
    real: Tensor | None,
    count: int,
    window: int,
    block: int,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    latent_k: Tensor | None,
) -> None:
    """The token takes its slot of the ring."""
    slot = (count + seen % (window + block - 1))[:, None, None]
    position = seen[:, None].expand(-1, score.shape[1])
    decay = None if held.log_decay is None else torch.zeros_like(held.log_decay[:, :, 0])
    for x, new in zip(held, (k, v, comparable(score), position, latent_k, decay), strict=True):
        if x is None or new is None:
            continue
        packed = x.dtype == torch.uint8
        new = pack(in_dtype(new, v.dtype)) if packed else in_dtype(new, x.dtype)
        new = new.unsqueeze(2)
        index = slot.view(*slot.shape, *[1] * (x.ndim - 3)).expand(new.shape)
        if real is not None:
            new = torch.where(real.view(-1, *[1] * (x.ndim - 1)), new, x.gather(2, index))
        x.scatter_(2, index, new)
