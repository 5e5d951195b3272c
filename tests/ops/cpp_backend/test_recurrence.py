"""The native RG-LRU and convolution: equations, gradients, laws to the last bit, contracts."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    key_mask,
    randn,
    relative_error,
    values_and_gradients,
)

from latte.ops import causal_conv1d, cpp_backend, rg_lru

FLAGS = pytest.mark.parametrize(
    ("masked", "packed", "carried"),
    [(m, p, c) for m in (False, True) for p in (False, True) for c in (False, True)],
)
HALF = [torch.float32, torch.bfloat16, torch.float16]


def lru_inputs(B, T, E, carried=0):
    """x, both gates, theta, and `carried` states of which the last is empty."""
    inputs = [*(randn(B, T, E, seed=s) for s in range(3)), randn(E, seed=3)]
    if carried:
        inputs.append(randn(carried, E, seed=4))
        inputs[-1][-1] = 0.0
    return inputs


def lru(backend, **options):
    def fn(x, r, i, theta, h0=None):
        options.setdefault("output_final_state", True)
        return rg_lru(x, r, i, theta, initial_state=h0, backend=backend, **options)

    return fn


def convolution(backend, **options):
    def fn(x, w, b=None, tail=None):
        options.setdefault("output_final_state", True)
        return causal_conv1d(x, w, b, initial_state=tail, backend=backend, **options)

    return fn


@FLAGS
@pytest.mark.parametrize("reverse", [False, True])
def test_rg_lru_agrees_with_the_reference(reverse, masked, packed, carried):
    for T, E in ((1, 3), (31, 17), (33, 8), (65, 40)):
        B = 1 if packed else 2
        cu = boundaries(T) if packed else None
        options = {"key_mask": key_mask(B, T) if masked else None, "cu_seqlens": cu}
        inputs = lru_inputs(B, T, E, carried and (B if cu is None else len(cu) - 1))
        found, wanted = (
            values_and_gradients(lru(b, reverse=reverse, **options), inputs)
            for b in ("cpu", "reference")
        )
        assert_same(found, wanted)


def test_rg_lru_of_many_channels_agrees_with_the_reference():
    found, wanted = (
        values_and_gradients(lru(b), lru_inputs(1, 9, 523, 1)) for b in ("cpu", "reference")
    )
    assert_same(found, wanted)


@FLAGS
@pytest.mark.parametrize("taps", [1, 3, 4])
def test_convolution_agrees_with_the_reference(taps, masked, packed, carried):
    for T, E in ((1, 3), (2, 8), (33, 17), (300, 5)):
        B = 1 if packed else 2
        cu = boundaries(T) if packed else None
        options = {"key_mask": key_mask(B, T) if masked else None, "cu_seqlens": cu}
        inputs = [randn(B, T, E), randn(E, taps, seed=1), randn(E, seed=2)]
        if carried:
            inputs.append(randn(B if cu is None else len(cu) - 1, taps - 1, E, seed=3))
        found, wanted = (
            values_and_gradients(convolution(b, **options), inputs) for b in ("cpu", "reference")
        )
        assert_same(found, wanted)


@pytest.mark.parametrize("dtype", HALF)
def test_low_precision_errs_as_little_as_the_reference_in_that_precision(dtype):
    for op, inputs in (
        (lru, lru_inputs(2, 130, 19)),
        (convolution, [randn(2, 130, 19), randn(19, 3, seed=1), randn(19, seed=2)]),
    ):
        low = [x.to(dtype) for x in inputs]
        exact = values_and_gradients(op("reference"), [x.to(F64) for x in low])
        equations = values_and_gradients(op("reference"), low)
        found = values_and_gradients(op("cpu"), low)
        for a, b, e in zip(found, equations, exact, strict=True):
            assert a.dtype == b.dtype
            assert relative_error(a, e) <= 2 * relative_error(b, e) + 1e-7


@pytest.mark.parametrize("gate", [-1e4, -90.0, 90.0, 1e4])
def test_saturated_gates(gate):
    x, theta = randn(1, 40, 5), randn(5)
    gates = torch.full((1, 40, 5), gate, dtype=F64)
    inputs = [x, gates, gates, theta]
    exact = values_and_gradients(lru("reference"), inputs)
    found = values_and_gradients(lru("cpu"), [z.float() for z in inputs])
    assert_same(found, exact, 1e-5)


def test_decays_near_one_keep_their_digits():
    """sqrt(1 - a^2) for log a from -1e-12 to -1: no cancellation in fp32."""
    theta = torch.linspace(-30, -2, 64, dtype=F64)
    x, opened = torch.zeros(1, 2, 64, dtype=F64), torch.full((1, 2, 64), 30.0, dtype=F64)
    x[:, 1] = 1.0
    exact, _ = lru("reference")(x, opened, opened, theta)
    found, _ = lru("cpu")(x.float(), opened.float(), opened.float(), theta.float())
    error = ((found[0, 1].double() - exact[0, 1]) / exact[0, 1]).abs().max().item()
    # theta and the logits are rounded to fp32 too: |theta| ulps of them.
    assert error < 40 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [*HALF, F64])
@pytest.mark.parametrize("op", ["rg_lru", "convolution"])
def test_a_sequence_that_is_cut_goes_on_in_the_same_bits(op, dtype):
    T, E = 100, 21
    if op == "rg_lru":
        x, r, i, theta = (z.to(dtype) for z in lru_inputs(2, T, E))

        def run(span, state):
            return lru("cpu")(*(z[:, span] for z in (x, r, i)), theta, state)

    else:
        x, w = randn(2, T, E).to(dtype), randn(E, 4).to(dtype)

        def run(span, state):
            return convolution("cpu")(x[:, span], w, None, state)

    whole, last = run(slice(0, T), None)
    for cut in (1, 2, 31, 32, 50, 99):
        head, state = run(slice(0, cut), None)
        rest, end = run(slice(cut, T), state)
        assert torch.equal(torch.cat([head, rest], 1), whole) and torch.equal(end, last)


@pytest.mark.parametrize("op", ["rg_lru", "convolution"])
def test_packed_is_separate_and_later_tokens_change_nothing(op):
    lengths, E = [5, 0, 40, 1, 33], 21
    T = sum(lengths)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    x, r, i, theta = (z.float() for z in lru_inputs(1, T, E))
    weight = randn(E, 3).float()

    def run(span, **options):
        if op == "rg_lru":
            return lru("cpu", **options)(*(z[:, span] for z in (x, r, i)), theta)
        return convolution("cpu", **options)(x[:, span], weight)

    packed, states = run(slice(0, T), cu_seqlens=bounds)
    for n, length in enumerate(lengths):
        if length:
            span = slice(int(bounds[n]), int(bounds[n + 1]))
            out, state = run(span)
            assert torch.equal(packed[:, span], out) and torch.equal(states[n], state[0])
    before, _ = run(slice(0, T))
    x[:, 50:] = torch.nan
    assert torch.equal(run(slice(0, T))[0][:, :50], before[:, :50])


@pytest.mark.parametrize("op", ["rg_lru", "convolution"])
def test_masked_tokens_may_hold_anything(op):
    mask, E = key_mask(2, 40), 9
    inputs = [z.float() for z in lru_inputs(2, 40, E)]
    if op == "convolution":
        inputs = [inputs[0], randn(E, 3).float()]
    run = {"rg_lru": lru, "convolution": convolution}[op]("cpu", key_mask=mask)
    wanted = values_and_gradients(run, inputs)
    for x in inputs:
        if x.ndim == 3:
            x[~mask] = torch.nan
    for a, b in zip(values_and_gradients(run, inputs), wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_comes_through(place, dtype):
    inputs = [z.to(dtype) for z in lru_inputs(1, 10, 21)]
    inputs[place].view(-1)[-11] = torch.nan  # channel 10 of the last token, or of theta
    states, _ = lru("cpu")(*inputs)
    expected, _ = lru("reference")(*inputs)
    assert torch.equal(states.isnan(), expected.isnan()) and expected.isnan().any()


def test_results_do_not_depend_on_the_number_of_threads_or_on_strides():
    inputs = [z.float() for z in lru_inputs(3, 70, 150)]
    taps = [inputs[0], randn(150, 3).float(), randn(150).float()]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(
                values_and_gradients(lru("cpu"), inputs)
                + values_and_gradients(convolution("cpu"), taps)
            )
    finally:
        torch.set_num_threads(before)
    turned = [z.mT.contiguous().mT if z.ndim == 3 else z for z in inputs]
    out = lru("cpu")(*turned)[0]
    assert torch.equal(out, results[0][0])
    y = convolution("cpu")(turned[0], taps[1].t().contiguous().t(), taps[2])[0]
    assert torch.equal(y, results[0][-5])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_gradients_by_differences():
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    inputs = [z.requires_grad_() for z in lru_inputs(1, 7, 2, 3)]
    with torch.no_grad():
        inputs[-1][-1] = 0.5  # a state that begins a sequence is a step, not a slope
        inputs[-1][:-1] += 2.0
    assert torch.autograd.gradcheck(lru("cpu", cu_seqlens=cu), inputs)
    inputs = [randn(1, 7, 2), randn(2, 3), randn(2), randn(3, 2, 2)]
    assert torch.autograd.gradcheck(
        convolution("cpu", cu_seqlens=cu), [z.requires_grad_() for z in inputs]
    )


def test_gradients_of_gradients_and_transforms_are_pytorchs():
    inputs = [z.requires_grad_() for z in (randn(1, 5, 2), randn(2, 3), randn(2))]
    assert torch.autograd.gradgradcheck(convolution("cpu"), inputs)
    batched = torch.func.vmap(lambda x: causal_conv1d(x, inputs[1])[0])(randn(3, 1, 5, 2))
    assert batched.shape == (3, 1, 5, 2)
    _, slope = torch.func.jvp(
        lambda x: causal_conv1d(x, inputs[1])[0], (inputs[0],), (randn(1, 5, 2),)
    )
    assert slope.abs().sum() > 0
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0].detach(), randn(1, 5, 2))
        assert torch.autograd.forward_ad.unpack_dual(
            causal_conv1d(dual, inputs[1])[0]
        ).tangent.any()
        with pytest.raises(NotImplementedError, match="forward-mode"):
            convolution("cpu")(dual, inputs[1])


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_in_one_graph(packed):
    torch._dynamo.reset()
    B, T = (1 if packed else 2), 20
    options = {"cu_seqlens": boundaries(T) if packed else None, "key_mask": key_mask(B, T)}

    def fn(x, r, i, theta, weight):
        y, tail = causal_conv1d(x, weight, backend="cpu", output_final_state=True, **options)
        return tail, *rg_lru(y, r, i, theta, backend="cpu", output_final_state=True, **options)

    inputs = [*lru_inputs(B, T, 6), randn(6, 3)]
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    assert_same(values_and_gradients(compiled, inputs), values_and_gradients(fn, inputs), 0.0)


@pytest.mark.parametrize(  # every pair of choices
    ("masked", "packed", "carried"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
def test_custom_ops_keep_their_contracts(masked, packed, carried):
    B, T, E = (1 if packed else 2), 40, 3
    cu = boundaries(T).long() if packed else None
    N = B if cu is None else len(cu) - 1
    mask = key_mask(B, T) if masked else None
    state, tail = (randn(N, E), randn(N, 2, E)) if carried else (None, None)
    inputs = [x.requires_grad_() for x in lru_inputs(B, T, E)]
    checks = torch.library.opcheck(cpp_backend.rg_lru_op, (*inputs, state, mask, cu, False))
    args = (inputs[0], randn(E, 3).requires_grad_(), None, tail, mask, cu)
    checks |= torch.library.opcheck(cpp_backend.convolution_op, args)
    assert set(checks.values()) == {"SUCCESS"}
