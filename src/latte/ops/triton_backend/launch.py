"""The inputs that the kernels accept, all tuned numbers, and the launch of a kernel.

The sizes of tiles, warps, stages and limits of registers of all kernels are here. They were chosen
by the resources and instructions of the machine code: see docs/kernels.md. They are functions of
the compute capability, the widths and the dtype. Except for the cuts, none depends on B or T.

This file loads without Triton.

Shape suffixes: B batch, T tokens, H heads, L latents, K key width, D value width, E channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_LATENTS = 256
WIDEST_VALUE = 512
WIDEST_KEY = 256  # of a window
HOPPER = 90  # the compute capability, 9.0, that the tables are for
OLDEST = 80  # the least that is served: bf16's products, and copies beside the program
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# What the factors of products are rounded to: WIDE for factors in fp32, NARROW where one has the
# inputs' dtype, WALKED in the walks. fp16 multiplies in tf32: weights below its range are common.
WIDE = {torch.bfloat16: "tf32", torch.float16: "tf32", torch.float32: "tf32x3"}
NARROW = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "tf32x3"}
WALKED = {torch.bfloat16: "bf16", torch.float16: "tf32_rounded", torch.float32: "tf32x3"}


class ByChunk(NamedTuple):
    """The kernels that have one program per chunk."""

    C: int  # tokens of a chunk
    BL: int  # latents, padded to a power of two
    BD: int  # tile of the value width
    wide: str
    narrow: str
    warps: int  # of the forward kernels
    warps_back: int  # of the backward kernels, which hold more
    stages: int  # of ``mixture_gradients``: loads of this many tiles of D are under way


# Padded latents -> C, BD, warps forward and back.
_HALF_BY_CHUNK = {
    16: (64, 64, 4, 4),
    32: (64, 64, 4, 8),
    64: (64, 64, 8, 8),
    128: (32, 64, 8, 8),
    256: (16, 32, 8, 8),
}
BY_CHUNK = {
    torch.bfloat16: _HALF_BY_CHUNK,
    torch.float16: _HALF_BY_CHUNK,
    torch.float32: {
        16: (64, 32, 8, 8),
        32: (64, 32, 8, 8),
        64: (64, 32, 8, 8),
        128: (16, 32, 8, 8),
        256: (16, 32, 8, 8),
    },
}


class Walk(NamedTuple):
    """The walks over segments."""

    C: int  # tokens of a chunk
    BL: int  # latents, padded to a power of two
    BD: int  # tile of the value width, forward: a program of its own
    BD_back: int  # tile of the value width, backward: a pass of its own
    product: str
    warps: int
    warps_back: int
    stages: int  # loads of this many chunks are under way
    stages_back: int
    registers: int | None  # asked for, of each thread


# Padded latents -> C, tile of D, warps, stages; then the backward pass's tile, warps, stages. Tiles
# of 128 take 8 warps. Four warps are one group of Hopper's: eight on a chunk of 64 compute most of
# it twice. What multiplies in tf32 needs more registers, so that its chunks are short.
WALKS = {
    torch.bfloat16: {
        16: (64, 64, 4, 3, 128, 4, 2),
        32: (64, 64, 4, 3, 128, 4, 2),
        64: (64, 64, 8, 2, 64, 8, 2),
        128: (16, 64, 8, 2, 64, 8, 2),
        256: (16, 64, 8, 2, 32, 8, 2),
    },
    torch.float16: {
        16: (16, 64, 4, 2, 64, 4, 2),
        32: (16, 64, 4, 2, 64, 4, 2),
        64: (16, 64, 8, 2, 64, 8, 2),
        128: (16, 64, 8, 2, 64, 8, 2),
        256: (16, 64, 8, 2, 32, 8, 2),
    },
    torch.float32: {
        16: (16, 64, 4, 2, 32, 4, 2),
        32: (16, 64, 4, 2, 32, 4, 2),
        64: (16, 64, 8, 2, 32, 8, 2),
        128: (16, 32, 8, 2, 32, 8, 2),
        256: (16, 16, 8, 2, 16, 8, 2),
    },
}
# Hopper's products have their factors in shared memory. Without them, bf16 needs registers too.
WALKS_ELSEWHERE = {
    **WALKS,
    torch.bfloat16: WALKS[torch.bfloat16]
    | {
        16: (32, 64, 4, 2, 64, 4, 2),
        32: (32, 64, 4, 2, 64, 4, 2),
        64: (32, 64, 8, 2, 32, 8, 2),
    },
}
# Left alone, ptxas gives tf32's walks over 128 latents and more 32 to 128 registers, and puts the
# rest on the stack.
MANY_REGISTERS = 255

# How sequences are cut into segments. Constants, so that what is computed does not depend on the
# device: the multiprocessors of an H100 and an H200.
MULTIPROCESSORS = 132
# Programs that are enough for one segment per sequence: nearly two for each multiprocessor.
ENOUGH = 240
# Programs to aim for where sequences are cut, and the fewest chunks of a segment then.
WANTED = 4 * MULTIPROCESSORS
SHORTEST = 4

# The scans over segments: U of them at a time, and the tile of (L, D). Small, as B x H x L x D is
# all their parallelism, but many at a time, as each round waits for memory once.
SCAN = {"U": 16, "BL": 8, "BD": 16, "num_warps": 4}


class WindowTiles(NamedTuple):
    """The window's kernels, beside the chunk of ``ByChunk``."""

    BX: int  # tile of the key and value widths
    warps: int  # of the forward kernel
    warps_back: int  # of the backward kernels
    stages_back: int  # loads ahead in the backward kernels, which pay for them in registers
    stages: int = 3  # of the forward kernel


