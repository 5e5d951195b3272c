"""Tiles of the kernels with a window, which shapes they serve, and how they are launched.

Shape suffixes: B batch, T tokens, H query heads, G key heads, L latents, K key width, D value
width, N sequences, P keys of the earlier state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.ops.buffers import without_masked
from latte.ops.state import WindowState
from latte.ops.triton_backend.launch import Launcher, configuration, unavailable
from latte.ops.triton_backend.states import readable

WIDEST_KEY = 256
FARTHEST_ROWS = 1 << 24  # elements between tokens; blocks have at most 64 of them


class WindowTiles(NamedTuple):
    """What is fixed when a kernel is compiled, beside the chunk of the latents' configuration."""

    BX: int  # tile of the key and value widths
    warps: int  # of the forward kernel
    warps_back: int  # of the backward kernels
    stages_back: int  # loads ahead in the backward kernels, which pay for them in registers


STAGES = 3  # of the forward kernel
# Padded latents -> tiles; for bf16, those for widths up to 64 and beyond. Without latents: as with
# few.
HALF = {
    16: ((64, 4, 8, 2), (128, 8, 8, 1)),
    32: ((64, 4, 8, 2), (128, 8, 8, 1)),
    64: ((64, 8, 8, 2), (128, 8, 8, 1)),
    128: ((64, 8, 8, 2), (64, 8, 8, 2)),
    256: ((32, 8, 8, 2), (32, 8, 8, 2)),
}
SINGLE = {BL: ((32, 8, 8, 1),) for BL in HALF}


def window_tiles(L: int, K: int, D: int, dtype: torch.dtype) -> WindowTiles:
    """The tiles for these shapes; they depend on neither T nor the window."""
    table = SINGLE if dtype == torch.float32 else HALF
    # fp16 multiplies in tf32: its tiles take twice the room of bf16's.
    wide = max(K, D) > 64 and dtype == torch.bfloat16
    return WindowTiles(*table[configuration(L, dtype).BL][wide])


def window_unavailable(q: Tensor, window: int | None, K: int, D: int, L: int = 1) -> str | None:
    """Why the kernels cannot serve these inputs, or None if they can."""
    if window is None:
        return "for window=None (full attention): expected a number of keys"
    if not 1 <= K <= WIDEST_KEY:
        return f"for K={K}: expected K from 1 to {WIDEST_KEY}"
    return unavailable(q, L, D)


