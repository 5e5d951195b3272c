"""One token per row, its states written in place: what decoding is made of.

The ops of :mod:`latte.ops.api` take a state and give a new one; these write into the one that they
are given, which nobody else may hold. They check nothing, have no gradients and go on only with
sequences that have begun: every row has read a real token. The cache sees to all of that
(:mod:`latte.layers.step`). Shapes never change and nothing waits for the host, so that a step is
one graph for ``torch.compile``.

Most are one call of a native CPU kernel where there are such (:mod:`latte.ops.cpp_backend`), unless
somebody has named another backend (the RG-LRU's kernel is in :mod:`latte.ops.dense`); elsewhere a
few large tensor operations, since at one token what an operation costs is its call. States are fp32
(fp64 for fp64 inputs), and what is computed is too; outputs have the dtype of ``v``. ``real`` (B,)
bool is False for rows whose token is padding, None if there are none: padding leaves latents, sums
and the RG-LRU as they are, and is a masked slot of the window and a zero of the convolution.

Shape suffixes: B batch, H query heads, G key/value heads, L latents per head, K key width, D value
width, F feature width, E channels, W slots of the window.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import cpp_backend
from latte.ops.backend import named_backend
from latte.ops.tensors import computation_dtype
from latte.ops.torch_backend.recurrence import GATE_STRENGTH

Rotary = tuple[Tensor, Tensor]  # of single tokens: (B or 1, 1, 1, K/2), and twice that with signs


class Ring(NamedTuple):
    """The last W local keys and values; the next token takes the oldest one's slot.

    Attributes:
        keys: (B, G, W, K), contiguous.
        values: (B, G, W, D), contiguous.
        mask: (B, W) bool, True = a real token; None if all slots are.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None


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
        q: query logits over the latents, (B, H, L).
        k: key logits, (B, H, L).
        v: (B, G, D).
        log_mass: A, (B, H, L), written.
        mean: mu, (B, H, L, D), written.
        real: (B,) bool or None.
        log_decay: what the latents forget before they see the token, (B, H, L) or (H, L).

    Returns:
        y, (B, H, D).
    """
    if _native(mean, q, k, v):
        return torch.ops.latte.cpu_latte_step(q, k, v, log_mass, mean, log_decay, real)
    B, H, L, D = mean.shape
    _see(k, v, log_mass, mean, log_decay, real)
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
    rotary: Rotary | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """Latte-Macchiato: ``y = p(0) SWA + sum_{l>=1} p(l) mu'[l]``.

    Args:
        latent_q: (B, H, L+1), column 0 is the window's logit.
        latent_k: (B, H, L).
        q, k: local, (B, H, K) and (B, G, K).
        v: values of both branches, (B, G, D).
        log_mass, mean: as for :func:`latte_step`, written.
        ring: the window, of which ``slot`` (1,) int64 is written.
        scale, softcap: of the local logits.
        rotary: turns ``q`` and ``k`` first, :func:`latte.layers.parts.of_single_tokens`.
        log_decay: as for :func:`latte_step`.

    Returns:
        y, (B, H, D).
    """
    if _native(mean, latent_q, latent_k, q, k, v, *ring[:2]):
        return torch.ops.latte.cpu_macchiato_step(
            *(latent_q, latent_k, q, k, v, log_mass, mean, log_decay, *ring, slot),
            *(*(rotary or (None, None)), real, scale, softcap or 0.0),
        )
    (B, H, L, D), G, W = mean.shape, ring.keys.shape[1], ring.keys.shape[2]
    _see(latent_k, v, log_mass, mean, log_decay, real)
    p_BH1, p_BHL = in_dtype(latent_q, mean.dtype).softmax(-1).split([1, L], -1)
    out = torch.bmm(p_BHL.view(B * H, 1, L), mean.view(B * H, L, D))
    q, k = _rotated(q, k, rotary)
    weights = _window_weights(q, k, v, ring, slot, real, scale, softcap, mean.dtype)
    weights = (weights.view(B, H, W) * p_BH1).view(B * G, H // G, W)
    values = in_dtype(ring.values.view(B * G, W, D), mean.dtype)
    out = out.view(B * G, H // G, D).baddbmm_(weights, values)
    return in_dtype(out.view(B, H, D), v.dtype)


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
    rotary: Rotary | None = None,
    length: int | None = None,
) -> Tensor:
    """Softmax attention over the slots of a window, or over all tokens so far.

    Args:
        q, k, v: (B, H, K), (B, G, K), (B, G, D).
        ring: of which ``slot`` (1,) int64 is written.
        length: slots that are used, from the first on; all if None.

    Returns:
        y, (B, H, D).
    """
    if _native(None, q, k, v, *ring[:2]):
        slots = ring.keys.shape[2] if length is None else length
        return torch.ops.latte.cpu_window_step(
            *(q, k, v, *ring, slot, *(rotary or (None, None))),
            *(real, scale, softcap or 0.0, slots),
        )
    B, H, D = *q.shape[:2], v.shape[-1]
    q, k = _rotated(q, k, rotary)
    weights = _window_weights(
        q, k, v, ring, slot, real, scale, softcap, computation_dtype(q.dtype), length
    )
    values = ring.values if length is None else ring.values.narrow(2, 0, length)
    values = in_dtype(values.view(weights.shape[0], -1, D), weights.dtype)
    out = torch.bmm(weights, values)
    return in_dtype(out.view(B, H, D), v.dtype)


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
        q, k: features (B, H, F), of at least fp32.
        v: (B, H, D), of the same dtype.
        memory: S, (B, H, F, D), written.
        normaliser: z, (B, H, F), written.

    Returns:
        y, (B, H, D); zero where nothing is visible.
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
        x, recurrence_gate, input_gate: (B, E), gates before their sigmoid.
        theta: (E,).
        state: h, (B, E), written.

    Returns:
        h' itself, (B, E): the state, which the next step overwrites.
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
        x: (B, E).
        weight: (E, K), the last tap is the present token's.
        bias: (E,) or None.
        tail: the last K-1 inputs, oldest first, (B, K-1, E), written.

    Returns:
        y, (B, E), in the dtype of x.
    """
    if _native(None, x, tail):
        return torch.ops.latte.cpu_convolution_step(x, weight, bias, tail, real)
    dtype = computation_dtype(x.dtype)
    if real is not None:
        x = x.masked_fill(~real[:, None], 0.0)
    inputs_BKE = torch.cat([tail, in_dtype(x, tail.dtype).unsqueeze(1)], 1)
    tail.copy_(inputs_BKE[:, 1:])
    y = (in_dtype(inputs_BKE, dtype) * in_dtype(weight, dtype).mT).sum(1)
    return in_dtype(y if bias is None else y + in_dtype(bias, dtype), x.dtype)