# Padded latents -> tiles for widths up to 64, and beyond. Without latents: as with few. fp16
# multiplies in tf32: its tiles take twice the room of bf16's.
_NARROW_WINDOW = {
    16: (64, 4, 8, 2),
    32: (64, 4, 8, 2),
    64: (64, 8, 8, 2),
    128: (64, 8, 8, 2),
    256: (32, 8, 8, 2),
}
_SINGLE_WINDOW = dict.fromkeys(_NARROW_WINDOW, (32, 8, 4, 1))
WINDOW = {
    torch.bfloat16: (
        _NARROW_WINDOW | dict.fromkeys((16, 32), (64, 4, 4, 2)),
        _NARROW_WINDOW | dict.fromkeys((16, 32, 64), (128, 8, 8, 1)),
    ),
    torch.float16: (_NARROW_WINDOW, _NARROW_WINDOW),
    torch.float32: (_SINGLE_WINDOW, _SINGLE_WINDOW),
}
WINDOW_ELSEWHERE = WINDOW | {torch.bfloat16: (_NARROW_WINDOW, _NARROW_WINDOW)}
# Elements between tokens from which on inputs of the window are copied: offsets within a chunk,
# of 64 tokens at most, then fit into 32 bits.
FARTHEST_TOKENS = 1 << 24


# What chunks of queries add to the gradients of sinks: U chunks at a time, and the tile of a width.
SINK_SUMS = {"U": 32, "BX": 64, "num_warps": 4}


class MacchiatoTiles(NamedTuple):
    """``macchiato_walk``, beside the chunk of ``Walk``."""

    BX: int  # tile of the key and value widths
    warps: int
    stages: int  # loads ahead, of the window's keys


_HALF_MACCHIATO = {
    16: (64, 4, 3),
    32: (64, 4, 3),
    64: (64, 8, 2),
    128: (64, 8, 2),
    256: (64, 8, 2),
}
MACCHIATO = {
    torch.bfloat16: _HALF_MACCHIATO,
    torch.float16: _HALF_MACCHIATO | dict.fromkeys((16, 32), (64, 8, 3)),
    torch.float32: dict.fromkeys(_HALF_MACCHIATO, (32, 8, 1)),
}

