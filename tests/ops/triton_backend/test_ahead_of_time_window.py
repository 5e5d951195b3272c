"""Every configuration of the kernels with a window compiles for sm_90, within its bounds.

Nothing runs here: neither a GPU nor a driver is needed.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ahead_of_time import SHARED_LIMIT, compiled  # noqa: E402
from ahead_of_time_walks import compiled_walk  # noqa: E402
from ahead_of_time_window import (  # noqa: E402
    BESIDE,
    WIDTHS,
    WINDOW,
    compiled_forward,
    window_compiled,
)

from latte.ops.triton_backend import macchiato_causal  # noqa: E402
from latte.ops.triton_backend.launch import HALF, PRODUCTS  # noqa: E402
from latte.ops.triton_backend.macchiato_causal import beside  # noqa: E402
from latte.ops.triton_backend.segments import walking  # noqa: E402
from latte.ops.triton_backend.window_launch import window_tiles  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
RARE = [(d, X) for d in PRODUCTS for X in WIDTHS if (d, X) != (torch.bfloat16, 64)]
FORWARD = [(d, L, X) for d in PRODUCTS for L in HALF for X in WIDTHS]


def most_spilled(dtype: torch.dtype) -> int:
    """Bytes of stack per thread that are let pass in the window's kernels."""
    return 96 if dtype == torch.bfloat16 else 640


def most_of_the_forward_walk(dtype: torch.dtype) -> int:
    """The same of ``macchiato_walk``: much of it belongs to rows beyond reach, which are rare."""
    return 1024 if dtype == torch.bfloat16 else 4096


def check(r, allowed, name):
    assert r.spilled <= allowed, f"{name}: {r.spilled} bytes of stack"
    assert r.shared <= SHARED_LIMIT, f"{name}: {r.shared} bytes of shared memory"


@pytest.mark.parametrize("name", WINDOW)
def test_the_common_configuration(name):
    check(window_compiled(name, None, 64, torch.bfloat16), 0, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOW)
@pytest.mark.parametrize(("dtype", "X"), RARE)
def test_rare_configurations(dtype, X, name):
    check(window_compiled(name, None, X, dtype), most_spilled(dtype), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOW)
def test_other_launches(name):
    """Beside latents; without mask, packing and state; odd and widest keys and values."""
    check(window_compiled(name, 32, 64, torch.bfloat16, causal=False), 16, name)
    check(window_compiled(name, None, 64, torch.bfloat16, plain=True), 16, name)
    check(window_compiled(name, None, 5, torch.bfloat16), 64, name)
    check(window_compiled(name, None, 256, torch.bfloat16), 96, name)


def test_sources_beside_latents():
    check(window_compiled(WINDOW[2], 32, 64, torch.bfloat16), 16, WINDOW[2])


@pytest.mark.slow
@pytest.mark.parametrize("L", HALF)
def test_sources_beside_bidirectional_latents(L):
    check(window_compiled(WINDOW[2], L, 64, torch.bfloat16, causal=False), 96, WINDOW[2])


def test_the_earlier_state_and_sizes_of_one():
    name = "window_source_gradients"
    check(window_compiled(name, None, 64, torch.bfloat16, earlier=True), 16, name)
    for name in WINDOW:
        r = window_compiled(name, None, 64, torch.bfloat16, plain=True, ones=True)
        check(r, 0, name)


def test_the_forward_walk():
    name = "macchiato_walk"
    check(compiled_forward(32, 64, torch.bfloat16), 128, name)
    check(compiled_forward(32, 64, torch.bfloat16, cut=True), 128, name)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "L", "X"), FORWARD)
def test_all_forward_walks(dtype, L, X):
    check(compiled_forward(L, X, dtype), most_of_the_forward_walk(dtype), "macchiato_walk")


@pytest.mark.parametrize("name", BESIDE)
def test_the_walks_back_beside_a_window(name):
    check(compiled_walk(name, 32, 64, torch.bfloat16, gated=True), 128, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PRODUCTS)
def test_mixtures_beside_a_window(dtype):
    name = "mixture_gradients"
    for L in HALF:
        check(compiled(name, L, dtype, gated=True), 640 if dtype == torch.float32 else 96, name)


def test_configurations_whatever_the_length():
    chosen = {
        (L, dtype == torch.float32, window_tiles(L, X, X, dtype))
        for L in HALF
        for X in (1, 64, 65, 256, 512)
        for dtype in PRODUCTS
    }
    assert len(chosen) == 13
    assert set(macchiato_causal.HALF) == set(macchiato_causal.SINGLE) == set(HALF)
    reached = {(walking(L, 64, dtype).BL, beside(L, 64, dtype)) for L in HALF for dtype in PRODUCTS}
    assert len(reached) <= 2 * len(HALF)
