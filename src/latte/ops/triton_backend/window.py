"""Softmax over a sliding window on kernels, alone or as state 0 of Latte; gradients in closed form.

In the forward pass, one program computes a chunk of outputs of one head, or one tile of them if
values are wide: :func:`attend` (softmax.py). Beside latents, the window's share of each token,
``gate`` = p(0|t), is saved. Backward, with w_ts the softmax over the window, p_t its share (1
without latents) and delta_t = <dy_t, SWA_t> = sum_s w_ts <dy_t, v_s>:

    dlogit_ts = p_t w_ts (<dy_t, v_s> - delta_t)
    dv_s      = sum_t p_t w_ts dy_t, and what the latents add

1. ``window_query_gradients``: each token's largest logit, mass and delta, then dq. It goes over the
   chunks of keys that a chunk of queries sees.
2. ``window_source_gradients``: dk and dv of a chunk of keys, from all queries that see it, so no
   sums between programs are needed. A second launch computes those of the earlier state's keys.

The weights are computed again from the inputs. The sums of the forward pass would not do: a product
of another shape may round a logit of 15,000 differently, and e^0.001 is not 1.

If window and latents share one softmax, dlogit_ts has the delta of the whole mixture, which the
latents' walk computes. Step 1 is then two launches, one before that walk and one after it.
Gradients of sinks are in sinks.py.

Shape suffixes: B batch, T tokens, H query heads, G key heads, R = H / G, L latents, K key width,
D value width, N sequences, P keys of the earlier state, C tokens of a chunk, queries or keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops import arguments
from latte.ops.arguments import WINDOW_GRADIENTS, Earlier
from latte.ops.custom_ops import differentiable_op, empty_gradients
from latte.ops.state import SeenSinks
from latte.ops.triton_backend.launch import (
    FARTHEST_TOKENS, SINK_SUMS, capability, contiguous, launch, readable, registers,
    window_tiles,
)  # fmt: skip
from latte.ops.triton_backend.segments import ChunkLauncher
from latte.ops.triton_backend.sinks import add_sinks, sink_gradients
from latte.ops.triton_backend.softmax import (
    SINKS_AT_ONCE, attend, chunk_logits, keys_at, load_chunk, sink_logits, softmax_step,
    store_chunk, unit_of, value_products, window_weights,
)  # fmt: skip
from latte.ops.triton_backend.tiles import (
    SIZES, finite, first_token, inverse, load_keys, load_latents, load_mixture, load_numbers,
    load_state, mm, place, store_numbers, store_tile,
)  # fmt: skip


def forward(x: arguments.Window) -> Tensor:
    """Outputs."""
    w = Window.of(x)
    run = WindowLauncher(x.q, None, w, x.cu_seqlens)
    out = x.q.new_empty((*x.q.shape[:3], run.D))
    run.outputs(unit_stride(x.q), None, None, out, None)
    return out


def token_buffers(q: Tensor, count: int) -> tuple[Tensor, ...]:
    """Empty fp32 buffers (B, T, H)."""
    return tuple(q.new_empty(tuple(q.shape[:3]), dtype=torch.float32) for _ in range(count))


def backward(x: arguments.Window, dout: Tensor) -> dict[str, Tensor]:
    """Gradients of queries, keys and values, those of the earlier state and the sinks included."""
    w = Window.of(x)
    run = WindowLauncher(x.q, None, w, x.cu_seqlens)
    dq, dk, dv, *dtail = empty_gradients(*x.qkv, *x.tail[:2])
    tokens = top, mass, delta = token_buffers(x.q, 3)
    q, dout = unit_stride(x.q), unit_stride(dout)
    run.query_gradients(q, None, *tokens, dq, dy=dout)
    run.source_gradients(q, dout, (top, mass, None, delta), (dk, dv), dtail)
    dsinks = run.sink_gradients(dout, (top, mass, None, delta), x.k, x.v)
    return dict(zip(WINDOW_GRADIENTS, (dq, dk, dv, *dtail, *dsinks), strict=True))


window_op = differentiable_op(
    "triton_window",
    arguments.Window,
    lambda x: x.v.new_empty((*x.q.shape[:3], x.v.shape[-1])),
    forward,
    backward,
    returns=["out"],
    gradients=WINDOW_GRADIENTS,
)


class Window(NamedTuple):
    """The inputs of the window as its kernels read them: unit strides, flags as bytes."""

    k: Tensor
    v: Tensor
    mask: Tensor | None  # (B, T)
    tail: Earlier
    P: int
    reach: int  # number of keys seen before a query's own, and after it if not causal
    scale: float
    softcap: float  # 0 if there is none
    causal: bool
    sinks: SeenSinks | None  # contiguous except q, with flags as bytes

    @classmethod
    def of(cls, x: arguments.Window) -> Window:
        """The window of a call. If there is an earlier state, both masks are filled in."""
        (_, k, v), tail, key_mask = x.qkv, x.tail, x.key_mask
        B, T = k.shape[:2]
        P = 0 if tail[0] is None else tail[0].shape[1]
        if P == 0:
            tail = (None, None, None)
        elif key_mask is None:
            key_mask = k.new_ones((B, T), dtype=torch.bool)
        keys, values = contiguous(*tail[:2])
        reach = min(x.window - 1 if x.causal else x.window // 2, T - 1 + P)
        return cls(
            unit_stride(k),
            unit_stride(v),
            readable(key_mask),
            (keys, values, readable(tail[2])),
            *(P, reach, x.scale, x.softcap, x.causal),
            None if x.sinks is None else readable_sinks(x.sinks),
        )

    @property
    def far(self) -> dict[str, Any]:
        """The kernels' arguments for the sinks."""
        if self.sinks is None:
            return {}
        q, keys, values, mask, seen = self.sinks
        found = {"sink_q_ptr": q, "sink_k_ptr": keys, "sink_v_ptr": values}
        found |= {"sink_mask_ptr": mask, "seen_ptr": seen}
        named_strides = dict(zip(("sq_b", "sq_t", "sq_h"), q.stride(), strict=False))
        return {**found, **named_strides, "S": keys.shape[1]}


