"""The inputs that the kernels accept, all tuned numbers, and the launch of a kernel.

The sizes of tiles, warps, stages and limits of registers of all kernels are here. They were chosen
by the resources and instructions of the machine code: see docs/kernels.md. They are functions of
the compute capability, the widths and the dtype. Except for the cuts, none depends on B or T.

This file loads without Triton.

Shape suffixes: B batch, T tokens, H heads, L latents, K key width, D value width, E channels.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.ops.notices import constant_in_graphs, warn_once

MOST_LATENTS = 256
WIDEST_VALUE = 512
WIDEST_KEY = 256  # of a window
HOPPER = 90  # compute capability 9.0, for which the tables were made
OLDEST = 80  # oldest card with bf16 products and asynchronous copies
OLDEST_ASSEMBLER = "12.9"  # oldest ptxas without the defect that `warn_of_assembler` is about
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The format to which the factors of products are rounded: NARROW if one of them has the inputs'
# dtype, WIDE for factors in fp32. fp16 inputs are multiplied in tf32, because many weights are
# below the range of fp16.
NARROW = {torch.bfloat16: "bf16", torch.float16: "tf32_rounded", torch.float32: "tf32x3"}
WIDE = {**NARROW, torch.bfloat16: "tf32_rounded"}


class ByChunk(NamedTuple):
    """The kernels that have one program per chunk."""

    C: int  # tokens of a chunk
    BL: int  # latents, padded to a power of two
    BD: int  # tile of the value width
    wide: str
    narrow: str
    warps: int  # of the forward kernels
    warps_back: int  # of the backward kernels, which need more registers
    stages: int  # number of tiles of D that are loaded ahead


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
    BD: int  # tile of the value width, forward: each tile is a separate program
    BD_back: int  # tile of the value width, backward: each tile is a separate pass
    product: str
    warps: int
    warps_back: int
    stages: int  # number of chunks that are loaded ahead
    stages_back: int
    registers: bool  # whether ptxas is asked for all


# Padded latents -> C, tile of D, warps, stages; then the backward pass's tile, warps, stages. Tiles
# of 128 take 8 warps. Four warps are one of Hopper's groups. Eight warps on a chunk of 64 would
# compute most of it twice. Products in tf32 need more registers, so their chunks are short.
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
# Hopper's products have their factors in shared memory. On other cards, bf16 factors need registers
# too.
WALKS_ELSEWHERE = {
    **WALKS,
    torch.bfloat16: WALKS[torch.bfloat16]
    | {
        16: (32, 64, 4, 2, 64, 4, 2),
        32: (32, 64, 4, 2, 64, 4, 2),
        64: (32, 64, 8, 2, 32, 8, 2),
    },
}
# Without this request, ptxas gives 32 to 128 registers to some kernels, and puts the rest on the
# stack: to the tf32 walks over 128 and more latents, and to the window of wide fp32 heads.
MANY_REGISTERS = 255

# How sequences are cut into segments. The number of multiprocessors is that of an H100 and an H200.
# It is a constant, so that results do not depend on the device.
MULTIPROCESSORS = 132
# With this many programs, a sequence is one segment: nearly two for each multiprocessor.
ENOUGH = 240
# Number of programs to aim for if sequences are cut, and the fewest chunks of a segment then.
WANTED = 4 * MULTIPROCESSORS
SHORTEST = 4

# The scans over segments: U segments at a time, and the tile of (L, D). The tile is small, because
# B x H x L x D is all their parallelism. U is large, because each round waits for memory once.
SCAN = {"U": 16, "BL": 8, "BD": 16, "num_warps": 4}


class WindowTiles(NamedTuple):
    """The window's kernels, beside the chunk of ``ByChunk``."""

    BX: int  # tile of the key and value widths
    warps: int  # of the forward kernel
    warps_back: int  # of the backward kernels
    stages_back: int  # loads ahead in the backward kernels; these take registers
    stages: int = 3  # of the forward kernel


# Padded latents -> tiles for widths up to 64, and for wider ones. A call without latents uses those
# of few latents. fp16 is multiplied in tf32, so its tiles need twice the memory of bf16's.
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
# If tokens lie at least this many elements apart, inputs of the window are copied. Offsets within a
# chunk, of 64 tokens at most, then fit into 32 bits.
FARTHEST_TOKENS = 1 << 24


# The sums over chunks of the gradients of sinks: U chunks at a time, and the tile of a width.
SINK_SUMS = {"U": 32, "BX": 64, "num_warps": 4}

# The choice of kept tokens: number of candidates that are compared with as many at a time, and the
# fewest blocks of a segment.
CHOICE = {"BN": 64, "num_warps": 4}
SHORTEST_CHOICE = 16
# The sums over blocks of the gradients of kept tokens: U blocks at a time, and the tile of a width.
ADD_KEPT = {"U": 16, "BX": 64, "num_warps": 1}


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

