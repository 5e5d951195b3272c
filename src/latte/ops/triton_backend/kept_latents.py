"""The latents beside kept tokens, on kernels: what each block's queries see of them; gradients.

At a block's update the latents read at most C sources, and all queries of the block see the same
means. So an update is a segment of the scans of segments.py:

1. ``late_sums``: maximum, mass and weighted sum of values of the sources that an update reads.
2. ``scan``: the state before each part; then its gradient, by ``scan_back``.
3. ``late_gradients``: those of the sources, which the latents read once.

A *part* is an update, and one more at the end of each sequence, which reads nothing: the state that
a block sees is the one before the part that follows its update.

Places are rows of a table of all slots and groups, (B S G, ...), as in torch_backend/kept_plan.py.

Shape suffixes: B batch, N sequences, S slots, Z blocks of C queries, M parts, H query heads, G
key/value heads, R = H / G, L latents, D value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.torch_backend.kept import KeptCall
from latte.ops.triton_backend.launch import ByChunk, WindowTiles, contiguous, launch
from latte.ops.triton_backend.segments import Launcher, Parts, scan, scan_back
from latte.ops.triton_backend.tiles import (
    factor, finite, inverse, load_latents, load_state, mm, power, store_latents, store_state,
)  # fmt: skip

# Numbers that depend on the length: kernels are not compiled again for them.
SIZES = ["S", "Z", "front"]


class Tables(NamedTuple):
    """The parts of all sequences. Nothing here waits for a GPU."""

    parts: Parts
    block: Tensor  # (M,) int64: row and block, b Z + z, of each part; -1 for none
    part: Tensor  # (B Z,) int64: the part of each block

    @classmethod
    def of(cls, x: KeptCall) -> Tables:
        """The parts of a call."""
        B, Z, _, _ = x.shape
        device = x.q.device
        if x.age is None or x.ends is None:
            M, at = B * (Z + 1), torch.arange(B * (Z + 1), device=device)
            block = torch.where(at % (Z + 1) < Z, at - at // (Z + 1), -1)
            every = torch.arange(B * Z, device=device)
            return cls(Parts(M, B, Z + 1, None, None, None), block, every + every // Z)
        N = len(x.ends)
        own = torch.arange(1, N + 1, device=device)
        blocks = x.ends.cummax(0).values + 1  # of each sequence and those before it
        first = torch.cat([own.new_zeros(1), blocks + own])
        at, z = torch.arange(Z + N, device=device), torch.arange(Z, device=device)
        n = torch.bucketize(at, first[1:], right=True).clamp(max=N - 1)
        block = torch.where(at < first[n + 1] - 1, at - n, -1)
        part = z + torch.bucketize(z, blocks, right=True).clamp(max=N - 1)
        return cls(Parts(Z + N, N, 0, None, first, None), block, part)


class LateLatents(Launcher):
    """The latents of a call, forward and backward."""

    def __init__(
        self, x: KeptCall, tables: Tables, config: ByChunk, tiles: WindowTiles, *products: str
    ) -> None:
        assert x.latent_k is not None
        super().__init__(x.latent_k, x.v.shape[-1], tables.parts)
        self.x, self.tables, self.config, self.BX = x, tables, config, tiles.BX
        self.warps, self.R = max(config.warps, tiles.warps), x.shape[3]
        self.wide, self.narrow = products

    @property
    def falls(self) -> bool:
        """Whether latents forget."""
        return self.x.lost is not None

    def buffers(self) -> tuple[Tensor, ...]:
        """Empty (top, mass, mean) before each part, the final (top, mass), log-mass and mean.

        The last one is the log-decay of each part, without numbers if latents do not forget.
        """
        parts = self.parts
        before = self.states(self.x.v)
        top = before[0].new_empty((parts.N, self.H, self.L))
        finals = top, torch.empty_like(top), torch.empty_like(top)
        mean = top.new_empty((*top.shape, self.D))
        fall = torch.empty_like(before[0]) if self.falls else top.new_empty(0)
        return *before, *finals, mean, fall

    def forward(self, buffers: tuple[Tensor, ...]) -> None:
        """Write :meth:`buffers`."""
        x, sums = self.x, self.states(self.x.v)
        *results, fall = buffers
        given = {
            "PRODUCT": self.narrow,
            "num_warps": self.warps,
            "fall_ptr": fall if self.falls else None,
        }
        self.by_place(late_sums, self.H, *sums, **given)
        earlier = contiguous(x.log_mass, x.mean)
        self.by_sequence(scan, *sums, self.parts.first, *earlier, *results, **self.decay(fall))

    def backward(
        self,
        saved: tuple[Tensor, ...],
        asked: Tensor,
        later: tuple[Tensor, Tensor],
        results: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Add to dv, write the keys' gradient; those of the initial mean, and ``lost`` (tiles.py).

        Args:
            saved: :meth:`buffers`, without the final log-mass.
            asked: Gradient of the mean before each part by the queries that see it, (M, H, L, D).
            later: Gradients of the final log-mass and mean.
            results: dlatent_k (B, S, H, L) and dv (B, S, G, D).
        """
        top, mass, mean, top1, mass1, mean1, fall = saved
        dA, dmean1 = (y.contiguous() for y in later)
        lost, lost1 = (asked * mean).sum(-1), (dmean1 * mean1).sum(-1) - dA
        after = torch.empty_like(asked), torch.empty_like(lost)
        first = torch.empty_like(dmean1), torch.empty_like(lost1)
        given = (top, mass, asked, lost, self.parts.first, top1, mass1, dmean1, lost1)
        self.by_sequence(scan_back, *given, *after, *first, **self.decay(fall))
        late = (top, mass, *after, *results)
        options = {"PRODUCT": self.wide, "num_warps": self.warps_back(self.warps)}
        self.by_place(late_gradients, self.H // self.R, *late, **options)
        return first

    def decay(self, fall: Tensor) -> dict[str, Any]:
        """The scans' argument for latents that forget."""
        return {"fall_ptr": fall} if self.falls else {}

    def by_place(self, kernel: Any, heads: int, *args: Tensor | None, **more: Any) -> None:
        """One program per part, head and tile of the value width."""
        x, (_, Z, G, R) = self.x, self.x.shape
        assert x.latent_k is not None
        launch(
            self.device,
            kernel[(self.parts.M, heads, -(-self.D // self.BX))],
            *(x.latent_k.contiguous(), x.v.contiguous(), x.late, x.late_there.view(torch.uint8)),
            *(None if x.lost is None else x.lost.contiguous(), self.tables.block, *args),
            *(Z, x.block, G, self.L, self.D),
            R=R,
            C=self.config.C,
            BL=self.config.BL,
            BX=self.BX,
            num_stages=1,
            **more,
        )


@triton.jit
def load_rows(ptr, row, there, x0, X, BX: tl.constexpr):
    """Rows (C, BX) in fp32 of a contiguous table (., X); zeros where there is none."""
    x = x0 + tl.arange(0, BX)
    at = ptr + row[:, None] * X + x[None, :]
    return tl.load(at, mask=there[:, None] & (x < X)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, row, there, x0, X, value, BX: tl.constexpr):
    """Write (C, BX) to where :func:`load_rows` reads."""
    x = x0 + tl.arange(0, BX)
    at = ptr + row[:, None] * X + x[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=there[:, None] & (x < X)[None, :])


@triton.jit
def load_places(late_ptr, there_ptr, i, c0, block, C: tl.constexpr):
    """Places (C,) of what the i-th update reads, from its ``c0``-th source on; which there are."""
    c = c0 + tl.arange(0, C)
    there = tl.load(there_ptr + i * block + c, mask=c < block, other=0) != 0
    return tl.load(late_ptr + i * block + c, mask=there, other=0), there


@triton.jit
def load_late(latent_k_ptr, row, there, lost_ptr, i, L, BL: tl.constexpr):
    """Logits (C, BL) of these rows at the update: -inf if there is none, 0 for padded latents.

    With latents that forget, keys and ``lost`` are in fp64, because their sums are large.
    """
    x = tl.arange(0, BL)
    at = latent_k_ptr + row[:, None] * L + x[None, :]
    k = tl.load(at, mask=there[:, None] & (x < L)[None, :], other=0.0)
    if lost_ptr is not None:
        k += tl.load(lost_ptr + i * L + x, mask=x < L, other=0.0)[None, :]
    return tl.where(there[:, None] | (x >= L)[None, :], k.to(tl.float32), float("-inf"))


@triton.jit(do_not_specialize=SIZES)
def late_sums(
    latent_k_ptr, v_ptr, late_ptr, there_ptr, lost_ptr, block_ptr,
    top_ptr, mass_ptr, sum_ptr,
    Z, block, G, L, D,
    R: tl.constexpr, C: tl.constexpr, BL: tl.constexpr, BX: tl.constexpr, PRODUCT: tl.constexpr,
    fall_ptr=None,
):  # fmt: skip
    """(M, H, L) twice and (M, H, L, D): top, mass and sum_s exp(k_s - top) v_s of each part.

    ``fall`` (M, H, L) is the log-decay since the update before it.
    """
    m, h, d0 = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BX
    H = G * R
    i = m * H + h
    top = tl.full((BL,), float("-inf"), tl.float32)
    mass = tl.zeros((BL,), tl.float32)
    total = tl.zeros((BL, BX), tl.float32)
    fall = tl.zeros((BL,), tl.float32)
    bz = tl.load(block_ptr + m)
    if bz >= 0:
        b, z = bz // Z, bz % Z
        if lost_ptr is not None:
            x = tl.arange(0, BL)
            now = tl.load(lost_ptr + (bz * H + h) * L + x, mask=x < L, other=0.0)
            last = tl.load(lost_ptr + ((bz - 1) * H + h) * L + x, mask=(x < L) & (z > 0), other=0.0)
            fall = (now - last).to(tl.float32)
        for c0 in tl.range(0, block, C):
            row, there = load_places(late_ptr, there_ptr, (b * G + h // R) * Z + z, c0, block, C)
            k = load_late(latent_k_ptr, row * R + h % R, there, lost_ptr, bz * H + h, L, BL)
            v = load_rows(v_ptr, row, there, d0, D, BX)
            later = tl.maximum(top, tl.max(k, 0))
            kept = power(top - finite(later))
            e = factor(power(k - finite(later)[None, :]), PRODUCT)
            mass = mass * kept + tl.sum(e.to(tl.float32), 0)
            total = total * kept[:, None] + mm(tl.trans(e), v, PRODUCT)
            top = later
    if d0 == 0:
        store_latents(top_ptr, i, L, top, BL)
        store_latents(mass_ptr, i, L, mass, BL)
        if fall_ptr is not None:
            store_latents(fall_ptr, i, L, fall, BL)
    store_state(sum_ptr, i, L, D, d0, total, BL, BX)


@triton.jit(do_not_specialize=SIZES)
def late_gradients(
    latent_k_ptr, v_ptr, late_ptr, there_ptr, lost_ptr, block_ptr,
    top_ptr, mass_ptr, dmean_ptr, dmass_ptr, dk_ptr, dv_ptr,
    Z, block, G, L, D,
    R: tl.constexpr, C: tl.constexpr, BL: tl.constexpr, BX: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """dlatent_k (B, S, H, L) of what each part reads; what this adds to dv (B, S, G, D), in fp32.

    ``dmean`` and ``dmass`` are the gradient of the state after each part, as ``scan_back`` gives
    it. Each source is read once, so no two programs write to one place.
    """
    m, g, d0 = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BX
    bz = tl.load(block_ptr + m)
    if bz < 0:
        return
    b, z = bz // Z, bz % Z
    for c0 in tl.range(0, block, C):
        row, there = load_places(late_ptr, there_ptr, (b * G + g) * Z + z, c0, block, C)
        dv = load_rows(dv_ptr, row, there, d0, D, BX)
        for r in range(0, R):
            h = g * R + r
            i = m * G * R + h
            # The state after this part is the one before the next.
            top, mass = (
                load_latents(top_ptr, i + G * R, L, BL),
                load_latents(mass_ptr, i + G * R, L, BL),
            )
            k = load_late(latent_k_ptr, row * R + r, there, lost_ptr, bz * G * R + h, L, BL)
            w = power(k - finite(top)[None, :]) * inverse(mass)[None, :]
            dv += mm(w, load_state(dmean_ptr, i, L, D, d0, BL, BX), PRODUCT)
            if d0 == 0:
                dk = tl.zeros((C, BL), tl.float32) - load_latents(dmass_ptr, i, L, BL)[None, :]
                for e0 in range(0, D, BX):
                    dmean = load_state(dmean_ptr, i, L, D, e0, BL, BX)
                    v = load_rows(v_ptr, row, there, e0, D, BX)
                    dk += mm(v, tl.trans(dmean), PRODUCT)
                store_rows(dk_ptr, row * R + r, there, 0, L, w * dk, BL)
        store_rows(dv_ptr, row, there, d0, D, dv, BX)
