"""The ops of decoding: one token per row, with states that are written in place.

The ops of :mod:`latte.ops.api` take a state and return a new one. These ops overwrite the state
they are given, so nothing else may hold it. They check nothing and have no gradients. Every row
must have read a real token before. The cache ensures all of this (:mod:`latte.layers.step`). Shapes
never change and nothing waits for the host, so that a step is one graph for ``torch.compile``.

If there are native CPU kernels (:mod:`latte.ops.cpp_backend`) and no other backend was named, most
of these ops are one kernel call (the RG-LRU's kernel is in :mod:`latte.ops.decoding`). If not, they
are a few large tensor operations, because for one token most of the cost of an operation is its
call. States and sums are fp32 (fp64 for fp64 inputs). Outputs have the dtype of ``v``. ``real``
(B,) bool is False for rows whose token is padding; None if there is no padding. Padding does not
change latents, sums and the RG-LRU. It is a masked slot of the window, and a zero for the
convolution.

Shape suffixes: B batch, H query heads, G key/value heads, L latents per head, K key width, D value
width, F feature width, E channels, W slots of the window, n sinks, R = H / G.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import backend, cpp_backend
from latte.ops.tensors import computation_dtype, number
from latte.ops.torch_backend.recurrence import GATE_STRENGTH

# Rotary tables of single tokens: (B or 1, 1, 1, K/2), and twice as wide with signs.
TokenRotary = tuple[Tensor, Tensor]


class Ring(NamedTuple):
    """The last W local keys and values; the next token takes the oldest one's slot.

    Attributes:
        keys: Keys, (B, G, W, K), contiguous.
        values: Values, (B, G, W, D), contiguous.
        mask: Mask of the slots, (B, W) bool, True = a valid token; None if all slots are real.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None


