"""Functions that kernels share: the place of a program, loads and stores, products, masses.

A log-mass is held as (top, mass) and is ``top + log(mass)``. ``top`` is a logit that occurred, so
the log-mass never loses digits, however large the logits are. Only a mass can exceed 1 in this
file.

Shape suffixes: C tokens of a chunk, L latents (of a tile, padded), D value width, E channels (of a
tile). BL, BD, BX, BE are the sizes of tiles, powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# One reference is used for a token while the running maximum is within e^16 of it. exp's argument
# is then exact to 1e-6 in fp32, and the factors fit into bf16, tf32 and fp32.
REACH = tl.constexpr(16.0)
# If latents forget, the past loses weight as fast as the present gains it. At e^48 exp's argument
# is exact to 2e-6.
FORGETTING_REACH = tl.constexpr(48.0)
# Replaces a mass of 0, whose numerator is 0 too. Any other mass counts from the logit of one of its
# sources, so it is at least about 1. The reciprocal of a number smaller than this could overflow
# when outputs without sources have large gradients.
TINY = tl.constexpr(1e-6)
# Arguments that depend on the length. Kernels are not compiled again when they are 1 or a multiple
# of 16.
SIZES = ["T", "length", "per_row", "reach", "P"]
LOG2_E = tl.constexpr(1.4426950408889634)
# Whether the compiled kernels may use NVIDIA's instructions.
PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)


@triton.jit
def place(m, table_ptr, T, per_row, C: tl.constexpr):
    """Batch entry, first token, end and number of the sequence of part ``m``, of C tokens."""
    if table_ptr is None:
        batch = m // per_row
        start = (m % per_row) * C
        return batch.to(tl.int64), start.to(tl.int64), tl.cast(T, tl.int64), batch.to(tl.int64)
    else:
        start = tl.load(table_ptr + m * 3)
        stop = tl.load(table_ptr + m * 3 + 1)
        sequence = tl.load(table_ptr + m * 3 + 2)
        return sequence * 0, start, stop, sequence


@triton.jit
def walk_place(H, D, BD: tl.constexpr):
    """First column, head and segment of a walk's program. Tiles of D are next to each other."""
    tiles = tl.cdiv(D, BD)
    d0 = (tl.program_id(0) % tiles) * BD
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    return d0, h, tl.program_id(0) // (tiles * H)


@triton.jit
def state_tile(H, L, D, BL: tl.constexpr, BD: tl.constexpr):
    """Sequence, head, latents and columns of a program's tile of (L, D); which exist; offsets."""
    n, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    x = tl.program_id(1) * BL + tl.arange(0, BL)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    real_L = x < L
    real_LD = real_L[:, None] & (d < D)[None, :]
    return n, h, x, d, real_L, real_LD, x[:, None].to(tl.int64) * D + d[None, :]


@triton.jit
def parts_of(n, per_row, first_ptr):
    """First part of sequence ``n``, and the one after its last."""
    if first_ptr is None:
        return n * per_row, n * per_row + per_row
    else:
        return tl.load(first_ptr + n), tl.load(first_ptr + n + 1)


@triton.jit
def bounds_of(n, batch, bounds_ptr, T):
    """First token of a sequence, and the one after its last."""
    if bounds_ptr is None:
        return batch * 0, tl.cast(T, tl.int64)
    else:
        return tl.load(bounds_ptr + n).to(tl.int64), tl.load(bounds_ptr + n + 1).to(tl.int64)


@triton.jit
def first_token(bounds_ptr, sequence):
    """The sequence's first token; ``bounds_ptr`` (N+1,) when packed, else None."""
    if bounds_ptr is None:
        return sequence * 0
    else:
        return tl.load(bounds_ptr + sequence)


@triton.jit
def slot_of(batch, at, T, n, C: tl.constexpr):
    """A different number for each chunk of all sequences, below B T / C + N."""
    return (batch * T + at) // C + n


