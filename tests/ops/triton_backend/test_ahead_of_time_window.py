"""Every configuration of the kernels with a window compiles for sm_90, within its bounds.

Nothing runs here: neither a GPU nor a driver is needed.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ahead_of_time import SHARED_LIMIT, compiled  # noqa: E402
from ahead_of_time_window import WIDTHS, WINDOW, window_compiled  # noqa: E402

from latte.ops.triton_backend.launch import PRODUCTS  # noqa: E402
from latte.ops.triton_backend.window_launch import HALF, window_tiles  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
LATENTS = (None, *HALF)
COMMON = (torch.bfloat16, 32, 64)
RARE = [(d, L, X) for d in PRODUCTS for L in LATENTS for X in WIDTHS if (d, L, X) != COMMON]


def most_spilled(dtype: torch.dtype, L: int | None, X: int) -> int:
    """Bytes of stack per thread that are let pass."""
    if dtype != torch.bfloat16:
        return 640
    return 0 if X <= 64 and (L or 1) <= 32 else 96


def check(r, allowed, name):
    assert r.spilled <= allowed, f"{name}: {r.spilled} bytes of stack"
    assert r.shared <= SHARED_LIMIT, f"{name}: {r.shared} bytes of shared memory"


@pytest.mark.parametrize("name", WINDOW)
def test_the_common_configuration(name):
    check(window_compiled(name, 32, 64, torch.bfloat16), 0, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOW)
@pytest.mark.parametrize(("dtype", "L", "X"), RARE)
def test_rare_configurations(dtype, L, X, name):
    check(window_compiled(name, L, X, dtype), most_spilled(dtype, L, X), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOW)
def test_other_launches(name):
    """In both directions; without mask, packing and state; odd and widest keys and values."""
    check(window_compiled(name, 32, 64, torch.bfloat16, causal=False), 0, name)
    check(window_compiled(name, 32, 64, torch.bfloat16, plain=True), 16, name)
    check(window_compiled(name, None, 5, torch.bfloat16), 32, name)
    check(window_compiled(name, 32, 256, torch.bfloat16), 96, name)


def test_the_earlier_state_and_sizes_of_one():
    name = "window_source_gradients"
    check(window_compiled(name, None, 64, torch.bfloat16, earlier=True), 16, name)
    for name in WINDOW:
        r = window_compiled(name, None, 64, torch.bfloat16, plain=True, ones=True)
        check(r, 0, name)


@pytest.mark.parametrize("name", ["query_gradients", "source_gradients"])
def test_the_latents_beside_a_window(name):
    check(compiled(name, 32, torch.bfloat16, gated=True), 0, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["query_gradients", "source_gradients", "mixture_gradients"])
@pytest.mark.parametrize("dtype", PRODUCTS)
def test_all_latents_beside_a_window(dtype, name):
    for L in HALF:
        check(compiled(name, L, dtype, gated=True), 640 if dtype == torch.float32 else 96, name)


def test_thirteen_configurations_whatever_the_length():
    chosen = {
        (L, dtype == torch.float32, window_tiles(L, X, X, dtype))
        for L in HALF
        for X in (1, 64, 65, 256, 512)
        for dtype in PRODUCTS
    }
    assert len(chosen) == 13
