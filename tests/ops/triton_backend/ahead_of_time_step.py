"""Compile the kernel of a decoding step for sm_90, and report what it takes.

python tests/ops/triton_backend/ahead_of_time_step.py    # the table of docs/kernels.md
"""

from __future__ import annotations

import torch
from ahead_of_time import ELEMENTS, Resources, resources

from latte.ops.triton_backend.step import WARPS, step_tiles

SHAPES = [(16, 64, 64), (32, 96, 96), (256, 128, 128), (32, 256, 256), (16, 512, 512), (1, 5, 3)]
SHAPES += [(256, 512, 16), (256, 16, 512), (64, 64, 128), (128, 128, 64)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WINDOW_ONLY = ("local_q_ptr", "local_k_ptr", "keys_ptr", "values_ptr", "slots_ptr")
WINDOW_ONLY += ("keys1_ptr", "values1_ptr", "slots1_ptr", "softcap")


def compiled(
    L: int, K: int, D: int, dtype: torch.dtype, *, window: bool = True, plain: bool = False
) -> Resources:
    """``plain``: neither mask nor softcap, and every size is 1, which Triton makes a constant."""
    from latte.ops.triton_backend.step_kernel import step

    values: dict[str, object] = {**step_tiles(L, K, D), "WINDOW": int(window)}
    if plain:
        values |= {"mask_ptr": None, "softcap": None, **dict.fromkeys("HGLKDP", 1)}
    if not window:
        values |= {**dict.fromkeys(WINDOW_ONLY), "scale": 1.0, "K": 1, "P": 0}
    del values["num_warps"]
    return resources(step, values, WARPS, dtype, odd=tuple("HGLKDP"))


def main() -> None:
    print("| inputs | L | K, D | window | registers | stack, bytes | shared, KB |")
    print("|---|---|---|---|---|---|---|")
    for dtype in DTYPES:
        for L, K, D in SHAPES:
            for window in (True, False):
                r = compiled(L, K, D, dtype, window=window)
                print(
                    f"| {ELEMENTS[dtype]} | {L} | {K}, {D} | {'yes' if window else 'no'} "
                    f"| {r.registers} | {r.spilled} | {r.shared / 1024:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
