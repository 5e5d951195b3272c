"""What the ops launch compiles for sm_90 as it is launched: arguments as Triton itself sees them.

The other compile tests spell each kernel's signature out. Here the ops run on CPU tensors up to the
launch; Triton then binds and specialises the arguments, and compiles, for a stand-in of a driver.
Nothing is executed, so that results are whatever memory held.

Shapes: B rows, T tokens, H query heads, G key/value heads, L latents, K, D widths, N sequences.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from latte.ops import (  # noqa: E402
    LatteState,
    WindowState,
    causal_conv1d,
    latte_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)
from latte.ops.triton_backend import launch, segments  # noqa: E402
from latte.ops.triton_backend import rg_lru as rg_lru_module  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LARGEST_GRID = (2**31 - 1, 65535, 65535)


class Hopper:
    """A driver of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched, each of them compiled."""
    names: list[str] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names.append(self.__name__)
        sizes = tuple(grid)
        assert len(sizes) <= 3 and all(type(n) is int for n in sizes), (names[-1], sizes)
        assert all(0 < n <= most for n, most in zip(sizes, LARGEST_GRID, strict=False)), sizes
        run(self, *args, grid=grid, warmup=True, **options)

    previous = driver._active
    driver.set_active(Hopper())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    served = launch.unavailable_for
    for name, module in list(sys.modules.items()):
        if name.startswith("latte.") and getattr(module, "unavailable_for", None) is served:
            monkeypatch.setattr(module, "unavailable_for", lambda x: None)
    yield names
    driver.set_active(previous)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def differentiate(outputs: Any, inputs: list[Tensor]) -> None:
    """Through every output and every part of a state that has a gradient."""
    flat: list[Tensor] = []

    def visit(tree: Any) -> None:
        if isinstance(tree, Tensor):
            flat.extend([tree] if tree.requires_grad else [])
        else:
            for x in tree or ():
                visit(x)

    visit(outputs)
    torch.autograd.grad(flat, inputs, [torch.ones_like(x) for x in flat], allow_unused=True)


def options_of(kind: str, B: int, T: int) -> dict[str, Any]:
    """``plain``; or masked, from a state and to one; or packed as well."""
    if kind == "plain":
        return {}
    options: dict[str, Any] = {"key_mask": torch.rand(B, T) < 0.8, "output_final_state": True}
    if kind == "packed":
        options["cu_seqlens"] = torch.tensor([0, T // 3, T])
    return options


def latte_start(N: int, H: int, L: int, D: int) -> LatteState:
    mean = torch.randn(N, H, L, D).requires_grad_()
    return LatteState(torch.randn(N, H, L).requires_grad_(), mean)


def window_start(N: int, P: int, G: int, K: int, D: int, dtype: torch.dtype) -> WindowState:
    keys, values = randn(N, P, G, K, dtype=dtype), randn(N, P, G, D, dtype=dtype)
    return WindowState(keys, values, torch.ones(N, P, dtype=torch.bool))


def start_latte(dtype, kind, causal, shortest, monkeypatch, L=32, D=64):
    monkeypatch.setattr(segments, "SHORTEST", shortest)
    B, T, H, G = (1 if kind == "packed" else 2), 200, 4, 2
    inputs = [randn(B, T, H, n, dtype=dtype) for n in (L, L)] + [randn(B, T, G, D, dtype=dtype)]
    options = options_of(kind, B, T)
    if kind != "plain" and causal:
        options["initial_state"] = latte_start(2, H, L, D)
    if not causal:
        options.pop("output_final_state", None)
    out = latte_attention(*inputs, causal=causal, backend="triton", **options)
    differentiate(out, [*inputs, *options.get("initial_state", ())])


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_causal_latte(kind, launched, monkeypatch):
    start_latte(torch.bfloat16, kind, True, 1, monkeypatch)
    assert {"segment_sums", "scan", "walk", "query_walk", "scan_back", "source_walk"} <= {*launched}


def test_bidirectional_latte(launched, monkeypatch):
    start_latte(torch.bfloat16, "packed", False, 4, monkeypatch)
    assert {"mixtures", "queries_ask", "mixture_gradients"} <= {*launched}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "state", "packed"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("L", "D"), [(16, 96), (3, 5), (200, 300)])
def test_latte_in_other_sizes(dtype, kind, causal, L, D, launched, monkeypatch):
    start_latte(dtype, kind, causal, 1, monkeypatch, L, D)
    assert launched


def start_macchiato(dtype, kind, causal, shortest, monkeypatch, L=32, D=64, softcap=None):
    monkeypatch.setattr(segments, "SHORTEST", shortest)
    B, T, H, G, window = (1 if kind == "packed" else 2), 200, 4, 2, 33
    inputs = [randn(B, T, H, L + 1, dtype=dtype), randn(B, T, H, L, dtype=dtype)]
    inputs += [randn(B, T, H, D, dtype=dtype)] + [randn(B, T, G, D, dtype=dtype) for _ in "kv"]
    options = options_of(kind, B, T)
    state: tuple[Tensor, ...] = ()
    if kind != "plain" and causal:
        latents, local = latte_start(2, H, L, D), window_start(2, window - 1, G, D, D, dtype)
        options["initial_state"] = (latents, local)
        state = (*latents, local.keys, local.values)
    if not causal:
        options.pop("output_final_state", None)
    options |= {"window": window, "softcap": softcap, "causal": causal}
    out = macchiato_attention(*inputs, backend="triton", **options)
    differentiate(out, [*inputs, *state])


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_causal_macchiato(kind, launched, monkeypatch):
    start_macchiato(torch.bfloat16, kind, True, 1, monkeypatch)
    back = {"window_query_gradients", "query_walk", "source_walk", "window_source_gradients"}
    assert {"macchiato_walk"} | back <= {*launched}


def test_bidirectional_macchiato(launched, monkeypatch):
    start_macchiato(torch.bfloat16, "packed", False, 4, monkeypatch, softcap=20.0)
    assert {"window_outputs", "window_query_gradients"} <= {*launched}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "state", "packed"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("L", "D"), [(16, 96), (3, 5), (130, 200)])
def test_macchiato_in_other_sizes(dtype, kind, causal, L, D, launched, monkeypatch):
    start_macchiato(dtype, kind, causal, 1, monkeypatch, L, D, softcap=30.0)
    assert launched


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.bfloat16, "packed"),
        pytest.param(torch.bfloat16, "plain", marks=pytest.mark.slow),
        pytest.param(torch.float16, "plain", marks=pytest.mark.slow),
        pytest.param(torch.float32, "packed", marks=pytest.mark.slow),
    ],
)
def test_the_window_alone(dtype, kind, launched):
    B, T, H, G, D = (1 if kind == "packed" else 2), 100, 4, 2, 64
    inputs = [randn(B, T, H, D, dtype=dtype)] + [randn(B, T, G, D, dtype=dtype) for _ in "kv"]
    options = options_of(kind, B, T)
    state: tuple[Tensor, ...] = ()
    if kind == "packed":
        local = window_start(2, 32, G, D, D, dtype)
        options["initial_state"], state = local, (local.keys, local.values)
    out = sliding_window_attention(*inputs, window=33, backend="triton", **options)
    differentiate(out, [*inputs, *state])
    assert {"window_outputs", "window_query_gradients", "window_source_gradients"} <= {*launched}


def start_recurrence(dtype, packed, whole, monkeypatch):
    """``whole``: one program walks a sequence, as where there are enough of them."""
    monkeypatch.setattr(rg_lru_module, "one_walk", lambda *_: whole)
    B, T, E, N = (1 if packed else 2), 100, 48, 2
    options: dict[str, Any] = {"backend": "triton", "output_final_state": True}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 30, T])
    x, a, b = (randn(B, T, E, dtype=dtype) for _ in range(3))
    decay, start = randn(E, dtype=torch.float32), randn(N, E, dtype=torch.float32)
    out = rg_lru(x, a, b, decay, initial_state=start, **options)
    differentiate(out, [x, a, b, decay, start])
    weight, bias = randn(E, 4, dtype=dtype), randn(E, dtype=dtype)
    tail = randn(N, 3, E, dtype=dtype)
    out = causal_conv1d(x, weight, bias, initial_state=tail, **options)
    differentiate(out, [x, weight, bias, tail])


@pytest.mark.parametrize("whole", [False, True])
def test_the_rg_lru_and_the_convolution(whole, launched, monkeypatch):
    start_recurrence(torch.bfloat16, True, whole, monkeypatch)
    walks = {"walk", "walk_back"} if whole else {"ends", "carry", "apply", "ends_back"}
    assert walks | {"convolve"} <= {*launched}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_recurrences_in_other_dtypes(dtype, packed, whole, launched, monkeypatch):
    start_recurrence(dtype, packed, whole, monkeypatch)
    assert launched


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_decoding(dtype, launched):
    B, H, G, L, D, P = 3, 4, 2, 32, 96, 127
    latte = [randn(B, 1, n, m, dtype=dtype) for n, m in ((H, L), (H, L), (G, D))]
    window = [
        randn(B, 1, n, m, dtype=dtype) for n, m in ((H, L + 1), (H, L), (H, D), (G, D), (G, D))
    ]
    options: dict[str, Any] = {"backend": "triton", "output_final_state": True}
    with torch.no_grad():
        latents = latte_start(B, H, L, D)
        latte_attention(*latte, initial_state=latents, **options)
        both = (latents, window_start(B, P, G, D, D, dtype))
        macchiato_attention(*window, window=P + 1, initial_state=both, **options)
        rg_lru(*(randn(B, 1, D, dtype=dtype) for _ in range(3)), torch.randn(D), **options)
    assert launched[:2] == ["step", "step"]
