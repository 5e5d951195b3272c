"""Undirected linear attention, the RG-LRU and the convolution against their equations."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    key_mask,
    latte_inputs,
    linear_state,
    randn,
    values_and_gradients,
)

from latte.ops import LinearState, causal_conv1d, latte_attention, linear_attention, rg_lru

FLAGS = pytest.mark.parametrize(
    ("masked", "packed", "carried"),
    [(m, p, c) for m in (False, True) for p in (False, True) for c in (False, True)],
)


@FLAGS
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature_map", ["exp", "elu", None])
def test_linear_attention_agrees_with_the_reference(causal, feature_map, masked, packed, carried):
    for T in (1, 63, 65, 257):
        B = 1 if packed else 2
        cu = boundaries(T) if packed else None
        q, k, v = latte_inputs(B, T, 2, 3, 5)
        inputs = [q, k, v] if feature_map else [q.exp(), k.exp(), v]
        if carried:
            inputs += [*linear_state(B if cu is None else len(cu) - 1, 2, 3, 5)]
        mask = key_mask(B, T) if masked else None
        results = []
        for backend in ("torch", "reference"):

            def fn(q, k, v, *state, backend=backend, mask=mask, cu=cu):
                return linear_attention(
                    q,
                    k,
                    v,
                    feature_map=feature_map,
                    causal=causal,
                    key_mask=mask,
                    cu_seqlens=cu,
                    initial_state=LinearState(*state) if state else None,
                    output_final_state=True,
                    backend=backend,
                )

            results.append(values_and_gradients(fn, inputs))
        assert_same(*results)


def test_latte_is_linear_attention_when_the_query_knows_the_masses():
    """p(l|t) proportional to e^{q_l} alpha_t[l] makes Latte the undirected model (eq. 4-5)."""
    q, k, v = latte_inputs(2, 40, 2, 3, 5)
    undirected, _ = linear_attention(q, k, v, feature_map="exp")
    directed, _ = latte_attention(q + torch.logcumsumexp(k, 1), k, v)
    assert_same([directed], [undirected], 1e-12)


def rg_lru_by_hand(x, r, i, theta, mask, starts, h):
    """Griffin's equations, token by token, for one sequence (T, E)."""
    out = []
    begun = starts is None
    for t in range(x.shape[0]):
        if mask is None or mask[t]:
            log_a = -8.0 * torch.sigmoid(r[t]) * torch.log1p(torch.exp(theta))
            gated = torch.sigmoid(i[t]) * x[t]
            if begun:
                h = torch.exp(log_a) * h + torch.sqrt(1 - torch.exp(2 * log_a)) * gated
            else:
                h = gated
            begun = True
        out.append(h)
    return torch.stack(out), h


@FLAGS
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_rg_lru_is_griffins_recurrence(backend, reverse, masked, packed, carried):
    for T in (1, 2, 65, 130):
        B, E = (1 if packed else 2), 3
        cu = boundaries(T) if packed else None
        inputs = [*(randn(B, T, E, seed=s) for s in range(3)), randn(E, seed=3)]
        N = B if cu is None else len(cu) - 1
        if carried:
            h0 = randn(N, E, seed=4)
            h0[-1] = 0.0
            inputs.append(h0)
        mask = key_mask(B, T) if masked else None

        def op(x, r, i, theta, h0=None, mask=mask, cu=cu):
            return rg_lru(
                x,
                r,
                i,
                theta,
                key_mask=mask,
                cu_seqlens=cu,
                initial_state=h0,
                output_final_state=True,
                reverse=reverse,
                backend=backend,
            )

        def by_hand(x, r, i, theta, h0=None, mask=mask, cu=cu, N=N, T=T):
            bounds = [0, T] if cu is None else cu.tolist()
            outs, states = [], []
            for n in range(N):
                row, lo, hi = (n, 0, T) if cu is None else (0, bounds[n], bounds[n + 1])
                h = x.new_zeros(x.shape[-1]) if h0 is None else h0[n]
                fresh = h0 is None or bool((h0[n] == 0).all())
                part = [z[row, lo:hi] for z in (x, r, i)]
                keep = None if mask is None else mask[row, lo:hi]
                if reverse:
                    part = [z.flip(0) for z in part]
                    keep = None if keep is None else keep.flip(0)
                if hi == lo:
                    out = x.new_zeros(0, x.shape[-1])
                else:
                    out, h = rg_lru_by_hand(*part, theta, keep, 0 if fresh else None, h)
                outs.append(out.flip(0) if reverse else out)
                states.append(h)
            out = torch.stack(outs) if cu is None else torch.cat(outs)[None]
            return out, torch.stack(states)

        assert_same(values_and_gradients(op, inputs), values_and_gradients(by_hand, inputs))


@pytest.mark.parametrize("gate", [-1e4, 1e4])
def test_rg_lru_with_saturated_gates_has_finite_gradients(gate):
    x, theta = randn(1, 20, 3), randn(3)
    gates = torch.full((1, 20, 3), gate, dtype=F64)
    for dtype in (torch.float32, F64):
        leaves = [z.to(dtype) for z in (x, gates, gates, theta)]
        assert all(torch.isfinite(z).all() for z in values_and_gradients(rg_lru, leaves))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("situation", ["plain", "masked", "packed"])
