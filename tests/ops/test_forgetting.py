"""Latents that forget (``log_decay``): the recurrence, states, and any decay in fp32."""

from __future__ import annotations

import pytest
import torch

from latte.ops import (
    LatteState,
    cpp_backend,
    latte_attention,
)
from tests.ops.helpers import (
    F64,
    assert_same,
    flat,
    key_mask,
    latte_inputs,
    randn,
    relative_error,
    values_and_gradients,
)
from tests.ops.opdb import OPS, Bench

# Who serves latents that forget, beside the reference.
NATIVE = pytest.mark.skipif(
    cpp_backend.ABSENT is not None, reason="the native kernels are not built"
)
SERVES = pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=NATIVE)])


def decays(B, T, H, L, mean=0.2, seed=5):
    """Uniform between twice the mean and 0; latent 0 never forgets."""
    g = -2 * mean * torch.rand(B, T, H, L, generator=torch.Generator().manual_seed(seed)).double()
    g[..., 0] = 0.0
    return g


@SERVES
@pytest.mark.parametrize("mean", [1e-8, 2.0, 50.0])
@pytest.mark.parametrize("op", ["forgetting", "macchiato-forgetting"])
def test_slow_and_fast_decays_agree_with_the_reference(op, mean, backend):
    bench = Bench(OPS[op], backend)
    for T, packed in ((63, False), (257, True)):
        inputs, state, options = bench.given(T, True, packed, True)
        inputs[-1] *= mean / 0.16
        wanted = bench.judge().results(inputs, state, **options)
        assert_same(bench.results(inputs, state, **options), wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_the_reference_is_the_recurrence(masked):
    """A' = logaddexp(A + g, k), mu' = mu + e^{k - A'} (v - mu); padding changes nothing."""
    q, k, v = latte_inputs(2, 40)
    g, mask = decays(2, 40, 2, 3), key_mask(2, 40) if masked else None
    earlier = LatteState(randn(2, 2, 3, seed=9), randn(2, 2, 3, 5, seed=10))
    out, state = latte_attention(
        *(q, k, v),
        log_decay=g,
        key_mask=mask,
        initial_state=earlier,
        output_final_state=True,
        backend="reference",
    )
    (A, mu), G, outs = earlier, torch.zeros(2, 2, 3, dtype=F64), []
    for t in range(40):
        real = torch.ones(2, 1, 1, dtype=torch.bool) if mask is None else mask[:, t, None, None]
        A1 = torch.logaddexp(A + g[:, t], k[:, t])
        mu1 = mu + torch.exp(k[:, t] - A1)[..., None] * (v[:, t, :, None] - mu)
        A, mu = torch.where(real, A1, A), torch.where(real[..., None], mu1, mu)
        G = torch.where(real, G + g[:, t], G)
        outs.append((q[:, t].softmax(-1)[..., None] * mu).sum(-2))
    assert_same([out, *state], [torch.stack(outs, 1), A, mu, G], 1e-12)


def test_the_gradient_is_a_running_sum_of_that_of_the_keys():
    """dg_u = dA_0 + sum_{s<u} dk_s, and a constant decay gets the sum of all."""
    inputs = [x.requires_grad_() for x in latte_inputs(2, 70)]
    constant = decays(1, 1, 2, 3)[0, 0].requires_grad_()
    A0, mu0 = (x.requires_grad_() for x in (randn(2, 2, 3, seed=8), randn(2, 2, 3, 5, seed=9)))
    out, _ = latte_attention(*inputs, log_decay=constant, initial_state=LatteState(A0, mu0))
    weights = randn(*out.shape, seed=3)
    dk, dA, dg = torch.autograd.grad((out * weights).sum(), [inputs[1], A0, constant])
    each = dA[:, None] + dk.cumsum(1) - dk
    assert_same([dg], [each.sum((0, 1))], 1e-12)


@SERVES
@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("T", [1, 40, 700])
def test_no_decay_is_no_argument_to_the_last_bit(T, scale, backend):
    inputs = [x.float() for x in latte_inputs(2, T, 2, 8, 16, scale)]
    for mask in (None, key_mask(2, T)):

        def run(g=None, mask=mask):
            options = {"key_mask": mask, "output_final_state": True, "backend": backend}
            return lambda *x: latte_attention(*x, log_decay=g, **options)

        *_, state = run()(*inputs)
        want = values_and_gradients(lambda *x: flat(run()(*x)), inputs)
        for g in (torch.zeros(2, 8), torch.zeros(2, T, 2, 8)):
            found = values_and_gradients(lambda *x, g=g: flat(run(g)(*x))[:3], inputs)
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
            *_, forgetting = run(g)(*inputs)
            assert not forgetting.log_decay.any() and not state.log_decay.any()


@SERVES
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_any_decay_in_single_precision(scale, offset, backend):
    """Latents from never to at once, jumps of logits, and large ones: as exact as without."""
    T, rates = 1500, [0.0, 1e-8, 1e-3, 1 / 64, 0.25, 1.0, 5.0, 50.0]
    q, k, v = latte_inputs(1, T, 2, 8, 16, scale)
    k = k + offset
    k[:, 700:710] += 300.0
    g = decays(1, T, 2, 8, 1.0) * torch.tensor(rates, dtype=F64)
    g[:, 400] = -200.0
    inputs = [x.float() for x in (q, k, v, g)]

    def fn(q, k, v, g):
        options = {"log_decay": g, "output_final_state": True, "backend": backend}
        return latte_attention(q, k, v, **options)

    got = values_and_gradients(fn, inputs)
    want = values_and_gradients(fn, [x.double() for x in inputs])
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 2e-5


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("reset", [-1e3, -1e9, torch.finfo(torch.float32).min])
def test_after_a_reset_the_past_is_gone(reset, backend):
    """However it is written: the tokens from the reset on are as alone."""
    q, k, v = (x.float() for x in latte_inputs(1, 60, 2, 3, 4))
    g = torch.full((1, 60, 2, 3), -0.1)
    g[:, 30] = reset
    g.requires_grad_(True)
    out, _ = latte_attention(q, k, v, log_decay=g, backend=backend)
    alone, _ = latte_attention(*(x[:, 30:] for x in (q, k, v)), log_decay=g[:, 30:].detach())
    assert relative_error(out[:, 30:], alone) < 5e-5  # -200 in fp32 sums
    out.sum().backward()
    assert g.grad.isfinite().all() and g.grad[:, 30].abs().max() == 0


def test_decays_under_vmap():
    q, k, v = latte_inputs(2, 9, 2, 3, 4)
    g = torch.full((2, 9, 2, 3), -0.1, dtype=F64)

    def fn(q, k, v, g):
        return latte_attention(*(x[None] for x in (q, k, v)), log_decay=g[None])[0][0]

    expected = latte_attention(q, k, v, log_decay=g)[0]
    torch.testing.assert_close(torch.vmap(fn)(q, k, v, g), expected)


def test_a_million_tokens_in_pieces():
    """With a half-life of some tokens only the last of them count: the same as those alone."""
    generator = torch.Generator().manual_seed(0)
    T, piece, H, L, D = 1_000_000, 8192, 1, 4, 2
    g = -torch.tensor([[1e-6, 0.01, 0.1, 0.5]])
    state = None
    for start in range(0, T, piece):
        n = min(piece, T - start)
        q, k = (torch.randn(1, n, H, L, generator=generator) for _ in "qk")
        v = torch.randn(1, n, H, D, generator=generator)
        inputs = (q, k, v)
        _, state = latte_attention(
            *inputs, log_decay=g, initial_state=state, output_final_state=True
        )
    assert_same([state.log_decay], [g.expand(1, 1, 4) * T], 1e-3)
    _, late = latte_attention(
        *(x[:, -500:].double() for x in inputs), log_decay=g.double(), output_final_state=True
    )
    assert relative_error(state.mean[..., 2:, :], late.mean[..., 2:, :]) < 1e-5
    assert relative_error(state.log_mass[..., 2:], late.log_mass[..., 2:]) < 1e-5
    assert state.mean[..., 0, :].abs().max() < 0.02  # of all of the million


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_decay_whole(dtype):
    q, k, v = (x.to(dtype) for x in latte_inputs(1, 100))
    g = decays(1, 100, 2, 3, 1e-3).float()
    out, state = latte_attention(q, k, v, log_decay=g, output_final_state=True)
    want, exact = latte_attention(
        *(x.double() for x in (q, k, v)), log_decay=g.double(), output_final_state=True
    )
    assert out.dtype == dtype and state.mean.dtype == torch.float32
    assert relative_error(out, want) < 1e-2
    assert relative_error(state.log_mass, exact.log_mass) < 1e-6
