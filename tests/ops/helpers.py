"""Inputs and comparisons shared by the tests of the ops.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width,
D value width, N states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from latte.ops import LatteState, WindowState
from latte.ops.torch_backend.kept_plan import Plan

F64 = torch.float64


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Standard normal numbers in fp64, a function of the seed and the shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64) * scale


def latte_inputs(B=2, T=65, H=2, L=3, D=5, scale=1.0, seed=0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (B, T, H, L) and v (B, T, H, D)."""
    q, k = (randn(B, T, H, L, seed=seed + i, scale=scale) for i in (0, 1))
    return q, k, randn(B, T, H, D, seed=seed + 2)


def macchiato_inputs(B=2, T=65, H=4, G=2, L=3, K=6, D=5, scale=1.0, seed=0) -> tuple[Tensor, ...]:
    """latent_q, latent_k, q, k, v."""
    return (
        randn(B, T, H, L + 1, seed=seed, scale=scale),
        randn(B, T, H, L, seed=seed + 1, scale=scale),
        randn(B, T, H, K, seed=seed + 2, scale=scale),
        randn(B, T, G, K, seed=seed + 3, scale=scale),
        randn(B, T, G, D, seed=seed + 4),
    )


def latte_state(N: int, H: int, L: int, D: int, seed: int = 7, scale: float = 1.0) -> LatteState:
    """A state with some mass everywhere but in its first entry, which is empty."""
    log_mass, mean = randn(N, H, L, seed=seed, scale=scale), randn(N, H, L, D, seed=seed + 1)
    log_mass[0, 0], mean[0, 0] = -torch.inf, 0.0
    return LatteState(log_mass, mean)


def window_state(N: int, P: int, G: int, K: int, D: int, seed: int = 7) -> WindowState:
    """A tail of P keys of which some are missing."""
    mask = randn(N, P, seed=seed) > -0.7
    return WindowState(randn(N, P, G, K, seed=seed + 1), randn(N, P, G, D, seed=seed + 2), mask)


def seen_sinks(B: int, T: int, N: int) -> list[Tensor]:
    """Sinks as ops take them, both of which are seen, for :func:`macchiato_inputs`."""
    shapes = ((B, T, 4, 6), (N, 2, 2, 6), (N, 2, 2, 5))
    tensors = [randn(*shape, seed=40 + i).requires_grad_() for i, shape in enumerate(shapes)]
    return [*tensors, torch.ones(N, 2, dtype=torch.bool), torch.full((B, T), 2)]


def key_mask(B: int, T: int, seed: int = 11) -> Tensor:
    """About two thirds of the tokens, and none of the first third in the first row."""
    mask = randn(B, T, seed=seed) > -0.4
    mask[0, : T // 3] = False
    return mask


def boundaries(T: int) -> Tensor:
    """Packed sequences of very different lengths, two of them empty."""
    inner = sorted({T // 4, min(T, T // 4 + 1), T // 2})
    return torch.tensor([0, 0, *inner, T, T], dtype=torch.int32)


def flat(tree: object) -> list[Tensor]:
    """The floating-point tensors of nested tuples, in order."""
    if isinstance(tree, Tensor):
        return [tree] if tree.is_floating_point() else []
    if isinstance(tree, Iterable):
        return [x for item in tree for x in flat(item)]
    return []


def values_and_gradients(
    fn: Callable[..., object], inputs: Iterable[Tensor], seed: int = 99
) -> list[Tensor]:
    """All outputs of ``fn(*inputs)``, then the gradients of a random projection of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = flat(fn(*leaves))
    total = torch.zeros((), dtype=F64)
    for i, out in enumerate(outputs):
        finite = torch.where(torch.isfinite(out), out, 0.0)
        weights = randn(*out.shape, seed=seed + i).to(out)
        total = total + (finite * weights).sum().to(F64)
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return [x.detach() for x in outputs] + list(grads)


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    """Equal up to ``tolerance`` of each tensor's largest finite entry (at least 1)."""
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape, f"tensor {i}: shape {tuple(a.shape)}, want {tuple(e.shape)}"
        a, e = a.to(F64), e.to(F64)
        finite = torch.isfinite(e)
        assert torch.equal(torch.isfinite(a), finite), f"tensor {i}: other infinities or NaN"
        assert torch.equal(a[~finite], e[~finite]), f"tensor {i}: other infinities"
        if not finite.any():
            continue
        scale = max(1.0, e[finite].abs().max().item())
        error = (a[finite] - e[finite]).abs().max().item() / scale
        assert error <= tolerance, f"tensor {i}: error {error:.3g} above {tolerance:.3g}"


def relative_error(a: Tensor, e: Tensor) -> float:
    """The norm of the difference over the norm of the expected tensor."""
    a, e = a.to(F64), e.to(F64)
    return ((a - e).norm() / e.norm().clamp(min=1e-300)).item()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of PyTorch in one op."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_plans_are_equal(plan: Plan, other: Plan) -> None:
    """Two plans of a call with kept tokens keep, and leave to the latents, the same places."""
    for name in ("kept", "late", "after"):
        there = getattr(plan, f"{name}_there")
        assert torch.equal(there, getattr(other, f"{name}_there"))
        assert torch.equal(*(getattr(x, name)[there] for x in (plan, other)))
