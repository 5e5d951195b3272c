"""Where the kernels' tests run, and how they are judged.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, N states, W window.
"""

from __future__ import annotations

import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    flat,
    key_mask,
    latte_inputs,
    latte_state,
    macchiato_inputs,
    values_and_gradients,
    window_state,
)
from torch import Tensor

from latte.ops import (
    LatteState,
    WindowState,
    latte_attention,
    macchiato_attention,
    sliding_window_attention,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def call(backend, q, k, v, *state, **options):
    """``latte_attention`` with its final state."""
    return latte_attention(
        q,
        k,
        v,
        initial_state=LatteState(*state) if state else None,
        **{"output_final_state": True, "backend": backend, **options},
    )


def judged(inputs: list[Tensor], op=call, **options) -> list[Tensor]:
    """Values and gradients of the kernels, which may err at most twice what the reference does.

    Both get the same inputs in low precision; what is exact comes from fp64. The floor of a few
    ulps is for the cases where the reference, by luck, is exact; two ulps of the largest tensor,
    for gradients of logits: each is a difference of sums as large as the other gradients.
    """

    def run(backend, inputs):
        inputs = [x.to(DEVICE) for x in inputs]
        outputs = values_and_gradients(lambda *x: op(backend, *x, **options), inputs)
        return [x.cpu() for x in outputs]

    want = run("reference", [x.to(F64) for x in inputs])
    plain, got = run("reference", inputs), run("triton", inputs)
    eps = torch.finfo(torch.float32).eps
    largest = max(torch.where(torch.isfinite(e), e, 0.0).norm().item() for e in want)
    for i, (a, b, e) in enumerate(zip(got, plain, want, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        seen = torch.isfinite(e)
        assert torch.equal(a[~seen].to(F64), e[~seen]), f"tensor {i}: other infinities, or NaN"
        a, b, e = (torch.where(seen, x.to(F64), 0.0) for x in (a, b, e))
        floor = eps * max(16.0, 16.0 * e.norm().item(), 2.0 * largest)
        error, limit = (a - e).norm().item(), 2 * (b - e).norm().item()
        assert error <= max(limit, floor), f"tensor {i}: {error:.3g} above {limit:.3g}"
    return got


def compare(
    T, *, masked=False, packed=False, carried=False, H=1, L=3, D=5, B=2, scale=1.0, **options
) -> list[Tensor]:
    """The kernels against the reference on random inputs in fp32."""
    B = 1 if packed else B
    cu = boundaries(T) if packed else None
    inputs = [x.float() for x in latte_inputs(B, T, H, L, D, scale)]
    if carried:
        N = B if cu is None else len(cu) - 1
        inputs += [x.float() for x in latte_state(N, H, L, D, scale=scale)]
    mask = key_mask(B, T).to(DEVICE) if masked else None
    cu = None if cu is None else cu.to(DEVICE)
    return judged(inputs, key_mask=mask, cu_seqlens=cu, **options)


def window(backend, q, k, v, *tail, tail_mask=None, window=16, **options):
    """``sliding_window_attention`` with its final state."""
    options = {"output_final_state": options.get("causal", True), **options}
    state = WindowState(*tail, tail_mask) if tail else None
    return sliding_window_attention(
        q, k, v, window=window, initial_state=state, backend=backend, **options
    )


def macchiato(backend, latent_q, latent_k, q, k, v, *earlier, tail_mask=None, **options):
    """``macchiato_attention`` with its final state."""
    options = {"output_final_state": options.get("causal", True), "window": 16, **options}
    state = None
    if earlier:
        state = (LatteState(*earlier[:2]), WindowState(*earlier[2:], tail_mask))
    return macchiato_attention(
        latent_q, latent_k, q, k, v, initial_state=state, backend=backend, **options
    )


def compare_window(
    op, T, *, masked=False, packed=False, carried=False,
    B=1, H=2, G=1, L=3, K=6, D=5, W=16, scale=1.0, **options,
) -> list[Tensor]:  # fmt: skip
    """The kernels against the reference on random inputs in fp32: values and all gradients."""
    cu = boundaries(T) if packed else None
    inputs = [*macchiato_inputs(B, T, H, G, L, K, D, scale)]
    if op is window:
        inputs = inputs[2:]
    if carried:
        N = B if cu is None else len(cu) - 1
        keys, values, flags = window_state(N, W - 1, G, K, D)
        if op is macchiato:
            inputs += [*latte_state(N, H, L, D, scale=scale)]
        inputs += [keys, values]
        options["tail_mask"] = flags.to(DEVICE)
    options["key_mask"] = key_mask(B, T).to(DEVICE) if masked else None
    options["cu_seqlens"] = None if cu is None else cu.to(DEVICE)
    return judged([x.float() for x in inputs], op, window=W, **options)


class Fences:
    """Replaces PyTorch's empty buffers by NaN ones inside larger NaN ones."""

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Tensor, int]] = []

    def fenced(self, shape, dtype, device, fence=512):
        size = 1
        for n in shape:
            size *= n
        whole = torch.full((size + 2 * fence,), torch.nan, dtype=dtype, device=device)
        self.kept.append((whole, size))
        return whole[fence : fence + size].view(shape)

    def of(self, x):
        """A copy of ``x`` inside NaN: what is read beyond it shows in the results."""
        out = self.fenced(x.shape, x.dtype, x.device)
        out.detach().copy_(x)
        return out

    def check(self, fence=512):
        assert self.kept
        for whole, size in self.kept:
            assert torch.isnan(whole[:fence]).all() and torch.isnan(whole[fence + size :]).all()

    def guard(self, monkeypatch):
        """From here on, buffers made by ``new_empty`` and ``empty_like`` are fenced."""
        plain = torch.Tensor.new_empty

        def new_empty(like, size, dtype=None, device=None):
            if not isinstance(size, tuple):
                return plain(like, size, device=device)  # the interpreter's own
            return self.fenced(size, dtype or like.dtype, like.device)

        def empty_like(x, memory_format=None):
            return self.fenced(tuple(x.shape), x.dtype, x.device)

        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
        monkeypatch.setattr(torch, "empty_like", empty_like)


def same_when_compiled(fn, inputs: list[Tensor]) -> None:
    """``torch.compile(fullgraph=True)`` changes neither values nor gradients."""
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in inputs]
    results = []
    for run in (torch.compile(fn, fullgraph=True, backend="aot_eager"), fn):
        outputs = flat(run(*leaves))
        total = sum((torch.where(x.isfinite(), x, 0.0) ** 2).sum() for x in outputs)
        grads = torch.autograd.grad(total, leaves)
        results.append([*(x.detach() for x in outputs), *grads])
    assert_same(*results, 1e-6)
