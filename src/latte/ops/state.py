"""The states of fixed size that a decoder keeps between calls, instead of a growing cache.

Shape suffixes: B batch, T tokens, N states (B, or the packed sequences), H query heads, G
key/value heads, L latents per head, D value width, K key width, F feature width, W window, P tail
slots (W-1), n sinks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node

from latte.ops.kept import Kept, KeptState
from latte.ops.tensors import (
    Sequences,
    computation_dtype,
    count_sequences,
    real_tokens,
    sequence_bounds,
    sequence_ids,
    sequence_starts,
    token_positions,
    without_masked,
)


class LatteState(tuple[Tensor, ...]):
    """The state of Latte attention: a normaliser (as its log) and a mean for each latent.

    ``log_mass[l] = logsumexp_s k_s[l]`` over the sources seen so far and ``mean[l] = sum_s
    p(s|l) v_s``. The mean never exceeds ``max |v|``, whatever the logits or the length (paper,
    eq. 7-14). The empty state is ``(-inf, 0)``.

    A state is the tuple ``(log_mass, mean)``, or ``(log_mass, mean, log_decay)`` with decay.

    Args:
        log_mass: Log-masses, (B, H, L), in fp32 (fp64 for fp64 inputs). With decay, after
            the decay of each source.
        mean: Means of the values, (B, H, L, D), of the same dtype.
        log_decay: Total log-decay over the tokens of this state, (B, H, L). It applies to whatever
            the latents read before these tokens. None without decay.
    """

    __slots__ = ()

    def __new__(cls, log_mass: Tensor, mean: Tensor, log_decay: Tensor | None = None) -> LatteState:
        parts = (log_mass, mean) if log_decay is None else (log_mass, mean, log_decay)
        return tuple.__new__(cls, parts)

    def __getnewargs__(self) -> tuple[Tensor, ...]:
        return tuple(self)  # a copy and a pickle are made from the parts

    @property
    def _fields(self) -> tuple[str, ...]:
        """The names of the parts, as of a named tuple."""
        return ("log_mass", "mean", "log_decay")[: len(self)]

    def _asdict(self) -> dict[str, Tensor]:
        """The parts by their names. By this method libraries know a named tuple."""
        return dict(zip(self._fields, self, strict=True))

    @property
    def log_mass(self) -> Tensor:
        """Log-masses, (B, H, L)."""
        return self[0]

    @property
    def mean(self) -> Tensor:
        """Means of the values, (B, H, L, D)."""
        return self[1]

    @property
    def log_decay(self) -> Tensor:
        """Total log-decay, (B, H, L): zeros without decay."""
        return self[2] if self.forgets else torch.zeros_like(self.log_mass)

    @property
    def forgets(self) -> bool:
        """Whether the state has a total log-decay."""
        return len(self) == 3

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        latents: int,
        value_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> LatteState:
        """The state before any token, the neutral element of :meth:`merge`."""
        log_mass = torch.full((batch, heads, latents), -torch.inf, device=device, dtype=dtype)
        return cls(log_mass, log_mass.new_zeros(batch, heads, latents, value_dim))

    @classmethod
    def empty_for(cls, q: Tensor, *sizes: int) -> LatteState:
        """The same for inputs like ``q``, of N, H, L and D."""
        return cls.empty(*sizes, device=q.device, dtype=computation_dtype(q.dtype))

    def merge(self, other: LatteState) -> LatteState:
        """The state of this sequence followed by the other one (associative).

        ``A = logaddexp(A1 + G2, A2)``, ``mu = e^{A1+G2-A} mu1 + e^{A2-A} mu2`` and ``G = G1 + G2``
        with G the ``log_decay``. Safe, also in its gradients, when one side or both are empty.

        Raises:
            ValueError: The other state has another shape, dtype or device. Nothing is broadcast.
        """
        if not isinstance(other, LatteState):
            raise ValueError(f"merge: expected a LatteState, got {type(other).__name__}")
        for name, mine, its in zip(self._fields, self, other, strict=False):
            if mine.shape != its.shape:
                raise ValueError(
                    f"merge: the other state's {name} must have shape {tuple(mine.shape)}, got"
                    f" {tuple(its.shape)}"
                )
            if (mine.dtype, mine.device) != (its.dtype, its.device):
                raise ValueError(
                    f"merge: the other state's {name} must be {mine.dtype} on {mine.device}, got"
                    f" {its.dtype} on {its.device}"
                )
        log_mass = self.log_mass + other.log_decay if other.forgets else self.log_mass
        merged = merge_states(log_mass, self.mean, other.log_mass, other.mean)
        forget = self.forgets or other.forgets
        return LatteState(*merged, self.log_decay + other.log_decay if forget else None)


# The transforms of torch.func and torch.compile see the parts, as of a named tuple.
register_pytree_node(
    LatteState, lambda state: (list(state), None), lambda parts, _: LatteState(*parts)
)


def final_buffers(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty buffers for a state, (N, H, L) and (N, H, L, D)."""
    N = count_sequences(q.shape[0], cu_seqlens)
    A = q.new_empty((N, *q.shape[2:]), dtype=computation_dtype(q.dtype))
    return A, A.new_empty((*A.shape, v.shape[-1]))


