"""Sinks beside the window, and latents that see a source when it leaves the window.

Every backend against the fp64 reference, values and all gradients; then laws, and the equation
spelled out with loops.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    flat,
    key_mask,
    latte_state,
    macchiato_inputs,
    randn,
    relative_error,
    values_and_gradients,
    window_state,
)

from latte.ops import (
    LatteState,
    Sinks,
    WindowState,
    cpp_backend,
    latte_attention,
    macchiato_attention,
    sliding_window_attention,
)
from latte.ops.torch_backend import macchiato as torch_macchiato
from latte.ops.torch_backend.window import window_op as torch_window_op

NATIVE = pytest.mark.skipif(cpp_backend.ABSENT is not None, reason="no native kernels")
FAST = pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=NATIVE)])
FLAGS = pytest.mark.parametrize(
    ("masked", "packed", "carried"),
    [(m, p, c) for m in (False, True) for p in (False, True) for c in (False, True)],
)
KINDS = pytest.mark.parametrize("kind", ["sinks", "delay", "both", "window"])


def sink_inputs(B, T, N, n, H, G, K, D, seed=40, scale=1.0):
    """Queries (B, T, H, K), keys (N, n, G, K) and values (N, n, G, D) of sinks."""
    shapes = ((B, T, H, K), (N, n, G, K), (N, n, G, D))
    q, k, v = (randn(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    return [q * scale, k * scale, v]


def attend(backend, kind, window, around, **options):
    """A function of an op's inputs, sinks and state, as far as the kind has them.

    Args:
        around: what has no gradient: masks of sinks, tail and pending sources, and positions.
    """
    options = {"output_final_state": True, "backend": backend, "window": window, **options}
    sink_mask, position, tail_mask, pending_mask = around

    def run(*tensors):
        tensors = list(tensors)
        given = {}
        inputs = [tensors.pop(0) for _ in range(3 if kind == "window" else 5)]
        if kind != "delay":
            given["sinks"] = Sinks(*(tensors.pop(0) for _ in range(3)), sink_mask, position)
        if kind == "window":
            if tensors:
                given["initial_state"] = WindowState(*tensors, tail_mask)
            return sliding_window_attention(*inputs, **given, **options)
        given["delay"] = kind != "sinks"
        if tensors:
            state = [LatteState(*tensors[:2]), WindowState(*tensors[2:4], tail_mask)]
            if given["delay"]:
                state.append(WindowState(*tensors[4:6], pending_mask))
            given["initial_state"] = tuple(state)
        return macchiato_attention(*inputs, **given, **options)

    return run


def case(
    kind, T, window, *, n=3, masked=False, packed=False, carried=False, scale=1.0, decay=None, **more
):
    """A function of the backend's name, to values and gradients."""
    sizes = {"H": 4, "G": 2, "L": 3, "K": 6, "D": 5} | {
        name: more.pop(name) for name in list(more) if name in "HGLKD"
    }
    H, G, L, K, D = sizes.values()
    B, cu = (1, boundaries(T)) if packed else (2, None)
    N = B if cu is None else len(cu) - 1
    inputs = [*macchiato_inputs(B, T, **sizes, scale=scale)][2 if kind == "window" else 0 :]
    inputs += sink_inputs(B, T, N, n, H, G, K, D, scale=scale) if kind != "delay" else []
    sink_mask = torch.ones(N, n, dtype=torch.bool)
    sink_mask[0, n // 2 :] = False
    position = tail_mask = pending_mask = None
    if carried:
        position = torch.arange(N) * (window // 2) + n
        keys, values, tail_mask = window_state(N, window - 1, G, K, D)
        latents = latte_state(N, H, L, D)
        latents.log_mass[-1], latents.mean[-1] = -torch.inf, 0.0
        inputs += [] if kind == "window" else [*latents]
        inputs += [keys, values]
        if kind in ("delay", "both"):
            pending_mask = randn(N, window, seed=31) > -0.5
            inputs += [randn(N, window, H, L, seed=32), randn(N, window, G, D, seed=33)]
    options = {"key_mask": key_mask(B, T) if masked else None, "cu_seqlens": cu, **more}
    if decay is not None and kind != "window":
        shape = (H, L) if decay == "static" else (B, T, H, L)
        options["log_decay"] = -randn(*shape, seed=50).abs()
    around = (sink_mask, position, tail_mask, pending_mask)
    return lambda backend, dtype=F64: values_and_gradients(
        attend(backend, kind, window, around, **options), [x.to(dtype) for x in inputs]
    )


@FLAGS
@KINDS
@FAST
def test_it_agrees_with_the_reference(backend, kind, masked, packed, carried):
    options = {"masked": masked, "packed": packed, "carried": carried}
    for W in (5, 16):
        for T in (1, W - 1, W, W + 1, 3 * W + 5):
            run = case(kind, T, W, **options)
            assert_same(run(backend), run("reference"))
    for T, W in ((130, 64), (140, 65), (200, 17), (66, 1), (70, 100)):
        run = case(kind, T, W, **options)
        assert_same(run(backend), run("reference"))


@FLAGS
@FAST
def test_a_soft_cap_and_large_logits_agree_with_the_reference(backend, masked, packed, carried):
    options = {"masked": masked, "packed": packed, "carried": carried}
    for more in ({"softcap": 2.0}, {"scale": 100.0}, {"n": 19}):
        run = case("both", 90, 20, **options, **more)
        assert_same(run(backend), run("reference"))


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize(("L", "K", "D"), [(1, 1, 1), (16, 64, 32), (33, 17, 96)])
@FAST
def test_odd_widths_and_groups_agree_with_the_reference(backend, G, L, K, D):
    run = case("both", 70, 20, G=G, L=L, K=K, D=D, masked=True, carried=True)
    assert_same(run(backend), run("reference"))


@FLAGS
@pytest.mark.parametrize("decay", ["static", "gated"])
@FAST
def test_delayed_latents_may_forget(backend, decay, masked, packed, carried):
    for T, W in ((40, 7), (150, 64)):
        options = {"masked": masked, "packed": packed, "carried": carried, "decay": decay}
        run = case("both", T, W, **options)
        assert_same(run(backend), run("reference"))


@KINDS
@FAST
def test_tokens_by_the_thousand_agree_with_the_reference(backend, kind):
    """Several segments, and heads that go through them together."""
    run = case(kind, 1100, 70, H=2, G=1, L=2)
    assert_same(run(backend), run("reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@KINDS
@FAST
def test_low_precision_errs_at_most_twice_the_reference(backend, kind, dtype):
    run = case(kind, 257, 64, L=5, K=32, D=32)
    low = lambda backend: run(backend, dtype)  # noqa: E731

    def rounded(backend):
        inputs_as = case(kind, 257, 64, L=5, K=32, D=32)
        return inputs_as(backend, dtype)

    want = run_exact(kind, dtype)
    for a, b, e in zip(low(backend), rounded("reference"), want, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e) + torch.finfo(torch.float32).eps