def test_rg_lru_goes_on_from_tokens_that_are_zero(situation, backend):
    x, r, i, theta = randn(2, 7, 4), randn(2, 7, 4), randn(2, 7, 4), randn(4)
    x[:, :2] = 0.0  # as the embedding of padding is
    mask, options = None, {"backend": backend, "output_final_state": True}
    if situation == "masked":
        mask = torch.tensor([[True] * 7, [False, False] + [True] * 5])
    x.requires_grad_()
    if situation == "packed":
        x1, r1, i1 = (z.flatten(0, 1)[None] for z in (x, r, i))
        bounds = torch.tensor([0, 7, 7, 14], dtype=torch.int32)
        whole, _ = rg_lru(x1, r1, i1, theta, cu_seqlens=bounds, **options)
        whole = whole.view(2, 7, 4)
        first = [z[:, :2].flatten(0, 1)[None] for z in (x, r, i)]
        cut = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
        _, state = rg_lru(*first, theta, cu_seqlens=cut, **options)
        assert (state[1] == 0).all()  # the sequence without a token has not begun
        state = state[[0, 2]]
    else:
        whole, _ = rg_lru(x, r, i, theta, key_mask=mask, **options)
        head = None if mask is None else mask[:, :2]
        _, state = rg_lru(*(z[:, :2] for z in (x, r, i)), theta, key_mask=head, **options)
        if mask is not None:
            assert (state[1] == 0).all() and (state[0] != 0).all()
    rest, last = rg_lru(*(z[:, 2:] for z in (x, r, i)), theta, initial_state=state, **options)
    torch.testing.assert_close(rest, whole[:, 2:], rtol=1e-12, atol=1e-12)
    slope = torch.autograd.grad(state.sum(), x, retain_graph=True)[0]
    assert slope[0, 1].abs().min() > 0  # what was added leaves the gradient as it is


def test_features_of_very_negative_logits_keep_their_digits():
    q, k, v = latte_inputs(1, 40, 2, 3, 5)
    exact, _ = linear_attention(q - 16, k, v, feature_map="elu")
    found, _ = linear_attention(*(x.float() for x in (q - 16, k, v)), feature_map="elu")
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_the_state_of_linear_attention_owns_its_bytes_alone(packed):
    cu = torch.tensor([0, 1000], dtype=torch.int32) if packed else None
    _, state = linear_attention(*latte_inputs(1, 1000, 2, 3, 5), feature_map="exp",
                                cu_seqlens=cu, output_final_state=True)  # fmt: skip
    for part in state:
        assert part.untyped_storage().nbytes() == part.nbytes


def test_rg_lru_long_sequence_matches_one_step_at_a_time():
    inputs = [*(randn(1, 4099, 2, seed=s) for s in range(3)), randn(2, seed=3)]
    fast = values_and_gradients(lambda *x: rg_lru(*x, backend="torch"), inputs)
    slow = values_and_gradients(lambda *x: rg_lru(*x, backend="reference"), inputs)
    assert_same(fast, slow)


@FLAGS
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_convolution_is_its_sum(backend, taps, masked, packed, carried):
    for T in (1, 2, 33):
        B, E = (1 if packed else 2), 3
        cu = boundaries(T) if packed else None
        N = B if cu is None else len(cu) - 1
        inputs = [randn(B, T, E), randn(E, taps, seed=1), randn(E, seed=2)]
        if carried:
            inputs.append(randn(N, taps - 1, E, seed=3))
        mask = key_mask(B, T) if masked else None

        def op(x, w, b, tail=None, mask=mask, cu=cu):
            return causal_conv1d(
                x,
                w,
                b,
                key_mask=mask,
                cu_seqlens=cu,
                initial_state=tail,
                output_final_state=True,
                backend=backend,
            )

        def by_hand(x, w, b, tail=None, mask=mask, cu=cu, N=N, T=T):
            if mask is not None:
                x = x * mask[..., None]
            bounds = [0, T] if cu is None else cu.tolist()
            outs, tails = [], []
            for n in range(N):
                row, lo, hi = (n, 0, T) if cu is None else (0, bounds[n], bounds[n + 1])
                old = x.new_zeros(taps - 1, x.shape[-1]) if tail is None else tail[n]
                line = torch.cat([old, x[row, lo:hi]])
                for t in range(hi - lo):
                    outs.append(b + sum(w[:, i] * line[t + i] for i in range(taps)))
                tails.append(line[hi - lo :])
            return torch.stack(outs).view(x.shape), torch.stack(tails)

        assert_same(values_and_gradients(op, inputs), values_and_gradients(by_hand, inputs))


def test_decay_at_initial_theta_is_in_griffins_range():
    """a^(1/r) = exp(-8 softplus(theta)): theta for a = 0.9 and 0.999 gives those decays."""
    for a in (0.9, 0.999):
        theta = torch.tensor([math.log(math.expm1(-math.log(a) / 8))], dtype=F64)
        x = torch.zeros(1, 2, 1, dtype=F64)
        x[0, 0] = 1.0
        opened = torch.full_like(x, 1e4)
        h, _ = rg_lru(x, opened, opened, theta)
        assert abs(h[0, 1, 0].item() - a) < 1e-12
