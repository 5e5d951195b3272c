"""The kernels with a window, compiled for sm_90 without a GPU: alone, and beside latents.

python tests/ops/triton_backend/ahead_of_time_window.py    # the window's tables of docs/kernels.md
"""

from __future__ import annotations

import torch
from ahead_of_time import ELEMENTS, Resources, resources
from ahead_of_time_walks import CUT, WHOLE, compiled_walk

from latte.ops.triton_backend.launch import PRODUCTS, configuration
from latte.ops.triton_backend.macchiato_causal import HALF, beside
from latte.ops.triton_backend.segments import walking
from latte.ops.triton_backend.window_launch import STAGES, window_tiles

# One width for each tile: up to 64, and beyond.
WIDTHS = (64, 128)
WINDOW = ("window_outputs", "window_query_gradients", "window_source_gradients")
BESIDE = ("query_walk", "source_walk")
# Like those of the latents' own kernels.
ODD = ("latent_q_ptr", "lq_b", "lq_t", "lq_h", "P", "reach")
TAIL = ("tail_k_ptr", "tail_v_ptr", "tail_mask_ptr")


def window_compiled(
    name: str,
    L: int | None,
    X: int,
    dtype: torch.dtype,
    *,
    causal: bool = True,
    plain: bool = False,
    earlier: bool = False,
    ones: bool = False,
) -> Resources:
    """Compile one kernel of the window for K = D = X: alone, or beside L latents.

    ``plain``: without mask, packing, soft cap and initial state, which else are all there.
    ``earlier``: the launch for the earlier state's keys. ``ones``: every size is 1. Beside causal
    latents the window's kernels run backward alone, in the configuration of the window alone.
    """
    from latte.ops.triton_backend import window_backward, window_forward

    kernel = getattr(window_forward, name, None) or getattr(window_backward, name)
    latents = 1 if L is None or causal else L
    c, tiles = configuration(latents, dtype), window_tiles(latents, X, X, dtype)
    values = {"C": c.C, "BL": c.BL, "BX": tiles.BX, "WIDE": c.wide, "NARROW": c.narrow}
    values |= {"K": X, "D": X, "R": 2, "CAUSAL": causal, "CAPPED": not plain, "EARLIER": earlier}
    absent = []
    if L is None or causal or earlier:
        absent += ["latent_q_ptr", "latent_k_ptr", "top_ptr", "mass_ptr", "mean_ptr", "dmean_ptr"]
    if L is None or not causal or earlier:
        absent += ["latents_dv_ptr"]
    if L is None:
        absent += ["gate_ptr"]
    if plain:
        absent += ["mask_ptr", "table_ptr", "bounds_ptr"]
    if plain or not causal:
        absent += TAIL
    if earlier:
        absent += ["table_ptr"]
    values |= dict.fromkeys(absent) | {"lq_l": 1, "lk_l": 1}
    if ones:
        values |= dict.fromkeys(("T", "chunks", "H", "L", "P", "reach", "R"), 1)
    if name == "window_outputs":
        return resources(kernel, values, tiles.warps, dtype, ODD, STAGES)
    return resources(kernel, values, tiles.warps_back, dtype, ODD, tiles.stages_back)


def compiled_forward(
    L: int, X: int, dtype: torch.dtype, *, cut: bool = False, plain: bool = False
) -> Resources:
    """Compile ``macchiato_walk`` for K = D = X, whole sequences or ``cut`` ones.

    ``plain``: without mask, packing, soft cap and initial state.
    """
    from latte.ops.triton_backend.macchiato_walk import macchiato_walk

    walk, tiles = walking(L, X, dtype), beside(L, X, dtype)
    values = {"C": walk.C, "BL": walk.BL, "BX": tiles.BX, "PRODUCT": walk.product}
    values |= {"K": X, "D": X, "R": 2, "CAPPED": not plain, "lq_l": 1, "lk_l": 1}
    absent: tuple[str, ...] = CUT if cut else WHOLE
    if plain:
        absent += ("mask_ptr", "table_ptr", "bounds_ptr", *TAIL, "log_mass0_ptr", "mean0_ptr")
    odd = (*ODD, "length", "segments")
    return resources(
        macchiato_walk, values | dict.fromkeys(absent), tiles.warps, dtype, odd, tiles.stages
    )


def main() -> None:
    """One row for each configuration that can be chosen."""
    print("| inputs | K, D up to | C, tile | " + " | ".join(f"`{name}`" for name in WINDOW) + " |")
    print("|---" * (3 + len(WINDOW)) + "|")
    for dtype in PRODUCTS:
        for X in WIDTHS:
            c, tiles = configuration(1, dtype), window_tiles(1, X, X, dtype)
            cells = []
            for name in WINDOW:
                warps = tiles.warps if name == "window_outputs" else tiles.warps_back
                cells.append(entry(warps, window_compiled(name, None, X, dtype)))
            width = X if X == WIDTHS[0] else 512
            print_row(ELEMENTS[dtype], width, f"{c.C}, {tiles.BX}", *cells)
    names = " | ".join(f"`{name}`" for name in ("macchiato_walk", *BESIDE))
    print(f"\n| inputs | L up to | K, D | C, tile | {names} |")
    print("|---" * 7 + "|")
    for dtype in PRODUCTS:
        for L in HALF:
            for X in WIDTHS:
                walk, tiles = walking(L, X, dtype), beside(L, X, dtype)
                cells = [entry(tiles.warps, compiled_forward(L, X, dtype))]
                for name in BESIDE:
                    r = compiled_walk(name, L, X, dtype, gated=True)
                    cells.append(entry(walk.warps_back, r))
                print_row(ELEMENTS[dtype], L, X, f"{walk.C}, {tiles.BX}", *cells)


def print_row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def entry(warps: int, r: Resources) -> str:
    """Warps: registers / bytes of stack / KB of shared memory."""
    return f"{warps}: {r.registers} / {r.spilled} / {r.shared / 1024:.0f}"


if __name__ == "__main__":
    main()
