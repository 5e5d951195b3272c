"""Kept tokens on kernels: softmax over the exact keys of a block and its latents, and gradients.

All queries of a block read the same keys: the window's, from the lowest slot that the block sees up
to their own, then kept tokens, whose rows are gathered. Sinks have queries of their own. The
latents are as many keys more, whose values are the means after the block's update
(kept_latents.py). With p_ts the weights of this one softmax and c_t = <dy_t, y_t>:

    dlogit_ts = p_ts (<dy_t, v_s> - c_t),    dv_s = sum_t p_ts dy_t

1. ``kept_outputs``: y of a block.
2. ``kept_query_gradients``: each token's largest exact logit, share and c; gradients of all
   queries; what the block asks of the latents' means; its parts of the sinks' gradients.
3. ``kept_source_gradients``: dk and dv of a chunk of slots, from all queries whose window holds it.
   A second launch computes what each block adds for its kept tokens.
4. ``add_kept``: sums these for each source over the blocks that kept it, in a fixed order.
5. ``late_gradients``: what the latents add.

Saved for the backward pass: the inputs, and the latents before and after each update.

Shape suffixes: B batch, S slots, Z blocks of C queries, M parts, H query heads, G key/value heads,
R = H / G, L latents, J kept keys, n sinks, K key width, D value width; Q tokens of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.custom_ops import differentiable_op, empty_gradients
from latte.ops.torch_backend.kept import KeptCall
from latte.ops.triton_backend.kept_latents import (
    SIZES, LateLatents, Tables, load_rows, store_rows,
)  # fmt: skip
from latte.ops.triton_backend.launch import (
    ADD_KEPT, by_chunk, capability, launch, registers, rounding, warn_of_assembler,
    window_tiles,
)  # fmt: skip
from latte.ops.triton_backend.segments import state_gradients
from latte.ops.triton_backend.softmax import (
    load_chunk, log_mass_of_softmax, softmax_step, store_chunk, unit_of, window_weights,
)  # fmt: skip
from latte.ops.triton_backend.tiles import (
    added, inverse, load_mixture, load_numbers, load_state, load_window_logits, mm,
    store_state, tanh,
)  # fmt: skip
from latte.ops.triton_backend.window import strides, unit_stride

# A logit of the exact keys with which the latents have no share. It does not overflow when scaled.
ALL = tl.constexpr(1.0e38)
# Sinks at a time. Products over 16 by eight warps read at addresses that were never computed, as in
# launch.walking.
SINKS = tl.constexpr(32)


def forward(x: KeptCall) -> tuple[Tensor, ...]:
    """Output and the latents after the call; then what is saved of them."""
    run = KeptLauncher(x)
    out, log_mass, mean, *saved = buffers(x, run)
    if run.late is not None:
        before, top, mass, falls = saved[:3], *saved[3:5], saved[5]
        run.late.forward((*before, top, mass, log_mass, mean, falls))
    run.outputs(saved[2], out)
    return out, log_mass, mean, *saved


def buffers(x: KeptCall, run: KeptLauncher) -> tuple[Tensor, ...]:
    """Empty outputs of the op."""
    out = x.q.new_empty((*x.q.shape[:3], x.v.shape[-1]))
    if run.late is None:
        return out, *(out.new_empty(0, dtype=torch.float32) for _ in range(8))
    *before, top, mass, log_mass, mean, falls = run.late.buffers()
    return out, log_mass, mean, *before, top, mass, falls


def fake(x: KeptCall) -> tuple[Tensor, ...]:
    return buffers(x, KeptLauncher(x))


def backward(
    x: KeptCall, dout: Tensor, dA: Tensor, dmean: Tensor, mean1: Tensor, *saved: Tensor
) -> dict[str, Tensor]:
    """Gradients of the inputs."""
    run, dout = KeptLauncher(x), unit_stride(dout)
    dq, dlatent_q, dsink_q = empty_gradients(x.q, x.latent_q, x.sink_q)
    found = {"q": dq, "latent_q": dlatent_q, "sink_q": dsink_q}
    top, share, c = (x.q.new_empty(x.q.shape[:3], dtype=torch.float32) for _ in range(3))
    mean_M = saved[2]
    asked = torch.zeros_like(mean_M)
    found |= run.query_gradients(dout, mean_M, top, share, c, dq, dlatent_q, dsink_q, asked)
    dk, dv = run.source_gradients(dout, (top, share, c))
    if run.late is not None and x.latent_k is not None:
        wider = torch.promote_types(x.latent_k.dtype, torch.float32)
        dlatent_k = torch.zeros(x.latent_k.shape, dtype=wider, device=x.q.device)
        before, (top1, mass1, falls) = saved[:3], saved[3:]
        results = (*before, top1, mass1, mean1, falls)
        first = run.late.backward(results, asked, (dA, dmean), (dlatent_k, dv))
        dlog_mass, dmean_0 = state_gradients((x.log_mass, x.mean), *first)
        found |= {"latent_k": dlatent_k, "log_mass": dlog_mass, "mean": dmean_0}
    return found | {"k": dk, "v": dv}


kept_op = differentiable_op(
    "triton_kept",
    KeptCall,
    fake,
    forward,
    backward,
    returns=["out", "log_mass", "mean"],
    gradients=(
        *("q", "k", "v", "latent_q", "latent_k", "log_mass", "mean"),
        *("sink_q", "sink_k", "sink_v"),
    ),
    saves=["mean", "top_M", "mass_M", "mean_M", "top", "mass", "falls"],
)


class KeptLauncher:
    """Launches the kernels of one call."""

    def __init__(self, x: KeptCall) -> None:
        self.x, self.device = x, x.q.device
        warn_of_assembler(self.device)
        Z, K, D = x.shape[1], x.q.shape[-1], x.v.shape[-1]
        L = 1 if x.latent_q is None else x.latent_q.shape[-1] - 1
        self.K, self.D, self.L, self.front = K, D, L, x.k.shape[1] - Z * x.block
        card, sinks = capability(self.device), x.sink_q is not None
        self.config = by_chunk(L, x.q.dtype, card, K)
        self.window = window_tiles(L, K, D, x.q.dtype, card, sinks, x.latent_q is not None)
        self.C = self.config.C
        if x.q.dtype == torch.float32:
            # Larger tiles, and keys loaded ahead, do not fit into registers; 16 keys are too few
            # for four warps, which would compute the same.
            self.C, self.window = 32, self.window._replace(stages=1)
        self.Q = min(self.C, self.config.C, max(16, 1 << (x.block - 1).bit_length()))
        self.tiles = -(-x.block // self.Q)  # of a block's queries
        self.wide, self.narrow = rounding(self.config.wide), rounding(self.config.narrow)
        self.k, self.v = x.k.contiguous(), x.v.contiguous()
        self.q = unit_stride(x.q)
        self.latent_q = None if x.latent_q is None else unit_stride(x.latent_q)[..., 1:]
        self.tables, self.late = Tables.of(x), None
        if x.latent_k is not None:
            products = self.wide, self.narrow
            self.late = LateLatents(x, self.tables, self.config, self.window, *products)
        # The lowest slot that a block's queries see: (Z,).
        z = torch.arange(Z, device=self.device)
        first = torch.full_like(z, x.kept.shape[-1])
        first = first if x.age is None else self.front + (z - x.age) * x.block
        self.low = torch.maximum(self.front + z * x.block - x.window + 1, first)

    @property
    def far(self) -> dict[str, Any]:
        """The kernels' arguments for the sinks."""
        x = self.x
        if x.sink_q is None or x.sink_k is None or x.sink_v is None or x.sinks_seen is None:
            return {}
        q, shared = unit_stride(x.sink_q), x.sink_k.shape[1] == 1
        found: dict[str, Any] = {"sink_q_ptr": q, "seen_ptr": flags(x.sinks_seen)}
        found |= {"sink_k_ptr": x.sink_k.contiguous(), "sink_v_ptr": x.sink_v.contiguous()}
        found |= zip(("sq_b", "sq_t", "sq_h"), q.stride(), strict=False)
        return found | {"n": x.sink_k.shape[2], "SHARED": shared}

    def by_tile(
        self, kernel: Any, grid: tuple[int, int], width: int, *args: Any, back: bool, **more: Any
    ) -> None:
        """One program per block (or another part of the slots), head and tile of the width."""
        x, w, (_, Z, G, R) = self.x, self.window, self.x.shape
        launch(
            self.device,
            kernel[(*grid, -(-width // w.BX))],
            *(*args, self.q, self.k, self.v, flags(x.real), self.low, x.kept.contiguous()),
            *(flags(x.kept_there), *self.q.stride()[:3], x.scale, x.softcap),
            *(x.k.shape[1], Z, self.front, x.block, x.window, x.kept.shape[-1], G, self.L, self.D),
            K=self.K,
            R=R,
            Q=self.Q,
            C=self.C,
            BX=w.BX,
            NARROW=self.narrow,
            CAPPED=x.softcap != 0.0,
            num_warps=w.warps_back if back else w.warps,
            num_stages=w.stages_back if back else w.stages,
            **more,
        )

    def by_block(self, kernel: Any, per_block: int, width: int, *args: Any, **more: Any) -> None:
        """With the latents and the sinks: one program per block, or tile of it, and head."""
        x, (B, Z, _, _) = self.x, self.x.shape
        seen = (self.latent_q, flags(x.begun), self.tables.part)
        self.by_tile(
            kernel,
            (B * Z * per_block, x.q.shape[2]),
            width,
            *(*args, *seen, *strides(self.latent_q, 3)),
            BL=self.config.BL,
            WIDE=self.wide,
            TILES=self.tiles,
            **self.far,
            # For products in tf32. With tf32x3, ptxas does better without.
            **registers(self.config.BL >= 128 and x.q.dtype != torch.float32),
            **more,
        )

    def outputs(self, mean: Tensor, out: Tensor) -> None:
        """``mean`` (M, H, L, D) is the one before each part."""
        self.by_block(kept_outputs, self.tiles, self.D, mean, out, back=False)

    def query_gradients(self, dy: Tensor, mean: Tensor, *results: Tensor) -> dict[str, Tensor]:
        """Write ``results``: top, share and c of each token; dq, dlatent_q, dsink_q; asked.

        Returns the gradients of the sinks' keys and values.
        """
        x, (B, Z, G, R), dsinks = self.x, self.x.shape, []
        if x.sink_k is not None and x.sink_v is not None:
            n = x.sink_k.shape[2]
            for width in (self.K, self.D):
                parts = (B, Z, self.tiles, G, R, n, width)
                dsinks.append(dy.new_empty(parts, dtype=torch.float32))
        given = (dy, mean, *results, *(dsinks or (None, None)), *dy.stride()[:3])
        self.by_block(kept_query_gradients, 1, max(self.K, self.D), *given, back=True)
        if not dsinks or x.sink_k is None:
            return {}
        over = (1, 2, 4) if x.sink_k.shape[1] == 1 else (2, 4)
        sums = [y.sum(over, keepdim=True).squeeze((2, 4)).transpose(2, 3) for y in dsinks]
        return dict(zip(("sink_k", "sink_v"), sums, strict=True))

    def source_gradients(
        self, dy: Tensor, tokens: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """dk and dv in fp32, without what the latents add to dv."""
        x, (B, Z, G, _), J = self.x, self.x.shape, self.x.kept.shape[-1]
        widths = (self.K, self.D)
        found = [dy.new_empty((*x.k.shape[:3], X), dtype=torch.float32) for X in widths]
        parts = [dy.new_empty((B, G, Z, J, X), dtype=torch.float32) for X in widths]
        before = -(-self.front // x.block)
        for results, blocks, keys in ((found, before + Z, x.block), (parts, Z, J)):
            programs, kept = B * blocks * -(-keys // self.C), results is parts
            given = (dy, *tokens, *results, *dy.stride()[:3])
            self.by_tile(
                kept_source_gradients, (programs, G), max(widths), *given, back=True, KEPT=kept
            )
        # For each source the blocks that kept it, in their order.
        places = x.k.shape[0] * x.k.shape[1] * G
        every = torch.where(x.kept_there, x.kept, places).flatten().sort(stable=True)
        first = torch.searchsorted(every.values, torch.arange(places + 1, device=self.device))
        grid = (places, -(-max(widths) // ADD_KEPT["BX"]))
        given = (*parts, every.indices, first, *found, *widths)
        launch(self.device, add_kept[grid], *given, **ADD_KEPT)
        return found[0], found[1]


def flags(x: Tensor) -> Tensor:
    """Flags as contiguous bytes."""
    return x.contiguous().view(torch.uint8)


@triton.jit
def load_exact(
    j, near, reach, real_ptr, first_row, G, kept_ptr, there_ptr, J, C: tl.constexpr
):  # fmt: skip
    """Rows (C,) of the j-th tile of a block's exact keys; which there are; places in the window.

    The first ``near`` tiles are ``reach`` slots from the lowest on that the block sees, to whose
    flags ``real_ptr`` points. Kept tokens follow, at place 0.
    """
    i = tl.arange(0, C)
    place, number = j * C + i, (j - near) * C + i
    own, held = (j < near) & (place < reach), (j >= near) & (number < J)
    real = tl.load(real_ptr + place, mask=own, other=0)
    there = tl.load(there_ptr + number, mask=held, other=0)
    row = tl.load(kept_ptr + number, mask=held, other=0)
    row = tl.where(j < near, first_row + place.to(tl.int64) * G, row)
    return row, (real | there) != 0, tl.where(j < near, place, 0)


@triton.jit
def exact_logits(
    q, q_ptr, q_t, queries, k_ptr, row, there, seen, scale, softcap,
    K: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Logits (Q, C) of queries over these rows, to be multiplied by :func:`unit_of`.

    They are -inf where not ``seen``. ``q`` is the first tile of the queries. Also returns
    the slope of the soft cap.
    """
    logits = tl.zeros((Q, C), tl.float32)
    for k0 in tl.static_range(0, K, BX):
        k = load_rows(k_ptr, row, there, k0, K, BX)
        if k0 > 0:
            q = load_chunk(q_ptr, q_t, 0, queries, k0, K, Q, BX)
        logits += mm(q, tl.trans(k), NARROW)
    slope = tl.full((Q, C), 1.0, tl.float32)
    if CAPPED:
        logits = tanh(logits * (scale / softcap))
        slope = 1.0 - logits * logits
    return tl.where(seen, logits, float("-inf")), slope


@triton.jit
def row_products(
    dy_ptr, dy_t, queries, v_ptr, row, there,
    D: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """<dy_t, v_s> of these queries and rows, (Q, C)."""
    products = tl.zeros((Q, C), tl.float32)
    for d0 in range(0, D, BX):
        dy = load_chunk(dy_ptr, dy_t, 0, queries, d0, D, Q, BX)
        products += mm(dy, tl.trans(load_rows(v_ptr, row, there, d0, D, BX)), NARROW)
    return products


@triton.jit
def load_sinks(b, z, g, s0, Z, G, n, seen_ptr, SHARED: tl.constexpr):
    """Rows of the sinks from ``s0`` on, which there are, and which the block sees."""
    number = s0 + tl.arange(0, SINKS)
    first = b if SHARED else b * Z + z
    there = number < n
    seen = tl.load(seen_ptr + (b * Z + z) * n + number, mask=there, other=0) != 0
    return (first * n + number) * G + g, there & seen


@triton.jit
def mixture(lq_ptr, lq_t, queries, begun, top, mass, unit, L, Q: tl.constexpr, BL: tl.constexpr):
    """p(l|t) of the latents (Q, BL), and the share of the exact keys (Q,)."""
    own = load_window_logits(lq_ptr, lq_t, 1, 0, queries, Q)
    own = tl.where(begun, own + log_mass_of_softmax(top, mass, unit), ALL)
    return load_mixture(lq_ptr, lq_t, 1, 0, queries, L, Q, BL, own)


@triton.jit(do_not_specialize=SIZES)
def kept_outputs(
    mean_ptr, out_ptr, lq_ptr, begun_ptr, part_ptr, lq_b, lq_t, lq_h,
    q_ptr, k_ptr, v_ptr, real_ptr, low_ptr, kept_ptr, there_ptr, q_b, q_t, q_h, scale, softcap,
    S, Z, front, block, W, J, G, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAPPED: tl.constexpr, BL: tl.constexpr, WIDE: tl.constexpr,
    TILES: tl.constexpr,
    sink_q_ptr=None, seen_ptr=None, sink_k_ptr=None, sink_v_ptr=None,
    sq_b=None, sq_t=None, sq_h=None, n=None, SHARED: tl.constexpr = True,
):  # fmt: skip
    """y (B, Z C, H, D), contiguous. One program per tile of a block, head and tile of D.

    ``lq_ptr`` points to the first latent's logit, after that of the exact keys. ``mean_ptr`` points
    to the means before each part, (M, H, L, D).
    """
    bz, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    h, d0 = tl.program_id(1), tl.program_id(2) * BX
    b, z, g, H = bz // Z, bz % Z, h // R, G * R
    start = z * block + tile * Q
    queries = tl.minimum(block - tile * Q, Q)
    token = tl.arange(0, Q)
    out_ptr += (b * Z * block + start) * H * D + h * D
    real_ptr += b * S
    own_ptr = real_ptr + front + start + token
    alive = tl.max(tl.load(own_ptr, mask=token < queries, other=0), 0)
    if alive == 0:
        store_chunk(out_ptr, H * D, 0, queries, d0, D, tl.zeros((Q, BX), tl.float32), Q, BX)
        return
    q_ptr += b * q_b + start * q_t + h * q_h
    i = (b * G + g) * Z + z
    kept_ptr += i * J
    there_ptr += i * J
    low = tl.load(low_ptr + z)
    # The queries' places among the slots from the lowest one on.
    own = (front + start - low).to(tl.int32) + token
    reach = (front + start - low).to(tl.int32) + queries
    near = tl.cdiv(reach, C)
    unit = unit_of(scale, softcap, CAPPED)
    top = tl.full((Q,), float("-inf"), tl.float32)
    mass = tl.zeros((Q,), tl.float32)
    y = tl.zeros((Q, BX), tl.float32)
    if sink_q_ptr is not None:
        sink_q_ptr += b * sq_b + start * sq_t + h * sq_h
        far_q = load_chunk(sink_q_ptr, sq_t, 0, queries, 0, K, Q, BX)
        for s0 in tl.range(0, n, SINKS, num_stages=1, disable_licm=True):
            row, there = load_sinks(b, z, g, s0, Z, G, n, seen_ptr, SHARED)
            logits, _ = exact_logits(
                far_q, sink_q_ptr, sq_t, queries, sink_k_ptr, row, there,
                there[None, :] & (token >= 0)[:, None], scale, softcap,
                K, Q, SINKS, BX, NARROW, CAPPED,
            )  # fmt: skip
            top, mass, kept, w = softmax_step(top, mass, logits, unit)
            y = y * kept[:, None] + mm(w, load_rows(sink_v_ptr, row, there, d0, D, BX), NARROW)
    q = load_chunk(q_ptr, q_t, 0, queries, 0, K, Q, BX)
    for j in tl.range(0, near + tl.cdiv(J, C), disable_licm=True):
        row, there, at = load_exact(
            j, near, reach, real_ptr + low, (b * S + low) * G + g, G, kept_ptr, there_ptr, J, C
        )
        logits, _ = exact_logits(
            q, q_ptr, q_t, queries, k_ptr, row, there,
            there[None, :] & (at[None, :] <= own[:, None]), scale, softcap,
            K, Q, C, BX, NARROW, CAPPED,
        )  # fmt: skip
        top, mass, kept, w = softmax_step(top, mass, logits, unit)
        y = added(y * kept[:, None], mm(w, load_rows(v_ptr, row, there, d0, D, BX), NARROW))
    share = inverse(mass)
    if lq_ptr is not None:
        lq_ptr += b * lq_b + start * lq_t + h * lq_h
        begun = tl.load(begun_ptr + i) != 0
        p, gate = mixture(lq_ptr, lq_t, queries, begun, top, mass, unit, L, Q, BL)
        # The state that the block sees is the one before the part after its update.
        part = (tl.load(part_ptr + bz) + 1) * H + h
        y = y * (share * gate)[:, None]
        y += mm(p, load_state(mean_ptr, part, L, D, d0, BL, BX), WIDE)
    else:
        y = y * share[:, None]
    store_chunk(out_ptr, H * D, 0, queries, d0, D, y, Q, BX)


@triton.jit(do_not_specialize=SIZES)
def kept_query_gradients(
    dy_ptr, mean_ptr, top_ptr, share_ptr, c_ptr, dq_ptr, dlq_ptr, dsq_ptr, asked_ptr,
    dsk_ptr, dsv_ptr, dy_b, dy_t, dy_h, lq_ptr, begun_ptr, part_ptr, lq_b, lq_t, lq_h,
    q_ptr, k_ptr, v_ptr, real_ptr, low_ptr, kept_ptr, there_ptr, q_b, q_t, q_h, scale, softcap,
    S, Z, front, block, W, J, G, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAPPED: tl.constexpr, BL: tl.constexpr, WIDE: tl.constexpr,
    TILES: tl.constexpr,
    sink_q_ptr=None, seen_ptr=None, sink_k_ptr=None, sink_v_ptr=None,
    sq_b=None, sq_t=None, sq_h=None, n=None, SHARED: tl.constexpr = True,
):  # fmt: skip
    """Each token's top, share of the exact keys over their mass, and c (B, Z C, H); dq, dsink_q,
    dlatent_q; what the block asks of the latents, (M, H, L, D) by the part that follows its update;
    parts of dsink_k and dsink_v, (B, Z, TILES, H, n, .).

    One program per block, head and tile of K and of D.
    """
    bz, h, x0 = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BX
    leads = tl.program_id(2) == 0
    b, z, g, H = bz // Z, bz % Z, h // R, G * R
    first_token = b * Z * block + z * block
    token = tl.arange(0, Q)
    real_ptr += b * S
    alive = 0
    for tile in range(0, TILES):
        own = tile * Q + token
        found = tl.load(real_ptr + front + z * block + own, mask=own < block, other=0)
        alive = tl.maximum(alive, tl.max(found, 0).to(tl.int32))
    i = (b * G + g) * Z + z
    kept_ptr += i * J
    there_ptr += i * J
    low = tl.load(low_ptr + z)
    first_row = (b * S + low) * G + g
    real_ptr += low
    unit = unit_of(scale, softcap, CAPPED)
    asked = tl.zeros((BL, BX), tl.float32)
    if lq_ptr is not None:
        begun = tl.load(begun_ptr + i) != 0
        state = (tl.load(part_ptr + bz) + 1) * H + h
    for tile in range(0, TILES):
        start = z * block + tile * Q
        queries = tl.minimum(block - tile * Q, Q)
        numbers = (first_token + tile * Q + token) * H + h
        real = token < queries
        own = (front + start - low).to(tl.int32) + token
        reach = (front + start - low).to(tl.int32) + queries
        near = tl.cdiv(reach, C)
        # Blocks without tokens have zeros everywhere.
        count = tl.where(alive > 0, near + tl.cdiv(J, C), 0)
        qs_ptr = q_ptr + b * q_b + start * q_t + h * q_h
        dys_ptr = dy_ptr + b * dy_b + start * dy_t + h * dy_h
        q = load_chunk(qs_ptr, q_t, 0, queries, 0, K, Q, BX)
        top = tl.full((Q,), float("-inf"), tl.float32)
        mass = tl.zeros((Q,), tl.float32)
        delta = tl.zeros((Q,), tl.float32)
        if sink_q_ptr is not None:
            sqs_ptr = sink_q_ptr + b * sq_b + start * sq_t + h * sq_h
            far_q = load_chunk(sqs_ptr, sq_t, 0, queries, 0, K, Q, BX)
            for s0 in tl.range(0, n, SINKS, num_stages=1):
                row, there = load_sinks(b, z, g, s0, Z, G, n, seen_ptr, SHARED)
                logits, _ = exact_logits(
                    far_q, sqs_ptr, sq_t, queries, sink_k_ptr, row, there,
                    there[None, :] & real[:, None], scale, softcap,
                    K, Q, SINKS, BX, NARROW, CAPPED,
                )  # fmt: skip
                products = row_products(
                    dys_ptr, dy_t, queries, sink_v_ptr, row, there, D, Q, SINKS, BX, NARROW
                )
                top, mass, kept, w = softmax_step(top, mass, logits, unit)
                delta = delta * kept + tl.sum(w * products, 1)
        for j in range(0, count):
            row, there, at = load_exact(
                j, near, reach, real_ptr, first_row, G, kept_ptr, there_ptr, J, C
            )
            logits, _ = exact_logits(
                q, qs_ptr, q_t, queries, k_ptr, row, there,
                there[None, :] & (at[None, :] <= own[:, None]), scale, softcap,
                K, Q, C, BX, NARROW, CAPPED,
            )  # fmt: skip
            products = row_products(dys_ptr, dy_t, queries, v_ptr, row, there, D, Q, C, BX, NARROW)
            top, mass, kept, w = softmax_step(top, mass, logits, unit)
            delta = delta * kept + tl.sum(w * products, 1)
        share = inverse(mass)
        delta *= share
        c = delta
        if lq_ptr is not None:
            lqs_ptr = lq_ptr + b * lq_b + start * lq_t + h * lq_h
            p, gate = mixture(lqs_ptr, lq_t, queries, begun, top, mass, unit, L, Q, BL)
            late = tl.zeros((Q, BL), tl.float32)
            if alive > 0:
                for d0 in range(0, D, BX):
                    dy = load_chunk(dys_ptr, dy_t, 0, queries, d0, D, Q, BX)
                    mean = load_state(mean_ptr, state, L, D, d0, BL, BX)
                    late += mm(dy, tl.trans(mean), WIDE)
            late *= p
            c = gate * delta + tl.sum(late, 1)
            share *= gate
            dy = load_chunk(dys_ptr, dy_t, 0, queries, x0, D, Q, BX)
            asked += mm(tl.trans(p), dy, WIDE)
            if leads:
                out = dlq_ptr + (first_token + tile * Q) * H * (L + 1) + h * (L + 1)
                dlq = late - p * c[:, None]
                store_chunk(out + 1, H * (L + 1), 0, queries, 0, L, dlq, Q, BL)
                own_gradient = (gate * (delta - c)).to(dlq_ptr.dtype.element_ty)
                tl.store(out + token * H * (L + 1), own_gradient, mask=real)
        if leads:
            tl.store(top_ptr + numbers, top, mask=real)
            tl.store(share_ptr + numbers, share, mask=real)
            tl.store(c_ptr + numbers, c, mask=real)
        dq = tl.zeros((Q, BX), tl.float32)
        for j in range(0, count):
            row, there, at = load_exact(
                j, near, reach, real_ptr, first_row, G, kept_ptr, there_ptr, J, C
            )
            logits, slope = exact_logits(
                q, qs_ptr, q_t, queries, k_ptr, row, there,
                there[None, :] & (at[None, :] <= own[:, None]), scale, softcap,
                K, Q, C, BX, NARROW, CAPPED,
            )  # fmt: skip
            products = row_products(dys_ptr, dy_t, queries, v_ptr, row, there, D, Q, C, BX, NARROW)
            pulled = window_weights(logits, unit, top) * (products - c[:, None]) * slope
            dq += mm(pulled, load_rows(k_ptr, row, there, x0, K, BX), NARROW)
        dq *= (share * scale)[:, None]
        out = (first_token + tile * Q) * H * K + h * K
        store_chunk(dq_ptr + out, H * K, 0, queries, x0, K, dq, Q, BX)
        if sink_q_ptr is not None:
            dq = tl.zeros((Q, BX), tl.float32)
            part = ((bz * TILES + tile) * H + h) * n
            for s0 in tl.range(0, n, SINKS, num_stages=1):
                row, there = load_sinks(b, z, g, s0, Z, G, n, seen_ptr, SHARED)
                logits, slope = exact_logits(
                    far_q, sqs_ptr, sq_t, queries, sink_k_ptr, row, there,
                    there[None, :] & real[:, None], scale, softcap,
                    K, Q, SINKS, BX, NARROW, CAPPED,
                )  # fmt: skip
                products = row_products(
                    dys_ptr, dy_t, queries, sink_v_ptr, row, there, D, Q, SINKS, BX, NARROW
                )
                w = window_weights(logits, unit, top) * share[:, None]
                pulled = w * (products - c[:, None]) * slope
                dq += mm(pulled, load_rows(sink_k_ptr, row, there, x0, K, BX), NARROW)
                far = load_chunk(sqs_ptr, sq_t, 0, queries, x0, K, Q, BX)
                dk = mm(tl.trans(pulled), far, NARROW) * scale
                dy = load_chunk(dys_ptr, dy_t, 0, queries, x0, D, Q, BX)
                dv = mm(tl.trans(w), dy, NARROW)
                left = n - s0
                store_chunk(dsk_ptr + (part + s0) * K, K, 0, left, x0, K, dk, SINKS, BX)
                store_chunk(dsv_ptr + (part + s0) * D, D, 0, left, x0, D, dv, SINKS, BX)
            dq *= scale
            store_chunk(dsq_ptr + out, H * K, 0, queries, x0, K, dq, Q, BX)
    if lq_ptr is not None:
        if alive > 0:
            store_state(asked_ptr, state, L, D, x0, asked, BL, BX)


@triton.jit(do_not_specialize=SIZES)
def kept_source_gradients(
    dy_ptr, top_ptr, share_ptr, c_ptr, dk_ptr, dv_ptr, dy_b, dy_t, dy_h,
    q_ptr, k_ptr, v_ptr, real_ptr, low_ptr, kept_ptr, there_ptr, q_b, q_t, q_h, scale, softcap,
    S, Z, front, block, W, J, G, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAPPED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """dk and dv of a chunk of slots (B, S, G, .), by all queries whose window holds it.

    With ``KEPT`` what a block's queries add to those of its kept tokens, (B, G, Z, J, .). One
    program per chunk of them, key head and tile of K and of D.
    """
    m, g, x0 = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BX
    i, H, tiles = tl.arange(0, C), G * R, tl.cdiv(block, Q)
    if KEPT:
        chunks = tl.cdiv(J, C)
        bz, number = m // chunks, (m % chunks * C).to(tl.int32) + i
        b, z = bz // Z, bz % Z
        entry = ((b * G + g) * Z + z) * J + number
        wanted = number < J
        there = tl.load(there_ptr + entry, mask=wanted, other=0) != 0
        row = tl.load(kept_ptr + entry, mask=there, other=0)
        first, stop = z, z + 1
    else:
        # Chunks are of one block, so that sequences stay apart; before the first block too.
        chunks = tl.cdiv(block, C)
        before = tl.cdiv(front, block)
        all_blocks = before + Z
        b, own = m // (all_blocks * chunks), m // chunks % all_blocks - before
        number = (m % chunks * C).to(tl.int32) + i
        slot = front + own * block + number
        wanted = (number < block) & (slot >= 0)
        there = tl.load(real_ptr + b * S + slot, mask=wanted, other=0) != 0
        row = (b * S + slot) * G + g
        entry = row
        # From this block on, up to the last one whose window reaches it.
        first = tl.maximum(own, 0)
        stop = tl.minimum(Z, tl.maximum(own + 1 + (W + block - 2) // block, 0))
        base = front + own * block
    dk = tl.zeros((C, BX), tl.float32)
    dv = tl.zeros((C, BX), tl.float32)
    unit = unit_of(scale, softcap, CAPPED)
    for r in range(0, R):
        h = g * R + r
        for t in range(first * tiles, stop * tiles):
            z, tile = t // tiles, (t % tiles).to(tl.int32)
            start, end = z * block + tile * Q, z * block + block
            queries = tl.minimum(end - start, Q).to(tl.int32)
            token = tl.arange(0, Q)
            qs_ptr = q_ptr + b * q_b + start * q_t + h * q_h
            dys_ptr = dy_ptr + b * dy_b + start * dy_t + h * dy_h
            if KEPT:
                seen = there[None, :] & (token < queries)[:, None]
            else:
                low = (tl.load(low_ptr + z) - base).to(tl.int32)
                # Zeros of a block that sees none of them.
                queries = tl.where(low < block, queries, 0)
                last = ((z - own) * block).to(tl.int32) + tile * Q + token
                seen = there & (number >= low)
                seen = seen[None, :] & (number[None, :] <= last[:, None])
                seen = seen & (token < queries)[:, None]
            q = load_chunk(qs_ptr, q_t, 0, queries, 0, K, Q, BX)
            logits, slope = exact_logits(
                q, qs_ptr, q_t, queries, k_ptr, row, there, seen, scale, softcap,
                K, Q, C, BX, NARROW, CAPPED,
            )  # fmt: skip
            reached = start + queries
            top = load_numbers(top_ptr, b, h, start, reached, Z * block, H, Q)
            share = load_numbers(share_ptr, b, h, start, reached, Z * block, H, Q)
            c = load_numbers(c_ptr, b, h, start, reached, Z * block, H, Q)
            w = window_weights(logits, unit, top) * share[:, None]
            dy = load_chunk(dys_ptr, dy_t, 0, queries, x0, D, Q, BX)
            dv += mm(tl.trans(w), dy, NARROW)
            products = row_products(dys_ptr, dy_t, queries, v_ptr, row, there, D, Q, C, BX, NARROW)
            pulled = w * (products - c[:, None]) * slope
            q = load_chunk(qs_ptr, q_t, 0, queries, x0, K, Q, BX)
            dk += mm(tl.trans(pulled), q, NARROW)
    store_rows(dk_ptr, entry, wanted, x0, K, dk * scale, BX)
    store_rows(dv_ptr, entry, wanted, x0, D, dv, BX)


@triton.jit
def add_kept(
    dk_parts_ptr, dv_parts_ptr, order_ptr, first_ptr, dk_ptr, dv_ptr, K, D,
    U: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv (., K), (., D) the parts of each row, which are in ``order`` from ``first``.

    U parts at a time; one program per row and tile of K and of D.
    """
    i, x0 = tl.program_id(0).to(tl.int64), tl.program_id(1) * BX
    first, last = tl.load(first_ptr + i), tl.load(first_ptr + i + 1)
    if first == last:
        return
    row, there = i + tl.arange(0, 1), tl.full((1,), 1, tl.int1)
    dk, dv = tl.zeros((U, BX), tl.float32), tl.zeros((U, BX), tl.float32)
    for at in tl.range(first, last, U):
        number = at + tl.arange(0, U)
        entry = tl.load(order_ptr + number, mask=number < last, other=0)
        dk += load_rows(dk_parts_ptr, entry, number < last, x0, K, BX)
        dv += load_rows(dv_parts_ptr, entry, number < last, x0, D, BX)
    dk = load_rows(dk_ptr, row, there, x0, K, BX) + tl.sum(dk, 0)[None, :]
    dv = load_rows(dv_ptr, row, there, x0, D, BX) + tl.sum(dv, 0)[None, :]
    store_rows(dk_ptr, row, there, x0, K, dk, BX)
    store_rows(dv_ptr, row, there, x0, D, dv, BX)
