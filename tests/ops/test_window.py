"""Sliding windows and Macchiato against the fp64 reference, values and all gradients."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    key_mask,
    latte_state,
    macchiato_inputs,
    relative_error,
    values_and_gradients,
    window_state,
)

from latte.ops import LatteState, WindowState, macchiato_attention, sliding_window_attention


def compare_window(
    T,
    window,
    *,
    causal=True,
    masked=False,
    packed=False,
    carried=False,
    softcap=None,
    G=2,
    scale=1.0,
):
    B, K, D, H = (1 if packed else 2), 6, 5, 4
    cu = boundaries(T) if packed else None
    inputs = [*macchiato_inputs(B, T, H, G, 3, K, D, scale)[2:]]
    tail_mask = None
    if carried:
        N = B if cu is None else len(cu) - 1
        keys, values, tail_mask = window_state(N, window - 1, G, K, D)
        inputs += [keys, values]
    mask = key_mask(B, T) if masked else None

    def run(backend):
        def fn(q, k, v, *tail):
            return sliding_window_attention(
                q,
                k,
                v,
                window=window,
                softcap=softcap,
                causal=causal,
                key_mask=mask,
                cu_seqlens=cu,
                initial_state=WindowState(*tail, tail_mask) if tail else None,
                output_final_state=causal and window is not None,
                backend=backend,
            )

        return values_and_gradients(fn, inputs)

    assert_same(run("torch"), run("reference"))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 17, 128])
def test_window_agrees_with_the_reference(window, causal, masked, packed, softcap):
    for T in (1, 63, 65, 257):
        compare_window(T, window, causal=causal, masked=masked, packed=packed, softcap=softcap)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [1, 2, 17, 128])
def test_window_continues_from_a_state(window, masked, packed):
    for T in (1, 5, 65, 257):
        compare_window(T, window, masked=masked, packed=packed, carried=True)


@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_window_groups_and_large_logits(G, scale):
    compare_window(130, 32, G=G, scale=scale)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_full_attention_agrees_with_the_reference(causal, masked, packed):
    for T in (1, 65):
        compare_window(T, None, causal=causal, masked=masked, packed=packed)


def test_full_attention_carries_everything():
    q, k, v = macchiato_inputs(2, 20)[2:]
    whole, _ = sliding_window_attention(q, k, v, window=None)
    first, state = sliding_window_attention(
        q[:, :7], k[:, :7], v[:, :7], window=None, output_final_state=True
    )
    rest, state = sliding_window_attention(
        q[:, 7:], k[:, 7:], v[:, 7:], window=None, initial_state=state, output_final_state=True
    )
    assert_same([torch.cat([first, rest], 1)], [whole], 1e-12)
    assert state.keys.shape[1] == 20


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_window_errs_at_most_twice_the_reference(dtype):
    low = [x.to(dtype) for x in macchiato_inputs(2, 257, 4, 2, 3, 64, 64)[2:]]

    def run(backend, inputs):
        fn = sliding_window_attention
        return values_and_gradients(lambda *x: fn(*x, window=64, backend=backend), inputs)

    want = run("reference", [x.to(F64) for x in low])
    for a, b, e in zip(run("torch", low), run("reference", low), want, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e)


def test_window_gradcheck():
    inputs = [x.requires_grad_() for x in macchiato_inputs(1, 7, 2, 1, 2, 3, 2)[2:]]

    def fn(q, k, v):
        return sliding_window_attention(q, k, v, window=3, softcap=1.5, backend="torch")[0]

    assert torch.autograd.gradcheck(fn, inputs)


def compare_macchiato(T, *, causal=True, masked=False, packed=False, carried=False, scale=1.0):
    B, H, G, L, K, D, W = (1 if packed else 2), 4, 2, 3, 6, 5, 16
    cu = boundaries(T) if packed else None
    inputs = [*macchiato_inputs(B, T, H, G, L, K, D, scale)]
    tail_mask = None
    if carried:
        N = B if cu is None else len(cu) - 1
        keys, values, tail_mask = window_state(N, W - 1, G, K, D)
        inputs += [*latte_state(N, H, L, D), keys, values]
    mask = key_mask(B, T) if masked else None

    def run(backend):
        def fn(latent_q, latent_k, q, k, v, *earlier):
            state = None
            if earlier:
                state = (LatteState(*earlier[:2]), WindowState(*earlier[2:], tail_mask))
            return macchiato_attention(
                latent_q,
                latent_k,
                q,
                k,
                v,
                window=W,
                causal=causal,
                key_mask=mask,
                cu_seqlens=cu,
                initial_state=state,
                output_final_state=causal,
                backend=backend,
            )

        return values_and_gradients(fn, inputs)

    assert_same(run("torch"), run("reference"))


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_macchiato_agrees_with_the_reference(causal, masked, packed, scale):
    for T in (1, 63, 65, 257):
        compare_macchiato(T, causal=causal, masked=masked, packed=packed, scale=scale)
        if causal:
            compare_macchiato(T, masked=masked, packed=packed, carried=True, scale=scale)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_macchiato_is_the_equation(backend):
    """y = p(0|t) SWA + sum_l p(l|t) mu[l], spelled out with loops (eq. 15-17)."""
    T, H, L, W = 9, 2, 3, 4
    latent_q, latent_k, q, k, v = macchiato_inputs(1, T, H, H, L, 6, 5)
    out, _ = macchiato_attention(latent_q, latent_k, q, k, v, window=W, backend=backend)
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
