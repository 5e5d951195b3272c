"""Laws that every backend obeys, whatever the numbers: they need no reference."""

from __future__ import annotations

import math

import pytest
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
    randn,
)

from latte.ops import (
    LatteState,
    attention_weights,
    causal_conv1d,
    latte_attention,
    linear_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)
from latte.ops.state import WindowState

W = 8


def latte(inputs, **options):
    return latte_attention(*inputs, **options)


def macchiato(inputs, **options):
    return macchiato_attention(*inputs, window=W, **options)


def window(inputs, **options):
    return sliding_window_attention(*inputs, window=W, **options)


def full(inputs, **options):
    return sliding_window_attention(*inputs, window=None, **options)


def linear(inputs, **options):
    return linear_attention(*inputs, feature_map="elu", **options)


def recurrent(inputs, **options):
    return rg_lru(*inputs, randn(4, seed=50).to(inputs[0].dtype), **options)


def convolution(inputs, **options):
    return causal_conv1d(*inputs, randn(4, 3, seed=50), **options)


def time_inputs(op, T, B=2):
    """The inputs of an op that have a time dimension."""
    if op is macchiato:
        return list(macchiato_inputs(B, T))
    if op in (window, full):
        return list(macchiato_inputs(B, T)[2:])
    if op is recurrent:
        return [randn(B, T, 4, seed=s) for s in range(3)]
    if op is convolution:
        return [randn(B, T, 4)]
    return list(latte_inputs(B, T))


OPS = pytest.mark.parametrize(
    "op", [latte, macchiato, window, linear, recurrent, convolution], ids=lambda f: f.__name__
)
BACKENDS = pytest.mark.parametrize("backend", ["torch", "reference"])


@OPS
@BACKENDS
@pytest.mark.parametrize("cut", [0, 1, 2, 31, 32, 64])
def test_split_equals_whole(op, cut, backend):
    inputs = time_inputs(op, 65)
    whole, last = op(inputs, output_final_state=True, backend=backend)
    first, state = op([x[:, :cut] for x in inputs], output_final_state=True, backend=backend)
    rest, end = op(
        [x[:, cut:] for x in inputs],
        initial_state=state,
        output_final_state=True,
        backend=backend,
    )
    assert_same([torch.cat([first, rest], 1), *flat(end)], [whole, *flat(last)], 1e-12)


@OPS
def test_decoding_equals_prefill(op):
    inputs = time_inputs(op, 40)
    whole, last = op(inputs, output_final_state=True)
    state, outs = None, []
    for t in range(40):
        step = [x[:, t : t + 1] for x in inputs]
        out, state = op(step, initial_state=state, output_final_state=True)
        outs.append(out)
    assert_same([torch.cat(outs, 1), *flat(state)], [whole, *flat(last)], 1e-12)


@OPS
def test_gradients_flow_through_a_split(op):
    inputs = [x.requires_grad_() for x in time_inputs(op, 30)]
    whole, _ = op(inputs)
    weights = randn(*whole.shape, seed=3)
    want = torch.autograd.grad((whole * weights).sum(), inputs)
    first, state = op([x[:, :13] for x in inputs], output_final_state=True)
    rest, _ = op([x[:, 13:] for x in inputs], initial_state=state)
    got = torch.autograd.grad((torch.cat([first, rest], 1) * weights).sum(), inputs)
    assert_same(list(got), list(want), 1e-12)


@OPS
@BACKENDS
def test_packed_equals_separate(op, backend):
    inputs = time_inputs(op, 70, B=1)
    cu = boundaries(70)
    packed, states = op(inputs, cu_seqlens=cu, output_final_state=True, backend=backend)
    for n in range(len(cu) - 1):
        lo, hi = int(cu[n]), int(cu[n + 1])
        alone, state = op([x[:, lo:hi] for x in inputs], output_final_state=True, backend=backend)
        assert_same([packed[:, lo:hi]], [alone], 1e-12)
        assert_same([x[n] for x in flat(states)], [x[0] for x in flat(state)], 1e-12)