# The RG-LRU: tokens of a chunk; channels of a tile and warps of one program per chunk, one per row,
# and backward; the number of chunks that a walk loads ahead; U chunks of a round of the scan
# over chunks. A chunk of 64 backward takes all registers of eight warps, and half as much again to
# issue.
LRU_CHUNK = 32
LRU_BY_CHUNK = {"BE": 64, "num_warps": 4}
LRU_WALK = {"BE": 32, "num_warps": 4}
LRU_BACK = {"BE": 32, "num_warps": 4}
LRU_STAGES = 2
LRU_CARRY = {"U": 32, "BE": 32, "num_warps": 4}
# Programs from which one walk each fills a GPU of some 130 processors.
LRU_WALKS_FROM = 512

# The convolution: tokens and channels of a tile.
CONVOLUTION = {"C": 64, "BE": 64}
CONVOLUTION_WARPS = 8

# A step of decoding: elements of a tile of keys, values or means.
STEP_ELEMENTS = 4096
STEP_WARPS = 8


def padded(L: int) -> int:
    """Latents as the kernels hold them: a power of two from 16 on, the least side of a product."""
    return max(16, 1 << (L - 1).bit_length())


@torch.compiler.assume_constant_result
def capability(device: torch.device) -> int:
    """90 for compute capability 9.0, which stands for a CPU's interpreter too."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shared_memory(card: int) -> int:
    """Bytes of shared memory that one program may use, by compute capability."""
    if card in (80, 87):
        return 166912
    return 232448 if card in (90, 100, 101, 103) else 101376


def warpgroups(card: int) -> bool:
    """Whether products take their factors from shared memory: Hopper, and B200 after it."""
    return 90 <= card < 120


def little_room(card: int) -> bool:
    """Whether this is a consumer card, or of their design: 99 KB of shared memory."""
    return shared_memory(card) < 150_000


def by_chunk(L: int, dtype: torch.dtype, card: int = HOPPER, K: int = 1) -> ByChunk:
    """The one configuration for these latents: ten in all, for two sizes of element.

    ``K``: the width of a window's keys.
    """
    BL = padded(L)
    C, BD, warps, warps_back = BY_CHUNK[dtype][BL]
    if dtype == torch.float32 and K > 128:
        C = min(C, 32)  # 64 keys and queries are more than fits into registers, and most cards
    largest = dtype == torch.float32 and BL == 256
    stages = 3 if shared_memory(card) > 200_000 else 1 if little_room(card) and largest else 2
    return ByChunk(C, BL, BD, WIDE[dtype], NARROW[dtype], warps, warps_back, stages)


def walking(L: int, D: int, dtype: torch.dtype, card: int = HOPPER, forgets: bool = False) -> Walk:
    """The one configuration of the walks for these sizes."""
    BL = padded(L)
    # Triton 3.7.1 cannot compile latents that forget to B200's products, which take 64 tokens.
    table = WALKS_ELSEWHERE if not warpgroups(card) or forgets and card > HOPPER else WALKS
    C, tile, warps, stages, tile_back, warps_back, stages_back = table[dtype][BL]
    width = max(64, 1 << (D - 1).bit_length())
    BD, BD_back = min(width, tile), min(width, tile_back)
    warps_back = warps_back if BD_back <= 64 else 8
    if little_room(card) and dtype == torch.float32 and BL == 256:
        stages = stages_back = 1  # two chunks under way take 115 to 128 KB
    product = WALKED[dtype]
    registers = MANY_REGISTERS if product != "bf16" and BL >= 128 else None
    return Walk(C, BL, BD, BD_back, product, warps, warps_back, stages, stages_back, registers)


def window_tiles(L: int, K: int, D: int, dtype: torch.dtype, card: int = HOPPER) -> WindowTiles:
    """The tiles of the window's kernels; they do not depend on the window."""
    table = WINDOW if warpgroups(card) else WINDOW_ELSEWHERE
    tiles = WindowTiles(*table[dtype][max(K, D) > 64][padded(L)])
    if little_room(card) and K > 128:
        tiles = tiles._replace(stages=2)
    if K % 16 == D % 16 == 0:
        return tiles
    # An address for every element, for which four warps, or wide tiles, lack registers.
    return tiles._replace(BX=min(tiles.BX, 32 if max(K, D) > 64 else 64), warps_back=8)