class WindowState(NamedTuple):
    """The last W-1 local keys and values, oldest first.

    Attributes:
        keys: Keys, (B, W-1, G, K).
        values: Values, (B, W-1, G, D).
        mask: Whether a slot holds a token, (B, W-1) bool.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor

    @classmethod
    def empty(cls, k_BTGK: Tensor, v_BTGD: Tensor, window: int) -> WindowState:
        """A state without a token, with the shapes and dtypes of these keys and values."""
        B, slots = k_BTGK.shape[0], window - 1
        keys, values = (x.new_zeros(B, slots, *x.shape[2:]) for x in (k_BTGK, v_BTGD))
        return cls(keys, values, k_BTGK.new_zeros(B, slots, dtype=torch.bool))


class Sinks(NamedTuple):
    """A sequence's first valid tokens, which stay visible to all its queries (arXiv 2309.17453).

    At first a sink is a key of the window like any other. It joins the window's softmax as a sink
    when it leaves the window: from the query that is W valid tokens after it.

    Attributes:
        q: Queries for the sinks, (B, T, H, K), with a position encoding of their own.
        keys: Keys of the sinks, (N, n, G, K).
        values: Values of the sinks, (N, n, G, D).
        mask: Whether a sequence has such a token, (N, n) bool.
        position: Number of valid tokens of each sequence before the first query, (N,) int64; None
            is 0.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor
    position: Tensor | None = None


class SeenSinks(NamedTuple):
    """Sinks as backends take them. Each query sees the first ``seen`` (B, T) int64 of them."""

    q: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor
    seen: Tensor

    @classmethod
    def of(cls, sinks: Sinks, window: int, sequences: Sequences) -> SeenSinks:
        """The sinks that have left the window of each query."""
        (B, T), n = sinks.q.shape[:2], sinks.mask.shape[1]
        place = token_positions(sinks.q, *sequences[:2], sinks.position)
        seen = (place - (window - 1)).clamp(0, n).expand(B, T)
        keys, values = (without_masked(sinks.mask, x) for x in (sinks.keys, sinks.values))
        return cls(sinks.q, keys, values, sinks.mask, seen)


class Partition(NamedTuple):
    """How the past is divided between the window and the latents, beyond the paper.

    Attributes:
        sinks: First tokens, which stay visible to the window's softmax.
        delay: Whether the latents read only sources that have left the window, s <= t - W. The two
            branches then share no source. While none has left the window, p(0|t) is 1.
        joint: Whether the window's keys and the latents share one softmax. The window's logit
            ``latent_q[..., 0]`` is then added to the logit of every key, so that p(0|t) is
            ``softmax(latent_q_t + [m_t, 0, ..., 0])[0]`` with m_t the logsumexp of the window's
            logits, sinks included.
        kept: Which tokens stay visible after they have left the window. Latents then have to be
            delayed and joint, and they read neither these tokens nor sinks.
    """

    sinks: Sinks | None = None
    delay: bool = False
    joint: bool = False
    kept: Kept | None = None