@OPS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_unpadded(op, side):
    inputs = time_inputs(op, 33, B=1)
    alone, _ = op(inputs)
    junk = [1e3 * randn(1, 9, *x.shape[2:], seed=77) for x in inputs]
    pair = zip(junk, inputs, strict=True) if side == "left" else zip(inputs, junk, strict=True)
    mask = torch.ones(1, 42, dtype=torch.bool)
    if side == "left":
        mask[:, :9] = False
    else:
        mask[:, 33:] = False
    out, _ = op([torch.cat(p, 1) for p in pair], key_mask=mask)
    assert_same([out[mask]], [alone[0]], 1e-12)


@pytest.mark.parametrize("op", [latte, macchiato, window, full, linear, recurrent, convolution])
@BACKENDS
@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_a_masked_source_may_hold_anything(op, junk, backend):
    """Also what is not finite: for outputs, gradients and what follows."""
    inputs = time_inputs(op, 21)
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:12] = False
    queries = {macchiato: (0, 2), recurrent: (), convolution: ()}.get(op, (0,))
    later = [x[:, :4] for x in inputs]
    results = []
    for fill in (0.0, junk):
        parts = [x.clone() for x in inputs]
        for i, x in enumerate(parts):
            if i not in queries:
                x[~mask] = fill
            x.requires_grad_()
        options = {"output_final_state": True, "backend": backend}
        out, state = op(parts, key_mask=mask, **options)
        more, _ = op(later, initial_state=state, backend=backend)
        total = out[mask].square().sum() + more.square().sum()
        gradients = torch.autograd.grad(total, parts)
        results.append([out[mask], more, *(g[mask] for g in gradients)])
    assert_same(*results, 0.0)


@OPS
@BACKENDS
@pytest.mark.parametrize("scale", [1.0, 3.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_future_cannot_change_the_past(op, backend, dtype, scale):
    """Exactly: not even the rounding of the past may depend on what follows."""
    inputs = [x.to(dtype) for x in time_inputs(op, 130)]
    out, _ = op(inputs, backend=backend)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, 70:] = randn(*x[:, 70:].shape, seed=5).to(dtype) * scale
    after, _ = op(changed, backend=backend)
    assert torch.equal(out[:, :70], after[:, :70])


@OPS
def test_a_batch_of_one_equals_a_batch_of_many(op):
    inputs = time_inputs(op, 65, B=3)
    together, _ = op(inputs)
    for b in range(3):
        alone, _ = op([x[b : b + 1] for x in inputs])
        assert_same([alone[0]], [together[b]], 1e-13)


@OPS
@BACKENDS
def test_empty_sequences(op, backend):
    inputs = time_inputs(op, 0)
    out, state = op(inputs, output_final_state=True, backend=backend)
    assert out.shape[1] == 0
    later = time_inputs(op, 5)
    first, _ = op(later, initial_state=state, backend=backend)
    assert_same([first], [op(later, backend=backend)[0]], 1e-12)


@OPS
@BACKENDS
def test_empty_sequences_have_gradients(op, backend):
    """All inputs are in the graph, as for any other length."""
    inputs = [x.requires_grad_() for x in time_inputs(op, 0)]
    gradients = torch.autograd.grad(op(inputs, backend=backend)[0].sum(), inputs)
    assert [g.shape for g in gradients] == [x.shape for x in inputs]


@pytest.mark.parametrize("op", [latte, macchiato, window, linear], ids=lambda f: f.__name__)
@BACKENDS
@pytest.mark.parametrize("causal", [True, False])
def test_a_query_without_sources_gets_zeros(op, causal, backend):
    inputs = [x.requires_grad_() for x in time_inputs(op, 12)]
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0] = False
    mask[1, :5] = False
    out, _ = op(inputs, key_mask=mask, causal=causal, backend=backend)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    if causal:
        assert torch.equal(out[1, :5], torch.zeros_like(out[1, :5]))
    grads = torch.autograd.grad(out.square().sum(), inputs)
    assert all(torch.isfinite(g).all() for g in grads)
    assert all(torch.equal(g[0], torch.zeros_like(g[0])) for g in grads[-2:])


