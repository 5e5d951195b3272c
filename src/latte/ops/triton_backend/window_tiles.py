"""What the kernels with a window share: blocks of queries and keys, their logits and weights.

Keys lie at positions of a row; those before the sequence's first token are the earlier state's, in
``tail`` buffers (N, P, G, .), the last of them just before the first token. Chunks and blocks are
counted from the sequence's first token, so that no block holds keys of both kinds.

Shape suffixes: C tokens of a chunk, queries or keys; L latents (padded), K key width, D value
width (of a tile).
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.tiles import (
    finite,
    inverse,
    load_queries,
    load_tile,
    mm,
    store_tile,
)
from latte.ops.triton_backend.walk_tiles import load_query


@triton.jit
def first_token(bounds_ptr, sequence):
    """Where the sequence begins in its row; ``bounds_ptr`` (N+1,) when packed, else None."""
    if bounds_ptr is None:
        return sequence * 0
    else:
        return tl.load(bounds_ptr + sequence)


@triton.jit
def rows_at(at, begin, ptr, stride, tail_ptr, tail_stride, P):
    """A pointer to the key at position ``at``, and how far the next key lies behind it."""
    here = ptr + at * stride
    step = tl.cast(stride, tl.int32)
    if tail_ptr is not None:
        if at < begin:
            here = tail_ptr + (at - begin + P) * tail_stride
            step = tl.cast(tail_stride, tl.int32)
    return here, step


@triton.jit
def load_block(ptr, stride, first, last, x0, X, C: tl.constexpr, BX: tl.constexpr):
    """(C, BX) in fp32: rows from ``first`` up to ``last`` of those at ``ptr``; zeros outside.

    Inside a block offsets of 32 bits do: the launcher sees to it that rows lie close enough.
    """
    i = tl.arange(0, C)
    x = x0 + tl.arange(0, BX)
    inside = ((i >= first) & (i < last))[:, None] & (x < X)[None, :]
    at = ptr + (i[:, None] * stride + x[None, :])
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_block(ptr, stride, first, last, x0, X, value, C: tl.constexpr, BX: tl.constexpr):
    """Write (C, BX) to where :func:`load_block` reads."""
    i = tl.arange(0, C)
    x = x0 + tl.arange(0, BX)
    inside = ((i >= first) & (i < last))[:, None] & (x < X)[None, :]
    at = ptr + (i[:, None] * stride + x[None, :])
    tl.store(at, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_flags(
    at, begin, mask_ptr, tail_mask_ptr, P, first, last, C: tl.constexpr
):  # fmt: skip
    """(C,) bool: the keys from ``first`` up to ``last`` that are not masked.

    An earlier state comes with both masks.
    """
    i = tl.arange(0, C)
    real = (i >= first) & (i < last)
    if mask_ptr is not None:
        mask_ptr, _ = rows_at(at, begin, mask_ptr, 1, tail_mask_ptr, 1, P)
        real = tl.load(mask_ptr + i, mask=real, other=0) != 0
    return real


@triton.jit
def load_numbers(ptr, row, h, start, stop, T, H, C: tl.constexpr):
    """(C,) fp32 numbers of one head's tokens, from a contiguous (B, T, H); zeros outside."""
    t = start + tl.arange(0, C)
    return tl.load(ptr + (row * T + t) * H + h, mask=t < stop, other=0.0)


@triton.jit
def store_numbers(ptr, row, h, start, stop, T, H, value, C: tl.constexpr):
    """Write (C,) to where :func:`load_numbers` reads."""
    t = start + tl.arange(0, C)
    tl.store(ptr + (row * T + t) * H + h, value, mask=t < stop)


@triton.jit
def tanh(x):
    """Without a library, to some ulps of its own size: a series near 0, where 1 - e cancels."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0.0, -far, far)
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, far)


@triton.jit
def block_logits(
    q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, tail_k_ptr, tail_t, tail_mask_ptr, P,
    at, begin, stop, off, reach, scale, softcap,
    K: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Logits (C, C) of a block of queries over the block of keys that begins at position ``at``.

    That is ``off`` positions after the first query. A query sees ``reach`` keys before its own,
    and as many behind it if not causal; invisible pairs are -inf. Also returns the soft cap's
    slope (1 without one), and the keys that exist: from ``first`` up to ``last`` of the block.
    """
    first = tl.maximum(begin - P - at, 0)
    last = stop - at
    real = load_flags(at, begin, mask_ptr, tail_mask_ptr, P, first, last, C)
    k_ptr, step = rows_at(at, begin, k_ptr, k_t, tail_k_ptr, tail_t, P)
    logits = tl.zeros((C, C), tl.float32)
    for k0 in range(0, K, BX):
        q = load_block(q_ptr, q_t, 0, queries, k0, K, C, BX)
        k = load_block(k_ptr, step, first, last, k0, K, C, BX)
        logits += mm(q, tl.trans(k), NARROW)
    logits *= scale
    slope = tl.full((C, C), 1.0, tl.float32)
    if CAPPED:
        bent = tanh(logits / softcap)
        slope = 1.0 - bent * bent
        logits = softcap * bent
    i = tl.arange(0, C)
    gap = i[:, None] - i[None, :] - off
    seen = (gap <= reach) & real[None, :] & (i < queries)[:, None]
    seen = seen & ((gap >= 0) if CAUSAL else (gap >= -reach))
    return tl.where(seen, logits, float("-inf")), slope, first, last


