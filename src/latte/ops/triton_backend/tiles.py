"""What the kernels share: where a chunk lies, loads, products, running masses.

A log-mass is carried as (top, mass), ``top + log(mass)`` with ``top`` a logit that occurred, so
that it never loses digits, however large the logits. Nothing in this file exceeds 1 but a mass.

Shape suffixes: C tokens of a chunk, L latents (of a tile, padded), D value width (of a tile).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# One reference serves a row while its running maximum stays within e^16 of it: the argument of exp
# is then exact to 1e-6 in fp32, and the factors fit bf16, tf32 and fp32 alike.
REACH = tl.constexpr(16.0)
# In place of a mass of 0, whose numerator is 0 too. Any other mass counts from the logit of one of
# its sources, so it is about 1 at least; the reciprocal of a smaller number could overflow beside
# large gradients of outputs that nothing has reached.
TINY = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)
# Whether the compiled kernels may use instructions of NVIDIA's.
PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)


@triton.jit
def place(m, table_ptr, T, chunks, C: tl.constexpr):
    """Row, first token, end of the sequence and number of the sequence of chunk ``m``."""
    if table_ptr is None:
        row = m // chunks
        start = (m % chunks) * C
        return row.to(tl.int64), start.to(tl.int64), tl.cast(T, tl.int64), row.to(tl.int64)
    else:
        start = tl.load(table_ptr + m * 3)
        stop = tl.load(table_ptr + m * 3 + 1)
        sequence = tl.load(table_ptr + m * 3 + 2)
        return sequence * 0, start, stop, sequence


@triton.jit
def chunks_of(n, chunks, first_ptr):
    """First chunk of sequence ``n``, and the one after its last."""
    if first_ptr is None:
        return n * chunks, n * chunks + chunks
    else:
        return tl.load(first_ptr + n), tl.load(first_ptr + n + 1)


@triton.jit
def load_tile(ptr, stride_t, stride_x, start, stop, x0, X, C: tl.constexpr, BX: tl.constexpr):
    """(C, BX) in fp32 from tokens ``start`` on and columns ``x0`` on; zeros outside."""
    t = start + tl.arange(0, C)
    x = x0 + tl.arange(0, BX)
    inside = (t < stop)[:, None] & (x < X)[None, :]
    at = ptr + t[:, None] * stride_t + x[None, :].to(tl.int64) * stride_x
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(
    ptr, stride_t, stride_x, start, stop, x0, X, value, C: tl.constexpr, BX: tl.constexpr
):
    """Write (C, BX) to where :func:`load_tile` reads."""
    t = start + tl.arange(0, C)
    x = x0 + tl.arange(0, BX)
    inside = (t < stop)[:, None] & (x < X)[None, :]
    at = ptr + t[:, None] * stride_t + x[None, :].to(tl.int64) * stride_x
    tl.store(at, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_state(ptr, i, L, D, d0, BL: tl.constexpr, BD: tl.constexpr):
    """(BL, BD) of the i-th (L, D) block of contiguous fp32 states; zeros outside."""
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
def load_row(ptr, i, L, BL: tl.constexpr):
    """(BL,) of the i-th row of contiguous (., L) fp32 numbers; zeros outside."""
    x = tl.arange(0, BL)
    return tl.load(ptr + i * L + x, mask=x < L, other=0.0)


@triton.jit
def store_row(ptr, i, L, value, BL: tl.constexpr):
    """Write (BL,) to where :func:`load_row` reads."""
    x = tl.arange(0, BL)
    tl.store(ptr + i * L + x, value, mask=x < L)


@triton.jit
def load_queries(ptr, stride_t, stride_x, start, stop, L, C: tl.constexpr, BL: tl.constexpr):
    """p(l|t) = softmax of the query logits, (C, BL); padded latents get 0."""
    q = load_tile(ptr, stride_t, stride_x, start, stop, 0, L, C, BL)
    q = tl.where((tl.arange(0, BL) < L)[None, :], q, float("-inf"))
    e = power(q - tl.max(q, 1)[:, None])
    return e * reciprocal(tl.sum(e, 1))[:, None]


@triton.jit
def load_keys(ptr, mask_ptr, stride_t, stride_x, start, stop, L, C: tl.constexpr, BL: tl.constexpr):
    """Key logits (C, BL): -inf for masked tokens and past the end, 0 for padded latents.

    ``mask_ptr`` points to the mask's row, or is None.
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
    """The key logits (BL,) of token ``t``, like a row of :func:`load_keys`."""
    x = tl.arange(0, BL)
    k = tl.load(ptr + t * stride_t + x.to(tl.int64) * stride_x, mask=x < L, other=0.0)
    k = k.to(tl.float32)
    if mask_ptr is not None:
        real = tl.load(mask_ptr + t) != 0
        k = tl.where((x >= L) | real, k, float("-inf"))
    return k


@triton.jit
def factor(x, PRODUCT: tl.constexpr):
    """What :func:`mm` makes of a factor. Called before, where several products share it."""
    if PRODUCT == "bf16":
        return x.to(tl.bfloat16)
    elif PRODUCT == "bf16_as_fp32":
        return x.to(tl.bfloat16).to(tl.float32)
    elif PRODUCT == "tf32_rounded":
        # Where tf32 is to be as good as fp16: the hardware cuts the last 13 bits off.
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def mm(a, b, PRODUCT: tl.constexpr):
    """a @ b with fp32 sums; ``PRODUCT`` says what the factors are rounded to.

    "bf16_as_fp32" rounds as a GPU does, then multiplies in fp32: it is for Triton's interpreter.
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
def finite(top):
    """``top``, or 0 where nothing has been seen: differences from it are then never NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def merge_masses(top1, mass1, top2, mass2):
    """(top, mass) of two stretches; (-inf, 0) is neutral."""
    top = tl.maximum(top1, top2)
    at = finite(top)
    return top, mass1 * tl.exp(top1 - at) + mass2 * tl.exp(top2 - at)


@triton.jit
def compose(a1, b1, a2, b2):
    """x -> a1 x + b1, then x -> a2 x + b2."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def inverse(mass):
    """1 / mass, and 1 where nothing has been seen (what it multiplies is 0 there)."""
    return 1.0 / tl.where(mass == 0.0, 1.0, mass)


@triton.jit
def kept_share(top1, mass1, top2, mass2):
    """exp(A_1 - A_2), what an earlier state is worth to a later one: exactly 1 if they agree."""
    kept = mass1 * tl.exp(top1 - finite(top2))
    return kept / tl.where(mass2 == 0.0, 1.0, mass2)


@triton.jit
def log_mass_of(top, mass):
    """top + log(mass), and -inf where nothing has been seen."""
    return tl.where(mass == 0.0, float("-inf"), top + tl.log(tl.where(mass == 0.0, 1.0, mass)))


@triton.jit
def power(x):
    """exp(x) in three instructions: what is below the range of normal numbers is 0."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2_E],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.exp(x)


@triton.jit
def reciprocal(x):
    """1 / x for normal numbers, in one instruction."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x