# The RG-LRU: number of tokens of a chunk; then the channels of a tile and the warps, for one
# program per chunk, for one per row, and for the backward pass; the number of chunks that a walk
# loads ahead; the U chunks of a round of the scan over chunks. In the backward pass, a chunk of 64
# takes all registers of eight warps, and issues half as many instructions again.
LRU_CHUNK = 32
LRU_BY_CHUNK = {"BE": 64, "num_warps": 4}
LRU_WALK = {"BE": 32, "num_warps": 4}
LRU_BACK = {"BE": 32, "num_warps": 4}
LRU_STAGES = 2
LRU_CARRY = {"U": 32, "BE": 32, "num_warps": 4}
# With this many programs, one walk per program fills a GPU of about 130 multiprocessors.
LRU_WALKS_FROM = 512

# The convolution: number of tokens and channels of a tile.
CONVOLUTION = {"C": 64, "BE": 64}
CONVOLUTION_WARPS = 8

# The pointwise kernels: number of elements of a program; the widest row of a norm, the number of
# elements of its threads, and the number of programs of its backward pass, each of which sums its
# rows' part of the weight's gradient.
ROTATION = {"elements": 2048, "num_warps": 4}
GATED_PRODUCT = {"BE": 1024, "num_warps": 4}
WIDEST_NORM = 8192
NORM_ELEMENTS = 16
NORM_PROGRAMS = 4 * MULTIPROCESSORS

# A step of decoding: number of elements of a tile of keys, values or means.
STEP_ELEMENTS = 4096
STEP_WARPS = 8


def padded(L: int) -> int:
    """Number of latents in the kernels: a power of two, at least 16, a product's least side."""
    return max(16, 1 << (L - 1).bit_length())