@triton.jit
def softmax_step(top, mass, logits):
    """The running softmax of each row with one more block of logits, which may all be -inf.

    Returns (top, mass), what a sum over the earlier keys is multiplied by, and the weights of the
    new ones; sums are yet to be divided by the last mass.
    """
    later = tl.maximum(top, tl.max(logits, 1))
    kept = tl.exp(top - finite(later))
    w = tl.exp(logits - finite(later)[:, None])
    return later, mass * kept + tl.sum(w, 1), kept, w


@triton.jit
def window_weights(logits, top, mass):
    """The softmax over the window again, from its rows' (top, mass)."""
    w = tl.exp(tl.minimum(logits - finite(top)[:, None], 0.0))
    return w * inverse(mass)[:, None]


@triton.jit
def value_products(
    dy_ptr, dy_t, queries, v_ptr, v_t, first, last,
    D: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """<dy_t, v_s> of a block of queries and a block of keys, (C, C)."""
    products = tl.zeros((C, C), tl.float32)
    for d0 in range(0, D, BX):
        dy = load_block(dy_ptr, dy_t, 0, queries, d0, D, C, BX)
        v = load_block(v_ptr, v_t, first, last, d0, D, C, BX)
        products += mm(dy, tl.trans(v), NARROW)
    return products


@triton.jit
def load_mixture(ptr, stride_t, stride_x, start, stop, L, C: tl.constexpr, BL: tl.constexpr):
    """p(l|t) of the latents (C, BL), and of the window (C,): one softmax over L + 1 logits.

    The window's logit stands before that of the first latent, to which ``ptr`` points.
    """
    q = load_tile(ptr, stride_t, stride_x, start, stop, 0, L, C, BL)
    q = tl.where((tl.arange(0, BL) < L)[None, :], q, float("-inf"))
    t = start + tl.arange(0, C)
    own = tl.load(ptr + t * stride_t - stride_x, mask=t < stop, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(q, 1), own)
    e, own = tl.exp(q - top[:, None]), tl.exp(own - top)
    total = tl.sum(e, 1) + own
    return e / total[:, None], own / total


@triton.jit
def load_share(ptr, stride_t, stride_x, t, L, BL: tl.constexpr):
    """Row ``t`` of :func:`load_mixture`: (BL,) and a number."""
    x = tl.arange(0, BL)
    at = ptr + t * stride_t
    q = tl.load(at + x.to(tl.int64) * stride_x, mask=x < L, other=float("-inf")).to(tl.float32)
    own = tl.load(at - stride_x).to(tl.float32)
    top = tl.maximum(tl.max(q, 0), own)
    e = tl.exp(q - top)
    own = tl.exp(own - top)
    total = tl.sum(e, 0) + own
    return e / total, own / total


@triton.jit
def load_shares(
    ptr, stride_t, stride_x, start, stop, L, C: tl.constexpr, BL: tl.constexpr, GATED: tl.constexpr
):
    """p(l|t) of the latents, and of the window (0 if there is none)."""
    if GATED:
        p, gate = load_mixture(ptr, stride_t, stride_x, start, stop, L, C, BL)
    else:
        p = load_queries(ptr, stride_t, stride_x, start, stop, L, C, BL)
        gate = tl.zeros((C,), tl.float32)
    return p, gate


@triton.jit
def load_one_share(ptr, stride_t, stride_x, t, L, BL: tl.constexpr, GATED: tl.constexpr):
    """Row ``t`` of :func:`load_shares`."""
    if GATED:
        p, gate = load_share(ptr, stride_t, stride_x, t, L, BL)
    else:
        p, gate = load_query(ptr, stride_t, stride_x, t, L, BL), 0.0
    return p, gate


@triton.jit
def store_query_gradients(
    dq_ptr, p, delta, gate_ptr, window_delta_ptr, row, h, start, stop, T, H, L,
    C: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """p_t (delta_t - sum_l p_t delta_t), contiguous; with a window, state 0 takes part.

    The window's logit then stands before that of the first latent, to which ``dq_ptr`` points.
    """
    mean = tl.sum(p * delta, 1)
    width = L
    if gate_ptr is not None:
        width = L + 1
        gate = load_numbers(gate_ptr, row, h, start, stop, T, H, C)
        own = load_numbers(window_delta_ptr, row, h, start, stop, T, H, C)
        mean += gate * own
        t = start + tl.arange(0, C)
        at = dq_ptr + ((row * T + t) * H + h) * width - 1
        tl.store(at, (gate * (own - mean)).to(dq_ptr.dtype.element_ty), mask=t < stop)
    dq = p * (delta - mean[:, None])
    dq_ptr += (row * T * H + h) * width
    store_tile(dq_ptr, H * width, 1, start, stop, 0, L, dq, C, BL)
