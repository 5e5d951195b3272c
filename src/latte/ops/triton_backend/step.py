"""One step of decoding on one kernel: state update, window and mixture, one token per sequence.

    A' = logaddexp(A + g, k),  mu' = e^{A+g-A'} mu + e^{k-A'} v       (g: what latents forget)
    y = p(0) SWA + sum_{l>=1} p(l) mu'[l],  p = softmax over L + 1 logits     (L without a window)

There is one program per sequence and head. Nothing is updated in place, because the caller may keep
the old state. The window's slots move up by one; the first head of each group writes them. Every
slot is inside the window. Sinks are additional slots, which do not move. Latents that are late
receive the oldest of the pending sources, which also move up by one. Such latents have no share
before they have received a source.

For inference: these ops have no gradient. All shapes follow from the inputs' shapes and nothing
waits for the host, so that a step can be captured in a CUDA graph.

Shape suffixes: B batch, H query heads, G key/value heads, L latents, K key width, D value width,
P = W - 1 slots of the window, W pending sources, S sinks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.arguments import Latte, Macchiato
from latte.ops.custom_ops import custom_op, empty_gradients
from latte.ops.triton_backend.launch import contiguous, launch, readable, step_tiles
from latte.ops.triton_backend.tiles import (
    at_most, finite, inverse, log1p_of_share, log_mass_of, tanh,
)  # fmt: skip

# The kernel's arguments for sinks, except their mask and number; those for pending sources, before
# and after the step.
SINKS = ("sink_q_ptr", "sink_k_ptr", "sink_v_ptr", "seen_ptr")
PENDING = (
    *("pending_k_ptr", "pending_v_ptr", "pending_mask_ptr"),
    *("pending_k1_ptr", "pending_v1_ptr", "pending_mask1_ptr"),
)


def latte_step(x: Latte) -> tuple[Tensor, Tensor, Tensor]:
    """y (B, 1, H, D), and the state after the step. Values may be (B, 1, G, D)."""
    assert x.log_mass is not None
    assert x.mean is not None
    (B, _, H, L), (G, D) = x.q.shape, x.v.shape[2:]
    q, k, v, log_mass, mean = (y.contiguous() for y in (x.q, x.k, x.v, x.log_mass, x.mean))
    outputs = (q.new_empty((B, 1, H, D)), torch.empty_like(log_mass), torch.empty_like(mean))
    launch(
        q.device,
        step[(B * H,)],
        *(q, k, None, None, v, readable(x.key_mask), log_mass, mean, None, None, None),
        *(*outputs, None, None, None),
        *(1.0, None, H, G, L, 1, D, 0),
        WINDOW=0,
        **step_tiles(L, 1, D),
        **_forgetting(x.log_decay),
    )
    return outputs


def latte_fake(x: Latte) -> tuple[Tensor, ...]:
    B, _, H, _ = x.q.shape
    return x.q.new_empty((B, 1, H, x.v.shape[-1])), *empty_gradients(x.log_mass, x.mean)


def macchiato_step(x: Macchiato) -> tuple[Tensor, ...]:
    """y (B, 1, H, D), and the states after the step. Those of late latents are empty without."""
    (B, _, H, L), (G, K), D = x.latent_k.shape, x.k.shape[2:], x.v.shape[-1]
    assert x.tail_mask is not None
    inputs = [y.contiguous() for y in (x.latent_q, x.latent_k, x.q, x.k, x.v)]
    state: Any = contiguous(x.log_mass, x.mean, x.tail_k, x.tail_v)
    out = x.v.new_empty((B, 1, H, D))
    log_mass1, mean1, keys1, values1 = (torch.empty_like(y) for y in state)
    slots = x.tail_mask.contiguous().view(torch.uint8)
    slots_after = torch.empty_like(slots)
    more: dict[str, Any] = {}
    if x.sink_q is not None and x.sink_k is not None:
        given = contiguous(x.sink_q, x.sink_k, x.sink_v, x.sinks_seen)
        more |= dict(zip(SINKS, given, strict=True))
        more |= {"sink_mask_ptr": readable(x.sink_mask), "S": x.sink_k.shape[1]}
    after = [x.v.new_empty(0), x.v.new_empty(0), x.tail_mask.new_empty(0)]
    if x.pending_k is not None and x.pending_v is not None and x.pending_mask is not None:
        late = [y.contiguous() for y in (x.pending_k, x.pending_v, x.pending_mask)]
        after = [torch.empty_like(y) for y in late]
        moved = (*late[:2], readable(late[2]), *after[:2], readable(after[2]))
        more |= dict(zip(PENDING, moved, strict=True))
    launch(
        out.device,
        step[(B * H,)],
        *(*inputs, readable(x.key_mask), *state, slots),
        *(out, log_mass1, mean1, keys1, values1, slots_after),
        *(x.scale, x.softcap or None, H, G, L, K, D, slots.shape[1]),
        WINDOW=1,
        JOINT=x.joint,
        **step_tiles(L, K, D),
        **_forgetting(x.log_decay),
        **more,
    )
    return out, log_mass1, mean1, keys1, values1, slots_after.view(torch.bool), *after


def macchiato_fake(x: Macchiato) -> tuple[Tensor, ...]:
    B, _, H, _ = x.latent_k.shape
    state = empty_gradients(x.log_mass, x.mean, x.tail_k, x.tail_v, x.tail_mask)
    after: tuple[Tensor, ...] = (x.v.new_empty(0), x.v.new_empty(0), state[4].new_empty(0))
    if x.pending_k is not None:
        after = empty_gradients(x.pending_k, x.pending_v, x.pending_mask)
    return x.v.new_empty((B, 1, H, x.v.shape[-1])), *state, *after


latte_step_op = custom_op("triton_latte_step", Latte, 3, latte_fake, latte_step)
macchiato_step_op = custom_op("triton_macchiato_step", Macchiato, 9, macchiato_fake, macchiato_step)


def _forgetting(log_decay: Tensor | None) -> dict[str, Tensor]:
    return {} if log_decay is None else {"g_ptr": log_decay.contiguous()}


@triton.jit
def capped(x, softcap):
    """softcap tanh(x / softcap); ``softcap`` is None if there is none."""
    if softcap is None:
        return x
    else:
        return softcap * tanh(x / softcap)


@triton.jit
def attend(
    local_q_ptr, local_k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr,
    keys1_ptr, values1_ptr, slots1_ptr,
    b, h, real, scale, softcap, H, G, K, D, P,
    BP: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    sink_q_ptr, sink_k_ptr, sink_v_ptr, sink_mask_ptr, seen_ptr, S,
):  # fmt: skip
    """Window attention (BD,) of one head over the slots, the sinks and the token itself, and the
    logsumexp of its logits; moves the slots."""
    x, d = tl.arange(0, BK), tl.arange(0, BD)
    g = h // (H // G)
    leads = h % (H // G) == 0
    first = h == 0
    q = tl.load(local_q_ptr + (b * H + h) * K + x, mask=x < K, other=0.0).to(tl.float32)
    own_k = tl.load(local_k_ptr + (b * G + g) * K + x, mask=x < K, other=0.0)
    own_v = tl.load(v_ptr + (b * G + g) * D + d, mask=d < D, other=0.0)
    newest = ((b + 1) * P - 1) * G + g
    fits = leads & (P > 0)
    tl.store(keys1_ptr + newest * K + x, own_k.to(keys1_ptr.dtype.element_ty), mask=(x < K) & fits)
    at = values1_ptr + newest * D + d
    tl.store(at, own_v.to(values1_ptr.dtype.element_ty), mask=(d < D) & fits)
    tl.store(slots1_ptr + (b + 1) * P - 1, real.to(tl.uint8), mask=first & (P > 0))
    own_k = tl.where(real, own_k.to(tl.float32), 0.0)
    top = tl.where(real, capped(tl.sum(q * own_k, 0) * scale, softcap), float("-inf"))
    total = tl.where(real, 1.0, 0.0)
    mixed = tl.where(real, own_v.to(tl.float32), 0.0)
    for p0 in tl.range(0, P, BP):
        p = p0 + tl.arange(0, BP)
        slot = b * P + p
        seen = tl.load(slots_ptr + slot, mask=p < P, other=0)
        moves = (p > 0) & (p < P)
        tl.store(slots1_ptr + slot - 1, seen, mask=moves & first)
        seen = seen != 0
        at_slot = (slot * G + g)[:, None]
        inside = (p < P)[:, None] & (x < K)[None, :]
        keys = tl.load(keys_ptr + at_slot * K + x[None, :], mask=inside, other=0.0)
        moved = (moves & leads)[:, None]
        tl.store(keys1_ptr + (at_slot - G) * K + x[None, :], keys, mask=inside & moved)
        keys = tl.where(seen[:, None], keys.to(tl.float32), 0.0)
        logits = capped(tl.sum(keys * q[None, :], 1) * scale, softcap)
        logits = tl.where(seen, logits, float("-inf"))
        inside = (p < P)[:, None] & (d < D)[None, :]
        values = tl.load(values_ptr + at_slot * D + d[None, :], mask=inside, other=0.0)
        tl.store(values1_ptr + (at_slot - G) * D + d[None, :], values, mask=inside & moved)
        values = tl.where(seen[:, None], values.to(tl.float32), 0.0)
        higher = tl.maximum(top, tl.max(logits, 0))
        weights = tl.exp(logits - finite(higher))
        kept = tl.exp(top - finite(higher))
        total = total * kept + tl.sum(weights, 0)
        mixed = mixed * kept + tl.sum(weights[:, None] * values, 0)
        top = higher
    if sink_q_ptr is not None:
        q = tl.load(sink_q_ptr + (b * H + h) * K + x, mask=x < K, other=0.0).to(tl.float32)
        gone = tl.load(seen_ptr + b)
        for s0 in tl.range(0, S, BP):
            s = s0 + tl.arange(0, BP)
            seen = tl.load(sink_mask_ptr + b * S + s, mask=s < S, other=0) != 0
            seen = seen & (s < gone)
            at_sink = ((b * S + s) * G + g)[:, None]
            inside = seen[:, None] & (x < K)[None, :]
            keys = tl.load(sink_k_ptr + at_sink * K + x[None, :], mask=inside, other=0.0)
            logits = capped(tl.sum(keys.to(tl.float32) * q[None, :], 1) * scale, softcap)
            logits = tl.where(seen, logits, float("-inf"))
            inside = seen[:, None] & (d < D)[None, :]
            values = tl.load(sink_v_ptr + at_sink * D + d[None, :], mask=inside, other=0.0)
            higher = tl.maximum(top, tl.max(logits, 0))
            weights = tl.exp(logits - finite(higher))
            kept = tl.exp(top - finite(higher))
            total = total * kept + tl.sum(weights, 0)
            mixed = mixed * kept + tl.sum(weights[:, None] * values.to(tl.float32), 0)
            top = higher
    return mixed * inverse(total), log_mass_of(top, total)


@triton.jit
def move_pending(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, keys1_ptr, values1_ptr, slots1_ptr,
    b, h, real, H, G, L, D, W,
    BS: tl.constexpr, BL: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Move the pending sources (B, W, ...) by one slot, and put the token into the last slot.

    Each head moves its latent keys. The first head of a group moves the group's values, and the
    first of all heads moves the flags.
    """
    d = tl.arange(0, BD)
    g, leads = h // (H // G), h % (H // G) == 0
    v = tl.load(v_ptr + (b * G + g) * D + d, mask=d < D, other=0.0)
    newest = values1_ptr + ((b * W + W - 1) * G + g) * D + d
    tl.store(newest, v.to(values1_ptr.dtype.element_ty), mask=(d < D) & leads)
    tl.store(slots1_ptr + b * W + W - 1, real.to(tl.uint8), mask=h == 0)
    for p0 in tl.range(1, W, BP):
        p = p0 + tl.arange(0, BP)
        slot = b * W + p
        seen = tl.load(slots_ptr + slot, mask=p < W, other=0)
        tl.store(slots1_ptr + slot - 1, seen, mask=(p < W) & (h == 0))
        inside = ((p < W) & leads)[:, None] & (d < D)[None, :]
        at = (slot * G + g)[:, None] * D + d[None, :]
        values = tl.load(values_ptr + at, mask=inside, other=0.0)
        tl.store(values1_ptr + at - G * D, values, mask=inside)
    for l0 in tl.range(0, L, BL):
        x = l0 + tl.arange(0, BL)
        k = tl.load(k_ptr + (b * H + h) * L + x, mask=x < L, other=0.0)
        own = keys1_ptr + ((b * W + W - 1) * H + h) * L + x
        tl.store(own, k.to(keys1_ptr.dtype.element_ty), mask=x < L)
        for p0 in tl.range(1, W, BS):
            p = p0 + tl.arange(0, BS)
            inside = (p < W)[:, None] & (x < L)[None, :]
            moved = ((b * W + p) * H + h)[:, None] * L + x[None, :]
            keys = tl.load(keys_ptr + moved, mask=inside, other=0.0)
            tl.store(keys1_ptr + moved - H * L, keys, mask=inside)


