"""The native step with kept tokens: any sizes on any processor, rows alone, threads, one kernel."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.profiler import profile

from latte.ops import use_backend
from latte.ops.kept_step import KeptBuffers, kept_step
from latte.ops.step import StepSinks
from latte.ops.tensors import computation_dtype
from tests.ops.helpers import F64, randn, relative_error, threads

# K, D, window, L, count, block, heads of a group: no vector, parts of one, several and a part.
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (3, 17, 5, 3, 2, 4, 2),
    (17, 3, 33, 65, 40, 7, 3),
    (65, 65, 130, 17, 16, 20, 4),
    (128, 96, 70, 33, 20, 30, 5),
]


def buffers(size, dtype, wide, seen):
    """What is held after so many tokens of each row: all places are taken that can be."""
    (K, D, W, L, N, C, R), B, G = size, len(seen), 2
    M = N + W + C - 1
    positions = torch.full((B, G, M), -1)
    for b, number in enumerate(seen.tolist()):
        update = (number - 1) // C * C
        for s in range(max(0, update - W + 1), number):
            positions[b, :, N + s % (M - N)] = s
        left = min(N, max(0, update - W + 1))
        positions[b, :, :left] = torch.arange(left)
    there = positions >= 0
    exact = computation_dtype(dtype)
    scores = randn(B, G, M, seed=5).mul(2).round().masked_fill(~there, -torch.inf).to(wide)
    decays = -randn(B, G * R, M, L, seed=6).abs().to(exact)
    decays = decays * (positions < seen[:, None, None] - W).repeat_interleave(R, 1)[..., None]
    rows = (
        randn(B, h, M, n, seed=s).to(dtype) for h, n, s in ((G, K, 7), (G, D, 8), (G * R, L, 9))
    )
    keys, values, latent_keys = (x.to(wide) if wide == F64 else x for x in rows)
    return KeptBuffers(keys, values, scores, positions, latent_keys, decays.to(wide))


def sized(size, dtype, to=None, rows=slice(None)):
    """Outputs of two steps, before which some rows have an update, and what is held after them.

    Args:
        dtype: of the numbers, and of the calculation unless ``to`` says another.
        rows: Rows of the batch that take part.
    """
    (K, D, W, L, N, C, R), G, n = size, 2, 2
    B, H, wide = 3, G * R, to or computation_dtype(dtype)
    last = (W + N + C) // C * C + C
    seen = torch.tensor([last, last - 1, 1])
    held = buffers(size, dtype, wide, seen)
    held = KeptBuffers(*(x[rows].contiguous() for x in held))
    seen = seen[rows].contiguous()

    def numbers(*shape, seed, state=False):
        x = randn(*shape, seed=seed).to(computation_dtype(dtype) if state else dtype)[rows]
        return x.to(wide if state else to or dtype).contiguous()

    state = numbers(B, H, L, seed=10, state=True), numbers(B, H, L, D, seed=11, state=True)
    sinks = numbers(B, G, n, K, seed=12), numbers(B, G, n, D, seed=13)
    outs = []
    for t in range(2):
        q, k, v = (
            numbers(B, m, width, seed=20 + 3 * t + i)
            for i, (m, width) in enumerate(((H, K), (G, K), (G, D)))
        )
        decay = -numbers(B, H, L, seed=30 + t, state=True).abs()
        late = numbers(B, H, L + 1, seed=32 + t), numbers(B, H, L, seed=34 + t), decay, *state
        options = {"scale": K**-0.5, "softcap": 3.0 if t else None, "latents": late}
        options |= {"count": N, "window": W, "block": C, "sinks": StepSinks(*sinks, seen)}
        options["rise"] = 0.25 * t
        score, real = numbers(B, G, seed=36 + t), torch.tensor([True, True, t == 1])[rows]
        with torch.no_grad():
            outs.append(kept_step(q, k, v, score, held, seen, real, **options))
        seen = seen + real
    after = held.state(seen, N, W, C)
    return [*outs, *state, *after]


@functools.cache
def by_pytorch(size, dtype):
    """The same by PyTorch's operations, in fp64 and in the dtype."""
    with use_backend("torch"):
        return sized(size, dtype, to=F64), sized(size, dtype)


@pytest.mark.parametrize("instructions", ["default", "avx2", "avx512"])
def test_any_size_on_any_processor(instructions, with_instructions):
    """As exact as PyTorch's operations, with what instructions this processor has."""
    code = (
        "import sys, torch\nfrom tests.ops.cpp_backend import test_kept_step as t\n"
        "dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16\n"
        "found = {(size, dtype): t.sized(size, dtype) for size in t.SIZES for dtype in dtypes}\n"
        "torch.save(found, sys.argv[1])\n"
    )
    for (size, dtype), found in with_instructions(instructions, code).items():
        exact, rounded = by_pytorch(size, dtype)
        floor = 1e-12 if dtype == F64 else 4 * torch.finfo(dtype).eps
        for i, (a, e, low) in enumerate(zip(found, exact, rounded, strict=True)):
            assert torch.equal(a.isfinite(), e.isfinite()), (size, dtype, i)
            a, e, low = (torch.where(x.isfinite(), x, 0).to(F64) for x in (a, e, low))
            worst = max(2 * relative_error(low, e), floor)
            assert relative_error(a, e) <= worst, (size, dtype, i)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("size", SIZES[:4], ids=str)
def test_rows_of_a_batch_are_alone(size, dtype):
    together = sized(size, dtype)
    for b in range(3):
        alone = sized(size, dtype, rows=slice(b, b + 1))
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone, strict=True))


def test_threads_change_nothing():
    results = []
    for count in (1, 3):
        with threads(count):
            results.append(sized(SIZES[-1], torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_step_is_one_kernel_by_default():
    with profile() as seen:
        sized(SIZES[1], torch.float32)
    assert sum(e.name == "latte::cpu_kept_step" for e in seen.events()) == 2