@BACKENDS
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_key_gradients_sum_to_zero(scale, causal, backend):
    """Adding a constant to a latent's key logits changes nothing: sum_s dk_s[l] = 0."""
    inputs = [x.requires_grad_() for x in latte_inputs(2, 257, scale=scale)]
    out, _ = latte_attention(*inputs, causal=causal, backend=backend)
    dk = torch.autograd.grad((out * randn(*out.shape, seed=3)).sum(), inputs[1])[0]
    assert dk.sum(1).abs().max() < 1e-11


@BACKENDS
def test_order_of_the_latents_does_not_matter(backend):
    q, k, v = latte_inputs(2, 65, L=5)
    order = torch.tensor([3, 0, 4, 1, 2])
    shuffled, _ = latte_attention(q[..., order], k[..., order], v, backend=backend)
    assert_same([shuffled], [latte_attention(q, k, v, backend=backend)[0]], 1e-13)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1.5e4])
def test_rows_sum_to_one(scale, causal):
    q, k, _ = latte_inputs(1, 100, scale=scale)
    a = attention_weights(q, k, causal=causal)
    assert (a.sum(-1) - 1).abs().max() < 1e-12 and a.min() >= 0
    latent_q, latent_k, q, k, _ = macchiato_inputs(1, 100, scale=scale)
    a = attention_weights(latent_q, latent_k, q, k, window=W, causal=causal)
    assert (a.sum(-1) - 1).abs().max() < 1e-12 and a.min() >= 0
    if causal:
        assert torch.equal(a, a.tril())
    ones = torch.ones(1, 100, 4, 3)
    out, _ = latte_attention(*(x.float() for x in latte_inputs(1, 100, 4, scale=scale)[:2]), ones)
    assert (out - 1).abs().max() < 1e-5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_weights_times_values_is_the_output(causal, packed):
    B = 1 if packed else 2
    cu = boundaries(50) if packed else None
    mask = key_mask(B, 50)
    options = {"causal": causal, "cu_seqlens": cu, "key_mask": mask}
    q, k, v = latte_inputs(B, 50)
    a = attention_weights(q, k, **options)
    out, _ = latte_attention(q, k, v, **options)
    assert_same([torch.einsum("bhts,bshd->bthd", a, v)], [out], 1e-12)
    latent_q, latent_k, q, k, v = macchiato_inputs(B, 50)
    a = attention_weights(latent_q, latent_k, q, k, window=W, softcap=3.0, **options)
    out, _ = macchiato_attention(latent_q, latent_k, q, k, v, window=W, softcap=3.0, **options)
    want = torch.einsum("bhts,bshd->bthd", a, v.repeat_interleave(2, 2))
    assert_same([want], [out], 1e-12)


def test_merge_is_associative_and_has_a_neutral_element():
    a, b, c = (latte_state(2, 3, 4, 5, seed=s, scale=50.0) for s in (1, 20, 40))
    assert_same([*a.merge(b).merge(c)], [*a.merge(b.merge(c))], 1e-12)
    empty = LatteState.empty(2, 3, 4, 5, dtype=F64)
    assert_same([*a.merge(empty)], [*a], 0.0)
    assert_same([*empty.merge(a)], [*a], 0.0)
    nothing = empty.merge(empty)
    assert torch.isneginf(nothing.log_mass).all() and (nothing.mean == 0).all()


def test_merge_of_parts_is_the_state_of_the_whole():
    q, k, v = latte_inputs(2, 50, scale=5.0)
    _, whole = latte_attention(q, k, v, output_final_state=True)
    parts = [
        latte_attention(q[:, s], k[:, s], v[:, s], output_final_state=True)[1]
        for s in (slice(0, 20), slice(20, 50))
    ]
    assert_same([*parts[0].merge(parts[1])], [*whole], 1e-12)


