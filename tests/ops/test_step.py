"""Steps in place against the reference run over the whole sequence, and what they leave alone."""

from __future__ import annotations

import pytest
import torch

from latte.ops import (
    LatteState,
    causal_conv1d,
    cpp_backend,
    latte_attention,
    linear_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
    use_backend,
)
from latte.ops.step import (
    Ring,
    StepSinks,
    conv_step,
    latte_step,
    linear_step,
    macchiato_step,
    rg_lru_step,
    window_step,
)
from latte.ops.tensors import computation_dtype
from tests.ops.helpers import F64, key_mask, latte_inputs, macchiato_inputs, randn, relative_error

B, T, H, L, K, D = 2, 14, 4, 3, 6, 5
WHOLE = {"backend": "reference", "output_final_state": True}  # the call that steps are compared to


@pytest.fixture(autouse=True, params=["torch", "cpu"])
def steps_by(request):
    """PyTorch's operations, then the native kernels."""
    if request.param == "cpu" and cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    with use_backend(request.param):
        yield


def stepped(step, *inputs, mask):
    """``step`` on every token (B, ...) of the inputs (B, T, ...) in turn, (B, T, ...)."""
    outs = []
    for t in range(inputs[0].shape[1]):
        real = None if mask is None else mask[:, t]
        outs.append(step(t, *(x[:, t] for x in inputs), real=real).clone())
    return torch.stack(outs, 1)


def close(out, step_state, expected, dtype, lowest):
    """Output and state are the reference's: in fp64 to rounding, else as well as it is in dtype.

    ``lowest`` is the reference run in ``dtype``.
    """
    pairs = zip((out, *step_state), expected, lowest, strict=True)
    for i, (a, e, low) in enumerate(pairs):
        assert torch.equal(a.isfinite(), e.isfinite()), i
        a, e, low = (torch.where(x.isfinite(), x, 0.0).to(F64) for x in (a, e, low))
        floor = 1e-12 if dtype == F64 else 4 * torch.finfo(dtype).eps
        assert relative_error(a, e) <= max(2 * relative_error(low, e), floor), i


def empty(dtype, heads=H):
    return LatteState.empty(B, heads, L, D, dtype=computation_dtype(dtype))


def ring_of(window, groups, dtype):
    shape = (B, groups, window)
    keys, values = (torch.zeros(*shape, n, dtype=dtype) for n in (K, D))
    return Ring(keys, values, torch.zeros(B, window, dtype=torch.bool))


cases = pytest.mark.parametrize(
    ("dtype", "masked", "scale"),
    [
        (F64, False, 1.0),
        (F64, True, 1.0),
        (F64, True, 1e4),
        (torch.float32, True, 1.0),
        (torch.float32, False, 1e4),
        (torch.bfloat16, True, 1.0),
        (torch.float16, False, 1.0),
    ],
)


def decays(dtype):
    """What latents forget, at each token."""
    return -0.2 * randn(B, T, H, L, seed=6).abs().to(computation_dtype(dtype))