class MacchiatoState(NamedTuple):
    """The state of Latte-Macchiato. All parts are None before the first token.

    Attributes:
        latent: State of the latents.
        window: Last W-1 local keys and values.
        pending: Sources that delayed latents have not read yet, the last W tokens: their latent
            keys (B, W, H, L) and mask (B, W), and the value (B, 1, G, D) of the oldest token alone,
            because the window holds the others. None without delay.
        kept: The tokens that are held with kept tokens, those of the window among them. The parts
            ``window`` and ``pending`` are then None.
    """

    latent: LatteState | None = None
    window: WindowState | None = None
    pending: WindowState | None = None
    kept: KeptState | None = None


def oldest_alone(pending: WindowState) -> WindowState:
    """Pending sources (B, W, ...) with the value of the oldest alone."""
    # A copy, because a view would keep all values alive.
    return pending._replace(values=pending.values[:, :1].clone())


def with_all_values(pending: WindowState, window: WindowState) -> WindowState:
    """Pending sources with all their values, (B, W, G, D), those of the window too."""
    if pending.values.shape[1] == pending.keys.shape[1]:
        return pending
    return pending._replace(values=torch.cat([pending.values, window.values], 1))


class LinearState(NamedTuple):
    """Undirected linear attention: ``sum_s phi(k_s) v_s`` and ``sum_s phi(k_s)`` (eq. 4-5).

    Attributes:
        memory: Sum of phi(k) v, (B, H, F, D), in fp32 (fp64 for fp64 inputs).
        normaliser: Sum of phi(k), (B, H, F), of the same dtype.
    """

    memory: Tensor
    normaliser: Tensor