def test_merge_of_empty_states_has_finite_gradients():
    states = [x.requires_grad_() for _ in range(2) for x in LatteState.empty(1, 1, 2, 3, dtype=F64)]
    merged = LatteState(*states[:2]).merge(LatteState(*states[2:]))
    grads = torch.autograd.grad(merged.mean.sum(), states, allow_unused=True)
    assert all(g is None or torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_million_tokens_in_pieces(scale):
    """Streamed through a state: finite, exact against one fp64 sum, means bounded by max |v|."""
    T, piece, H, L, D = 1_000_000, 4096, 1, 4, 2
    generator = torch.Generator().manual_seed(0)
    state, exact_top, sums = None, None, None
    for start in range(0, T, piece):
        n = min(piece, T - start)
        q = torch.randn(1, n, H, L, generator=generator) * scale
        k = torch.randn(1, n, H, L, generator=generator) * scale
        v = torch.randn(1, n, H, D, generator=generator)
        out, state = latte_attention(
            q, k, v, initial_state=state, output_final_state=True, backend="torch"
        )
        assert torch.isfinite(out).all() and out.abs().max() < 6.5
        keys, values = k.double(), v.double()
        top = keys.amax(1)[0]
        top = top if exact_top is None else torch.maximum(top, exact_top)
        e = torch.exp(keys[0] - top)
        mass, weighted = e.sum(0), torch.einsum("shl,shd->hld", e, values[0])
        if sums is not None:
            decay = torch.exp(exact_top - top)
            mass, weighted = mass + decay * sums[0], weighted + decay[..., None] * sums[1]
        exact_top, sums = top, (mass, weighted)
    log_mass, mean = exact_top + sums[0].log(), sums[1] / sums[0][..., None]
    # fp32 states: the log-mass is rounded once per piece, so are the means.
    assert torch.allclose(state.log_mass[0].double(), log_mass, rtol=1e-6, atol=2e-5)
    assert (state.mean[0] - mean).abs().max() < 1e-3


@OPS
@BACKENDS
def test_autocast_changes_nothing(op, backend):
    """Sums stay in fp32 inside an autocast region."""
    inputs = [x.float().requires_grad_() for x in time_inputs(op, 40)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, _ = op(inputs, backend=backend)
        assert out.dtype == torch.float32
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert_same(results[1], results[0], 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(("T", "causal"), [(5, True), (5, False), (130, True), (130, False)])
def test_a_sequence_that_is_not_finite_stays_alone(T, causal, carried, bad):
    """Values and gradients of its neighbours in the batch are those beside a sound one."""
    if carried and not causal:
        pytest.skip("a bidirectional window carries no state")
    B, H, L, D, W = 3, 2, 4, 8, 16
    torch.manual_seed(T)
    shapes = [(B, T, H, L + 1), (B, T, H, L), *[(B, T, H, D)] * 3]
    inputs = [torch.randn(shape) for shape in shapes]
    past = [torch.randn(B, W - 1, H, D) for _ in range(2)]

    def run(inputs):
        state, inputs = None, [x.requires_grad_() for x in inputs]
        if carried:
            latent = LatteState.empty(B, H, L, D)
            state = (latent, WindowState(*past, torch.ones(B, W - 1, dtype=torch.bool)))
        options = {"window": W, "causal": causal, "backend": "torch", "initial_state": state}
        y = macchiato_attention(*inputs, **options)[0][[0, 2]]
        return y, *(g[[0, 2]] for g in torch.autograd.grad(y.square().sum(), inputs))

    sound = run([x.clone() for x in inputs])
    for x in inputs:
        x[1, T // 2] = bad
    for x, y in zip(sound, run(inputs), strict=True):
        torch.testing.assert_close(y, x)  # an infinite key may take the batch another way
