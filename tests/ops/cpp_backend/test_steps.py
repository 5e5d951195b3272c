"""Steps of decoding by the native kernels: who takes them, one graph, extreme logits, any sizes."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import profile

from latte.layers import RGLRU, RMSNorm
from latte.layers.native import native_weights
from latte.layers.recurrent import STEP_KINDS
from latte.ops import LatteState, decoding, use_backend
from latte.ops.step import (
    Ring,
    StepSinks,
    conv_step,
    latte_step,
    macchiato_step,
    window_step,
)
from latte.ops.tensors import computation_dtype
from tests.ops.helpers import F64, latte_inputs, macchiato_inputs, randn, relative_error

B, H, G, L, K, D, W, E = 2, 4, 2, 3, 6, 20, 5, 21


def case(dtype=torch.float32, scale=1.0):
    """Every step as a function of no arguments, and the states that it writes."""
    latent_q, latent_k, q, k, v = (
        x[:, 0].to(dtype) for x in macchiato_inputs(B, 1, H, G, L, K, D, scale=scale)
    )
    log_mass, mean = (x.float() for x in LatteState(randn(B, H, L), randn(B, H, L, D)))
    ring = Ring(randn(B, G, W, K).to(dtype), randn(B, G, W, D).to(dtype), randn(B, W) > 0)
    slot, real = torch.tensor([2]), torch.tensor([True, False])
    x = randn(B, E).to(dtype)
    torch.manual_seed(0)
    rglru, norm = RGLRU(E, 3).to(dtype), RMSNorm(E, eps=1e-6).to(dtype)

    def recur():
        parts = rglru.recurrence_gate, rglru.input_gate, rglru, norm
        with torch.no_grad():
            weights = native_weights(x, parts, STEP_KINDS)
        if weights:
            return decoding.rg_lru(x, weights, norm.eps, state, real)
        return norm(rglru.step(x, state, real).to(dtype))

    state, tail = randn(B, E).float(), randn(B, 2, E).to(dtype)
    weight, bias = randn(E, 3), randn(E)
    angles = randn(B, 1, 1, K // 2).to(state.dtype)
    rotary = angles.cos(), torch.cat([-angles.sin(), angles.sin()], 2)
    local = {"scale": 0.4, "softcap": 3.0, "rotary": rotary}
    latents = (log_mass, mean)
    decay = -randn(B, H, L).float().square()

    def latte(**options):
        return latte_step(latent_q[..., 1:], latent_k, v, *latents, real, **options)

    def macchiato(**options):
        inputs = latent_q, latent_k, q, k, v, *latents, ring, slot, real
        return macchiato_step(*inputs, **local, **options)

    steps = {
        "latte": latte,
        "forgetful latte": lambda: latte(log_decay=decay[0]),
        "macchiato": macchiato,
        "forgetful macchiato": lambda: macchiato(log_decay=decay),
        "window": lambda: window_step(q, k, v, ring, slot, real, length=4, **local),
        "rg_lru": recur,
        "conv": lambda: conv_step(x, weight, bias, tail, real),
    }
    return steps, [*latents, *ring, state, tail]


FORGETFUL = ["forgetful latte", "forgetful macchiato"]
STEPS = pytest.mark.parametrize(
    "name", ["latte", "macchiato", *FORGETFUL, "window", "rg_lru", "conv"]
)


@STEPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_step_is_pytorchs_step(name, dtype, scale):
    results = []
    for backend in ("torch", "cpu"):
        steps, states = case(dtype, scale)
        with use_backend(backend), torch.no_grad():
            results.append([steps[name](), *states])
    for a, b in zip(*results, strict=True):
        worst = 2e-2 if a.dtype == torch.bfloat16 else 1e-5
        top = b.to(torch.float32).abs().max().item()
        torch.testing.assert_close(a, b, rtol=worst, atol=worst * top)


@STEPS
def test_a_step_is_one_kernel_by_default_and_one_graph(name):
    steps, states = case()
    with torch.no_grad(), profile() as seen:
        out = steps[name]()
    events = [e.name for e in seen.events()]
    assert sum(e.startswith("latte::cpu_") for e in events) == 1
    assert "aten::add_" not in events and "aten::copy_" not in events
    plain = [out.clone(), *(x.clone() for x in states)]
    steps, states = case()
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(steps[name], fullgraph=True, backend="aot_eager")()
    assert all(torch.equal(a, b) for a, b in zip([out, *states], plain, strict=True))


def test_threads_change_nothing():
    heads, before, results = 64, torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            q, k, v = (x[:, 0].float() for x in latte_inputs(2, 1, heads, 32, 64))
            state = LatteState(*(randn(2, heads, 32, *n).float() for n in ((), (64,))))
            results.append([latte_step(q, k, v, *state), *state])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_a_state_that_is_not_contiguous_is_refused():
    q, k, v = (x[:, 0].float() for x in latte_inputs(2, 1, H, L, D))
    state = LatteState(randn(2, L, H).float().mT, randn(2, H, L, D).float())
    with pytest.raises(ValueError, match="log_mass must be contiguous"):
        latte_step(q, k, v, *state)


# K, D, W, L: no vector, parts of one, several and a part, whole ones; and long windows.
SIZES = [(1, 1, 1, 1), (3, 17, 5, 3), (17, 3, 33, 65), (65, 65, 130, 17), (128, 96, 512, 64)]


def sized(size, dtype, to=None, rows=slice(None)):
    """Outputs and states of one step of these sizes, two rows of which have masks and sinks.

    Args:
        dtype: of the numbers, and of the calculation unless ``to`` says another.
        rows: Rows of the batch that take part.
    """
    (K, D, W, L), B, H, G, n = size, 3, 4, 2, 2
    wide = to or computation_dtype(dtype)

    def numbers(*shape, seed, state=False):
        x = randn(*shape, seed=seed).to(computation_dtype(dtype) if state else dtype)[rows]
        return x.to(wide if state else to or dtype).contiguous()

    q, k, v = (
        numbers(B, m, width, seed=i) for i, (m, width) in enumerate(((H, K), (G, K), (G, D)))
    )
    latent_q, latent_k = numbers(B, H, L + 1, seed=3), numbers(B, H, L, seed=4)
    mask = randn(B, W, seed=5) > -0.5
    mask[2] = True
    mask = mask[rows].contiguous()
    real, slot = torch.tensor([True, False, True])[rows], torch.tensor([W // 2])
    position = torch.tensor([W + 5, W, 1])[rows].contiguous()
    found = []
    for delayed in (False, True):
        ring = Ring(numbers(B, G, W, K, seed=6), numbers(B, G, W, D, seed=7), mask.clone())
        sinks = StepSinks(numbers(B, G, n, K, seed=8), numbers(B, G, n, D, seed=9), position)
        latents = numbers(B, H, L, seed=10, state=True), numbers(B, H, L, D, seed=11, state=True)
        pending = numbers(B, H, W, L, seed=12) if delayed else None
        given = (latent_q, latent_k, q, k, v, *latents, ring, slot, real)
        with torch.no_grad():
            options = {"scale": K**-0.5, "softcap": 3.0 if delayed else None, "sinks": sinks}
            y = macchiato_step(*given, **options, pending=pending, joint=delayed)
            alone = window_step(q, k, v, ring, slot, real, scale=K**-0.5)
            far = latte_step(latent_q[..., 1:], latent_k, v, *latents, real)
        found += [y, alone, far, *latents]
    return found


@pytest.mark.parametrize("instructions", ["default", "avx2", "avx512"])
def test_any_size_on_any_processor(instructions, with_instructions):
    """As exact as PyTorch's operations, with what instructions this processor has."""
    code = (
        "import sys, torch\nfrom tests.ops.cpp_backend import test_steps as t\n"
        "dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16\n"
        "found = {(size, dtype): t.sized(size, dtype) for size in t.SIZES for dtype in dtypes}\n"
        "torch.save(found, sys.argv[1])\n"
    )
    for (size, dtype), found in with_instructions(instructions, code).items():
        with use_backend("torch"):
            exact, rounded = sized(size, dtype, to=F64), sized(size, dtype)
        floor = 1e-12 if dtype == F64 else 4 * torch.finfo(dtype).eps
        for i, (a, e, low) in enumerate(zip(found, exact, rounded, strict=True)):
            worst = max(2 * relative_error(low.to(F64), e), floor)
            assert relative_error(a.to(F64), e) <= worst, (size, dtype, i)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_of_a_batch_are_alone(size, dtype):
    together = sized(size, dtype)
    for b in range(3):
        alone = sized(size, dtype, rows=slice(b, b + 1))
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone, strict=True))