def merge_states(a1: Tensor, mu1: Tensor, a2: Tensor, mu2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two (log-mass, mean) pairs without ever forming -inf - -inf.

    The larger log-mass is subtracted first; where both are -inf, 0 is. Then no term of the result
    or of its gradient is NaN.
    """
    top = torch.maximum(a1, a2).detach()
    top = torch.where(torch.isneginf(top), 0.0, top)
    e1, e2 = torch.exp(a1 - top), torch.exp(a2 - top)
    mass = e1 + e2
    empty = mass == 0
    safe = torch.where(empty, 1.0, mass)
    mean = (e1 / safe).unsqueeze(-1) * mu1 + (e2 / safe).unsqueeze(-1) * mu2
    return torch.where(empty, -torch.inf, top + torch.log(safe)), mean


def total_log_decay(
    log_decay_BTHL: Tensor | None, earlier: LatteState | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """Total log-decay at the end of every sequence, (N, H, L); None without decay."""
    before = earlier.log_decay if earlier is not None and earlier.forgets else None
    if log_decay_BTHL is None:
        return before
    if cu_seqlens is None:
        total_NHL = log_decay_BTHL.sum(1)
    else:
        T, N = log_decay_BTHL.shape[1], len(cu_seqlens) - 1
        total_NHL = log_decay_BTHL.new_zeros(N, *log_decay_BTHL.shape[2:])
        total_NHL = total_NHL.index_add(0, sequence_ids(cu_seqlens, T), log_decay_BTHL[0])
    return total_NHL if before is None else before + total_NHL


def final_window_state(
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    window: int | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: WindowState | None,
) -> WindowState:
    """The last W-1 keys and values of every sequence; masked tokens are kept, as masked slots.

    ``window=None`` keeps them all.
    """
    real_BT = real_tokens(k_BTGK, key_mask)
    if window is not None:
        keys, values, mask = (None, None, None) if initial_state is None else initial_state
        return WindowState(
            last_tokens(k_BTGK, window - 1, cu_seqlens, keys),
            last_tokens(v_BTGD, window - 1, cu_seqlens, values),
            last_tokens(real_BT, window - 1, cu_seqlens, mask),
        )
    state = WindowState(without_masked(key_mask, k_BTGK), without_masked(key_mask, v_BTGD), real_BT)
    if initial_state is not None:
        both = zip(initial_state, state, strict=True)
        return WindowState(*(torch.cat(pair, 1) for pair in both))
    return WindowState(*(x.clone() for x in state))


def first_tokens(
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    count: int,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    earlier: WindowState | None,
) -> WindowState:
    """The first ``count`` valid tokens of every sequence, (N, n, ...), to be its sinks.

    They are the sinks of these tokens and of the state after them. A query does not see sinks that
    come after it. ``earlier`` are the sinks among the earlier tokens.
    """
    (B, T), real_BT = k_BTGK.shape[:2], real_tokens(k_BTGK, key_mask)
    if cu_seqlens is not None:
        start_N1 = cu_seqlens[:-1, None].long()
        slots_Nn = start_N1 + torch.arange(count, device=k_BTGK.device)
        mask = slots_Nn < cu_seqlens[1:, None]
        index = slots_Nn.clamp_max(max(T - 1, 0))
        return WindowState(k_BTGK[0, index], v_BTGD[0, index], mask & real_BT[0, index])
    # Without a mask all tokens are real, so only the first can be sinks.
    first = slice(None if key_mask is not None else count)
    parts = [(k_BTGK[:, first], v_BTGD[:, first], real_BT[:, first])]
    if earlier is not None:
        parts.insert(0, tuple(earlier))  # type: ignore[arg-type]
    keys, values, mask = (torch.cat(xs, 1) for xs in zip(*parts, strict=True))
    short = count - mask.shape[1]
    if short > 0:
        keys, values = (F.pad(x, (0, 0, 0, 0, 0, short)) for x in (keys, values))
        mask = F.pad(mask, (0, short))
    # Valid tokens first, in their order: a stable sort by "is padding".
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
    rows = torch.arange(B, device=order.device)[:, None]
    return WindowState(keys[rows, order], values[rows, order], mask[rows, order])


def last_tokens(
    x_BTX: Tensor, P: int, cu_seqlens: Tensor | None, earlier_NPX: Tensor | None
) -> Tensor:
    """The last P tokens (N, P, ...) of every sequence; before its first the earlier tail, or 0.

    A copy: the tail must not keep the whole sequence's buffer alive.
    """
    T = x_BTX.shape[1]
    if cu_seqlens is None:
        if T >= P:
            return x_BTX.narrow(1, T - P, P).clone()
        if earlier_NPX is None:
            kept_NPX = x_BTX.new_zeros(x_BTX.shape[0], P - T, *x_BTX.shape[2:])
        else:
            kept_NPX = earlier_NPX.narrow(1, T, P - T)
        return torch.cat([kept_NPX, x_BTX], 1)
    # Slot j of sequence n holds its token end - P + j, or the earlier tail's slot.
    bounds = sequence_bounds(cu_seqlens)
    start_N1, end_N1 = bounds[:-1, None], bounds[1:, None]
    token_NP = end_N1 - P + torch.arange(P, device=x_BTX.device)
    if T == 0:
        x_BTX = x_BTX.new_zeros(1, 1, *x_BTX.shape[2:])
    new_NPX = x_BTX[0, token_NP.clamp(0, max(T - 1, 0))]
    if earlier_NPX is None:
        old_NPX = torch.zeros_like(new_NPX)
    else:
        rows_N1 = torch.arange(new_NPX.shape[0], device=x_BTX.device)[:, None]
        old_NPX = earlier_NPX[rows_N1, (token_NP - start_N1 + P).clamp(0, max(P - 1, 0))]
    own_NP = token_NP >= start_N1
    return torch.where(own_NP.view(*own_NP.shape, *[1] * (x_BTX.ndim - 2)), new_NPX, old_NPX)


def delayed(
    x_BTX: Tensor, window: int, cu_seqlens: Tensor | None, pending_NWX: Tensor | None
) -> Tensor:
    """The token that leaves the window at every token, W tokens earlier, (B, T, ...).

    Where that is before the sequence's first token here, it is taken from ``pending``, or is 0.
    """
    B, T = x_BTX.shape[:2]
    if cu_seqlens is None:
        if pending_NWX is None:
            pending_NWX = x_BTX.new_zeros(B, min(window, T), *x_BTX.shape[2:])
        return torch.cat([pending_NWX[:, :T], x_BTX[:, : max(T - window, 0)]], 1)
    token_T = torch.arange(T, device=x_BTX.device) - window
    place_T = token_T - sequence_starts(cu_seqlens, T)
    new_TX = x_BTX[0, token_T.clamp_min(0)]
    if pending_NWX is None:
        old_TX = torch.zeros_like(new_TX)
    else:
        old_TX = pending_NWX[sequence_ids(cu_seqlens, T), (place_T + window).clamp_max(window - 1)]
    own_T = place_T >= 0
    return torch.where(own_T.view(T, *[1] * (x_BTX.ndim - 2)), new_TX, old_TX)[None]


class LateSources(NamedTuple):
    """The source that delayed latents read at each query: the token that leaves the window.

    Attributes:
        keys: Latent keys, (B, T, H, L).
        values: Values, (B, T, G, D).
        mask: Whether there is such a token, (B, T) bool.
        begun: Whether the latents have read any token by now, (B, T) bool.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    begun: Tensor

    @classmethod
    def of(
        cls,
        k_BTHL: Tensor,
        v_BTGD: Tensor,
        window: int,
        sequences: Sequences,
        pending: WindowState | None,
        log_mass_NHL: Tensor | None,
    ) -> LateSources:
        """The delayed sources, from these tokens, pending tokens and the latents' earlier state."""
        T, (key_mask, cu_seqlens, _) = k_BTHL.shape[1], sequences
        real = real_tokens(k_BTHL, key_mask)
        earlier = (None, None, None) if pending is None else pending
        keys, values, mask = (
            delayed(x, window, cu_seqlens, old)
            for x, old in zip((k_BTHL, v_BTGD, real), earlier, strict=True)
        )
        counted = mask.long().cumsum(1)
        some_N = None if log_mass_NHL is None else ~torch.isneginf(log_mass_NHL).all(2).all(1)
        if cu_seqlens is None:
            begun = counted > 0
            some = None if some_N is None else some_N[:, None]
        else:
            begun = counted > F.pad(counted, (1, 0))[:, sequence_starts(cu_seqlens, T)]
            some = None if some_N is None else some_N[sequence_ids(cu_seqlens, T)][None]
        return cls(keys, values, mask, begun if some is None else begun | some)


def begun(state_NE: Tensor, sequences: Sequences) -> Tensor:
    """The RG-LRU's state, kept different from zeros once a valid token was read.

    A row of zeros means the empty state. A token may be 0 itself, as the embedding of padding is,
    so the smallest normal number is added. It changes no state but 0.
    """
    dtype, (key_mask, cu_seqlens, _) = state_NE.dtype, sequences
    tiny = torch.finfo(dtype).tiny
    if cu_seqlens is not None:
        bounds = sequence_bounds(cu_seqlens)
        if key_mask is not None:
            bounds = F.pad(key_mask[0].long().cumsum(0), (1, 0))[bounds]
        read_N = bounds.diff() > 0
    elif key_mask is not None:
        read_N = key_mask.any(1)
    else:
        return state_NE + tiny
    return state_NE + tiny * read_N[:, None].to(dtype)
