"""Kept tokens: the definition by loops, the choice, and what is refused.

What holds of every op holds of these too (``test_laws.py``): any cut, packed and padded sequences,
causality, gradients by differences, low precision. In a process with Triton's interpreter
(``TRITON_INTERPRET=1``) these tests run on Triton's kernels, in fp32.
"""

from __future__ import annotations

import os

import pytest
import torch

from latte.ops import (
    Kept,
    KeptState,
    Partition,
    Sinks,
    macchiato_attention,
    sliding_window_attention,
    window_log_mass,
)
from latte.ops.mxint8 import pack, unpack
from latte.ops.tensors import Sequences
from latte.ops.torch_backend.kept import KeptCall, kept_op
from latte.ops.torch_backend.kept_plan import Plan
from tests.ops.helpers import assert_same, macchiato_inputs, randn

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
T, H, G, L, W, C, N, SINKS = 21 if INTERPRETED else 33, 4, 2, 3, 5, 4, 3, 2
BACKENDS = pytest.mark.parametrize(
    "backend", ["triton"] if INTERPRETED else ["reference", "torch", "cpu"]
)
DTYPE, EXACT = (torch.float32, 2e-6) if INTERPRETED else (torch.float64, 1e-12)


def kept_inputs(tokens=T):
    """latent_q, latent_k, q, k, v of one sequence."""
    return tuple(x.to(DTYPE) for x in macchiato_inputs(1, tokens))


def scores_of(B=1, tokens=T, seed=30):
    """Many equal ones, and some of -inf."""
    scores = randn(B, tokens, G, seed=seed).mul(2).round().to(DTYPE)
    scores[:, 3::7, 0], scores[:, 2::5, 1] = -torch.inf, -torch.inf
    return scores


def places(scores, t, g, sinks=0, count=N):
    """Window, sinks, kept (best first) and latents at query t, by the definition."""
    update = t // C * C
    window = [s for s in range(t + 1) if s > update - W]
    left = [s for s in range(t + 1) if s <= update - W]
    able = [s for s in left if s >= sinks and scores[s, g] > -torch.inf]
    kept = sorted(able, key=lambda s: (scores[s, g].item(), s), reverse=True)[:count]
    far = [s for s in left if s >= sinks and s not in kept]
    return window, [s for s in left if s < sinks], kept, far


def mix(inputs, scores, count=N, sinks=None, **options):
    partition = Partition(sinks, True, True, Kept(scores, count, C))
    return macchiato_attention(*inputs, window=W, partition=partition, **options)


def weights(inputs, scores, **options):
    """p(s|t) of all sources, (T, H, T): values are the tokens themselves."""
    *logits, _ = inputs
    tokens = torch.eye(logits[0].shape[1], dtype=logits[0].dtype)[None, :, None].expand(
        -1, -1, G, -1
    )
    return mix((*logits, tokens), scores, **options)[0][0]


