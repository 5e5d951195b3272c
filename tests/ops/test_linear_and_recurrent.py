"""Undirected linear attention, the RG-LRU and the convolution against their equations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from latte.ops import latte_attention, linear_attention, rg_lru
from latte.ops.api import FEATURE_MAPS
from tests.ops.helpers import F64, assert_same, latte_inputs, randn, values_and_gradients
from tests.ops.opdb import OPS, Bench, leaves

FLAGS = pytest.mark.parametrize(
    ("masked", "packed", "carried"),
    [(m, p, c) for m in (False, True) for p in (False, True) for c in (False, True)],
)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_features_may_be_given(name):
    q, k, v = latte_inputs(2, 40)
    named, _ = linear_attention(q, k, v, feature_map=name)
    phi = FEATURE_MAPS[name]
    assert_same([linear_attention(phi(q), phi(k), v)[0]], [named], 1e-12)
    assert_same([linear_attention(q, k, v, feature_map=phi)[0]], [named], 0.0)


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
def test_rg_lru_is_griffins_recurrence(reverse, masked, packed, carried):
    def by_hand(x, r, i, theta, h0=None, *, key_mask=None, cu_seqlens=None, **_):
        outs, states = [], []
        for n, (row, lo, hi) in enumerate(places(x, cu_seqlens)):
            h = x.new_zeros(x.shape[-1]) if h0 is None else h0[n]
            fresh = h0 is None or bool((h0[n] == 0).all())
            part = [z[row, lo:hi] for z in (x, r, i)]
            keep = None if key_mask is None else key_mask[row, lo:hi]
            if reverse:
                part = [z.flip(0) for z in part]
                keep = None if keep is None else keep.flip(0)
            out = x.new_zeros(0, x.shape[-1])
            if hi > lo:
                out, h = rg_lru_by_hand(*part, theta, keep, 0 if fresh else None, h)
            outs.append(out.flip(0) if reverse else out)
            states.append(h)
        return torch.cat(outs).view(x.shape), torch.stack(states)

    bench = Bench(OPS["rg_lru-reversed" if reverse else "rg_lru"], "reference").sized(E=3)
    for T in (1, 2, 65):
        compare_by_hand(bench, by_hand, T, masked, packed, carried)


def places(x, cu_seqlens):
    """Row, first token and end of every sequence."""
    if cu_seqlens is None:
        return [(row, 0, x.shape[1]) for row in range(x.shape[0])]
    return [(0, lo, hi) for lo, hi in itertools.pairwise(cu_seqlens.tolist())]


def compare_by_hand(bench, by_hand, T, *flags):
    inputs, state, options = bench.given(T, *flags)
    mine = [x.requires_grad_() for x in (*inputs, *leaves(state))]
    found = bench.results(inputs, state, **options)
    assert_same(found, bench.projected(by_hand(*mine, **options), mine))


@pytest.mark.parametrize("gate", [-1e4, 1e4])
def test_rg_lru_with_saturated_gates_has_finite_gradients(gate):
    x, theta = randn(1, 20, 3), randn(3)
    gates = torch.full((1, 20, 3), gate, dtype=F64)
    for dtype in (torch.float32, F64):
        inputs = [z.to(dtype) for z in (x, gates, gates, theta)]
        assert all(torch.isfinite(z).all() for z in values_and_gradients(rg_lru, inputs))


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
def test_convolution_is_its_sum(taps, masked, packed, carried):
    def by_hand(x, w, b, tail=None, *, key_mask=None, cu_seqlens=None, **_):
        x = x if key_mask is None else x * key_mask[..., None]
        outs, tails = [], []
        for n, (row, lo, hi) in enumerate(places(x, cu_seqlens)):
            old = x.new_zeros(taps - 1, x.shape[-1]) if tail is None else tail[n]
            line = torch.cat([old, x[row, lo:hi]])
            outs += [b + sum(w[:, i] * line[t + i] for i in range(taps)) for t in range(hi - lo)]
            tails.append(line[hi - lo :])
        return torch.stack(outs).view(x.shape), torch.stack(tails)

    bench = Bench(OPS["conv"], "reference").sized(E=3, C=taps)
    for T in (1, 2, 33):
        compare_by_hand(bench, by_hand, T, masked, packed, carried)


def test_decay_at_initial_theta_is_in_griffins_range():
    """a^(1/r) = exp(-8 softplus(theta)): theta for a = 0.9 and 0.999 gives those decays."""
    for a in (0.9, 0.999):
        theta = torch.tensor([math.log(math.expm1(-math.log(a) / 8))], dtype=F64)
        x = torch.zeros(1, 2, 1, dtype=F64)
        x[0, 0] = 1.0
        opened = torch.full_like(x, 1e4)
        h, _ = rg_lru(x, opened, opened, theta)
        assert abs(h[0, 1, 0].item() - a) < 1e-12
