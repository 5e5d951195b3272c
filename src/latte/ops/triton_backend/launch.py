"""Which configuration serves which shape, where the chunks lie, and how a kernel is launched.

Triton is imported inside functions only: this file loads without it.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, N sequences, M chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_LATENTS = 256
WIDEST_VALUE = 512
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Configuration(NamedTuple):
    """Everything that is fixed when a kernel is compiled. It depends on neither T nor B."""

    C: int  # tokens of a chunk
    BL: int  # latents, padded to a power of two
    BD: int  # tile of the value width
    wide: str  # products whose factors are fp32: tf32, or tf32x3 for fp32 inputs
    narrow: str  # products with a factor of the inputs' dtype
    warps: int  # of the forward kernels
    warps_back: int  # of the backward kernels, which hold more


PRODUCTS = {
    torch.bfloat16: ("tf32", "bf16"),
    torch.float16: ("tf32", "tf32"),  # weights below fp16's range are common; tf32 rounds alike
    torch.float32: ("tf32x3", "tf32x3"),
}
# Padded latents -> C, BD, warps forward and back; as compiled for sm_90, see docs/kernels.md.
HALF = {
    16: (64, 64, 4, 4),
    32: (64, 64, 4, 8),
    64: (64, 64, 8, 8),
    128: (32, 64, 8, 8),
    256: (16, 32, 8, 8),
}
SINGLE = {
    16: (64, 32, 8, 8),
    32: (64, 32, 8, 8),
    64: (64, 32, 8, 8),
    128: (16, 32, 8, 8),
    256: (16, 32, 8, 8),
}


# The scans' chunks at a time and their tile of (L, D): small, as B x H x L x D is all their
# parallelism, but many chunks, as each round waits for memory once.
SCAN = {"U": 16, "BL": 8, "BD": 16, "num_warps": 4}


def configuration(L: int, dtype: torch.dtype) -> Configuration:
    """The one configuration for these latents: ten in all, for two sizes of element."""
    BL = max(16, 1 << (L - 1).bit_length())
    C, BD, warps, warps_back = (SINGLE if dtype == torch.float32 else HALF)[BL]
    return Configuration(C, BL, BD, *PRODUCTS[dtype], warps, warps_back)


def unavailable(q: Tensor, L: int, D: int) -> str | None:
    """Why the kernels of Latte cannot serve these inputs, or None if they can."""
    if q.dtype in DTYPES and not (1 <= L <= MOST_LATENTS and 1 <= D <= WIDEST_VALUE):
        return (
            f"for L={L}, D={D}: expected L from 1 to {MOST_LATENTS} and D from 1 to {WIDEST_VALUE}"
        )
    return unavailable_for(q)


def unavailable_for(x: Tensor) -> str | None:
    """Why no kernel can serve inputs like ``x``, or None: its dtype, Triton, or its device."""
    if x.dtype not in DTYPES:
        return f"for {x.dtype}: expected float32, bfloat16 or float16"
    mode = triton_mode()
    if mode == "missing":
        return "here: Triton is not installed"
    if x.device.type != "cuda" and mode != "interpreter":
        return f"on {x.device}: expected CUDA tensors, or TRITON_INTERPRET=1 for the interpreter"
    return None


@torch.compiler.assume_constant_result
def triton_mode() -> str:
    """ "compiler", "interpreter" (kernels run on the CPU, for tests) or "missing"."""
    try:
        from triton import knobs
    except ImportError:
        return "missing"
    return "interpreter" if knobs.runtime.interpret else "compiler"


class Chunks(NamedTuple):
    """The chunks of all sequences, computed from shapes alone: nothing waits for a GPU."""

    M: int  # at most this many, at least one for each sequence
    N: int  # sequences
    per_row: int  # chunks of a row; unused when packed
    table: Tensor | None  # (M, 3) int64: first token, end of the sequence, its number
    first: Tensor | None  # (N+1,) int64: first chunk of each sequence

    @classmethod
    def of(cls, B: int, T: int, C: int, cu_seqlens: Tensor | None, at_least: int = 0) -> Chunks:
        """Rows of equal length, or packed sequences: at most T // C + N chunks.

        ``at_least``: this many for a sequence without tokens, which are then empty.
        """
        if cu_seqlens is None:
            per_row = -(-T // C)
            return cls(B * per_row, B, per_row, None, None)
        N = cu_seqlens.shape[0] - 1
        M = T // C + N
        bounds = cu_seqlens.long()
        first = bounds.new_zeros(N + 1)
        counts = torch.div(bounds.diff() + (C - 1), C, rounding_mode="floor")
        first[1:] = counts.clamp(min=at_least).cumsum(0)
        m = torch.arange(M, device=bounds.device)
        sequence = torch.bucketize(m, first[1:], right=True)
        real = sequence < N
        sequence = sequence.clamp(max=N - 1)
        start = bounds[sequence] + (m - first[sequence]) * C
        stop = bounds[sequence + 1]
        # A chunk past the last one begins beyond its end.
        start = torch.where(real, start, stop + 1)
        return cls(M, N, 0, torch.stack([start, stop, sequence], 1), first)


class Launcher:
    """Launches kernels with the sizes and the configuration of one call."""

    def __init__(
        self, q: Tensor, D: int, cu_seqlens: Tensor | None, chunks: Chunks | None = None
    ) -> None:
        B, self.T, self.H, self.L = q.shape
        self.D, self.device = D, q.device
        self.config = configuration(self.L, q.dtype)
        self.chunks = chunks or Chunks.of(B, self.T, self.config.C, cu_seqlens)
        wide, narrow = self.config.wide, self.config.narrow
        if triton_mode() == "interpreter":
            wide, narrow = "ieee", "bf16_as_fp32" if narrow == "bf16" else "ieee"
        self.products = {"WIDE": wide, "NARROW": narrow}

    def states(self, like: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Empty fp32 buffers (count, H, L) twice and (count, H, L, D)."""
        top = like.new_empty((count, self.H, self.L), dtype=torch.float32)
        return top, torch.empty_like(top), self.means(like, count)

    def means(self, like: Tensor, count: int) -> Tensor:
        """An empty fp32 buffer (count, H, L, D)."""
        return like.new_empty((count, self.H, self.L, self.D), dtype=torch.float32)

    def by_chunk(
        self,
        kernel: Any,
        *args: Any,
        products: tuple[str, ...],
        back: bool = False,
        **extras: Any,
    ) -> None:
        """One program per chunk and head; ``back`` for the backward pass."""
        c = self.config
        self.launch(
            kernel[self.chunks.M, self.H],
            *args,
            C=c.C,
            BL=c.BL,
            BD=c.BD,
            **{name: self.products[name] for name in products},
            **extras,
            num_warps=c.warps_back if back else c.warps,
        )

    def by_sequence(self, kernel: Any, *args: Any) -> None:
        """One program per sequence, head and tile of the state: it walks over the chunks."""
        grid = (self.chunks.N * self.H, -(-self.L // SCAN["BL"]), -(-self.D // SCAN["BD"]))
        self.launch(kernel[grid], *args, **SCAN)

    def launch(self, kernel: Any, *args: Any, **options: Any) -> None:
        """With the sizes that every kernel takes."""
        sizes = (self.T,) if "C" in options else ()
        args = (*args, *sizes, self.chunks.per_row, self.H, self.L, self.D)
        launch(self.device, kernel, *args, **options)


def launch(device: torch.device, kernel: Any, *args: Any, **options: Any) -> None:
    """On the device of the inputs, which need not be the current one."""
    if device.type != "cuda":
        kernel(*args, **options)
        return
    with torch.cuda.device(device):
        kernel(*args, **options)