@BACKENDS
@pytest.mark.parametrize("decay", [None, "static", "gated"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_it_is_the_equation(backend, decay, with_sinks):
    """One softmax over exact keys and latents; every source is in one place."""
    inputs, scores, n = kept_inputs(), scores_of(), SINKS * with_sinks
    latent_q, latent_k, q, k, v = (x[0] for x in inputs)
    sinks, sink_q = None, randn(1, T, H, 6, seed=50).to(DTYPE)
    if with_sinks:
        sinks = Sinks(sink_q, inputs[3][:, :n], inputs[4][:, :n], torch.ones(1, n).bool())
    g = None if decay is None else -randn(*([H, L] if decay == "static" else [1, T, H, L])).abs()
    g = None if g is None else g.to(DTYPE)
    total = (torch.zeros(T, H, L) if g is None else g.expand(1, T, H, L)[0]).cumsum(0)
    found, _ = mix(inputs, scores, sinks=sinks, log_decay=g, backend=backend)
    for t in range(T):
        for h in range(H):
            group = h // (H // G)
            window, gone, kept, far = places(scores[0], t, group, n)
            assert sorted(window + gone + kept + far) == list(range(t + 1))
            near = [*window, *kept]
            logits = [q[t, h] @ k[s, group] for s in near]
            logits += [sink_q[0, t, h] @ k[s, group] for s in gone]
            logits = [x / 6**0.5 + latent_q[t, h, 0] for x in logits]
            values = [v[s, group] for s in [*near, *gone]]
            for latent in range(L) if far else ():
                logit = torch.stack(
                    [latent_k[s, h, latent] + (total[t] - total[s + W])[h, latent] for s in far]
                )
                logits.append(latent_q[t, h, latent + 1])
                values.append(logit.softmax(0) @ v[far, group])
            y = torch.stack(logits).softmax(0) @ torch.stack(values)
            assert_same([found[0, t, h]], [y], EXACT)


@pytest.mark.parametrize("packed", [False, True])
def test_the_log_mass_is_that_of_all_exact_keys(packed):
    q, k, scores = kept_inputs()[2], kept_inputs()[3], scores_of()
    sinks = Sinks(q, k[:, :SINKS], k[:, :SINKS], torch.ones(1, SINKS).bool())
    options = {"window": W, "partition": Partition(sinks, kept=Kept(scores, N, C))}
    found = window_log_mass(q, k, **options)
    if packed:  # after another sequence
        bounds = torch.tensor([0, T, 2 * T], dtype=torch.int32)
        twice = Sinks(
            *(torch.cat([x, x], 1) for x in sinks[:1]),
            *(x.repeat(2, *[1] * (x.ndim - 1)) for x in sinks[1:4]),
        )
        kept = Kept(torch.cat([scores, scores], 1), N, C)
        options = {"window": W, "partition": Partition(twice, kept=kept)}
        both = window_log_mass(
            *(torch.cat([x, x], 1) for x in (q, k)), cu_seqlens=bounds, **options
        )
        assert_same([both[:, T:]], [found], EXACT)
    for t in range(T):
        for h in range(H):
            group = h // (H // G)
            window, gone, kept, _ = places(scores[0], t, group, SINKS)
            logits = torch.stack([q[0, t, h] @ k[0, s, group] for s in window + gone + kept])
            assert_same([found[0, t, h]], [(logits / 6**0.5).logsumexp(0)], EXACT)


@BACKENDS
@pytest.mark.parametrize("cuts", [[T], [1, 2, 9, 20, T]])
def test_what_is_held_is_the_largest_of_all_that_have_left(backend, cuts):
    """Wherever calls begin: the choice of two pieces is that of their union."""
    inputs, scores, state, start = kept_inputs(), scores_of(), None, 0
    outs, whole = [], mix(inputs, scores, backend="reference")[0]
    for stop in cuts:
        part = [x[:, start:stop] for x in inputs]
        options = {"initial_state": state, "output_final_state": True, "backend": backend}
        out, state = mix(part, scores[:, start:stop], **options)
        outs.append(out)
        start = stop
    assert_same([torch.cat(outs, 1)], [whole], EXACT)
    held = state.kept
    assert held.keys.shape[1] == N + W + C - 1 and held.seen.tolist() == [T]
    for g in range(G):
        window, _, kept, _ = places(scores[0], T - 1, g)
        positions = held.positions[0, :, g]
        assert positions[:N].tolist() == kept
        assert [s for s in positions[N:].tolist() if s >= 0] == window
        there = positions >= 0
        assert torch.equal(held.keys[0, there, g], inputs[3][0, positions[there], g])
        assert torch.equal(held.scores[0, there, g], scores[0, positions[there], g])
        assert held.scores[0, ~there, g].isneginf().all()


@BACKENDS
def test_a_source_that_is_not_kept_moves_to_the_latents_and_nowhere_else(backend):
    inputs, scores, s = kept_inputs(), randn(1, T, G, seed=8).abs(), 6
    kept = weights(inputs, scores, count=T, backend=backend)
    lower = scores.clone()
    lower[:, s] = -torch.inf
    gone = weights(inputs, lower, count=T, backend=backend)
    assert_same([kept.sum(-1), gone.sum(-1)], [torch.ones(T, H)] * 2, EXACT)
    left = -(-(s + W) // C) * C  # the update at which it leaves the window
    assert_same([gone[:left]], [kept[:left]], EXACT)
    # The latents have read it alone, and all of its weight is theirs.
    latent_q, q, k = inputs[0][0, left:], inputs[2][0, left:], inputs[3][0]
    logits = torch.einsum("thk,shk->ths", q, k.repeat_interleave(H // G, 1)) / 6**0.5
    logits = (logits + latent_q[..., :1]).masked_fill(
        torch.arange(T) > torch.arange(left, T)[:, None, None], -torch.inf
    )
    logits[..., s] = latent_q[..., 1:].logsumexp(-1)
    assert_same([gone[left:]], [logits.softmax(-1)], EXACT)


@BACKENDS
@pytest.mark.parametrize("least", [-torch.inf, torch.nan])
def test_the_lowest_score_is_never_kept(backend, least):
    inputs, scores = kept_inputs(), scores_of() * 0 + least
    _, state = mix(inputs, scores, output_final_state=True, backend=backend)
    assert (state.kept.positions[:, :N] == -1).all()
    scores[:, 2, 0] = torch.finfo(DTYPE).min  # as low as a number can be
    _, state = mix(inputs, scores, output_final_state=True, backend=backend)
    assert state.kept.positions[0, :N, 0].tolist() == [2, -1, -1]


@BACKENDS
def test_more_places_than_tokens_keep_them_all(backend):
    inputs = kept_inputs()
    out, _ = mix(inputs, randn(1, T, G, seed=3), count=10 * T, backend=backend)
    full, _ = sliding_window_attention(*inputs[2:], window=None)
    assert_same([out], [full], EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_none_kept_is_todays_op_to_the_bit(dtype):
    inputs = [x.to(dtype) for x in macchiato_inputs(1, T)]
    plain = {"window": W, "partition": Partition(None, True, True), "output_final_state": True}
    out, state = macchiato_attention(*inputs, **plain)
    found, after = mix(inputs, scores_of().to(dtype), count=0, output_final_state=True)
    assert torch.equal(out, found) and after.kept is None
    assert all(torch.equal(a, b) for a, b in zip(state.window, after.window, strict=True))


@BACKENDS
def test_a_window_forgets_what_is_not_kept(backend):
    inputs, scores = kept_inputs()[2:], scores_of()
    partition = Partition(kept=Kept(scores, N, C))
    out, state = sliding_window_attention(
        *inputs, window=W, partition=partition, output_final_state=True, backend=backend
    )
    assert isinstance(state, KeptState) and state.latent_keys is None
    q, k, v = (x[0] for x in inputs)
    for t in range(T):
        for h in range(H):
            window, _, kept, _ = places(scores[0], t, h // 2)
            near = [*window, *kept]
            y = (k[near, h // 2] @ q[t, h] / 6**0.5).softmax(0) @ v[near, h // 2]
            assert_same([out[0, t, h]], [y], EXACT)


@BACKENDS
def test_heads_choose_by_their_group(backend):
    """With the groups of key heads in another order, everything is in that order."""
    inputs, scores = kept_inputs(), scores_of()
    heads, order = [2, 3, 0, 1], [1, 0]
    moved = [x[:, :, heads if x.shape[2] == H else order] for x in inputs]
    options = {"output_final_state": True, "backend": backend}
    out, state = mix(inputs, scores, **options)
    other, after = mix(moved, scores[..., order], **options)
    assert_same([other], [out[:, :, heads]], EXACT)
    assert torch.equal(after.kept.positions, state.kept.positions[..., order])


def test_the_op_keeps_the_contract_of_a_custom_op():
    q, k, v = (x.requires_grad_() for x in macchiato_inputs(1, 16)[2:])
    plan = Plan.of(Kept(scores_of(1, 16), N, C), W, Sequences(None, None), None, None)
    lead = (0, 0, 0, 0, plan.layout.front, 0)
    k, v = (torch.nn.functional.pad(x, lead).detach().requires_grad_() for x in (k, v))
    given = dict.fromkeys(KeptCall._fields)
    given |= {x: getattr(plan, x) for x in ("real", "kept", "kept_there", "late", "late_there")}
    given |= {"q": q, "k": k, "v": v, "begun": plan.begun, "window": W, "block": C}
    given |= {"scale": 0.4, "softcap": 0.0}
    kinds = ["test_schema", "test_faketensor", "test_autograd_registration"]
    checks = torch.library.opcheck(kept_op, tuple(given.values()), test_utils=kinds)
    assert set(checks.values()) == {"SUCCESS"}


def test_what_does_not_fit_is_one_clear_line():
    inputs, scores = macchiato_inputs(1, 9), scores_of(1, 9)
    kept = Kept(scores, N, C)
    options = {"window": W, "output_final_state": True}
    both = Partition(None, True, True)
    _, state = macchiato_attention(*inputs, partition=both._replace(kept=kept), **options)
    _, plain = macchiato_attention(*inputs, partition=both, **options)
    packed = torch.tensor([0, 9], dtype=torch.int32)
    cases = [
        ("kept must be a Kept, got tuple", (scores, N, C), {}),
        ("kept.scores must have shape (B=1, T=9, G=2)", kept._replace(scores=scores[:, 1:]), {}),
        ("kept.scores must be floating point", kept._replace(scores=scores.isinf()), {}),
        ("kept.count must be a number from 0 on, got -1", kept._replace(count=-1), {}),
        ("kept.block must be a number from 1 on, got 0", kept._replace(block=0), {}),
        (
            "kept takes cu_seqlens or initial_state",
            kept,
            {"cu_seqlens": packed, "initial_state": state},
        ),
        (
            "initial_state.keys must have shape",
            kept._replace(count=N + 1),
            {"initial_state": state},
        ),
        ("initial_state must have latent and kept", kept, {"initial_state": plain}),
        ("initial_state has kept tokens", None, {"initial_state": state}),
        ("initial_state must be a MacchiatoState", kept, {"initial_state": tuple(plain)}),
        ("with kept tokens: backend 'triton' is not available", kept, {"backend": "triton"}),
    ]
    for message, chosen, more in cases:
        with pytest.raises(ValueError) as error:
            macchiato_attention(*inputs, window=W, partition=both._replace(kept=chosen), **more)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="kept needs delay=True and joint=True"):
        macchiato_attention(*inputs, window=W, partition=Partition(kept=kept))
    with pytest.raises(ValueError, match="kept needs a window"):
        sliding_window_attention(*inputs[2:], window=None, partition=Partition(kept=kept))
    with pytest.raises(ValueError, match="kept needs causal=True"):
        sliding_window_attention(
            *inputs[2:], window=W, partition=Partition(kept=kept), causal=False
        )
    with pytest.raises(ValueError, match="must be a KeptState"):
        sliding_window_attention(
            *inputs[2:], window=W, partition=Partition(kept=kept), initial_state=plain.window
        )


@BACKENDS
def test_a_packed_state_is_that_of_rounded_inputs(backend):
    """So a cut changes no bit, and an input's gradient is that of the rounded one."""
    latent_q, latent_k, q, k, v = (x.clone().requires_grad_() for x in kept_inputs())
    inputs, scores, options = (latent_q, latent_k, q, k, v), scores_of(), {"backend": backend}
    near = [latent_q, *(x.detach() for x in (latent_k, q, k, v))]
    for i in (1, 3, 4):
        near[i] = unpack(pack(near[i]), DTYPE).requires_grad_()
    wanted, state = mix(near, scores, output_final_state=True, **options)
    partition = Partition(None, True, True, Kept(scores, N, C, packed=True))
    whole = {"window": W, "output_final_state": True, **options}
    found, after = macchiato_attention(*inputs, partition=partition, **whole)
    assert_same([found], [wanted], EXACT)
    for name in ("keys", "values", "latent_keys"):
        assert getattr(after.kept, name).dtype == torch.uint8
        assert torch.equal(getattr(after.kept, name), pack(getattr(state.kept, name)))
    grads = torch.autograd.grad(found.square().sum(), [latent_k, k, v])
    assert_same(
        grads, torch.autograd.grad(wanted.square().sum(), [near[i] for i in (1, 3, 4)]), EXACT
    )
    outs, carried = [], None
    for part in (slice(0, 13), slice(13, T)):
        kept = Kept(scores[:, part], N, C, packed=True)
        out, carried = macchiato_attention(
            *(x[:, part] for x in inputs),
            partition=Partition(None, True, True, kept),
            initial_state=carried,
            **whole,
        )
        outs.append(out)
    assert_same([torch.cat(outs, 1)], [found], EXACT)
    for one, other in zip(carried.kept[:5], after.kept[:5], strict=True):
        assert torch.equal(one, other)


def test_a_state_of_other_bits_does_not_fit():
    inputs, scores = kept_inputs(), scores_of()
    for packed, wanted in ((True, "(1, 11, 2, 7), got (1, 11, 2, 6)"), (False, "(1, 11, 2, 6)")):
        kept = Kept(scores, N, C, packed)
        options = {"window": W, "output_final_state": True}
        other = Partition(None, True, True, kept._replace(packed=not packed))
        _, state = macchiato_attention(*inputs, partition=other, **options)
        with pytest.raises(ValueError) as error:
            partition = Partition(None, True, True, kept)
            macchiato_attention(*inputs, window=W, partition=partition, initial_state=state)
        assert f"initial_state.keys must have shape {wanted}" in str(error.value)


@pytest.mark.parametrize("change", [(1, -1, 0), (-1, 1, 0), (1, 0, -1), (-1, 0, 1), (0, 1, -1)])
def test_a_state_of_other_numbers_does_not_fit(change):
    """Though it has as many slots, its tokens stand in other places."""
    inputs, scores = macchiato_inputs(1, T), scores_of()
    states = [
        mix(inputs, scores, output_final_state=True)[1],
        sliding_window_attention(
            *inputs[2:],
            window=W,
            partition=Partition(kept=Kept(scores, N, C)),
            output_final_state=True,
        )[1],
    ]
    count, window, block = (x + by for x, by in zip((N, W, C), change, strict=True))
    kept = Kept(scores, count, block)
    calls = (macchiato_attention, inputs, True), (sliding_window_attention, inputs[2:], False)
    for (op, given, latents), state in zip(calls, states, strict=True):
        options = {"partition": Partition(None, latents, latents, kept), "initial_state": state}
        with pytest.raises(ValueError) as error:
            op(*given, window=window, **options)
        numbers = f"{count} kept tokens, a window of {window} and blocks of {block}"
        assert f"initial_state must be that of {numbers}" in str(error.value)