@triton.jit
def tile_at(ptr, stride_t, stride_x, start, stop, x0, X, C: tl.constexpr, BX: tl.constexpr):
    """Pointers to (C, BX) from token ``start`` and column ``x0`` on; which elements exist."""
    t = start + tl.arange(0, C)
    x = x0 + tl.arange(0, BX)
    inside = (t < stop)[:, None] & (x < X)[None, :]
    return ptr + t[:, None] * stride_t + x[None, :].to(tl.int64) * stride_x, inside


@triton.jit
def load_inputs(ptr, stride_t, stride_x, start, stop, x0, X, C: tl.constexpr, BX: tl.constexpr):
    """:func:`load_tile` in the inputs' own dtype, for use in products only."""
    at, inside = tile_at(ptr, stride_t, stride_x, start, stop, x0, X, C, BX)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_tile(ptr, stride_t, stride_x, start, stop, x0, X, C: tl.constexpr, BX: tl.constexpr):
    """(C, BX) in fp32 from tokens ``start`` on and columns ``x0`` on; zeros outside."""
    return load_inputs(ptr, stride_t, stride_x, start, stop, x0, X, C, BX).to(tl.float32)


@triton.jit
def store_tile(
    ptr, stride_t, stride_x, start, stop, x0, X, value, C: tl.constexpr, BX: tl.constexpr
):
    """Write (C, BX) to where :func:`load_tile` reads."""
    at, inside = tile_at(ptr, stride_t, stride_x, start, stop, x0, X, C, BX)
    tl.store(at, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_chosen(
    ptr, stride_t, stride_x, start, stop, x0, X, value, chosen, C: tl.constexpr, BX: tl.constexpr
):
    """:func:`store_tile` for the ``chosen`` (C,) tokens."""
    t = start + tl.arange(0, C)
    x = x0 + tl.arange(0, BX)
    inside = ((t < stop) & chosen)[:, None] & (x < X)[None, :]
    at = ptr + t[:, None] * stride_t + x[None, :].to(tl.int64) * stride_x
    tl.store(at, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_value(ptr, stride_t, stride_x, t, x0, X, BX: tl.constexpr):
    """Token ``t`` of :func:`load_tile`: (BX,)."""
    x = x0 + tl.arange(0, BX)
    return tl.load(ptr + t * stride_t + x.to(tl.int64) * stride_x, mask=x < X, other=0.0).to(
        tl.float32
    )


@triton.jit
def store_value(ptr, stride_t, stride_x, t, x0, X, value, wanted, BX: tl.constexpr):
    """Write (BX,) to token ``t`` if it is ``wanted``."""
    x = x0 + tl.arange(0, BX)
    at = ptr + t * stride_t + x.to(tl.int64) * stride_x
    tl.store(at, value.to(ptr.dtype.element_ty), mask=(x < X) & wanted)


@triton.jit
def load_state(ptr, i, L, D, d0, BL: tl.constexpr, BD: tl.constexpr):
    """(BL, BD) of the i-th (L, D) of contiguous fp32 states; zeros outside."""
    x = tl.arange(0, BL)
    d = d0 + tl.arange(0, BD)
    inside = (x < L)[:, None] & (d < D)[None, :]
    at = ptr + i * L * D + x[:, None].to(tl.int64) * D + d[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_state(ptr, i, L, D, d0, value, BL: tl.constexpr, BD: tl.constexpr):
    """Write (BL, BD) to where :func:`load_state` reads."""
    x = tl.arange(0, BL)
    d = d0 + tl.arange(0, BD)
    inside = (x < L)[:, None] & (d < D)[None, :]
    tl.store(ptr + i * L * D + x[:, None].to(tl.int64) * D + d[None, :], value, mask=inside)


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
def load_latents(ptr, i, L, BL: tl.constexpr):
    """(BL,) of the i-th (L,) of contiguous fp32 numbers; zeros outside."""
    x = tl.arange(0, BL)
    return tl.load(ptr + i * L + x, mask=x < L, other=0.0)


@triton.jit
def store_latents(ptr, i, L, value, BL: tl.constexpr):
    """Write (BL,) to where :func:`load_latents` reads."""
    x = tl.arange(0, BL)
    tl.store(ptr + i * L + x, value, mask=x < L)


@triton.jit
def store_row(ptr, i, L, value, C: tl.constexpr, BL: tl.constexpr):
    """:func:`store_latents` of one row of (C, BL), whose rows are all the same."""
    x = tl.arange(0, BL)[None, :]
    first = (tl.arange(0, C) == 0)[:, None]
    tl.store(ptr + i * L + x + tl.zeros((C, BL), tl.int32), value, mask=first & (x < L))


@triton.jit
def load_numbers(ptr, batch, h, start, stop, T, H, C: tl.constexpr):
    """(C,) fp32 numbers of one head's tokens, from a contiguous (B, T, H); zeros outside."""
    t = start + tl.arange(0, C)
    return tl.load(ptr + (batch * T + t) * H + h, mask=t < stop, other=0.0)


@triton.jit
def store_numbers(ptr, batch, h, start, stop, T, H, value, C: tl.constexpr):
    """Write (C,) to where :func:`load_numbers` reads."""
    t = start + tl.arange(0, C)
    tl.store(ptr + (batch * T + t) * H + h, value, mask=t < stop)


@triton.jit
def load_steps(ptr, stride_t, stride_e, t, real, e, E):
    """(C, E) in fp32; zeros for tokens and channels that are not real."""
    at = ptr + t[:, None] * stride_t + e[None, :].to(tl.int64) * stride_e
    return tl.load(at, mask=real[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_steps(ptr, t, stop, e, E, value):
    """Write (C, E) into contiguous (T, E)."""
    at = ptr + t[:, None] * E + e[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=(t < stop)[:, None] & (e < E)[None, :])


@triton.jit
def load_keys(ptr, mask_ptr, stride_t, stride_x, start, stop, L, C: tl.constexpr, BL: tl.constexpr):
    """Key logits (C, BL): -inf for masked tokens and past the end, 0 for padded latents.

    ``mask_ptr`` points to the batch entry's mask, or is None.
    """
    k = load_tile(ptr, stride_t, stride_x, start, stop, 0, L, C, BL)
    t = start + tl.arange(0, C)
    real = t < stop
    if mask_ptr is not None:
        real = tl.load(mask_ptr + t, mask=real, other=0) != 0
    padded = (tl.arange(0, BL) >= L)[None, :]
    return tl.where(real[:, None] | padded, k, float("-inf"))


@triton.jit
def load_key(ptr, mask_ptr, stride_t, stride_x, t, L, BL: tl.constexpr):
    """Token ``t`` of :func:`load_keys`: (BL,)."""
    x = tl.arange(0, BL)
    k = tl.load(ptr + t * stride_t + x.to(tl.int64) * stride_x, mask=x < L, other=0.0)
    k = k.to(tl.float32)
    if mask_ptr is not None:
        real = tl.load(mask_ptr + t) != 0
        k = tl.where((x >= L) | real, k, float("-inf"))
    return k


@triton.jit
def load_queries(ptr, stride_t, stride_x, start, stop, L, C: tl.constexpr, BL: tl.constexpr):
    """p(l|t) = softmax of the query logits, (C, BL); padded latents get 0."""
    q = load_tile(ptr, stride_t, stride_x, start, stop, 0, L, C, BL)
    q = tl.where((tl.arange(0, BL) < L)[None, :], q, float("-inf"))
    e = power(q - tl.max(q, 1)[:, None])
    return e * reciprocal(tl.sum(e, 1))[:, None]


@triton.jit
def load_query(ptr, stride_t, stride_x, t, L, BL: tl.constexpr):
    """Token ``t`` of :func:`load_queries`: (BL,)."""
    q = load_value(ptr, stride_t, stride_x, t, 0, L, BL)
    q = tl.where(tl.arange(0, BL) < L, q, float("-inf"))
    e = tl.exp(q - tl.max(q, 0))
    return e / tl.sum(e, 0)


@triton.jit
def load_window_logits(ptr, stride_t, stride_x, start, stop, C: tl.constexpr):
    """The window's logits (C,). Each is just before that of the first latent, at ``ptr``."""
    t = start + tl.arange(0, C)
    return tl.load(ptr + t * stride_t - stride_x, mask=t < stop, other=0.0).to(tl.float32)


@triton.jit
def load_mixture(
    ptr, stride_t, stride_x, start, stop, L, C: tl.constexpr, BL: tl.constexpr, own=None
):
    """p(l|t) of the latents (C, BL), and of the window (C,): one softmax over L + 1 logits.

    ``own`` has the window's logits (C,) if they are not those of :func:`load_window_logits`.
    """
    q = load_tile(ptr, stride_t, stride_x, start, stop, 0, L, C, BL)
    q = tl.where((tl.arange(0, BL) < L)[None, :], q, float("-inf"))
    if own is None:
        # The function above is not used: with it the backward walks take up to 24 bytes more stack.
        t = start + tl.arange(0, C)
        own = tl.load(ptr + t * stride_t - stride_x, mask=t < stop, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(q, 1), own)
    e, own = power(q - top[:, None]), power(own - top)
    share = reciprocal(tl.sum(e, 1) + own)
    return e * share[:, None], own * share


@triton.jit
def load_share(ptr, stride_t, stride_x, t, L, BL: tl.constexpr, own=None):
    """Token ``t`` of :func:`load_mixture`: (BL,) and a number."""
    x = tl.arange(0, BL)
    at = ptr + t * stride_t
    q = tl.load(at + x.to(tl.int64) * stride_x, mask=x < L, other=float("-inf")).to(tl.float32)
    if own is None:
        own = tl.load(at - stride_x).to(tl.float32)
    top = tl.maximum(tl.max(q, 0), own)
    e = tl.exp(q - top)
    own = tl.exp(own - top)
    total = tl.sum(e, 0) + own
    return e / total, own / total


@triton.jit
def load_shares(
    ptr, stride_t, stride_x, start, stop, L, C: tl.constexpr, BL: tl.constexpr, GATED: tl.constexpr,
    own_ptr=None, own_t=None,
):  # fmt: skip
    """p(l|t) of the latents, and of the window (0 if there is none).

    ``own_ptr`` points to the batch's window logits in fp32, if they are not before the latents'.
    """
    if GATED:
        own = None
        if own_ptr is not None:
            t = start + tl.arange(0, C)
            own = tl.load(own_ptr + t * own_t, mask=t < stop, other=0.0)
        p, gate = load_mixture(ptr, stride_t, stride_x, start, stop, L, C, BL, own)
    else:
        p = load_queries(ptr, stride_t, stride_x, start, stop, L, C, BL)
        gate = tl.zeros((C,), tl.float32)
    return p, gate


@triton.jit
def load_one_share(
    ptr, stride_t, stride_x, t, L, BL: tl.constexpr, GATED: tl.constexpr, own_ptr=None, own_t=None
):
    """Token ``t`` of :func:`load_shares`."""
    if GATED:
        own = None
        if own_ptr is not None:
            own = tl.load(own_ptr + t * own_t)
        p, gate = load_share(ptr, stride_t, stride_x, t, L, BL, own)
    else:
        p, gate = load_query(ptr, stride_t, stride_x, t, L, BL), 0.0
    return p, gate


@triton.jit
def factor(x, PRODUCT: tl.constexpr):
    """Round a factor as :func:`mm` does. Called before it if several products share the factor."""
    if PRODUCT == "bf16":
        return x.to(tl.bfloat16)
    elif PRODUCT == "bf16_as_fp32":
        return x.to(tl.bfloat16).to(tl.float32)
    elif PRODUCT == "tf32_rounded":
        # So that tf32 is as good as fp16: the hardware would cut off the last 13 bits.
        # A card's NaN has all bits set: the addition would make a zero of it.
        x = x.to(tl.float32)
        rounded = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        return x.to(tl.float32)


@triton.jit
def mm(a, b, PRODUCT: tl.constexpr):
    """a @ b with fp32 sums; ``PRODUCT`` is the format to which factors are rounded.

    "bf16_as_fp32" is for Triton's interpreter: it rounds as a GPU does, then multiplies in fp32.
    """
    a, b = factor(a, PRODUCT), factor(b, PRODUCT)
    if PRODUCT == "bf16":
        return tl.dot(a, b)
    elif PRODUCT == "bf16_as_fp32":
        return tl.dot(a, b, input_precision="ieee")
    elif PRODUCT == "tf32_rounded":
        return tl.dot(a, b, input_precision="tf32")
    else:
        return tl.dot(a, b, input_precision=PRODUCT)


@triton.jit
def added(total, product):
    """total + product, in a separate addition.

    Triton would make of ``total + mm(...)`` one product that accumulates in ``total``. Tensor cores
    truncate such sums where an addition would round, so sums over many chunks would drift. Triton
    does not merge this addition with the product.
    """
    return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), total)


@triton.jit
def counted(ones, x, PRODUCT: tl.constexpr):
    """ones @ x, for ``ones`` of zeros and ones. They are exact, so fp32 needs only two products."""
    if PRODUCT == "tf32x3":
        high = factor(x, "tf32_rounded")
        low = tl.dot(ones, factor(x - high, "tf32_rounded"), input_precision="tf32")
        return tl.dot(ones, high, low, input_precision="tf32")
    else:
        return mm(ones, x, PRODUCT)


@triton.jit
def summed(ones, x, PRODUCT: tl.constexpr):
    """:func:`counted`, with at least 16 bits of each summand."""
    if PRODUCT == "bf16":
        # Truncated, not rounded: this is one operation per number, and the remainder is exact.
        high = (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
        low = tl.dot(ones.to(tl.bfloat16), (x - high).to(tl.bfloat16))
        return tl.dot(ones.to(tl.bfloat16), high.to(tl.bfloat16), low)
    elif PRODUCT == "bf16_as_fp32":
        high = factor(x, PRODUCT)
        return tl.dot(ones, high + factor(x - high, PRODUCT), input_precision="ieee")
    elif PRODUCT == "tf32_rounded":
        return counted(ones, x, "tf32x3")
    else:
        return counted(ones, x, PRODUCT)


@triton.jit
def finite(top):
    """``top``, or 0 if nothing has been seen, so that differences from it are never NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def inverse(mass):
    """1 / mass, and 1 if nothing has been seen (the other factor is 0 then)."""
    return 1.0 / tl.where(mass == 0.0, 1.0, mass)


@triton.jit
def merge_masses(top1, mass1, top2, mass2):
    """(top, mass) of two stretches; (-inf, 0) is neutral."""
    top = tl.maximum(top1, top2)
    at = finite(top)
    return top, mass1 * tl.exp(top1 - at) + mass2 * tl.exp(top2 - at)


@triton.jit
def merge_forgetting(top1, mass1, fall1, top2, mass2, fall2):
    """:func:`merge_masses` if the first stretch decays by ``fall2`` during the second one.

    The top may be rounded, because the difference contains the rounding error.
    """
    top = tl.maximum(top1 + fall2, top2)
    at = finite(top)
    mass = mass1 * tl.exp(top1 - at + fall2) + mass2 * tl.exp(top2 - at)
    return top, mass, fall1 + fall2


@triton.jit
def kept_share(top1, mass1, top2, mass2, fall=None):
    """exp(A_1 - A_2), the weight of an earlier state in a later one: exactly 1 if they agree.

    ``fall`` is the log-decay between them.
    """
    above = top1 - finite(top2)
    if fall is not None:
        above += fall
    kept = mass1 * tl.exp(above)
    return kept / tl.where(mass2 == 0.0, 1.0, mass2)


@triton.jit
def log_mass_of(top, mass):
    """top + log(mass), and -inf if nothing has been seen."""
    return tl.where(mass == 0.0, float("-inf"), top + tl.log(tl.where(mass == 0.0, 1.0, mass)))


@triton.jit
def compose(a1, b1, a2, b2):
    """x -> a1 x + b1, then x -> a2 x + b2."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def first_reference(k, token, ref, fresh, C: tl.constexpr):
    """References and ``fresh`` (BL,) after one more chunk; fresh is 1 if a latent has seen nothing.

    The reference of a fresh latent is its first finite logit, or 0 if there is none.
    """
    seen = k != float("-inf")
    first = tl.min(tl.where(seen, token[:, None], C), 0)
    found = tl.sum(tl.where(seen & (token[:, None] == first[None, :]), k, 0.0), 0)
    return tl.where(fresh == 1, found, ref), tl.where(first < C, 0, fresh)


@triton.jit
def worn(j):
    """Whether a reference must move after chunk ``j``, because decays are summed in fp32."""
    return j % 8 == 7


@triton.jit
def moved(ref, fall, above):
    """The next chunk's reference, and the logarithm of the weight of one unit relative to it.

    ``fall`` (C, BL) is the decay up to then since ``ref`` was chosen, the same for all tokens.
    ``above`` (C, BL) are the chunk's logits minus ``ref`` and minus their decay up to the start.
    The new reference may be any near number, because the difference contains its rounding error.
    """
    fall = tl.max(fall, 0)
    later = ref + fall + tl.maximum(tl.max(above, 0), 0.0)
    return later, ref - later + fall


@triton.jit
def add_source(ref, mass, total, k, v, fall=None):
    """The state (ref, mass, S (BD, BL)) with one more source, for any finite logits.

    ``fall`` is the decay of latents that forget before this source.
    """
    if fall is None:
        later = tl.maximum(ref, k)
        kept = tl.exp(ref - later)
    else:
        later = tl.maximum(ref + fall, k)
        kept = tl.exp(ref - later + fall)
    e = tl.exp(k - later)
    # Written as one operation, because Triton 3.6 cannot compile the sum for 256 latents.
    added = v[:, None] * e[None, :]
    total = tl.fma(total, tl.broadcast_to(kept[None, :], total.shape), added)
    return later, mass * kept + e, total


@triton.jit
def mass_up_to(s, token, k, ref, mass):
    """(top, mass) (BL,) of the earlier (ref, mass) and the sources of a chunk up to ``s``."""
    k = tl.where((token <= s)[:, None], k, float("-inf"))
    top = tl.maximum(ref, tl.max(k, 0))
    return top, mass * tl.exp(ref - top) + tl.sum(tl.exp(k - top[None, :]), 0)


@triton.jit
def largest(x):
    """The largest number of a tile."""
    return uniform(tl.max(tl.max(x, 1), 0))


@triton.jit
def uniform(x):
    """``x``, a number in fp32 or int32 that all threads have, in such a way that ptxas knows it.

    If a branch in a loop depends on a number that may differ between threads, ptxas keeps addresses
    in registers of each thread, not of a warp: 9% more instructions. What Triton 3.8 computes by a
    reduction may differ, as far as ptxas knows; what Triton 3.7 does may not.
    """
    if PTX:
        kind: tl.constexpr = "=f,f" if x.dtype == tl.float32 else "=r,r"
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", kind, [x], dtype=x.dtype, is_pure=False, pack=1
        )
    else:
        return x


@triton.jit
def larger(a, b):
    """The larger of two numbers; a scan with it gives the running maximum."""
    return tl.maximum(a, b)


@triton.jit
def at_most(x, most):
    """The smaller of the two, or NaN where x is NaN. The card's own minimum would drop it."""
    return tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def power(x):
    """exp(x) in two instructions. Results below the range of normal numbers are 0."""
    return power_of_two(x * LOG2_E)


@triton.jit
def power_of_two(x):
    """2^x in one instruction, as :func:`power`."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x):
    """1 / x for normal numbers, in one instruction."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def tanh(x):
    """tanh without a library, exact to a few ulps: by a series near 0, where 1 - e cancels."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0.0, -far, far)
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, far)


@triton.jit
def log1p_of_share(e):
    """log(1 + e) for 0 <= e <= 1, as 2 artanh(e / (2 + e)): full precision also for small e."""
    z = e / (2.0 + e)
    s = z * z
    p = 1.0 / 15.0
    p = p * s + 1.0 / 13.0
    p = p * s + 1.0 / 11.0
    p = p * s + 1.0 / 9.0
    p = p * s + 1.0 / 7.0
    p = p * s + 1.0 / 5.0
    p = p * s + 1.0 / 3.0
    return 2.0 * z * (p * s + 1.0)