@cases
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("groups", [H, 2])
def test_latte(dtype, masked, scale, groups, forgets):
    inputs = [x.to(dtype) for x in latte_inputs(B, T, H, L, D, scale=scale)]
    inputs[2] = inputs[2][:, :, :groups]
    mask, decay = key_mask(B, T) if masked else None, decays(dtype) if forgets else None
    state = empty(dtype)

    def step(t, *x, real):
        return latte_step(*x, *state, real, log_decay=None if decay is None else decay[:, t])

    out = stepped(step, *inputs, mask=mask)

    def run(to):
        options = {"key_mask": mask, "log_decay": decay, **WHOLE}
        y, after = latte_attention(*(x.to(to) for x in inputs), **options)
        return y, *after[:2]

    close(out, state, run(F64), dtype, run(dtype))


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_keys_of_minus_infinity(dtype):
    """A latent does not see such a source, nor does one that has seen nothing."""
    q, k, v = (x.to(dtype) for x in latte_inputs(B, T, H, L, D))
    k[:, : T // 2, :, 1] = -torch.inf
    k[..., 2] = -torch.inf
    state = empty(dtype)
    out = stepped(lambda t, *x, real: latte_step(*x, *state, real), q, k, v, mask=None)

    def run(to):
        y, after = latte_attention(*(x.to(to) for x in (q, k, v)), **WHOLE)
        return y, *after

    close(out, state, run(F64), dtype, run(dtype))
    assert (state.log_mass[..., 2] == -torch.inf).all() and not state.mean[:, :, 2].any()


@pytest.mark.parametrize("key", [0.0, -torch.inf])
def test_a_state_that_is_not_a_number_stays_so(key):
    q, k, v = (x[:, 0] for x in latte_inputs(B, 1, H, L, D))
    state = LatteState(torch.zeros(B, H, L, dtype=F64), torch.zeros(B, H, L, D, dtype=F64))
    state.log_mass[0, 1, 2] = torch.nan
    y = latte_step(q, k + key, v, *state)
    alone = torch.zeros(B, H, dtype=torch.bool)
    alone[0, 1] = True
    assert torch.equal(y.isnan().all(-1), alone) and torch.equal(y.isnan().any(-1), alone)
    assert state.log_mass[0, 1, 2].isnan() and state.mean[0, 1, 2].isnan().all()


@cases
@pytest.mark.parametrize(
    ("window", "softcap", "forgets"),
    [(1, None, False), (4, None, True), (4, 2.0, False), (20, None, False)],
)
def test_macchiato_and_the_window_alone(dtype, masked, scale, window, softcap, forgets):
    inputs = [x.to(dtype) for x in macchiato_inputs(B, T, H, 2, L, K, D, scale=scale)]
    mask, decay = key_mask(B, T) if masked else None, decays(dtype) if forgets else None
    state, ring, alone = empty(dtype), ring_of(window, 2, dtype), ring_of(window, 2, dtype)
    options = {"scale": K**-0.5, "softcap": softcap}

    def both(t, *x, real):
        slot, lost = torch.tensor([t % window]), None if decay is None else decay[:, t]
        return macchiato_step(*x, *state, ring, slot, real, log_decay=lost, **options)

    def near(t, *x, real):
        return window_step(*x, alone, torch.tensor([t % window]), real, **options)

    def run(to):
        wide = [x.to(to) for x in inputs]
        around = {"window": window, "key_mask": mask, "log_decay": decay}
        y, after = macchiato_attention(*wide, **around, **options, **WHOLE)
        return y, *after.latent[:2]

    def window_alone(to):
        wide = [x.to(to) for x in inputs[2:]]
        around = {"window": window, "key_mask": mask, "backend": "reference"}
        return sliding_window_attention(*wide, **around, **options)[:1]

    close(stepped(both, *inputs, mask=mask), state, run(F64), dtype, run(dtype))
    out = stepped(near, *inputs[2:], mask=mask)
    close(out, (), window_alone(F64), dtype, window_alone(dtype))
    # Slots hold what came last, in turn; padding is a slot of its own.
    held = [t for t in range(T - window, T) if t >= 0]
    slots = [t % window for t in held]
    real = torch.ones(B, T, dtype=torch.bool) if mask is None else mask
    assert torch.equal(ring.mask[:, slots], real[:, held])
    keys = inputs[3].masked_fill(~real[..., None, None], 0.0)
    assert torch.equal(ring.keys[:, :, slots], keys[:, held].transpose(1, 2))


def turn_by(angle, dtype):
    """A rotary table of one angle for all pairs, and the rotation itself."""
    cos, sin = (x.expand(1, 1, 1, K // 2).to(dtype) for x in (angle.cos(), angle.sin()))

    def turned(x):
        first, second = x.chunk(2, -1)
        return torch.cat(
            [
                first * angle.cos() - second * angle.sin(),
                second * angle.cos() + first * angle.sin(),
            ],
            -1,
        )

    return (cos, torch.cat([-sin, sin], 2)), turned


def with_sinks_and_delay(inputs, mask, window, softcap, n, delayed, turned, joint):
    """The equations over the whole sequence: y (B, T, H, D), and the window's branch alone."""
    latent_q, latent_k, q, k, v = inputs
    k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    token, place = torch.arange(T), mask.long().cumsum(1) - 1
    gap = token[:, None] - token
    moved = place[:, :, None] - place[:, None]
    real = mask[:, None]  # sources
    near = (gap >= 0) & (gap < window) & real
    far = (moved >= window) & (place[:, None] < n) & real & (gap >= 0)
    read = (gap >= (window if delayed else 0)) & real
    logits = torch.einsum("bthk,bshk->bhts", q, k)
    logits = torch.where(far[:, None], torch.einsum("bthk,bshk->bhts", turned(q), k), logits)
    logits = logits * K**-0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)

    def softmax(x, seen):
        return x.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)

    seen = (near | far)[:, None]
    local = torch.einsum("bhts,bshd->bthd", softmax(logits, seen), v)
    if joint:
        log_mass = logits.masked_fill(~seen, -torch.inf).logsumexp(-1).transpose(1, 2)[..., None]
        latent_q = torch.cat([latent_q[..., :1] + log_mass, latent_q[..., 1:]], -1)
    p = latent_q.softmax(-1)
    if delayed:
        alone = torch.eye(L + 1, dtype=p.dtype)[0]
        p = torch.where(read.any(-1)[:, :, None, None], p, alone)
    keys = latent_k.permute(0, 2, 3, 1)[:, :, :, None].expand(B, H, L, T, T)
    mean = torch.einsum("bhlts,bshd->bthld", softmax(keys, read[:, None, None]), v)
    return p[..., :1] * local + (p[..., 1:, None] * mean).sum(3), local


@cases
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    ("window", "softcap", "n", "delayed"),
    [
        *((4, None, 3, True), (4, 2.0, 2, False), (1, None, 1, True)),
        *((5, None, 0, True), (20, None, 3, True)),
    ],
)
def test_sinks_and_delayed_latents(dtype, masked, scale, window, softcap, n, delayed, joint):
    inputs = [x.to(dtype) for x in macchiato_inputs(B, T, H, 2, L, K, D, scale=scale)]
    mask = key_mask(B, T) if masked else torch.ones(B, T, dtype=torch.bool)
    table, turned = turn_by(torch.tensor(0.7, dtype=F64), computation_dtype(dtype))
    state, ring, alone = empty(dtype), ring_of(window, 2, dtype), ring_of(window, 2, dtype)
    pending = torch.zeros(B, H, window, L, dtype=dtype) if delayed else None
    position = torch.zeros(B, dtype=torch.long)
    held = [[torch.zeros(B, 2, n, width, dtype=dtype) for width in (K, D)] for _ in "ab"]
    options = {"scale": K**-0.5, "softcap": softcap}
    own = {"pending": pending, "joint": joint}

    def both(t, *x, real):
        slot, sinks = torch.tensor([t % window]), [StepSinks(*xs, position, table) for xs in held]
        sinks = sinks if n else [None, None]
        y = macchiato_step(*x, *state, ring, slot, real, **options, sinks=sinks[0], **own)
        near = window_step(*x[2:], alone, slot, real, **options, sinks=sinks[1])
        position.add_(1 if real is None else real)
        return torch.cat([y, near], -1)

    def run(to):
        wide = [x.to(to) for x in inputs]
        return torch.cat(
            with_sinks_and_delay(wide, mask, window, softcap, n, delayed, turned, joint), -1
        )

    out = stepped(both, *inputs, mask=mask if masked else None)
    exact, rounded = run(F64), run(dtype)
    out, exact, rounded = (x[mask] for x in (out, exact, rounded))  # what padding gives is nobody's
    close(out, (), (exact,), dtype, (rounded,))
    if n:  # the first real tokens, in their order
        for b in range(B):
            first = mask[b].nonzero()[:n, 0]
            for row, source in zip(held[0], (inputs[3], inputs[4]), strict=True):
                assert torch.equal(row[b, :, : len(first)], source[b, first].transpose(0, 1))


