"""How the walks cut sequences into segments, in which configuration, and how they are launched.

One program walks one segment, for one head and, forward, one tile of D. Fewer programs than fill
the GPU leave it idle; more segments than one per sequence cost a pass over k and v.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, C tokens of a chunk,
N sequences, M segments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.ops.triton_backend.launch import SCAN, Chunks, Launcher, launch, triton_mode

# A constant, so that what is computed does not depend on the device: an H100's and an H200's.
MULTIPROCESSORS = 132
# Programs that are enough for one segment per sequence: nearly two for each multiprocessor.
ENOUGH = 240
# Programs to aim for where sequences are cut, and the fewest chunks of a segment then.
WANTED = 4 * MULTIPROCESSORS
SHORTEST = 4


class Walk(NamedTuple):
    """Everything that is fixed when a walk is compiled. It depends on neither T nor B."""

    C: int  # tokens of a chunk
    BL: int  # latents, padded to a power of two
    BD: int  # tile of the value width, forward: a program of its own
    BD_back: int  # tile of the value width, backward: a pass of its own
    product: str  # what the factors of products are rounded to
    warps: int
    warps_back: int
    stages: int  # loads of this many chunks are under way
    stages_back: int
    registers: int | None  # asked for, of each thread


PRODUCT = {torch.bfloat16: "bf16", torch.float16: "tf32_rounded", torch.float32: "tf32x3"}
# Padded latents -> C, tile of D, warps, stages; then the backward pass's tile, warps, stages. Tiles
# of 128 take 8 warps. What multiplies in tf32 needs more registers, so that its chunks are short.
BFLOAT = {
    16: (64, 128, 4, 3, 128, 8, 2),
    32: (64, 128, 4, 3, 128, 8, 2),
    64: (64, 64, 8, 2, 64, 8, 2),
    128: (16, 64, 8, 2, 64, 8, 2),
    256: (16, 64, 8, 2, 32, 8, 2),
}
HALF = {
    16: (16, 64, 4, 2, 64, 4, 2),
    32: (16, 64, 4, 2, 64, 4, 2),
    64: (16, 64, 8, 2, 64, 8, 2),
    128: (16, 64, 8, 2, 64, 8, 2),
    256: (16, 64, 8, 2, 32, 8, 2),
}
SINGLE = {
    16: (16, 64, 4, 2, 32, 4, 2),
    32: (16, 64, 4, 2, 32, 4, 2),
    64: (16, 64, 8, 2, 32, 8, 2),
    128: (16, 32, 8, 2, 32, 8, 2),
    256: (16, 16, 8, 2, 16, 8, 2),
}
TABLES = {torch.bfloat16: BFLOAT, torch.float16: HALF, torch.float32: SINGLE}
# Left alone, ptxas gives tf32's walks over 128 latents and more 32 to 128 registers, and puts the
# rest on the stack.
MANY_REGISTERS = 255


def walking(L: int, D: int, dtype: torch.dtype) -> Walk:
    """The one configuration for these sizes."""
    BL = max(16, 1 << (L - 1).bit_length())
    C, tile, warps, stages, tile_back, warps_back, stages_back = TABLES[dtype][BL]
    width = max(64, 1 << (D - 1).bit_length())
    BD, BD_back = min(width, tile), min(width, tile_back)
    warps = warps if BD <= 64 else 8
    product = PRODUCT[dtype]
    registers = MANY_REGISTERS if product != "bf16" and BL >= 128 else None
    return Walk(C, BL, BD, BD_back, product, warps, warps_back, stages, stages_back, registers)


def segment_length(B: int, T: int, heads: int, C: int, packed: bool) -> int:
    """Tokens of a segment, a multiple of C. ``heads``: of all tiles of D.

    Packed sequences may be of any lengths: they are cut as one sequence of T tokens would be.
    """
    chunks = max(1, -(-T // C))
    if not packed and B * heads >= ENOUGH:
        return chunks * C
    cuts = -(-WANTED // (B * heads))
    return min(chunks, max(SHORTEST, -(-chunks // cuts))) * C


class Segments(NamedTuple):
    """The segments of all sequences: at least one for each, if it is empty."""

    chunks: Chunks  # the segments, as the scans know them
    length: int  # tokens of a segment
    cut: bool  # whether a sequence may have more than one
    slots: int  # where chunks may keep something: see tiles.slot_of

    @classmethod
    def of(cls, B: int, T: int, H: int, D: int, walk: Walk, cu_seqlens: Tensor | None) -> Segments:
        """Rows of equal length, or packed sequences."""
        packed = cu_seqlens is not None
        length = segment_length(B, T, H * -(-D // walk.BD), walk.C, packed)
        per_row = max(1, -(-T // length))
        chunks = Chunks(B * per_row, B, per_row, None, None)
        if cu_seqlens is not None:
            chunks = Chunks.of(B, T, length, cu_seqlens, at_least=1)
        return cls(chunks, length, length < T, B * T // walk.C + chunks.N)


class Walker(Launcher):
    """Launches the walks, and the scans over their segments."""

    def __init__(self, q: Tensor, D: int, cu_seqlens: Tensor | None) -> None:
        B, T, H, L = q.shape
        self.walk = walking(L, D, q.dtype)
        self.segments = Segments.of(B, T, H, D, self.walk, cu_seqlens)
        super().__init__(q, D, cu_seqlens, self.segments.chunks)
        product = self.walk.product
        if triton_mode() == "interpreter":
            product = "bf16_as_fp32" if product == "bf16" else "ieee"
        self.product = product

    def forward(self, kernel: Any, *args: Any, **extras: Any) -> None:
        """One program per segment, head and tile of D."""
        c = self.walk
        programs = self.chunks.M * self.H * -(-self.D // c.BD)
        self._walk(kernel, programs, self.D, c.BD, c.stages, c.warps, *args, **extras)

    def back(self, kernel: Any, D: int, *args: Any, **extras: Any) -> None:
        """One program per segment and head, for a tile of D, which is D wide."""
        c = self.walk
        programs = self.chunks.M * self.H
        fixed = (c.BD_back, c.stages_back, c.warps_back)
        self._walk(kernel, programs, D, *fixed, *args, **extras)

    def _walk(
        self,
        kernel: Any,
        programs: int,
        D: int,
        BD: int,
        stages: int,
        warps: int,
        *args: Any,
        **extras: Any,
    ) -> None:
        sizes = (self.T, self.segments.length, self.chunks.per_row, self.H, self.L, D)
        fixed = (self.walk.C, self.walk.BL, BD, self.product, stages)
        options: dict[str, Any] = {"num_warps": warps} | extras
        if self.walk.registers is not None and torch.version.hip is None:
            options["maxnreg"] = self.walk.registers
        launch(self.device, kernel[(programs,)], *args, *sizes, *fixed, **options)

    def scan_back(self, kernel: Any, D: int, *args: Any) -> None:
        """The scan over segments in reverse, for a tile of D."""
        grid = (self.chunks.N * self.H, -(-self.L // SCAN["BL"]), -(-D // SCAN["BD"]))
        sizes = (self.chunks.per_row, self.H, self.L, D)
        launch(self.device, kernel[grid], *args, *sizes, **SCAN)

    def tiles(self) -> list[slice]:
        """The tiles of D that the backward pass takes one after the other."""
        BD = self.walk.BD_back
        return [slice(d, min(d + BD, self.D)) for d in range(0, self.D, BD)]
