"""What the walks share beside tiles.py: rows, transposed states, references, single steps.

Shape suffixes: C tokens of a chunk, L latents (padded), D value width (of a tile).
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.tiles import factor, mm


@triton.jit
def slot_of(row, at, T, n, C: tl.constexpr):
    """A number of its own for each chunk of all sequences, below B T / C + N."""
    return (row * T + at) // C + n


@triton.jit
def load_inputs(ptr, stride_t, stride_x, start, stop, x0, X, C: tl.constexpr, BX: tl.constexpr):
    """:func:`load_tile` in the inputs' own dtype, for products alone."""
    t = start + tl.arange(0, C)
    x = x0 + tl.arange(0, BX)
    inside = (t < stop)[:, None] & (x < X)[None, :]
    at = ptr + t[:, None] * stride_t + x[None, :].to(tl.int64) * stride_x
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_rows(
    ptr, stride_t, stride_x, start, stop, x0, X, value, chosen, C: tl.constexpr, BX: tl.constexpr
):
    """:func:`store_tile` for the ``chosen`` (C,) rows."""
    t = start + tl.arange(0, C)
    x = x0 + tl.arange(0, BX)
    inside = ((t < stop) & chosen)[:, None] & (x < X)[None, :]
    at = ptr + t[:, None] * stride_t + x[None, :].to(tl.int64) * stride_x
    tl.store(at, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_value(ptr, stride_t, stride_x, t, x0, X, BX: tl.constexpr):
    """Row ``t`` of :func:`load_tile`: (BX,)."""
    x = x0 + tl.arange(0, BX)
    return tl.load(ptr + t * stride_t + x.to(tl.int64) * stride_x, mask=x < X, other=0.0).to(
        tl.float32
    )


@triton.jit
def store_value(ptr, stride_t, stride_x, t, x0, X, value, wanted, BX: tl.constexpr):
    """Write (BX,) to row ``t`` if it is ``wanted``."""
    x = x0 + tl.arange(0, BX)
    at = ptr + t * stride_t + x.to(tl.int64) * stride_x
    tl.store(at, value.to(ptr.dtype.element_ty), mask=(x < X) & wanted)


@triton.jit
def load_query(ptr, stride_t, stride_x, t, L, BL: tl.constexpr):
    """Row ``t`` of :func:`load_queries`: (BL,)."""
    q = load_value(ptr, stride_t, stride_x, t, 0, L, BL)
    q = tl.where(tl.arange(0, BL) < L, q, float("-inf"))
    e = tl.exp(q - tl.max(q, 0))
    return e / tl.sum(e, 0)


@triton.jit
def load_across(ptr, i, L, D, d0, BL: tl.constexpr, BD: tl.constexpr):
    """:func:`load_state`, transposed: (BD, BL)."""
    x = tl.arange(0, BL)
    d = d0 + tl.arange(0, BD)
    inside = (d < D)[:, None] & (x < L)[None, :]
    at = ptr + i * L * D + x[None, :].to(tl.int64) * D + d[:, None]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_across(ptr, i, L, D, d0, value, BL: tl.constexpr, BD: tl.constexpr):
    """:func:`store_state`, from (BD, BL)."""
    x = tl.arange(0, BL)
    d = d0 + tl.arange(0, BD)
    inside = (d < D)[:, None] & (x < L)[None, :]
    tl.store(ptr + i * L * D + x[None, :].to(tl.int64) * D + d[:, None], value, mask=inside)


@triton.jit
def first_reference(k, rows, ref, fresh, C: tl.constexpr):
    """References and ``fresh`` (BL,), 1 for a latent that has seen nothing, with one more chunk.

    The reference of a fresh latent is its first finite logit, 0 if there is none.
    """
    seen = k != float("-inf")
    first = tl.min(tl.where(seen, rows[:, None], C), 0)
    found = tl.sum(tl.where(seen & (rows[:, None] == first[None, :]), k, 0.0), 0)
    return tl.where(fresh == 1, found, ref), tl.where(first < C, 0, fresh)


@triton.jit
def counted(ones, x, PRODUCT: tl.constexpr):
    """ones @ x, for ``ones`` of zeros and ones: they are exact, and fp32 takes two products."""
    if PRODUCT == "tf32x3":
        high = factor(x, "tf32_rounded")
        low = tl.dot(ones, factor(x - high, "tf32_rounded"), input_precision="tf32")
        return tl.dot(ones, high, low, input_precision="tf32")
    else:
        return mm(ones, x, PRODUCT)


@triton.jit
def largest(x):
    """The largest number of a tile."""
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def larger(a, b):
    """For scans: the running maximum."""
    return tl.maximum(a, b)


@triton.jit
def step(ref, mass, total, k, v):
    """The state (ref, mass, S (BD, BL)) with one more source: safe for any finite logits."""
    later = tl.maximum(ref, k)
    kept = tl.exp(ref - later)
    e = tl.exp(k - later)
    # Spelled out as one operation: Triton 3.6 cannot compile the sum for 256 latents.
    added = v[:, None] * e[None, :]
    total = tl.fma(total, tl.broadcast_to(kept[None, :], total.shape), added)
    return later, mass * kept + e, total


@triton.jit
def mass_up_to(s, rows, k, ref, mass):
    """(top, mass) (BL,) of the earlier (ref, mass) and the sources of a chunk up to row ``s``."""
    k = tl.where((rows <= s)[:, None], k, float("-inf"))
    top = tl.maximum(ref, tl.max(k, 0))
    return top, mass * tl.exp(ref - top) + tl.sum(tl.exp(k - top[None, :]), 0)