@triton.jit
def step(
    latent_q_ptr, latent_k_ptr, local_q_ptr, local_k_ptr, v_ptr, mask_ptr,
    log_mass_ptr, mean_ptr, keys_ptr, values_ptr, slots_ptr,
    out_ptr, log_mass1_ptr, mean1_ptr, keys1_ptr, values1_ptr, slots1_ptr,
    scale, softcap, H, G, L, K, D, P,
    WINDOW: tl.constexpr, BQ: tl.constexpr, BL: tl.constexpr, BP: tl.constexpr,
    BK: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, g_ptr=None,
    sink_q_ptr=None, sink_k_ptr=None, sink_v_ptr=None, sink_mask_ptr=None, seen_ptr=None, S=None,
    pending_k_ptr=None, pending_v_ptr=None, pending_mask_ptr=None,
    pending_k1_ptr=None, pending_v1_ptr=None, pending_mask1_ptr=None,
    JOINT: tl.constexpr = False,
):  # fmt: skip
    """y (B, H, D) and the state after the token; all tensors are contiguous."""
    i = tl.program_id(0).to(tl.int64)
    b, h = i // H, i % H
    real = i >= 0
    if mask_ptr is not None:
        real = tl.load(mask_ptr + b) != 0
    n = L + WINDOW
    c = tl.arange(0, BQ)
    q = tl.load(latent_q_ptr + i * n + c, mask=c < n, other=float("-inf")).to(tl.float32)
    if WINDOW:
        local, window_mass = attend(
            local_q_ptr, local_k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr,
            keys1_ptr, values1_ptr, slots1_ptr,
            b, h, real, scale, softcap, H, G, K, D, P, BP, BK, BD,
            sink_q_ptr, sink_k_ptr, sink_v_ptr, sink_mask_ptr, seen_ptr, S,
        )  # fmt: skip
        own = tl.load(latent_q_ptr + i * n).to(tl.float32)
        if JOINT:
            own += window_mass
            q = tl.where(c == 0, own, q)
    q_top = tl.max(q, 0)
    q_mass = tl.sum(tl.exp(q - q_top), 0)
    d = tl.arange(0, BD)
    y = tl.zeros((BD,), tl.float32)
    source_k_ptr, source_v_ptr, arrives = latent_k_ptr + i * L, v_ptr + b * G * D, real
    if WINDOW:
        p_window = tl.exp(own - q_top) / q_mass
        if pending_k_ptr is None:
            y += p_window * local
        else:
            W = P + 1
            move_pending(
                latent_k_ptr, v_ptr, pending_k_ptr, pending_v_ptr, pending_mask_ptr,
                pending_k1_ptr, pending_v1_ptr, pending_mask1_ptr,
                b, h, real, H, G, L, D, W, BS, BL, BP, BD,
            )  # fmt: skip
            source_k_ptr = pending_k_ptr + (b * W * H + h) * L
            source_v_ptr = pending_v_ptr + b * W * G * D
            arrives = tl.load(pending_mask_ptr + b * W) != 0
    begun = 0
    v = tl.load(source_v_ptr + h // (H // G) * D + d, mask=d < D, other=0.0).to(tl.float32)
    v = tl.where(arrives, v, 0.0)
    for l0 in tl.range(0, L, BL):
        x = l0 + tl.arange(0, BL)
        inside = (x < L)[:, None] & (d < D)[None, :]
        A = tl.load(log_mass_ptr + i * L + x, mask=x < L, other=0.0)
        if g_ptr is not None:
            A += tl.load(g_ptr + i * L + x, mask=x < L, other=0.0)
        k = tl.load(source_k_ptr + x, mask=x < L, other=0.0).to(tl.float32)
        k = tl.where(arrives, k, float("-inf"))
        top = tl.maximum(A, k)
        old, new = tl.exp(A - finite(top)), tl.exp(k - finite(top))
        mass = old + new
        # The larger of the two is exactly 1, or both are 0.
        after = tl.where(mass == 0.0, float("-inf"), top + log1p_of_share(at_most(old, new)))
        tl.store(log_mass1_ptr + i * L + x, after, mask=x < L)
        at = (i * L + x)[:, None] * D + d[None, :]
        mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
        mean = (old * inverse(mass))[:, None] * mean + (new * inverse(mass))[:, None] * v[None, :]
        tl.store(mean1_ptr + at, mean, mask=inside)
        p = tl.load(latent_q_ptr + i * n + WINDOW + x, mask=x < L, other=float("-inf"))
        p = tl.exp(p.to(tl.float32) - q_top) / q_mass
        y += tl.sum(p[:, None] * mean, 0)
        if pending_k_ptr is not None:
            begun = tl.maximum(begun, tl.max(((x < L) & (mass != 0.0)).to(tl.int32), 0))
    if pending_k_ptr is not None:
        y += tl.where(begun == 1, p_window, 1.0) * local
    tl.store(out_ptr + i * D + d, y.to(out_ptr.dtype.element_ty), mask=d < D)