@constant_in_graphs
def capability(device: torch.device) -> int:
    """Compute capability times ten: 90 for 9.0. The interpreter on a CPU counts as 90."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shared_memory(card: int) -> int:
    """Number of bytes of shared memory that one program may use, by compute capability."""
    if card in (80, 87):
        return 166912
    return 232448 if card in (90, 100, 101, 103) else 101376


def warpgroups(card: int) -> bool:
    """Whether products read their factors from shared memory: on Hopper and B200."""
    return 90 <= card < 120


def little_room(card: int) -> bool:
    """Whether the card has only 99 KB of shared memory: consumer cards and cards like them."""
    return shared_memory(card) < 150_000


def by_chunk(L: int, dtype: torch.dtype, card: int = HOPPER, K: int = 1) -> ByChunk:
    """The one configuration for these latents. There are ten, for two sizes of element.

    ``K`` is the width of a window's keys.
    """
    BL = padded(L)
    C, BD, warps, warps_back = BY_CHUNK[dtype][BL]
    # Without a window, a product over 16 latents reads at an address that was never computed, as in
    # `walking`. With 32 tokens it is of another kind.
    unsafe = BL == 16 and K == 1 and warpgroups(card)
    if dtype == torch.float32 and (K > 128 or unsafe):
        # 64 wide keys and queries do not fit into registers, nor into most cards.
        C = min(C, 32)
    # Triton 3.8 rounds a factor of tf32x3 twice: in registers, and for one of the three products in
    # shared memory. Tiles of 256 latents that are loaded ahead too do not fit into either.
    largest = dtype == torch.float32 and BL == 256
    stages = 1 if largest else 3 if shared_memory(card) > 200_000 else 2
    return ByChunk(C, BL, BD, WIDE[dtype], NARROW[dtype], warps, warps_back, stages)


def walking(
    L: int, D: int, dtype: torch.dtype, card: int = HOPPER, forgets: bool = False, K: int = 0
) -> Walk:
    """The one configuration of the walks for these sizes.

    ``K`` is the width of a window's keys, beside the latents; 0 without a window.
    """
    BL = padded(L)
    # With latents that forget, Triton 3.7.1 cannot compile to B200's products, which take 64
    # tokens. On Hopper the defect below is in all of them beside a window with wide heads.
    wide = K > 0 and max(K, D) > 64
    elsewhere = not warpgroups(card) or forgets and (card > HOPPER or wide)
    # ptxas 12.8 (Triton 3.6 and 3.7.1) lets some of Hopper's products read a factor at an address
    # that it never computed: tests/ops/triton_backend/descriptors.py finds them. So one latent
    # alone is computed without such products, and rows that cannot be loaded ahead without wide
    # tiles.
    table = WALKS_ELSEWHERE if elsewhere or L == 1 else WALKS
    C, tile, warps, stages, tile_back, warps_back, stages_back = table[dtype][BL]
    if D % 16:
        tile_back = min(tile_back, 64)
    width = max(64, 1 << (D - 1).bit_length())
    BD, BD_back = min(width, tile), min(width, tile_back)
    warps_back = warps_back if BD_back <= 64 else 8
    if little_room(card) and dtype == torch.float32 and BL == 256:
        stages = stages_back = 1  # two chunks loaded ahead take 115 to 128 KB
    product = NARROW[dtype]
    registers = product != "bf16" and BL >= 128
    return Walk(C, BL, BD, BD_back, product, warps, warps_back, stages, stages_back, registers)


def window_tiles(
    L: int,
    K: int,
    D: int,
    dtype: torch.dtype,
    card: int = HOPPER,
    sinks: bool = False,
    mixed: bool = False,
) -> WindowTiles:
    """The tiles of the window's kernels; they do not depend on the window.

    ``mixed``: the forward kernel adds bidirectional latents.
    """
    groups, widest = warpgroups(card), max(K, D)
    table = WINDOW if groups else WINDOW_ELSEWHERE
    tiles = WindowTiles(*table[dtype][widest > 64][padded(L)])
    # Otherwise a product reads at an address that was never computed, as in `walking`: one over 16
    # latents or over the sinks, by eight warps.
    single, half = dtype == torch.float32, dtype == torch.bfloat16
    few_latents = groups and mixed and padded(L) == 16 and (single or half and widest > 64)
    single_sinks = groups and single and sinks
    if few_latents or single_sinks:
        tiles = tiles._replace(warps=4)
    if groups and half and sinks and widest > 128:
        tiles = tiles._replace(stages_back=2)
    if little_room(card) and K > 128:
        tiles = tiles._replace(stages=2)
    if K % 16 == D % 16 == 0:
        return tiles
    # Every element then has an address. Four warps, or wide tiles, lack the registers for these.
    BX, warps_back = min(tiles.BX, 32 if widest > 64 else 64), 4 if single_sinks else 8
    return tiles._replace(BX=BX, warps_back=warps_back)


def macchiato_tiles(L: int, dtype: torch.dtype) -> MacchiatoTiles:
    """The tiles of ``macchiato_walk``."""
    return MacchiatoTiles(*MACCHIATO[dtype][padded(L)])


def step_tiles(L: int, K: int, D: int) -> dict[str, int]:
    """The constants with which the kernel of a step is compiled. The window is not one of them."""
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


def norm_tile(E: int) -> dict[str, int]:
    """The tile of a norm's row, and the warps that share it."""
    BE = 1 << (E - 1).bit_length()
    return {"BE": BE, "num_warps": min(16, max(1, BE // (32 * NORM_ELEMENTS)))}


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
    """Why no kernel can serve inputs like ``x`` (its dtype, Triton, or its device), or None."""
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


@constant_in_graphs
def triton_mode() -> str:
    """One of "compiler", "interpreter" (kernels run on the CPU, for tests) and "missing"."""
    try:
        from triton import knobs
    except ImportError:
        return "missing"
    return "interpreter" if knobs.runtime.interpret else "compiler"


def assembler() -> str | None:
    """Version of the ptxas that Triton uses for Hopper, such as "12.8"; None if there is none."""
    try:
        from triton import knobs

        return str(knobs.nvidia.ptxas.version)
    except (ImportError, RuntimeError, AttributeError):
        return None


def old_assembler() -> bool:
    """Whether :func:`assembler` may make products that read at an address never computed."""
    found = assembler()
    return found is not None and older(found)


def older(version: str | None) -> bool:
    """Whether a version of ptxas is older than the oldest good one, or unknown."""
    return version is None or _numbers(version) < _numbers(OLDEST_ASSEMBLER)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


@functools.cache
def warn_of_assembler(device: torch.device) -> None:
    """Warn once if kernels with products are launched on Hopper, and the assembler is old."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    if nvidia and capability(device) == HOPPER and old_assembler():
        warn_once(
            f"Triton assembles kernels with ptxas {assembler()}, and before {OLDEST_ASSEMBLER} "
            "some products on this GPU may read at a wrong address: Latte avoids the known ones; "
            "set TRITON_PTXAS_PATH to a newer ptxas (docs/gpu.md)"
        )


def rounding(product: str) -> str:
    """The precision argument of ``tiles.mm``. Under the interpreter rounded inputs stay fp32."""
    if triton_mode() == "interpreter":
        return "bf16_as_fp32" if product == "bf16" else "ieee"
    return product


def registers(many: bool) -> dict[str, Any]:
    """The limit of registers per thread for a launch, if ptxas is not to choose."""
    return {"maxnreg": MANY_REGISTERS} if many and torch.version.hip is None else {}


def readable(key_mask: Tensor | None) -> Tensor | None:
    """The mask as contiguous bytes."""
    return None if key_mask is None else key_mask.contiguous().view(torch.uint8)


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors, contiguous; some may be None."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def launch(device: torch.device, kernel: Any, *args: Any, **options: Any) -> None:
    """Launch ``kernel`` on the device of the inputs, which need not be the current one."""
    if device.type != "cuda":
        kernel(*args, **options)
        return
    with torch.cuda.device(device):
        kernel(*args, **options)