def readable_sinks(sinks: SeenSinks) -> SeenSinks:
    """The sinks in the form that the kernels read."""
    q, keys, values, mask, seen = sinks
    flags = readable(mask)
    assert flags is not None
    return SeenSinks(
        unit_stride(q), keys.contiguous(), values.contiguous(), flags, seen.contiguous()
    )


def unit_stride(x: Tensor) -> Tensor:
    """``x``, copied if its last dimension has a stride, or if its tokens are very far apart.

    Offsets within a chunk then fit into 32 bits.
    """
    return x if x.stride(-1) == 1 and x.stride(1) < FARTHEST_TOKENS else x.contiguous()


class WindowLauncher(ChunkLauncher):
    """Launches the kernels of the window, and of the bidirectional latents beside it."""

    def __init__(self, q: Tensor, latents: Tensor | None, w: Window, cu: Tensor | None) -> None:
        self.K, self.G = w.k.shape[-1], w.k.shape[2]
        super().__init__(q[..., :1] if latents is None else latents, w.v.shape[-1], cu, self.K)
        self.R = self.H // self.G
        card, sinks, mixed = capability(q.device), w.sinks is not None, latents is not None
        self.tiles = window_tiles(self.L, self.K, self.D, q.dtype, card, sinks, mixed)
        self.window = w

    def by_tile(
        self,
        kernel: Any,
        grid: tuple[int, int],
        width: int,
        *args: Any,
        products: tuple[str, ...],
        back: bool = False,
        **flags: Any,
    ) -> None:
        """One program per cell of the grid and tile of the width."""
        w, tiles = self.window, self.tiles
        options: dict[str, Any] = {name: self.products[name] for name in products}
        if "WIDE" in products:
            options["BL"] = self.config.BL
        launch(
            self.device,
            kernel[(*grid, -(-width // tiles.BX))],
            *(*args, w.scale, w.softcap, w.reach, w.P),
            *(self.T, self.parts.per_row, self.H, self.L, self.D),
            K=self.K,
            R=self.R,
            C=self.config.C,
            BX=tiles.BX,
            CAUSAL=w.causal,
            CAPPED=w.softcap != 0.0,
            **options,
            **flags,
            num_warps=tiles.warps_back if back else tiles.warps,
            num_stages=tiles.stages_back if back else tiles.stages,
        )

    def outputs(
        self, q: Tensor, latent_q: Tensor | None, mean: Tensor | None, *results: Tensor | None
    ) -> None:
        """The window alone, or beside bidirectional latents, whose final mean is ``mean``.

        ``latent_q`` begins with the first latent, after the window's logit.
        """
        w, parts = self.window, self.parts
        self.by_tile(
            window_outputs,
            (parts.M, self.H),
            self.D,
            *(latent_q, q, w.k, w.v, w.mask, parts.table, parts.bounds),
            *(*w.tail, mean, *results, *strides(latent_q, 4)),
            *(*strides(q, 3), *strides(w.k, 3), *strides(w.v, 3)),
            products=("WIDE", "NARROW"),
            **registers(q.dtype == torch.float32 and max(self.K, self.D) > 128),
            **w.far,
        )

    def query_gradients(
        self, q: Tensor, *rest: Tensor | None, dy: Tensor, given: bool = False
    ) -> None:
        """``rest`` are the gate, then the results: the tokens' top, mass and delta, and dq or None.

        If ``given``, only dq is computed, and the other results are inputs.
        """
        w, parts = self.window, self.parts
        self.by_tile(
            window_query_gradients,
            (parts.M, self.H),
            self.K,
            *(q, w.k, w.v, w.mask, parts.table, parts.bounds, *w.tail, dy, *rest),
            *(*strides(q, 3), *strides(w.k, 3), *strides(w.v, 3), *strides(dy, 3)),
            products=("NARROW",),
            back=True,
            GIVEN=given,
            **({} if given else w.far),
        )

    def source_gradients(
        self,
        q: Tensor,
        dy: Tensor,
        tokens: tuple[Tensor | None, ...],
        results: tuple[Tensor, Tensor],
        earlier: Sequence[Tensor],
        latents_dv: Tensor | None = None,
        bidirectional: tuple[Tensor, ...] = (),
    ) -> None:
        """dk and dv of the tokens, and of the earlier state.

        ``tokens`` are top, mass, gate and delta of each token. The latents' part of dv is
        ``latents_dv`` (B, T, H, D). With ``bidirectional`` it is computed from their keys, and from
        top, mass and the gradient of the mean of the whole sequences.
        """
        w, parts = self.window, self.parts
        latent_k, *states = bidirectional or (None,) * 4
        self._sources(
            parts.M,
            *(latent_k, latents_dv, q, w.k, w.v, w.mask, parts.table, parts.bounds),
            *(dy, *tokens, *states, *results),
            earlier=False,
        )
        if w.P:
            self._sources(
                parts.N * -(-w.P // self.config.C),
                *(None, None, q, *w.tail, None, parts.bounds),
                *(dy, *tokens, None, None, None, *earlier),
                earlier=True,
            )

    def sink_gradients(
        self, dy: Tensor, tokens: tuple[Tensor | None, ...], k: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of the sinks' queries, keys and values, empty where there are none.

        ``tokens`` are as for :meth:`source_gradients`. ``k`` and ``v`` have the sinks' dtypes.
        """
        w, parts = self.window, self.parts
        if w.sinks is None:
            return tuple(k.new_empty(0) for _ in range(3))
        dq, dk, dv = empty_gradients(*w.sinks[:3])
        S = dk.shape[1]
        sums = [
            dq.new_empty((parts.M, self.H, S, width), dtype=torch.float32)
            for width in (self.K, self.D)
        ]
        self.by_tile(
            sink_gradients,
            (parts.M, self.H),
            max(self.K, self.D),
            *(parts.table, dy, *tokens, dq, *sums, *strides(dy, 3)),
            products=("NARROW",),
            back=True,
            **w.far,
        )
        for parts_of_dx, dx in zip(sums, (dk, dv), strict=True):
            N, _, _, X = dx.shape
            grid = (N * S * self.G, -(-X // SINK_SUMS["BX"]))
            sizes = (parts.per_row, self.H, S, X)
            launch(
                self.device,
                add_sinks[grid],
                *(parts_of_dx, parts.first, dx, *sizes),
                R=self.R,
                **SINK_SUMS,
            )
        return dq, dk, dv

    def _sources(self, programs: int, *args: Tensor | None, earlier: bool) -> None:
        latent_k, _, q, k, v = args[:5]
        dy = args[8]
        self.by_tile(
            window_source_gradients,
            (programs, self.G),
            max(self.K, self.D),
            *args,
            *strides(latent_k, 4),
            *(*strides(q, 3), *strides(k, 3), *strides(v, 3), *strides(dy, 3)),
            products=("WIDE", "NARROW"),
            back=True,
            EARLIER=earlier,
        )


def strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """The first strides of a tensor that may be missing."""
    return (0,) * count if x is None else x.stride()[:count]


@triton.jit(do_not_specialize=SIZES)
def window_outputs(
    latent_q_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr, bounds_ptr,
    tail_k_ptr, tail_v_ptr, tail_mask_ptr, mean_ptr,
    out_ptr, gate_ptr,
    lq_b, lq_t, lq_h, lq_l,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    scale, softcap, reach, P,
    T, per_row, H, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BL: tl.constexpr, BX: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
    sink_q_ptr=None, sink_k_ptr=None, sink_v_ptr=None, sink_mask_ptr=None, seen_ptr=None,
    sq_b=None, sq_t=None, sq_h=None, S=None,
):  # fmt: skip
    """SWA_t, contiguous; beside bidirectional latents y_t = p(0|t) SWA_t + sum_l p(l|t) mu[l].

    ``latent_q_ptr`` points to the first latent's logit, after the window's. ``mean_ptr`` points to
    mu (N, H, L, D).
    """
    m, h, d0 = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    leads = tl.program_id(2) == 0
    batch, start, stop, sequence = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        return
    begin = first_token(bounds_ptr, sequence)
    q_ptr += batch * q_b + start * q_t + h * q_h
    k_ptr += batch * k_b + h // R * k_h
    v_ptr += batch * v_b + h // R * v_h
    if mask_ptr is not None:
        mask_ptr += batch * T
    if tail_k_ptr is not None:
        tail_k_ptr += (sequence * P * (H // R) + h // R) * K
        tail_v_ptr += (sequence * P * (H // R) + h // R) * D
        tail_mask_ptr += sequence * P
    if sink_q_ptr is not None:
        sink_q_ptr += batch * sq_b + h * sq_h
        sink_k_ptr += (sequence * S * (H // R) + h // R) * K
        sink_v_ptr += (sequence * S * (H // R) + h // R) * D
        sink_mask_ptr += sequence * S
        seen_ptr += batch * T
    queries = tl.minimum(stop - start, C).to(tl.int32)
    _, mass, w, kept, y = attend(
        q_ptr, q_t, queries, k_ptr, k_t, v_ptr, v_t, mask_ptr,
        tail_k_ptr, tail_v_ptr, tail_mask_ptr, P, H // R,
        start, begin, stop, d0, reach, scale, softcap,
        D, K, C, BX, NARROW, CAUSAL, CAPPED,
        sink_q_ptr, sq_t, sink_k_ptr, sink_v_ptr, sink_mask_ptr, seen_ptr, S,
    )  # fmt: skip
    share = inverse(mass)
    if latent_q_ptr is not None:
        latent_q_ptr += batch * lq_b + h * lq_h
        p, gate = load_mixture(latent_q_ptr, lq_t, lq_l, start, stop, L, C, BL)
        if leads:
            store_numbers(gate_ptr, batch, h, start, stop, T, H, gate, C)
        share *= gate
    w *= share[:, None]
    y *= (kept * share)[:, None]
    if latent_q_ptr is not None:
        y += mm(p, load_state(mean_ptr, sequence * H + h, L, D, d0, BL, BX), WIDE)
    v = load_chunk(v_ptr + start * v_t, v_t, 0, queries, d0, D, C, BX)
    y += mm(w, v, NARROW)
    store_tile(out_ptr + batch * T * H * D + h * D, H * D, 1, start, stop, d0, D, y, C, BX)


@triton.jit(do_not_specialize=SIZES)
def window_query_gradients(
    q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr, bounds_ptr, tail_k_ptr, tail_v_ptr, tail_mask_ptr,
    dy_ptr, gate_ptr, token_top_ptr, token_mass_ptr, delta_ptr, dq_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, dy_b, dy_t, dy_h,
    scale, softcap, reach, P,
    T, per_row, H, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, GIVEN: tl.constexpr = False,
    sink_q_ptr=None, sink_k_ptr=None, sink_v_ptr=None, sink_mask_ptr=None, seen_ptr=None,
    sq_b=None, sq_t=None, sq_h=None, S=None,
):  # fmt: skip
    """Each token's top, mass and delta (B, T, H); dq. One program per chunk, head and tile of K.

    ``dq_ptr`` is None if dq is not wanted. With ``GIVEN`` top, mass and delta are inputs.
    """
    m, h, x0 = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    batch, start, stop, sequence = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        return
    begin = first_token(bounds_ptr, sequence)
    q_ptr += batch * q_b + start * q_t + h * q_h
    k_ptr += batch * k_b + h // R * k_h
    v_ptr += batch * v_b + h // R * v_h
    dy_ptr += batch * dy_b + start * dy_t + h * dy_h
    if mask_ptr is not None:
        mask_ptr += batch * T
    if tail_k_ptr is not None:
        tail_k_ptr += (sequence * P * (H // R) + h // R) * K
        tail_v_ptr += (sequence * P * (H // R) + h // R) * D
        tail_mask_ptr += sequence * P
    if sink_q_ptr is not None:
        sink_q_ptr += batch * sq_b + h * sq_h
        sink_k_ptr += (sequence * S * (H // R) + h // R) * K
        sink_v_ptr += (sequence * S * (H // R) + h // R) * D
        sink_mask_ptr += sequence * S
        seen_ptr += batch * T
    queries = tl.minimum(stop - start, C).to(tl.int32)
    chunks = tl.cdiv(reach, C)
    before = tl.minimum(chunks, tl.cdiv(start - begin + P, C)).to(tl.int32)
    after = 0 if CAUSAL else tl.minimum(chunks, tl.cdiv(stop - start, C) - 1).to(tl.int32)
    unit = unit_of(scale, softcap, CAPPED)
    q = load_chunk(q_ptr, q_t, 0, queries, 0, K, C, BX)
    if GIVEN:
        top = load_numbers(token_top_ptr, batch, h, start, stop, T, H, C)
        mass = load_numbers(token_mass_ptr, batch, h, start, stop, T, H, C)
        delta = load_numbers(delta_ptr, batch, h, start, stop, T, H, C)
    else:
        top = tl.full((C,), float("-inf"), tl.float32)
        mass = tl.zeros((C,), tl.float32)
        delta = tl.zeros((C,), tl.float32)
        if sink_q_ptr is not None:
            v_step = H // R * D
            for s0 in tl.range(0, S, SINKS_AT_ONCE, num_stages=1):
                logits, _ = sink_logits(
                    sink_q_ptr + start * sq_t, sq_t, queries, sink_k_ptr, H // R * K, sink_mask_ptr,
                    seen_ptr + start, s0, S, scale, softcap, K, C, BX, NARROW, CAPPED,
                )  # fmt: skip
                products = value_products(
                    dy_ptr, dy_t, queries, sink_v_ptr + s0 * v_step, v_step, 0, S - s0,
                    D, C, SINKS_AT_ONCE, BX, NARROW,
                )  # fmt: skip
                top, mass, kept, w = softmax_step(top, mass, logits, unit)
                delta = delta * kept + tl.sum(w * products, 1)
        for j in range(0, before + after + 1):
            off = (j - before) * C
            logits, _, first, last = chunk_logits(
                q, q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, tail_k_ptr, H // R * K,
                tail_mask_ptr, P,
                start + off, begin, stop, off, reach, scale, softcap,
                K, C, BX, NARROW, CAUSAL, CAPPED,
            )  # fmt: skip
            at, step = keys_at(start + off, begin, v_ptr, v_t, tail_v_ptr, H // R * D, P)
            products = value_products(
                dy_ptr, dy_t, queries, at, step, first, last, D, C, C, BX, NARROW
            )
            top, mass, kept, w = softmax_step(top, mass, logits, unit)
            delta = delta * kept + tl.sum(w * products, 1)
        delta *= inverse(mass)
        if tl.program_id(2) == 0:
            store_numbers(token_top_ptr, batch, h, start, stop, T, H, top, C)
            store_numbers(token_mass_ptr, batch, h, start, stop, T, H, mass, C)
            store_numbers(delta_ptr, batch, h, start, stop, T, H, delta, C)
    if dq_ptr is not None:
        share = inverse(mass) * scale
        if gate_ptr is not None:
            share *= load_numbers(gate_ptr, batch, h, start, stop, T, H, C)
        dq = tl.zeros((C, BX), tl.float32)
        for j in range(0, before + after + 1):
            off = (j - before) * C
            logits, slope, first, last = chunk_logits(
                q, q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, tail_k_ptr, H // R * K,
                tail_mask_ptr, P,
                start + off, begin, stop, off, reach, scale, softcap,
                K, C, BX, NARROW, CAUSAL, CAPPED,
            )  # fmt: skip
            at, step = keys_at(start + off, begin, v_ptr, v_t, tail_v_ptr, H // R * D, P)
            products = value_products(
                dy_ptr, dy_t, queries, at, step, first, last, D, C, C, BX, NARROW
            )
            pulled = window_weights(logits, unit, top) * (products - delta[:, None]) * slope
            at, step = keys_at(start + off, begin, k_ptr, k_t, tail_k_ptr, H // R * K, P)
            k = load_chunk(at, step, first, last, x0, K, C, BX)
            dq += mm(pulled, k, NARROW)
        dq *= share[:, None]
        store_tile(dq_ptr + batch * T * H * K + h * K, H * K, 1, start, stop, x0, K, dq, C, BX)


@triton.jit(do_not_specialize=SIZES)
def window_source_gradients(
    latent_k_ptr, latents_dv_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr, bounds_ptr,
    dy_ptr, token_top_ptr, token_mass_ptr, gate_ptr, delta_ptr,
    top_ptr, mass_ptr, dmean_ptr, dk_ptr, dv_ptr,
    lk_b, lk_t, lk_h, lk_l,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, dy_b, dy_t, dy_h,
    scale, softcap, reach, P,
    T, per_row, H, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BL: tl.constexpr, BX: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
    EARLIER: tl.constexpr,
):  # fmt: skip
    """dk and dv, contiguous; one program per chunk of keys, key head and tile of K and of D.

    With ``EARLIER`` the keys, values, flags and gradients are those of the earlier state,
    (N, P, G, .). Otherwise P is not used, and the latents' part of dv is added. In the causal form
    this part is ``latents_dv`` (B, T, H, D). In the bidirectional form it is computed from ``top``
    and ``mass`` of the whole sequences, and the gradient of their means, ``dmean``.
    """
    m, g, x0 = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    if EARLIER:
        chunks = tl.cdiv(P, C)
        sequence = (m // chunks).to(tl.int64)
        if bounds_ptr is None:
            batch, begin, stop = sequence, sequence * 0, tl.cast(T, tl.int64)
        else:
            batch = sequence * 0
            begin, stop = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
        at = begin - (m % chunks + 1) * C
        # Position p is then p strides after these pointers, as it is for tokens.
        held = sequence
        k_ptr += (P - begin) * k_t
        v_ptr += (P - begin) * v_t
        mask_ptr += sequence * P + P - begin
        dk_ptr += (sequence * P + P - begin) * (H // R) * K
        dv_ptr += (sequence * P + P - begin) * (H // R) * D
        oldest = begin - P
    else:
        batch, at, stop, sequence = place(m, table_ptr, T, per_row, C)
        if at >= stop:
            return
        begin = first_token(bounds_ptr, sequence)
        held = batch
        if mask_ptr is not None:
            mask_ptr += batch * T
        dk_ptr += batch * T * (H // R) * K
        dv_ptr += batch * T * (H // R) * D
        oldest = begin
    k_ptr += held * k_b + g * k_h
    v_ptr += held * v_b + g * v_h
    q_ptr += batch * q_b
    dy_ptr += batch * dy_b
    # Queries are from `nearest` up to `farthest` chunks after the keys.
    farthest = tl.minimum(tl.cdiv(reach, C), tl.cdiv(stop - at, C) - 1).to(tl.int32)
    if EARLIER:
        nearest = ((begin - at) // C).to(tl.int32)
    elif CAUSAL:
        nearest = farthest * 0
    else:
        nearest = -tl.minimum(tl.cdiv(reach, C), (at - begin) // C).to(tl.int32)
    dk = tl.zeros((C, BX), tl.float32)
    dv = tl.zeros((C, BX), tl.float32)
    first, last = tl.maximum(oldest - at, 0), stop - at
    unit = unit_of(scale, softcap, CAPPED)
    if latents_dv_ptr is not None:
        for r in range(0, R):
            part_ptr = latents_dv_ptr + ((batch * T + at) * H + g * R + r) * D
            dv += load_chunk(part_ptr, H * D, first, last, x0, D, C, BX)
    if latent_k_ptr is not None:
        for r in range(0, R):
            h = g * R + r
            i = sequence * H + h
            keys_ptr = latent_k_ptr + batch * lk_b + h * lk_h
            lk = load_keys(keys_ptr, mask_ptr, lk_t, lk_l, at, stop, L, C, BL)
            top, mass = load_latents(top_ptr, i, L, BL), load_latents(mass_ptr, i, L, BL)
            worth = tl.exp(lk - finite(top)[None, :]) * inverse(mass)[None, :]
            dv += mm(worth, load_state(dmean_ptr, i, L, D, x0, BL, BX), WIDE)
    for r in range(0, R):
        h = g * R + r
        for j in range(nearest, farthest + 1):
            start = at + j * C
            queries = tl.minimum(stop - start, C).to(tl.int32)
            qs_ptr = q_ptr + start * q_t + h * q_h
            dys_ptr = dy_ptr + start * dy_t + h * dy_h
            q = load_chunk(qs_ptr, q_t, 0, queries, 0, K, C, BX)
            logits, slope, _, _ = chunk_logits(
                q, qs_ptr, q_t, queries, k_ptr, k_t, mask_ptr, None, 0, None, begin - oldest,
                at, begin, stop, -j * C, reach, scale, softcap,
                K, C, BX, NARROW, CAUSAL, CAPPED,
            )  # fmt: skip
            top = load_numbers(token_top_ptr, batch, h, start, stop, T, H, C)
            mass = load_numbers(token_mass_ptr, batch, h, start, stop, T, H, C)
            delta = load_numbers(delta_ptr, batch, h, start, stop, T, H, C)
            share = inverse(mass)
            if gate_ptr is not None:
                share *= load_numbers(gate_ptr, batch, h, start, stop, T, H, C)
            w = window_weights(logits, unit, top) * share[:, None]
            dy = load_chunk(dys_ptr, dy_t, 0, queries, x0, D, C, BX)
            dv += mm(tl.trans(w), dy, NARROW)
            products = value_products(
                dys_ptr, dy_t, queries, v_ptr + at * v_t, v_t, first, last, D, C, C, BX, NARROW
            )
            pulled = w * (products - delta[:, None]) * slope
            q = load_chunk(qs_ptr, q_t, 0, queries, x0, K, C, BX)
            dk += mm(tl.trans(pulled), q, NARROW)
    dk *= scale
    step = H // R * K
    store_chunk(dk_ptr + at * step + g * K, step, first, last, x0, K, dk, C, BX)
    step = H // R * D
    store_chunk(dv_ptr + at * step + g * D, step, first, last, x0, D, dv, C, BX)
