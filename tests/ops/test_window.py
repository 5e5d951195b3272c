"""Which keys a window sees, and Macchiato's equation by loops."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from latte.ops import macchiato_attention, sliding_window_attention
from tests.ops.helpers import F64, assert_same, macchiato_inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_attention_with_a_soft_cap_carries_on_in_half_precision(dtype):
    q, k, v = (x.to(dtype) for x in macchiato_inputs(2, 9)[2:])
    options = {"window": None, "softcap": 2.0}
    whole, _ = sliding_window_attention(q, k, v, **options)
    _, state = sliding_window_attention(
        *(x[:, :4] for x in (q, k, v)), **options, output_final_state=True
    )
    rest, _ = sliding_window_attention(
        *(x[:, 4:] for x in (q, k, v)), **options, initial_state=state
    )
    assert rest.dtype == dtype
    torch.testing.assert_close(rest, whole[:, 4:], rtol=0, atol=0)


def test_window_counts_the_keys_that_are_seen():
    """window=w sees exactly s in [t-w+1, t] (Hugging Face's convention), |s-t| <= w//2 if not."""
    T, w = 40, 8
    q, k = torch.zeros(1, T, 1, 4, dtype=F64), torch.zeros(1, T, 1, 4, dtype=F64)
    v = torch.eye(T, dtype=F64)[None, :, None]
    out, _ = sliding_window_attention(q, k, v, window=w)
    assert torch.equal(out[0, 20, 0].nonzero().flatten(), torch.arange(13, 21))
    out, _ = sliding_window_attention(q, k, v, window=w, causal=False)
    assert torch.equal(out[0, 20, 0].nonzero().flatten(), torch.arange(16, 25))


def test_macchiato_is_the_equation():
    """y = p(0|t) SWA + sum_l p(l|t) mu[l], spelled out with loops (eq. 15-17)."""
    T, H, L, W = 9, 2, 3, 4
    latent_q, latent_k, q, k, v = macchiato_inputs(1, T, H, H, L, 6, 5)
    out, _ = macchiato_attention(latent_q, latent_k, q, k, v, window=W, backend="reference")
    for t in range(T):
        for h in range(H):
            p = latent_q[0, t, h].softmax(-1)
            near = range(max(0, t - W + 1), t + 1)
            local = torch.stack([q[0, t, h] @ k[0, s, h] / 6**0.5 for s in near]).softmax(-1)
            y = p[0] * sum(w * v[0, s, h] for w, s in zip(local, near, strict=True))
            for latent in range(L):
                weights = latent_k[0, : t + 1, h, latent].softmax(-1)
                y = y + p[latent + 1] * (weights @ v[0, : t + 1, h])
            assert_same([out[0, t, h]], [y], 1e-12)


def test_first_column_closes_and_opens_the_window():
    latent_q, latent_k, q, k, v = macchiato_inputs(1, 50)
    window, _ = sliding_window_attention(q, k, v, window=8)
    only = latent_q.clone()
    only[..., 0] = 1e4
    assert_same([macchiato_attention(only, latent_k, q, k, v, window=8)[0]], [window], 1e-12)
    changed = only.clone()
    changed[..., 0] = -1e4
    out = macchiato_attention(changed, latent_k, q, k, v, window=8)[0]
    assert not torch.allclose(out, window)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("masked", [False, True])
def test_a_wide_window_forms_no_square_of_itself(masked):
    """Twice the tokens and the window: twice the memory at once."""

    def largest(T):
        q, k, v = (torch.randn(1, T, 1, 4) for _ in range(3))
        options = {"key_mask": torch.arange(T)[None] % 9 > 0} if masked else {}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            sliding_window_attention(q, k, v, window=T, backend="torch", **options)
        return max(event.self_cpu_memory_usage for event in seen.events())

    assert largest(2048) <= 2.5 * largest(1024)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_full_attention_takes_any_scale(scale):
    q, k, v = (torch.randn(1, 9, 2, 8, dtype=F64) for _ in "qkv")
    options = {"window": None, "scale": scale}
    got, want = (
        sliding_window_attention(q, k, v, **options, backend=backend)[0]
        for backend in ("torch", "reference")
    )
    torch.testing.assert_close(got, want)