class StepSinks(NamedTuple):
    """The first n valid tokens of each row, which stay visible.

    Sinks that have left the window, W or more positions ago, are further slots of its softmax.

    Attributes:
        keys: Keys, (B, G, n, K), contiguous.
        values: Values, (B, G, n, D), contiguous.
        position: Number of valid tokens before the current one, (B,) int64. The current token
            becomes a sink if this is less than n.
        rotary: Table that rotates the queries for the sinks; None: the same as for the window.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    rotary: TokenRotary | None = None


def latte_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_mass: Tensor,
    mean: Tensor,
    real: Tensor | None = None,
    *,
    log_decay: Tensor | None = None,
) -> Tensor:
    """Latte: ``A' = logaddexp(A, k)``, ``mu' = mu + e^{k - A'} (v - mu)``, ``y = p(l) mu'``.

    Args:
        q: Query logits over the latents, (B, H, L).
        k: Key logits, (B, H, L).
        v: Values, (B, G, D).
        log_mass: Log-mass A, (B, H, L), overwritten.
        mean: Mean mu, (B, H, L, D), overwritten.
        real: Whether each row's token is a real one, (B,) bool; None: all are.
        log_decay: Log-decay of the latents before they read the token, (B, H, L) or (H, L).

    Returns:
        Output y, (B, H, D).
    """
    if native(mean, q, k, v):
        return torch.ops.latte.cpu_latte_step(q, k, v, log_mass, mean, log_decay, real)
    B, H, L, D = mean.shape
    if log_decay is not None:
        _forget(log_mass, log_decay, real)
    _read_source(k, v, log_mass, mean, real)
    p_BHL = in_dtype(q, mean.dtype).softmax(-1)
    out = torch.bmm(p_BHL.view(B * H, 1, L), mean.view(B * H, L, D))
    return in_dtype(out.view(B, H, D), v.dtype)


def macchiato_step(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_mass: Tensor,
    mean: Tensor,
    ring: Ring,
    slot: Tensor,
    real: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    rotary: TokenRotary | None = None,
    log_decay: Tensor | None = None,
    sinks: StepSinks | None = None,
    pending: Tensor | None = None,
    joint: bool = False,
) -> Tensor:
    """Latte-Macchiato: ``y = p(0) SWA + sum_{l>=1} p(l) mu'[l]``.

    Args:
        latent_q: Latent query logits, (B, H, L+1). Column 0 is the window's logit.
        latent_k: Latent key logits, (B, H, L). The dtype of both may differ from the values'.
        q, k: Local queries and keys, (B, H, K) and (B, G, K).
        v: Values of both branches, (B, G, D).
        log_mass, mean: State as for :func:`latte_step`, overwritten.
        ring: Window, in which ``slot`` (1,) int64 is overwritten.
        scale, softcap: Scale and soft cap of the local logits.
        rotary: Table that rotates ``q`` and ``k`` first, in the format of
            :func:`latte.layers.parts.of_single_tokens`.
        log_decay: Log-decay as for :func:`latte_step`.
        sinks: Tokens that stay visible to the window's softmax, overwritten.
        pending: Latent keys of the ring's tokens, (B, H, W, L), of the values' dtype, overwritten.
            The latents then read the token that leaves the window, and p(0) = 1 while they have
            read none. None: they read this token.
        joint: Whether the logsumexp of the window's logits is added to its logit of the mixture.

    Returns:
        Output y, (B, H, D).
    """
    if native(mean, q, k, v, *ring[:2]):
        return torch.ops.latte.cpu_macchiato_step(
            *(latent_q, latent_k, q, k, v, log_mass, mean, log_decay, *ring, slot),
            *(
                *(rotary or (None, None)),
                real,
                scale,
                softcap or 0.0,
                pending,
                *_flat(sinks, rotary),
                joint,
            ),
        )
    B, H, L, D = mean.shape
    source = (latent_k, v, real)
    if pending is not None:
        source = _leaving(latent_k, ring, pending, slot, real)
    if log_decay is not None:
        _forget(log_mass, log_decay, real)
    _read_source(*source[:2], log_mass, mean, source[2])
    local = q, k, v, ring, slot, real, scale, softcap, rotary, mean.dtype, None, sinks
    near, log_mass_BH1 = _attend(*local, want_mass=joint)
    p_BHX = in_dtype(latent_q, mean.dtype)
    if log_mass_BH1 is not None:
        p_BHX = torch.cat([p_BHX[..., :1] + log_mass_BH1, p_BHX[..., 1:]], -1)
    p_BH1, p_BHL = p_BHX.softmax(-1).split([1, L], -1)
    if pending is not None:
        p_BH1 = p_BH1.masked_fill(torch.isneginf(log_mass).all(-1, keepdim=True), 1.0)
    out = torch.bmm(p_BHL.view(B * H, 1, L), mean.view(B * H, L, D)).view(B, H, D)
    return in_dtype(out.addcmul_(near, p_BH1), v.dtype)


def window_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    slot: Tensor,
    real: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    rotary: TokenRotary | None = None,
    length: int | None = None,
    sinks: StepSinks | None = None,
) -> Tensor:
    """Softmax attention over the slots of a window, or over all tokens so far.

    Args:
        q, k, v: Queries (B, H, K), keys (B, G, K) and values (B, G, D).
        ring: Window, in which ``slot`` (1,) int64 is overwritten.
        length: Number of used slots, from the first on; None: all.
        sinks: Sinks as for :func:`macchiato_step`.

    Returns:
        Output y, (B, H, D).
    """
    if native(None, q, k, v, *ring[:2]):
        slots = ring.keys.shape[2] if length is None else length
        return torch.ops.latte.cpu_window_step(
            *(q, k, v, *ring, slot, *(rotary or (None, None))),
            *(real, scale, softcap or 0.0, slots, *_flat(sinks, rotary)),
        )
    dtype = computation_dtype(q.dtype)
    local = q, k, v, ring, slot, real, scale, softcap, rotary, dtype, length, sinks
    return in_dtype(_attend(*local)[0], v.dtype)


def linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    real: Tensor | None = None,
) -> Tensor:
    """Undirected linear attention: ``S' = S + phi(k) v``, ``y = phi(q) S' / phi(q) z'``.

    Args:
        q, k: Features, (B, H, F), of at least fp32.
        v: Values, (B, H, D), of the same dtype.
        memory: Memory S, (B, H, F, D), overwritten.
        normaliser: Normaliser z, (B, H, F), overwritten.

    Returns:
        Output y, (B, H, D); zero if nothing is visible.
    """
    if real is not None:
        k, v = (x.masked_fill(~real[:, None, None], 0.0) for x in (k, v))
    B, H, features, D = memory.shape
    memory.addcmul_(k.unsqueeze(-1), v.unsqueeze(2))
    normaliser.add_(k)
    out = torch.bmm(q.reshape(B * H, 1, features), memory.view(B * H, features, D))
    below = (q * normaliser).sum(-1, keepdim=True)
    return out.view(B, H, D) / torch.where(below == 0, 1.0, below)


def rg_lru_step(
    x: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    theta: Tensor,
    state: Tensor,
    real: Tensor | None = None,
) -> Tensor:
    """The RG-LRU: ``h' = a h + sqrt(1 - a^2) sigmoid(i) x``, of rows that have begun.

    Args:
        x, recurrence_gate, input_gate: Input and logits of the gates, (B, E) each.
        theta: Parameter of the decay, (E,).
        state: State h, (B, E), overwritten.

    Returns:
        The new state h', (B, E): the same tensor, which the next step overwrites.
    """
    x, r, i, theta = (in_dtype(y, state.dtype) for y in (x, recurrence_gate, input_gate, theta))
    rate = torch.sigmoid(r) * F.softplus(theta)
    a = torch.exp(rate * number(-GATE_STRENGTH, rate))
    factor = torch.expm1(rate * number(-2.0 * GATE_STRENGTH, rate)).neg_().sqrt_()
    new = torch.addcmul(a * state, factor.mul_(torch.sigmoid(i)), x)
    return state.copy_(new if real is None else torch.where(real[:, None], new, state))


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, real: Tensor | None = None
) -> Tensor:
    """Causal depthwise convolution: ``y = bias + sum_i weight[:, i] x_{t-K+1+i}``.

    Args:
        x: Input, (B, E).
        weight: Taps of each channel, (E, K). The last tap is multiplied by the current token.
        bias: Bias, (E,), or None.
        tail: Last K-1 inputs, oldest first, (B, K-1, E), overwritten.

    Returns:
        Output y, (B, E), in the dtype of x.
    """
    if native(None, x, tail):
        return torch.ops.latte.cpu_convolution_step(x, weight, bias, tail, real)
    dtype = computation_dtype(x.dtype)
    if real is not None:
        x = x.masked_fill(~real[:, None], 0.0)
    inputs_BKE = torch.cat([tail, in_dtype(x, tail.dtype).unsqueeze(1)], 1)
    tail.copy_(inputs_BKE[:, 1:])
    y = (in_dtype(inputs_BKE, dtype) * in_dtype(weight, dtype).mT).sum(1)
    return in_dtype(y if bias is None else y + in_dtype(bias, dtype), x.dtype)


def native(state: Tensor | None, first: Tensor, *others: Tensor) -> bool:
    """Whether the native CPU kernels run this step: no other backend was named, and dtypes fit.

    Args:
        state: State, in the dtype of the sums; None if there is none.
        first, others: Other tensors, all of one dtype.
    """
    if first.device.type != "cpu":
        return False
    dtype = first.dtype
    for x in others:
        if x.dtype != dtype:
            return False
    if (backend.here.backend or backend.default) not in (None, "cpu"):
        return False
    if state is not None and state.dtype != computation_dtype(dtype):
        return False
    return cpp_backend.ABSENT is None or cpp_backend.ready()


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without a call where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def _forget(log_mass: Tensor, log_decay: Tensor, real: Tensor | None) -> None:
    """Applies the decay to the latents' log-mass, in place. At padding nothing decays.

    Delayed latents may decay at a token at which they read no source, so this is a separate step.
    """
    decay = in_dtype(log_decay, log_mass.dtype)
    log_mass.add_(decay if real is None else torch.where(real[:, None, None], decay, 0.0))


def _read_source(k: Tensor, v: Tensor, log_mass: Tensor, mean: Tensor, real: Tensor | None) -> None:
    """The latents' state after one more source, in place.

    ``e^{k - A'} = sigmoid(k - A)``, which is 1 for the empty state, and exact where it is small.
    """
    (B, H, L, D), G = mean.shape, v.shape[1]
    k, v = in_dtype(k, mean.dtype), in_dtype(v, mean.dtype)
    # The clamp: a source of log-weight -inf is not seen, not even by the empty state.
    gain = torch.sigmoid(k - log_mass.clamp_min(torch.finfo(log_mass.dtype).min))
    mass = torch.logaddexp(log_mass, k)
    if real is not None:
        # where, not a product: what stands at padding must not matter, even if it is not finite.
        real = real[:, None, None]
        gain, v = torch.where(real, gain, 0.0), torch.where(real, v, 0.0)
        mass = torch.where(real, mass, log_mass)
    log_mass.copy_(mass)
    if G == H:
        mean.lerp_(v.unsqueeze(2), gain.unsqueeze(-1))
    else:
        grouped = mean.view(B, G, H // G, L, D)
        grouped.lerp_(v.view(B, G, 1, 1, D), gain.view(B, G, H // G, L, 1))


def _leaving(
    latent_k: Tensor, ring: Ring, pending: Tensor, slot: Tensor, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Latent key (B, H, L), value (B, G, D) and mask (B,) of the token whose slot is taken.

    The present token's latent key takes its place.
    """
    k, v = (x.index_select(2, slot).squeeze(2) for x in (pending, ring.values))
    mask = None if ring.mask is None else ring.mask.index_select(1, slot).squeeze(1)
    if real is not None:
        latent_k = latent_k.masked_fill(~real[:, None, None], 0.0)
    pending.index_copy_(2, slot, in_dtype(latent_k, pending.dtype).unsqueeze(2))
    return k, v, mask


def _flat(sinks: StepSinks | None, rotary: TokenRotary | None) -> tuple[Tensor | None, ...]:
    """The sinks as a kernel's arguments."""
    if sinks is None:
        return (None,) * 5
    return *sinks[:3], *(sinks.rotary or rotary or (None, None))


def rotated(x: Tensor, rotary: TokenRotary | None) -> Tensor:
    """Queries or keys (B, H, K), their pairs (i, i + K/2) turned."""
    if rotary is None:
        return x
    cos, sin = rotary
    pairs = x.view(*x.shape[:2], 2, -1)
    turned = torch.addcmul(pairs * cos, pairs.flip(2), sin)
    return in_dtype(turned.view(x.shape), x.dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    slot: Tensor,
    real: Tensor | None,
    scale: float,
    softcap: float | None,
    rotary: TokenRotary | None,
    dtype: torch.dtype,
    length: int | None,
    sinks: StepSinks | None,
    want_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Puts the token into its slot: softmax attention over all slots, (B, H, D) in ``dtype``.

    Also the logsumexp of the logits, (B, H, 1), if it is wanted.
    """
    (B, H, K), G, D = q.shape, k.shape[1], v.shape[-1]
    q_far = None if sinks is None else rotated(q, sinks.rotary or rotary)
    if rotary is not None:
        q, k = rotated(torch.cat([q, k], 1), rotary).split([H, G], 1)
    if real is not None:
        k, v = (x.masked_fill(~real[:, None, None], 0.0) for x in (k, v))
    ring.keys.index_copy_(2, slot, in_dtype(k, ring.keys.dtype).unsqueeze(2))
    ring.values.index_copy_(2, slot, in_dtype(v, ring.values.dtype).unsqueeze(2))
    keys, values, mask = ring
    if mask is not None:
        seen = mask.new_ones(B, 1) if real is None else real[:, None]
        mask.index_copy_(1, slot, seen)
    if length is not None:
        keys, values = (x.narrow(2, 0, length) for x in (keys, values))
        mask = None if mask is None else mask.narrow(1, 0, length)

    def logits_of(q: Tensor, keys: Tensor) -> Tensor:
        q = in_dtype(q, dtype)
        q = (q * number(scale, q)).view(B * G, H // G, K)
        return torch.bmm(q, in_dtype(keys.view(B * G, -1, K), dtype).transpose(1, 2))

    def weighted(weights: Tensor, values: Tensor) -> Tensor:
        return torch.bmm(weights, in_dtype(values.view(B * G, -1, D), dtype))

    logits, W = logits_of(q, keys), keys.shape[2]
    if sinks is not None:
        assert q_far is not None
        take_sinks(sinks, k, v, real)
        slots_n = torch.arange(sinks.keys.shape[2], device=sinks.position.device)
        gone = sinks.position[:, None] - slots_n >= ring.keys.shape[2]
        logits = torch.cat([logits, logits_of(q_far, sinks.keys)], -1)
        mask = torch.cat([mask if mask is not None else gone.new_ones(B, W), gone], 1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    shape = logits.shape
    logits = logits.view(B, H, -1)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], -torch.inf)
    log_mass = logits.logsumexp(-1, keepdim=True) if want_mass else None
    weights = logits.softmax(-1)
    if mask is not None and real is not None:  # where nothing is seen, the softmax is NaN
        weights = weights.masked_fill(~mask[:, None], 0.0)
    weights = weights.view(shape)
    if sinks is None:
        return weighted(weights, values).view(B, H, D), log_mass
    out = weighted(weights[..., :W], values) + weighted(weights[..., W:], sinks.values)
    return out.view(B, H, D), log_mass


def take_sinks(sinks: StepSinks, k: Tensor, v: Tensor, real: Tensor | None) -> None:
    """Puts the token among the sinks if it is one."""
    place_B1 = sinks.position[:, None]
    slots_n = torch.arange(sinks.keys.shape[2], device=place_B1.device)
    here_Bn = place_B1 == slots_n
    if real is not None:
        here_Bn = here_Bn & real[:, None]
    for held, new in ((sinks.keys, k), (sinks.values, v)):
        new = in_dtype(new, held.dtype).unsqueeze(2)
        held.copy_(torch.where(here_Bn[:, None, :, None], new, held))