class Window(NamedTuple):
    """The inputs of the window as its kernels read them: rows of unit stride, flags as bytes."""

    k: Tensor
    v: Tensor
    mask: Tensor | None  # (B, T)
    tail: tuple[Tensor | None, Tensor | None, Tensor | None]
    P: int
    reach: int  # keys seen before one's own, and behind it if not causal
    scale: float
    softcap: float
    causal: bool

    @classmethod
    def of(
        cls,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        tail: tuple[Tensor | None, Tensor | None, Tensor | None],
        window: int,
        scale: float,
        softcap: float,
        causal: bool,
    ) -> Window:
        """Where there is an earlier state, both masks are spelled out."""
        B, T = k.shape[:2]
        P = 0 if tail[0] is None else tail[0].shape[1]
        if P == 0:
            tail = (None, None, None)
        elif key_mask is None:
            key_mask = k.new_ones((B, T), dtype=torch.bool)
        keys, values = (None if x is None else x.contiguous() for x in tail[:2])
        reach = min(window - 1 if causal else window // 2, T - 1 + P)
        return cls(
            unit_rows(k),
            unit_rows(v),
            readable(key_mask),
            (keys, values, readable(tail[2])),
            P=P,
            reach=reach,
            scale=scale,
            softcap=softcap,
            causal=causal,
        )


def unit_rows(x: Tensor) -> Tensor:
    """``x``, copied if its last dimension has a stride, or if its tokens lie very far apart.

    Offsets within a block of tokens then fit into 32 bits.
    """
    return x if x.stride(-1) == 1 and x.stride(1) < FARTHEST_ROWS else x.contiguous()


class WindowLauncher(Launcher):
    """Launches the kernels of the window, and of the bidirectional latents beside it."""

    def __init__(self, q: Tensor, latents: Tensor | None, w: Window, cu: Tensor | None) -> None:
        super().__init__(q[..., :1] if latents is None else latents, w.v.shape[-1], cu)
        self.K, self.G = w.k.shape[-1], w.k.shape[2]
        self.R = self.H // self.G
        self.tiles = window_tiles(self.L, self.K, self.D, q.dtype)
        self.window = w
        self.bounds = None if cu is None else cu.long()

    def by_tile(
        self,
        kernel: Any,
        grid: tuple[int, int],
        width: int,
        *args: Any,
        products: tuple[str, ...],
        back: bool = False,
        **flags: bool,
    ) -> None:
        """One program per cell of the grid and tile of the width."""
        w, tiles = self.window, self.tiles
        options: dict[str, Any] = {name: self.products[name] for name in products}
        if "WIDE" in products:
            options["BL"] = self.config.BL
        self.launch(
            kernel[(*grid, -(-width // tiles.BX))],
            *(*args, w.scale, w.softcap, w.reach, w.P),
            K=self.K,
            R=self.R,
            C=self.config.C,
            BX=tiles.BX,
            CAUSAL=w.causal,
            CAPPED=w.softcap != 0.0,
            **options,
            **flags,
            num_warps=tiles.warps_back if back else tiles.warps,
            num_stages=tiles.stages_back if back else STAGES,
        )

    def outputs(
        self, q: Tensor, latent_q: Tensor | None, mean: Tensor | None, *results: Tensor | None
    ) -> None:
        """The window alone, or beside bidirectional latents, whose final mean is ``mean``.

        ``latent_q`` begins with the first latent, behind the window's logit.
        """
        from latte.ops.triton_backend.window_forward import window_outputs

        w, chunks = self.window, self.chunks
        self.by_tile(
            window_outputs,
            (chunks.M, self.H),
            self.D,
            *(latent_q, q, w.k, w.v, w.mask, chunks.table, self.bounds),
            *(*w.tail, mean, *results, *strides(latent_q, 4)),
            *(*strides(q, 3), *strides(w.k, 3), *strides(w.v, 3)),
            products=("WIDE", "NARROW"),
        )

    def query_gradients(self, q: Tensor, *rest: Tensor | None, dy: Tensor) -> None:
        """``rest``: the gate; then the results, the rows' top, mass and delta, and dq."""
        from latte.ops.triton_backend.window_backward import window_query_gradients

        w, chunks = self.window, self.chunks
        self.by_tile(
            window_query_gradients,
            (chunks.M, self.H),
            self.K,
            *(q, w.k, w.v, w.mask, chunks.table, self.bounds, *w.tail, dy, *rest),
            *(*strides(q, 3), *strides(w.k, 3), *strides(w.v, 3), *strides(dy, 3)),
            products=("NARROW",),
            back=True,
        )

    def source_gradients(
        self,
        q: Tensor,
        dy: Tensor,
        rows: tuple[Tensor | None, ...],
        results: tuple[Tensor, Tensor],
        earlier: tuple[Tensor, Tensor],
        latents_dv: Tensor | None = None,
        bidirectional: tuple[Tensor, ...] = (),
    ) -> None:
        """dk and dv of the tokens, and of the earlier state; ``rows``: top, mass, gate, delta.

        The latents' part of dv is ``latents_dv`` (B, T, H, D); ``bidirectional``: comes from their
        keys, and top, mass and gradient of the mean of the whole sequences.
        """
        w, chunks, N = self.window, self.chunks, self.chunks.N
        latent_k, *states = bidirectional or (None,) * 4
        self._sources(
            chunks.M,
            *(latent_k, latents_dv, q, w.k, w.v, w.mask, chunks.table, self.bounds),
            *(dy, *rows, *states, *results),
            earlier=False,
        )
        if w.P:
            self._sources(
                N * -(-w.P // self.config.C),
                *(None, None, q, *w.tail, None, self.bounds),
                *(dy, *rows, None, None, None, *earlier),
                earlier=True,
            )

    def _sources(self, programs: int, *args: Tensor | None, earlier: bool) -> None:
        from latte.ops.triton_backend.window_backward import window_source_gradients

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


def tail_of(state: WindowState | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The earlier keys, values and flags, or three times None."""
    if state is None:
        return None, None, None
    keys, values = (without_masked(state.mask, x) for x in (state.keys, state.values))
    return keys, values, state.mask
