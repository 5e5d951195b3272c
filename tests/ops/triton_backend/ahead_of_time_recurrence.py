"""Compile the RG-LRU's and the convolution's kernels for sm_90, and report what they take.

python tests/ops/triton_backend/ahead_of_time_recurrence.py    # the table of docs/kernels.md
"""

from __future__ import annotations

import torch
from ahead_of_time import ELEMENTS, Resources, resources

from latte.ops.triton_backend import convolution, rg_lru

# Kernel -> what it is compiled with.
LRU = {
    "ends": rg_lru.CHUNK,
    "apply": rg_lru.CHUNK,
    "walk": rg_lru.WALK,
    "ends_back": rg_lru.BACK,
    "apply_back": rg_lru.BACK,
    "walk_back": rg_lru.BACK,
    "carry": rg_lru.CARRY,
}
CONVOLUTION = ("convolve", "gradients", "final_tail", "tail_gradients")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNIT_STRIDES = ("x_e", "r_e", "i_e", "dy_e")
OPTIONAL = ("mask_ptr", "table_ptr", "bounds_ptr", "first_ptr", "initial_ptr", "tail_ptr")


def compiled(
    name: str,
    dtype: torch.dtype,
    *,
    down: bool = False,
    plain: bool = False,
    ones: bool = False,
    taps: int = 4,
) -> Resources:
    """``plain``: without mask, packing and initial state. ``ones``: T, E and all strides are 1.

    Triton turns arguments that are 1 into constants, which know fewer operations.
    """
    from latte.ops.triton_backend import convolution_kernels, recurrence, recurrence_back

    values: dict[str, object] = dict.fromkeys(UNIT_STRIDES, 1)
    if name in LRU:
        kernel = getattr(recurrence, name, None) or getattr(recurrence_back, name)
        values |= {"C": rg_lru.C, "DOWN": down, **LRU[name]}
        warps = LRU[name]["num_warps"]
    else:
        kernel = getattr(convolution_kernels, name)
        values |= {**convolution.TILE, "BP": 4, "K": taps}
        warps = convolution.WARPS
    if ones:
        values |= dict.fromkeys(("T", "chunks", "E"), 1)
        values |= {f"{x}_{axis}": 1 for x in ("x", "r", "i", "dy") for axis in "bte"}
    if plain:
        # What tail_gradients works on is always there.
        absent = OPTIONAL if name in LRU or name != "tail_gradients" else OPTIONAL[:-2]
        values |= dict.fromkeys(absent)
    return resources(kernel, values, warps, dtype)


def row(name: str, dtype: torch.dtype) -> tuple[int, Resources]:
    warps = LRU[name]["num_warps"] if name in LRU else convolution.WARPS
    return warps, compiled(name, dtype)


def main() -> None:
    print("| inputs | kernel | warps | registers | stack, bytes | shared, KB |")
    print("|---|---|---|---|---|---|")
    for dtype in DTYPES:
        for name in (*LRU, *CONVOLUTION):
            warps, r = row(name, dtype)
            print(
                f"| {ELEMENTS[dtype]} | {name} | {warps} "
                f"| {r.registers} | {r.spilled} | {r.shared / 1024:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
