"""Compile the walks over segments for sm_90 without a GPU, and report what they take.

python tests/ops/triton_backend/ahead_of_time_walks.py    # the table of docs/kernels.md
"""

from __future__ import annotations

from typing import Any

import torch
from ahead_of_time import ELEMENTS, ODD, UNIT_STRIDES, Resources, resources

from latte.ops.triton_backend.segments import PRODUCT, Walk, walking

WALKS = ("segment_sums", "walk", "query_walk", "source_walk")
# (L, D) that reach every configuration.
REACHED = [(16, 64), (16, 128), (32, 64), (32, 128), (64, 64), (128, 64), (256, 64)]
# What the one segment of a sequence does without, and the segments of a cut one.
WHOLE = ("top_ptr", "mass_ptr", "mean_ptr", "asked_ptr", "lost_ptr")
GATE = "window_delta_ptr"
CUT = ("log_mass0_ptr", "mean0_ptr", "log_mass1_ptr", "mean1_ptr", "dmean0_ptr", "lost0_ptr")


def fixed(name: str, w: Walk) -> tuple[int, int, int]:
    """Tile of D, warps and stages of one walk."""
    if name in ("query_walk", "source_walk"):
        return w.BD_back, w.warps_back, w.stages_back
    return w.BD, w.warps, w.stages


def compiled_walk(
    name: str,
    L: int,
    D: int,
    dtype: torch.dtype,
    *,
    cut: bool = False,
    plain: bool = False,
    uneven: bool = False,
    ones: bool = False,
    gated: bool = False,
) -> Resources:
    """Compile one walk, with mask and packing, for whole sequences or ``cut`` ones.

    ``plain``: without mask, packing and initial state. ``uneven``: no address, size or stride is a
    multiple of anything. ``ones``: every size is 1, which Triton makes a constant. ``gated``:
    beside a window.
    """
    from latte.ops.triton_backend import walk, walk_back

    kernel = getattr(walk, name, None) or getattr(walk_back, name)
    w = walking(L, D, dtype)
    BD, warps, stages = fixed(name, w)
    values: dict[str, Any] = {"C": w.C, "BL": w.BL, "BD": BD, "PRODUCT": w.product}
    values |= {"STAGES": stages} | dict.fromkeys(() if uneven else UNIT_STRIDES, 1)
    if ones:
        values |= dict.fromkeys(("H", "L", "D"), 1)
    if name != "segment_sums":
        values |= dict.fromkeys(CUT if cut else WHOLE)
    values |= {"R": 2, "GATED": True} if gated else {"R": 1, "GATED": False, GATE: None}
    odd = ("length", "segments", *(ODD if gated else ()))
    if uneven:
        odd = tuple(kernel.arg_names)
    if plain:
        values |= dict.fromkeys(("mask_ptr", "table_ptr", "log_mass0_ptr", "mean0_ptr"))
    options = {} if w.registers is None else {"maxnreg": w.registers}
    return resources(kernel, values, warps, dtype, odd, **options)


def main() -> None:
    print("| inputs | L | D | kernel | C | tile of D | warps | registers | stack | shared, KB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for dtype in PRODUCT:
        for L, D in REACHED:
            w = walking(L, D, dtype)
            for name in WALKS:
                r = compiled_walk(name, L, D, dtype, cut=name == "segment_sums")
                BD, warps, _ = fixed(name, w)
                print(
                    f"| {ELEMENTS[dtype]} | {L} | {D} | {name} | {w.C} | {BD} | {warps} "
                    f"| {r.registers} | {r.spilled} | {r.shared / 1024:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
