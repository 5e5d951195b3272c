"""The kernels with a window, compiled for sm_90 without a GPU: alone, and as state 0 of Latte.

python tests/ops/triton_backend/ahead_of_time_window.py    # the second table of docs/kernels.md
"""

from __future__ import annotations

import torch
from ahead_of_time import ELEMENTS, Resources, compiled, resources

from latte.ops.triton_backend.launch import HALF, PRODUCTS, configuration
from latte.ops.triton_backend.window_launch import STAGES, window_tiles

# One width for each tile: up to 64, and beyond.
WIDTHS = (64, 128)
WINDOW = ("window_outputs", "window_query_gradients", "window_source_gradients")
# Like those of the latents' own kernels.
ODD = ("latent_q_ptr", "lq_b", "lq_t", "lq_h", "P", "reach")


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
    """Compile one kernel as it is chosen for L latents (None: the window alone) and K = D = X.

    ``plain``: without mask, packing, soft cap and initial state, which else are all there.
    ``earlier``: the launch for the earlier state's keys. ``ones``: every size is 1.
    """
    from latte.ops.triton_backend import window_backward, window_forward

    kernel = getattr(window_forward, name, None) or getattr(window_backward, name)
    c, tiles = configuration(L or 1, dtype), window_tiles(L or 1, X, X, dtype)
    values = {"C": c.C, "BL": c.BL, "BX": tiles.BX, "WIDE": c.wide, "NARROW": c.narrow}
    values |= {"K": X, "D": X, "R": 2, "CAUSAL": causal, "CAPPED": not plain, "EARLIER": earlier}
    absent = []
    if L is None or earlier:
        absent += ["latent_q_ptr", "latent_k_ptr", "top_ptr", "mass_ptr", "mean_ptr", "dmean_ptr"]
    if L is None:
        absent += ["gate_ptr"]
    if plain:
        absent += ["mask_ptr", "table_ptr", "bounds_ptr"]
    if plain or not causal:
        absent += ["tail_k_ptr", "tail_v_ptr", "tail_mask_ptr"]
    if earlier:
        absent += ["table_ptr"]
    values |= dict.fromkeys(absent) | {"lq_l": 1, "lk_l": 1}
    if ones:
        values |= dict.fromkeys(("T", "chunks", "H", "L", "P", "reach", "R"), 1)
    if name == "window_outputs":
        return resources(kernel, values, tiles.warps, dtype, ODD, STAGES)
    return resources(kernel, values, tiles.warps_back, dtype, ODD, tiles.stages_back)


def main() -> None:
    """One row for each configuration that can be chosen."""
    beside = ("query_gradients", "source_gradients")
    names = " | ".join(f"`{name}`" for name in (*WINDOW, *beside))
    print(f"| inputs | L up to | K, D up to | C, tile | {names} |")
    print("|---" * (4 + len(WINDOW) + len(beside)) + "|")
    for dtype in PRODUCTS:
        for L in (None, *HALF):
            for X in WIDTHS:
                c, tiles = configuration(L or 1, dtype), window_tiles(L or 1, X, X, dtype)
                cells = []
                for name in WINDOW:
                    warps = tiles.warps if name == "window_outputs" else tiles.warps_back
                    cells.append(entry(warps, window_compiled(name, L, X, dtype)))
                for name in beside:
                    # They take K and D in tiles of their own.
                    r = None if L is None or X > WIDTHS[0] else compiled(name, L, dtype, gated=True)
                    cells.append("-" if r is None else entry(c.warps_back, r))
                width = X if X == WIDTHS[0] else 512
                row = (ELEMENTS[dtype], L or "-", width, f"{c.C}, {tiles.BX}", *cells)
                print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)


def entry(warps: int, r: Resources) -> str:
    """Warps: registers / bytes of stack / KB of shared memory."""
    return f"{warps}: {r.registers} / {r.spilled} / {r.shared / 1024:.0f}"


if __name__ == "__main__":
    main()