def _native(state: Tensor | None, first: Tensor, *others: Tensor) -> bool:
    """The native CPU kernels take this step: nobody has named another backend.

    Args:
        state: of the precision of the sums; None if there is none.
        first, others: all of one dtype.
    """
    if cpp_backend.ABSENT is not None or first.device.type != "cpu":
        return False
    dtype = first.dtype
    for x in others:
        if x.dtype != dtype:
            return False
    if named_backend() not in (None, "cpu"):
        return False
    return state is None or state.dtype == computation_dtype(dtype)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without a call where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def number(value: float, like: Tensor) -> Any:
    """``value`` for arithmetic with ``like``: outside of graphs a tensor that is kept.

    A Python number is made into a tensor at every use, which takes four operations more.
    """
    return value if torch.compiler.is_compiling() else _kept(value, like.dtype)


@functools.cache
def _kept(value: float, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def _see(
    k: Tensor,
    v: Tensor,
    log_mass: Tensor,
    mean: Tensor,
    log_decay: Tensor | None,
    real: Tensor | None,
) -> None:
    """The latents' state after they forget and one more source, in place.

    ``e^{k - A'} = sigmoid(k - A)``, which is 1 for the empty state, and exact where it is small.
    """
    (B, H, L, D), G = mean.shape, v.shape[1]
    k, v = in_dtype(k, mean.dtype), in_dtype(v, mean.dtype)
    before = log_mass if log_decay is None else log_mass + in_dtype(log_decay, mean.dtype)
    gain = torch.sigmoid(k - before)
    mass = torch.logaddexp(before, k)
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


def _rotated(q: Tensor, k: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
    """Queries (B, H, K) and keys (B, G, K), the pairs (i, i + K/2) of both turned."""
    if rotary is None:
        return q, k
    x, (cos, sin) = torch.cat([q, k], 1), rotary
    pairs = x.view(*x.shape[:2], 2, -1)
    turned = torch.addcmul(pairs * cos, pairs.flip(2), sin)
    q, k = in_dtype(turned.view(x.shape), q.dtype).split([q.shape[1], k.shape[1]], 1)
    return q, k


def _window_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    slot: Tensor,
    real: Tensor | None,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
    length: int | None = None,
) -> Tensor:
    """Puts the token into its slot: the weights (B * G, H / G, W) of all slots, zeros if none."""
    (B, H, K), G = q.shape, k.shape[1]
    if real is not None:
        k, v = (x.masked_fill(~real[:, None, None], 0.0) for x in (k, v))
    ring.keys.index_copy_(2, slot, in_dtype(k, ring.keys.dtype).unsqueeze(2))
    ring.values.index_copy_(2, slot, in_dtype(v, ring.values.dtype).unsqueeze(2))
    keys, mask = ring.keys, ring.mask
    if mask is not None:
        seen = mask.new_ones(B, 1) if real is None else real[:, None]
        mask.index_copy_(1, slot, seen)
    if length is not None:
        keys = keys.narrow(2, 0, length)
        mask = None if mask is None else mask.narrow(1, 0, length)
    q = in_dtype(q, dtype)
    q = q * number(scale, q)
    keys = in_dtype(keys.view(B * G, -1, K), dtype)
    logits = torch.bmm(q.view(B * G, H // G, K), keys.transpose(1, 2))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is None:
        return logits.softmax(-1)
    hidden = ~mask[:, None]
    shape = logits.shape
    logits = logits.view(B, H, -1).masked_fill(hidden, -torch.inf)
    weights = logits.softmax(-1)
    if real is not None:  # where nothing is seen, the softmax is NaN
        weights = weights.masked_fill(hidden, 0.0)
    return weights.view(shape)