def test_sinks_without_a_table_of_their_own_have_the_windows():
    inputs, outs = [x[:, 0] for x in macchiato_inputs(B, 1, H, 2, L, K, D)], []
    table, _ = turn_by(torch.tensor(0.7, dtype=F64), F64)
    far = [randn(B, 2, 3, width, seed=width) for width in (K, D)]
    for own in (None, table):
        sinks = StepSinks(*far, torch.tensor([9, 9]), own)
        given = *inputs, *empty(F64), ring_of(4, 2, F64), torch.tensor([0])
        outs.append(macchiato_step(*given, scale=1.0, rotary=table, sinks=sinks))
    assert torch.equal(*outs)


def test_all_tokens_so_far_are_the_first_slots():
    inputs = macchiato_inputs(B, T, H, 2, L, K, D)[2:]
    ring = ring_of(2 * T, 2, F64)._replace(mask=None)

    def step(t, *x, real):
        return window_step(*x, ring, torch.tensor([t]), real, scale=K**-0.5, length=t + 1)

    expected, _ = sliding_window_attention(*inputs, window=None, backend="reference")
    torch.testing.assert_close(stepped(step, *inputs, mask=None), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_linear(masked):
    q, k, v = latte_inputs(B, T, H, L, D)
    q, k, mask = q.exp(), k.exp(), key_mask(B, T) if masked else None
    state = q.new_zeros(B, H, L, D), q.new_zeros(B, H, L)
    out = stepped(lambda t, *x, real: linear_step(*x, *state, real), q, k, v, mask=mask)
    y, after = linear_attention(q, k, v, key_mask=mask, **WHOLE)
    close(out, state, (y, *after), F64, (y, *after))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_rg_lru_goes_on_with_what_has_begun(dtype, masked):
    inputs = [randn(B, T, 8, seed=s, scale=3.0).to(dtype) for s in range(3)]
    theta, start = randn(8, seed=3).to(dtype), randn(B, 8, seed=4).to(computation_dtype(dtype))
    mask = key_mask(B, T) if masked else None
    state = start.clone()
    out = stepped(
        lambda t, *x, real: rg_lru_step(*x, theta, state, real), *inputs, mask=mask
    )  # at least fp32, as the state

    def run(to):
        every = [x.to(to) for x in (*inputs, theta)]
        begun = start.to(computation_dtype(to))
        return rg_lru(*every, key_mask=mask, initial_state=begun, **WHOLE)

    close(out, (state,), run(F64), dtype, run(dtype))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_conv(dtype, taps, masked):
    x, tail = randn(B, T, 8).to(dtype), randn(B, taps - 1, 8, seed=1).to(dtype)
    weight, bias = randn(8, taps, seed=2).to(dtype), randn(8, seed=3).to(dtype)
    mask = key_mask(B, T) if masked else None
    start = tail.clone()
    out = stepped(lambda t, x, real: conv_step(x, weight, bias, tail, real), x, mask=mask)

    def at(to):
        inputs = (y.to(to) for y in (x, weight, bias))
        return causal_conv1d(*inputs, key_mask=mask, initial_state=start.to(to), **WHOLE)

    close(out, (tail,), at(F64), dtype, at(dtype))
    assert out.dtype == dtype


def test_what_stands_at_padding_does_not_matter():
    latent_q, latent_k, q, k, v = (x[:, 0] for x in macchiato_inputs(B, 1, H, 2, L, K, D))
    k[1], v[1], latent_k[1] = torch.inf, torch.nan, torch.nan
    state, ring = empty(F64), ring_of(4, 2, F64)
    slot, real = torch.tensor([2]), torch.tensor([True, False])
    y = macchiato_step(latent_q, latent_k, q, k, v, *state, ring, slot, real, scale=1.0)
    assert y.isfinite().all() and (y[1] == 0).all()  # nothing was visible
    assert (state.log_mass[1] == -torch.inf).all() and (state.mean[1] == 0).all()
    assert ring.mask.tolist() == [[False, False, True, False], [False] * 4]
