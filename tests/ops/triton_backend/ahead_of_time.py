"""Compile the kernels for sm_90 without a GPU, and report what they take.

python tests/ops/triton_backend/ahead_of_time.py    # the table of docs/kernels.md
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import torch

from latte.ops.triton_backend.launch import HALF, PRODUCTS, SCAN, configuration

SHARED_LIMIT = 232448  # bytes that one block may use on sm_90
ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FORWARD = ("mixtures",)
BACKWARD = ("queries_ask", "mixture_gradients")
SCANS = ("scan", "scan_back", "add_up")
# Arguments of the inputs' dtype; every other pointer but these and the integers is to fp32.
OF_INPUTS = {f"{x}_ptr" for x in ("q", "k", "v", "dy", "out", "dq", "dk", "dv")}
OF_INPUTS |= {f"{x}_ptr" for x in ("latent_q", "latent_k", "latents_dv", "tail_k", "tail_v")}
# The recurrence's and the convolution's; "out" is their output too.
OF_INPUTS |= {f"{x}_ptr" for x in ("x", "r", "i", "theta", "w", "bias", "dx", "dr", "di")}
OF_INPUTS |= {f"{x}_ptr" for x in ("local_q", "local_k", "keys", "values", "keys1", "values1")}
INTEGERS = {f"{x}_ptr": "*u8" for x in ("mask", "tail_mask", "slots", "slots1")}
INTEGERS |= {"begins_ptr": "*i64"}
INTEGERS |= {"table_ptr": "*i64", "first_ptr": "*i64", "bounds_ptr": "*i64"}
REALS = ("scale", "softcap")
# The window's logit stands first: those of the latents are aligned to their elements alone.
ODD = ("q_ptr", "dq_ptr", "q_b", "q_t", "q_h")
UNIT_STRIDES = ("q_l", "k_l", "v_d", "dy_d")


class Resources(NamedTuple):
    """What one program takes."""

    registers: int  # per thread
    spilled: int  # bytes of stack per thread
    shared: int  # bytes


def compiled(
    name: str,
    L: int,
    dtype: torch.dtype,
    *,
    plain: bool = False,
    ones: bool = False,
    gated: bool = False,
) -> Resources:
    """Compile one kernel in the configuration that these inputs would choose.

    ``plain``: without mask, packing and initial state, which else are all there. ``ones``: every
    size is 1, which Triton makes a constant. ``gated``: beside a window (Macchiato).
    """
    from latte.ops.triton_backend import backward, forward

    kernel = getattr(forward, name, None) or getattr(backward, name)
    c = configuration(L, dtype)
    values = {"C": c.C, "BL": c.BL, "BD": c.BD, "WIDE": c.wide, "NARROW": c.narrow}
    warps = c.warps_back if name in BACKWARD else c.warps
    if name in SCANS:
        values |= SCAN
        warps = SCAN["num_warps"]
    values |= dict.fromkeys(UNIT_STRIDES, 1)
    if ones:
        values |= dict.fromkeys(("T", "chunks", "H", "L", "D"), 1)
    if gated:
        values |= {"R": 2, "GATED": True, "dv_ptr": None}
    else:
        values |= {"R": 1, "GATED": False, "gate_ptr": None, "window_delta_ptr": None}
    if plain:
        absent = ("mask_ptr", "table_ptr", "first_ptr", "log_mass0_ptr", "mean0_ptr")
        values |= dict.fromkeys(absent)
    return resources(kernel, values, warps, dtype, ODD if gated else ())


def resources(
    kernel: Any,
    values: dict[str, Any],
    warps: int,
    dtype: torch.dtype,
    odd: tuple[str, ...] = (),
    stages: int = 3,
    **options: int,
) -> Resources:
    """Compile one kernel with these constants; integers but ``odd`` ones are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {a: values[a] for a in kernel.arg_names if a in values}
    signature, aligned = {}, {}
    for i, a in enumerate(kernel.arg_names):
        if a in constants:
            signature[a] = "constexpr"
            continue
        pointer = f"*{ELEMENTS[dtype]}" if a in OF_INPUTS else INTEGERS.get(a, "*fp32")
        signature[a] = pointer if a.endswith("_ptr") else "fp32" if a in REALS else "i32"
        if a not in ("T", "chunks", *REALS, *odd):
            # Multiples of 16, as the sizes of models are.
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    options |= {"num_warps": warps, "num_stages": stages}
    binary = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Resources(int(found[1]), int(found[2]), binary.metadata.shared)


def main() -> None:
    print("| inputs | L | kernel | C | tile of D | warps | registers | stack, bytes | shared, KB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in SCANS:
        r = compiled(name, 16, torch.float32)
        print(
            f"| all | {SCAN['BL']} | {name} | - | {SCAN['BD']} | {SCAN['num_warps']} "
            f"| {r.registers} | {r.spilled} | {r.shared / 1024:.0f} |"
        )
    for dtype in PRODUCTS:
        for L in HALF:
            c = configuration(L, dtype)
            for name in FORWARD + BACKWARD:
                r = compiled(name, L, dtype)
                warps = c.warps_back if name in BACKWARD else c.warps
                print(
                    f"| {ELEMENTS[dtype]} | {L} | {name} | {c.C} | {c.BD} | {warps} "
                    f"| {r.registers} | {r.spilled} | {r.shared / 1024:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
