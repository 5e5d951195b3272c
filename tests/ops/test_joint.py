"""One softmax over the window's keys and the latents: the equation by loops, and its precision."""

from __future__ import annotations

import pytest
import torch

from latte.ops import (
    Partition,
    Sinks,
    macchiato_attention,
    sliding_window_attention,
    window_log_mass,
)
from tests.ops.helpers import randn

B, T, H, G, L, K, D, W, SINKS = 2, 23, 4, 2, 5, 8, 6, 7, 3


def inputs(seed=0):
    shapes = ((B, T, H, L + 1), (B, T, H, L), (B, T, H, K), (B, T, G, K), (B, T, G, D))
    return [randn(*shape, seed=seed + i).double() for i, shape in enumerate(shapes)]


def sinks_of(k, v, seed=9):
    far_q = randn(B, T, H, K, seed=seed).double()
    mask = torch.ones(B, SINKS, dtype=torch.bool)
    return Sinks(far_q, k[:, :SINKS], v[:, :SINKS], mask, None)


def by_loops(latent_q, latent_k, q, k, v, sinks=None, softcap=None):
    """y_t by a softmax over [the window's logits + q_0, the sinks' + q_0, q_1 ... q_L]."""

    def logit(query, keys):
        x = keys @ query / K**0.5
        return x if softcap is None else softcap * torch.tanh(x / softcap)

    rows = []
    for b in range(B):
        for t in range(T):
            for h in range(H):
                g, first = h // (H // G), max(0, t - W + 1)
                logits = [logit(q[b, t, h], k[b, first : t + 1, g]) + latent_q[b, t, h, 0]]
                values = [v[b, first : t + 1, g]]
                gone = min(first, SINKS)
                if sinks is not None and gone:
                    far = logit(sinks.q[b, t, h], sinks.keys[b, :gone, g])
                    logits.append(far + latent_q[b, t, h, 0])
                    values.append(sinks.values[b, :gone, g])
                if first:
                    logits.append(latent_q[b, t, h, 1:])
                    values.append(latent_k[b, :first, h].softmax(0).T @ v[b, :first, g])
                rows.append(torch.cat(logits).softmax(0) @ torch.cat(values))
    return torch.stack(rows).view(B, T, H, D)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_values_and_gradients_are_those_of_the_equation(softcap, with_sinks):
    own = [x.requires_grad_() for x in inputs()]
    sinks = sinks_of(*own[3:]) if with_sinks else None
    partition = Partition(sinks, delay=True, joint=True)
    options = {"window": W, "partition": partition, "softcap": softcap}
    out, _ = macchiato_attention(*own, backend="reference", **options)
    expected = by_loops(*own, sinks, softcap)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = randn(*out.shape, seed=5).double()
    found = torch.autograd.grad((out * weight).sum(), own)
    wanted = torch.autograd.grad((expected * weight).sum(), own)
    for dx, dy in zip(found, wanted, strict=True):
        torch.testing.assert_close(dx, dy, rtol=1e-9, atol=1e-9)


def test_half_precision_keeps_the_mixture():
    """The window's mass is large; the distribution over states must not lose its digits."""
    latent_q, latent_k, q, k, v = inputs(5)
    q = q * 6  # a log-mass of some tens
    options = {"window": W, "partition": Partition(joint=True)}
    half = [x.bfloat16() for x in (latent_q, latent_k, q, k, v)]
    exact, _ = macchiato_attention(*(x.double() for x in half), **options)
    fp32, _ = macchiato_attention(*(x.float() for x in half), **options)
    out, _ = macchiato_attention(*half, **options)
    rounding = (exact.bfloat16().double() - exact).abs().max()
    assert (fp32.double() - exact).abs().max() < 1e-4
    assert (out.double() - exact).abs().max() < 4 * rounding


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_window_far_above_the_latents_takes_all(backend):
    """Its log-mass is beyond fp16, so that the latents' logits relative to it would be -inf."""
    half = [x.half() for x in inputs()]
    half[2], half[3] = 1e3 * half[2].abs(), 1e3 * half[3].abs()
    options = {"window": W, "backend": backend}
    out, _ = macchiato_attention(*half, partition=Partition(joint=True), **options)
    alone, _ = sliding_window_attention(*half[2:], **options)
    torch.testing.assert_close(out, alone)


def test_the_log_mass_reads_long_rows_in_pieces():
    q, k = randn(1, 300, H, K, seed=1).double(), randn(1, 300, G, K, seed=2).double()
    with torch.no_grad():
        in_pieces = window_log_mass(q, k, window=3)  # blocks of 3: several pieces
    whole = window_log_mass(q.requires_grad_(), k, window=3)
    torch.testing.assert_close(in_pieces, whole.detach(), rtol=1e-12, atol=1e-12)


def test_the_log_mass_goes_on_from_a_state_with_sinks():
    q, k, v = randn(2, 9, H, K), randn(2, 9, G, K), randn(2, 9, G, 5)
    _, state = sliding_window_attention(*(x[:, :5] for x in (q, k, v)), window=4,
                                        output_final_state=True)  # fmt: skip
    sinks = Sinks(q, k[:, :2], v[:, :2], torch.ones(2, 2, dtype=torch.bool))
    rest = Partition(sinks._replace(q=q[:, 5:], position=torch.tensor([5, 5])))
    found = window_log_mass(q[:, 5:], k[:, 5:], window=4, initial_state=state, partition=rest)
    whole = window_log_mass(q, k, window=4, partition=Partition(sinks))
    torch.testing.assert_close(found, whole[:, 5:], rtol=1e-12, atol=1e-12)
