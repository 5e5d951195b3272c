"""The softmax of a window, as its kernels compute it: by chunks, with a running maximum and sum.

Keys have the positions of a sequence's tokens. Keys before the first token belong to the earlier
state. They are in ``tail`` buffers (N, P, G, .), and the last of them is just before the first
token. Chunks are counted from the first token, so that no chunk holds keys of both kinds.

Sinks are additional keys (N, S, G, K). Each query reads the first ``seen`` of them, with a separate
query vector. Sinks come before all other keys, ``SINKS_AT_ONCE`` at a time. Kernels without sinks
are compiled without any of this code.

Shape suffixes: G key heads, K key width, D value width, N sequences, P keys of the earlier state,
S sinks, C tokens of a chunk, queries or keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.tiles import LOG2_E, added, finite, mm, power_of_two, tanh

# The least side of a product; pretrained decoders need about four of them.
SINKS_AT_ONCE = tl.constexpr(16)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def keys_at(at, begin, ptr, stride, tail_ptr, tail_stride, P):
    """A pointer to the key at position ``at``, and the stride to the next key."""
    here = ptr + at * stride
    step = tl.cast(stride, tl.int32)
    if tail_ptr is not None:
        if at < begin:
            here = tail_ptr + (at - begin + P) * tail_stride
            step = tl.cast(tail_stride, tl.int32)
    return here, step


@triton.jit
def load_chunk(ptr, stride, first, last, x0, X, C: tl.constexpr, BX: tl.constexpr):
    """(C, BX) in fp32: keys from ``first`` up to ``last`` of those at ``ptr``; zeros outside.

    Inside a chunk offsets of 32 bits are enough, because the driver ensures that keys are near.
    """
    i = tl.arange(0, C)
    x = x0 + tl.arange(0, BX)
    inside = ((i >= first) & (i < last))[:, None] & (x < X)[None, :]
    at = ptr + (i[:, None] * stride + x[None, :])
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_chunk(ptr, stride, first, last, x0, X, value, C: tl.constexpr, BX: tl.constexpr):
    """Write (C, BX) to where :func:`load_chunk` reads."""
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
        mask_ptr, _ = keys_at(at, begin, mask_ptr, 1, tail_mask_ptr, 1, P)
        real = tl.load(mask_ptr + i, mask=real, other=0) != 0
    return real


@triton.jit
def chunk_logits(
    q, q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, tail_k_ptr, tail_t, tail_mask_ptr, P,
    at, begin, stop, off, reach, scale, softcap,
    K: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, BEFORE: tl.constexpr = False,
):  # fmt: skip
    """Logits (C, C) of a chunk of queries over the chunk of keys that begins at position ``at``.

    The caller must multiply them by :func:`unit_of`. Invisible pairs are -inf. The keys are ``off``
    positions after the first query. With ``BEFORE`` all keys are before it. A query sees ``reach``
    keys before its own, and as many after it if not causal. ``q`` is the first tile of the queries.
    Also returns the slope of the soft cap (1 without one), and a mask of the keys that exist: from
    ``first`` up to ``last`` of the chunk.
    """
    first = tl.maximum(begin - P - at, 0)
    last = C if BEFORE else stop - at
    real = load_flags(at, begin, mask_ptr, tail_mask_ptr, P, first, last, C)
    k_ptr, step = keys_at(at, begin, k_ptr, k_t, tail_k_ptr, tail_t, P)
    logits = tl.zeros((C, C), tl.float32)
    for k0 in tl.static_range(0, K, BX):
        k = load_chunk(k_ptr, step, first, last, k0, K, C, BX)
        if k0 > 0:
            q = load_chunk(q_ptr, q_t, 0, queries, k0, K, C, BX)
        logits += mm(q, tl.trans(k), NARROW)
    slope = tl.full((C, C), 1.0, tl.float32)
    if CAPPED:
        logits = tanh(logits * (scale / softcap))
        slope = 1.0 - logits * logits
    # A query sees a range of keys, so each pair needs two comparisons at most. Rows after the last
    # query have zeros as inputs and add nothing.
    i = tl.arange(0, C)
    oldest = tl.maximum(i - off - reach, tl.minimum(first, C).to(tl.int32))
    seen = i[None, :] >= oldest[:, None]
    if not BEFORE:
        newest = i - off if CAUSAL else i - off + reach
        newest = tl.minimum(newest, tl.minimum(last, C).to(tl.int32) - 1)
        seen = seen & (i[None, :] <= newest[:, None])
    if mask_ptr is not None:
        seen = seen & real[None, :]
    return tl.where(seen, logits, float("-inf")), slope, first, last


@triton.jit
def unit_of(scale, softcap, CAPPED: tl.constexpr):
    """Factor from :func:`chunk_logits` to exponents of 2. It is above 0: the order is kept."""
    return (softcap if CAPPED else scale) * LOG2_E


@triton.jit
def softmax_step(top, mass, logits, unit):
    """The running softmax of each query with one more chunk of logits, which may all be -inf.

    Returns (top, mass), with ``top`` as the largest logit; the factor for sums over the earlier
    keys; and the weights of the new keys. The caller must divide sums by the last mass.

    The difference comes before the product with ``unit``, and not after it: a GPU would fuse the
    two, so that the largest logit's weight would not be 1 but 2^(the rounding of its product).
    """
    later = tl.maximum(top, tl.max(logits, 1))
    kept = power_of_two((top - finite(later)) * unit)
    w = power_of_two((logits - finite(later)[:, None]) * unit)
    return later, mass * kept + tl.sum(w, 1), kept, w


@triton.jit
def log_mass_of_softmax(top, mass, unit):
    """The logsumexp of the logits that :func:`softmax_step` has seen; -inf if there was none."""
    seen = mass != 0.0
    found = (top * unit + tl.log2(tl.where(seen, mass, 1.0))) * LN_2
    return tl.where(seen, found, float("-inf"))


@triton.jit
def window_weights(logits, unit, top):
    """The window's weights again, from its queries' ``top``; the caller must divide by its mass."""
    return power_of_two((logits - finite(top)[:, None]) * unit)


@triton.jit
def value_products(
    dy_ptr, dy_t, queries, v_ptr, v_t, first, last,
    D: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr, BX: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """<dy_t, v_s> of a chunk of queries and a chunk of keys, (C, KEYS)."""
    products = tl.zeros((C, KEYS), tl.float32)
    for d0 in range(0, D, BX):
        dy = load_chunk(dy_ptr, dy_t, 0, queries, d0, D, C, BX)
        v = load_chunk(v_ptr, v_t, first, last, d0, D, KEYS, BX)
        products += mm(dy, tl.trans(v), NARROW)
    return products


@triton.jit
def sink_logits(
    q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, seen_ptr, s0, S, scale, softcap,
    K: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """:func:`chunk_logits` of a chunk of queries over the sinks from ``s0`` on, and the slope.

    ``q_ptr`` and ``seen_ptr`` point to the chunk's first query, the others to the first sink.
    """
    number = s0 + tl.arange(0, SINKS_AT_ONCE)
    logits = tl.zeros((C, SINKS_AT_ONCE), tl.float32)
    for k0 in tl.static_range(0, K, BX):
        q = load_chunk(q_ptr, q_t, 0, queries, k0, K, C, BX)
        k = load_chunk(k_ptr + s0 * k_t, k_t, 0, S - s0, k0, K, SINKS_AT_ONCE, BX)
        logits += mm(q, tl.trans(k), NARROW)
    slope = tl.full((C, SINKS_AT_ONCE), 1.0, tl.float32)
    if CAPPED:
        logits = tanh(logits * (scale / softcap))
        slope = 1.0 - logits * logits
    token = tl.arange(0, C)
    count = tl.load(seen_ptr + token, mask=token < queries, other=0).to(tl.int32)
    real = tl.load(mask_ptr + number, mask=number < S, other=0) != 0
    seen = (number[None, :] < count[:, None]) & real[None, :]
    return tl.where(seen, logits, float("-inf")), slope


@triton.jit
def attend(
    q_ptr, q_t, queries, k_ptr, k_t, v_ptr, v_t, mask_ptr,
    tail_k_ptr, tail_v_ptr, tail_mask_ptr, P, G,
    start, begin, stop, d0, reach, scale, softcap,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
    sink_q_ptr, sink_q_t, sink_k_ptr, sink_v_ptr, sink_mask_ptr, seen_ptr, S,
):  # fmt: skip
    """(top, mass, w, kept, y) of the chunk's queries: sum_s w_s v_s / mass is the window's part.

    ``top`` and ``mass`` are those of :func:`softmax_step`. ``w`` (C, C) are the weights of the
    chunk's own keys. ``y`` (C, BX) times ``kept`` is the sum over all other keys. The caller must
    divide both by ``mass``. ``q_ptr`` points to the chunk's first query. The other pointers are to
    the first key of the batch, or of the earlier state, for one of ``G`` heads. ``sink_q_ptr`` and
    ``seen_ptr`` point to the first token of the batch, the other pointers of sinks to the first
    sink. They are None if there are no sinks.
    """
    chunks = tl.cdiv(reach, C)
    before = tl.minimum(chunks, tl.cdiv(start - begin + P, C)).to(tl.int32)
    after = 0 if CAUSAL else tl.minimum(chunks, tl.cdiv(stop - start, C) - 1).to(tl.int32)
    top = tl.full((C,), float("-inf"), tl.float32)
    mass = tl.zeros((C,), tl.float32)
    y = tl.zeros((C, BX), tl.float32)
    unit = unit_of(scale, softcap, CAPPED)
    if sink_q_ptr is not None:
        for s0 in tl.range(0, S, SINKS_AT_ONCE, num_stages=1, disable_licm=True):
            logits, _ = sink_logits(
                sink_q_ptr + start * sink_q_t, sink_q_t, queries, sink_k_ptr, G * K,
                sink_mask_ptr, seen_ptr + start, s0, S, scale, softcap, K, C, BX, NARROW, CAPPED,
            )  # fmt: skip
            at = sink_v_ptr + s0 * (G * D)
            v = load_chunk(at, G * D, 0, S - s0, d0, D, SINKS_AT_ONCE, BX)
            top, mass, kept, w = softmax_step(top, mass, logits, unit)
            y = added(y * kept[:, None], mm(w, v, NARROW))
    q = load_chunk(q_ptr, q_t, 0, queries, 0, K, C, BX)
    for j in tl.range(0, before + after, disable_licm=True):
        # The chunks before it, then those after it.
        off = (j - before + tl.where(j < before, 0, 1)) * C
        logits, _, first, last = chunk_logits(
            q, q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, tail_k_ptr, G * K, tail_mask_ptr, P,
            start + off, begin, stop, off, reach, scale, softcap,
            K, C, BX, NARROW, CAUSAL, CAPPED, BEFORE=CAUSAL,
        )  # fmt: skip
        at, step = keys_at(start + off, begin, v_ptr, v_t, tail_v_ptr, G * D, P)
        v = load_chunk(at, step, first, last, d0, D, C, BX)
        top, mass, kept, w = softmax_step(top, mass, logits, unit)
        y = added(y * kept[:, None], mm(w, v, NARROW))
    logits, _, _, _ = chunk_logits(
        q, q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, None, 0, None, P,
        start, begin, stop, 0, reach, scale, softcap,
        K, C, BX, NARROW, CAUSAL, CAPPED,
    )  # fmt: skip
    top, mass, kept, w = softmax_step(top, mass, logits, unit)
    return top, mass, w, kept, y