def macchiato_tiles(L: int, dtype: torch.dtype) -> MacchiatoTiles:
    """The tiles of ``macchiato_walk``."""
    return MacchiatoTiles(*MACCHIATO[dtype][padded(L)])


def step_tiles(L: int, K: int, D: int) -> dict[str, int]:
    """What is fixed when the kernel of a step is compiled; the window does not matter."""
    BK, BD = (max(16, 1 << (width - 1).bit_length()) for width in (K, D))
    BL = min(1 << (L - 1).bit_length(), STEP_ELEMENTS // BD)
    return {
        "BQ": 1 << L.bit_length(),  # at least L + 1
        "BL": BL,
        "BS": min(STEP_ELEMENTS // BL, 128),
        "BP": min(STEP_ELEMENTS // max(BK, BD), 128),
        "BK": BK,
        "BD": BD,
        "num_warps": STEP_WARPS,
    }


def unavailable(q: Tensor, L: int, D: int) -> str | None:
    """Why the kernels of Latte cannot serve these inputs, or None if they can."""
    if q.dtype in DTYPES and not (1 <= L <= MOST_LATENTS and 1 <= D <= WIDEST_VALUE):
        return (
            f"for L={L}, D={D}: expected L from 1 to {MOST_LATENTS} and D from 1 to {WIDEST_VALUE}"
        )
    return unavailable_for(q)


def window_unavailable(q: Tensor, window: int | None, K: int, D: int, L: int = 1) -> str | None:
    """Why the kernels with a window cannot serve these inputs, or None if they can."""
    if window is None:
        return "for window=None (full attention): expected a number of keys"
    if not 1 <= K <= WIDEST_KEY:
        return f"for K={K}: expected K from 1 to {WIDEST_KEY}"
    return unavailable(q, L, D)


def unavailable_for(x: Tensor) -> str | None:
    """Why no kernel can serve inputs like ``x``, or None: its dtype, Triton, or its device."""
    if x.dtype not in DTYPES:
        return f"for {x.dtype}: expected float32, bfloat16 or float16"
    mode = triton_mode()
    if mode == "missing":
        return "here: Triton is not installed"
    if x.device.type != "cuda" and mode != "interpreter":
        return f"on {x.device}: expected CUDA tensors, or TRITON_INTERPRET=1 for the interpreter"
    if torch.version.hip is None and (card := capability(x.device)) < OLDEST:
        return f"on compute capability {card / 10}: expected {OLDEST / 10} or newer"
    return None


@torch.compiler.assume_constant_result
def triton_mode() -> str:
    """ "compiler", "interpreter" (kernels run on the CPU, for tests) or "missing"."""
    try:
        from triton import knobs
    except ImportError:
        return "missing"
    return "interpreter" if knobs.runtime.interpret else "compiler"


def rounding(product: str) -> str:
    """The precision argument of ``tiles.mm``. Under the interpreter rounded inputs stay fp32."""
    if triton_mode() == "interpreter":
        return "bf16_as_fp32" if product == "bf16" else "ieee"
    return product


def readable(key_mask: Tensor | None) -> Tensor | None:
    """The mask as contiguous bytes."""
    return None if key_mask is None else key_mask.contiguous().view(torch.uint8)


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Contiguous tensors, of which some may be missing."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def launch(device: torch.device, kernel: Any, *args: Any, **options: Any) -> None:
    """On the device of the inputs, which need not be the current one."""
    if device.type != "cuda":
        kernel(*args, **options)
        return
    with torch.cuda.device(device):
        kernel(*args, **options)
