"""The native Latte-Macchiato: equations, gradients, any logits, laws to the last bit, contracts."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    key_mask,
    latte_state,
    macchiato_inputs,
    randn,
    relative_error,
    values_and_gradients,
    window_state,
)

from latte.ops import LatteState, WindowState, cpp_backend, macchiato_attention

FLAGS = pytest.mark.parametrize(
    ("masked", "packed", "carried"),
    [(m, p, c) for m in (False, True) for p in (False, True) for c in (False, True)],
)


def attend(backend, window=16, tail_mask=None, **options):
    """A function of the op's inputs and, if they are given, of its state's four tensors."""
    options = {"output_final_state": True, **options}

    def fn(latent_q, latent_k, q, k, v, *earlier):
        state = None
        if earlier:
            state = (LatteState(*earlier[:2]), WindowState(*earlier[2:], tail_mask))
        inputs = (latent_q, latent_k, q, k, v)
        return macchiato_attention(
            *inputs, window=window, initial_state=state, backend=backend, **options
        )

    return fn


def compare(
    T, window, *, masked=False, packed=False, carried=False, scale=1.0, softcap=None, **sizes
):
    sizes = {"H": 4, "G": 2, "L": 3, "K": 6, "D": 5, **sizes}
    B, cu = (1, boundaries(T)) if packed else (2, None)
    inputs, tail_mask = [*macchiato_inputs(B, T, **sizes, scale=scale)], None
    if carried:
        N = B if cu is None else len(cu) - 1
        H, G, L, K, D = sizes.values()
        keys, values, tail_mask = window_state(N, window - 1, G, K, D)
        inputs += [*latte_state(N, H, L, D), keys, values]
    options = {
        "window": window,
        "tail_mask": tail_mask,
        "softcap": softcap,
        "key_mask": key_mask(B, T) if masked else None,
        "cu_seqlens": cu,
    }
    found, wanted = (
        values_and_gradients(attend(b, **options), inputs) for b in ("cpu", "reference")
    )
    assert_same(found, wanted)


@FLAGS
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_it_agrees_with_the_reference(scale, masked, packed, carried):
    for T, window in ((1, 16), (63, 1), (65, 65), (130, 17), (257, 16)):
        compare(T, window, masked=masked, packed=packed, carried=carried, scale=scale)


@FLAGS
def test_a_soft_cap_and_a_wide_window_agree_with_the_reference(masked, packed, carried):
    compare(130, 150, masked=masked, packed=packed, carried=carried, softcap=2.0)


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize(("L", "K", "D"), [(1, 1, 1), (16, 64, 32), (33, 17, 96)])
def test_odd_widths_and_groups_agree_with_the_reference(G, L, K, D):
    compare(70, 20, G=G, L=L, K=K, D=D, masked=True, carried=True)


def extreme(kind, T):
    """Latents' keys as the classic implementations fail on; queries large too for one kind."""
    inputs = list(macchiato_inputs(1, T))
    k, time = inputs[1], torch.arange(T, dtype=F64)[None, :, None, None]
    if kind == "jump":
        k[:, T // 2 :] += 120.0
    elif kind == "fall":
        k[:, T // 2 :] -= 120.0
    elif kind == "dominant":
        k[:, T // 3] += 1e4
    elif kind == "rising":
        k += 70.0 * time
    elif kind == "rising apart":
        k[..., 1:] += 3.0 * time
    elif kind == "alternating":
        k += 1.5e4 * (-1.0) ** time
    elif kind == "huge":
        for x in inputs[:4]:
            x *= 1e4
    elif kind == "nothing seen":
        k[:, : T // 2, :, 1] = -torch.inf
        k[:, :, :, 2] = -torch.inf
    return inputs


KINDS = ["jump", "fall", "dominant", "rising", "rising apart", "alternating", "huge"]


@pytest.mark.parametrize("kind", [*KINDS, "nothing seen"])
def test_extreme_logits(kind):
    """fp64 as exact as ever; fp32 errs at most twice as much as the reference in fp32."""
    low = [x.float() for x in extreme(kind, 130)]
    exact = [x.double() for x in low]
    want = values_and_gradients(attend("reference"), exact)
    assert_same(values_and_gradients(attend("cpu"), exact), want)
    judge = values_and_gradients(attend("reference"), low)
    for a, b, e in zip(values_and_gradients(attend("cpu"), low), judge, want, strict=True):
        finite = torch.isfinite(e)
        assert torch.equal(torch.isfinite(a), finite)
        floor = 16 * torch.finfo(torch.float32).eps * max(1.0, e[finite].norm().item())
        error, plain = ((x.double() - e)[finite].norm().item() for x in (a, b))
        assert error <= max(2 * plain, floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_errs_at_most_twice_the_reference(dtype):
    low = [x.to(dtype) for x in macchiato_inputs(2, 257, 4, 2, 16, 32, 32)]
    want = values_and_gradients(attend("reference", 64), [x.double() for x in low])
    judge = values_and_gradients(attend("reference", 64), low)
    for a, b, e in zip(values_and_gradients(attend("cpu", 64), low), judge, want, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e)


@pytest.mark.parametrize("kind", ["plain", "rising apart", "jump"])
@pytest.mark.parametrize("bad", [1e3, math.nan])
def test_later_tokens_change_no_bit_of_earlier_ones(kind, bad):
    inputs = [x.float() for x in extreme(kind, 200)]
    before, _ = attend("cpu")(*inputs)
    for cut in (1, 63, 64, 70, 133):
        changed = [torch.cat([x[:, :cut], bad * x[:, cut:]], 1) for x in inputs]
        after, _ = attend("cpu")(*changed)
        assert torch.equal(after[:, :cut], before[:, :cut])
        shorter, _ = attend("cpu")(*(x[:, :cut] for x in inputs))
        assert torch.equal(shorter, before[:, :cut])


@pytest.mark.parametrize("kind", ["plain", "rising apart", "jump"])
def test_split_is_whole(kind):
    inputs = extreme(kind, 200)
    whole, last = attend("cpu")(*inputs)
    for cut in (1, 63, 64, 65, 150):
        first, (latents, tail) = attend("cpu")(*(x[:, :cut] for x in inputs))
        rest, end = macchiato_attention(
            *(x[:, cut:] for x in inputs),
            window=16,
            initial_state=(latents, tail),
            output_final_state=True,
            backend="cpu",
        )
        assert_same([torch.cat([first, rest], 1), *end[0]], [whole, *last[0]], 1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sequence_that_is_not_finite_stays_alone(bad):
    inputs = [x.float() for x in macchiato_inputs(3, 130)]
    sound = values_and_gradients(attend("cpu"), inputs)
    for x in inputs:
        x[1, 65] = bad
    for x, y in zip(values_and_gradients(attend("cpu"), inputs), sound, strict=True):
        assert torch.equal(x[[0, 2]], y[[0, 2]])
    assert not torch.isfinite(attend("cpu")(*inputs)[0][1, 65:]).any()


def test_masked_tokens_may_hold_anything():
    mask, inputs = key_mask(2, 140), [x.float() for x in macchiato_inputs(2, 140)]
    fn = attend("cpu", key_mask=mask)

    def run(*inputs):
        out, (latents, _) = fn(*inputs)
        return out, latents

    wanted = values_and_gradients(run, inputs)
    for i in (1, 3, 4):
        inputs[i][~mask] = math.nan
    found = values_and_gradients(run, inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_bits_do_not_depend_on_threads_strides_or_old_memory():
    inputs = [x.float() for x in macchiato_inputs(3, 150)]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5, 1):
            torch.set_num_threads(threads)
            results.append(values_and_gradients(attend("cpu"), inputs))
            _ = [torch.full_like(x, math.nan) for x in results[-1]]
    finally:
        torch.set_num_threads(before)
    results.append(
        values_and_gradients(lambda *xs: attend("cpu")(*(x.mT.contiguous().mT for x in xs)), inputs)
    )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_gradients_by_differences_and_of_gradients():
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    inputs = [*macchiato_inputs(1, 7, 2, 1, 2, 3, 2), randn(3, 2, 2), randn(3, 2, 2, 2)]
    inputs += [randn(3, 2, 1, 3), randn(3, 2, 1, 2)]
    fn = attend("cpu", 3, key_mask=None, cu_seqlens=cu, tail_mask=randn(3, 2) > -1.0, softcap=1.5)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *xs: tuple(x for x in fn(*xs)[1][0]), leaves)
    assert torch.autograd.gradcheck(lambda *xs: fn(*xs)[0], leaves)
    fn = attend("cpu", 2, output_final_state=False)
    few = [x.requires_grad_() for x in macchiato_inputs(1, 4, 1, 1, 2, 2, 1)]
    assert torch.autograd.gradgradcheck(lambda *xs: fn(*xs)[0], few)


@pytest.mark.parametrize(("masked", "packed", "carried"), [(False,) * 3, (True,) * 3])
def test_it_keeps_the_contract_of_a_custom_op(masked, packed, carried):
    B = 1 if packed else 2
    inputs = [x.requires_grad_() for x in macchiato_inputs(B, 20)]
    bounds = boundaries(20).long() if packed else None
    N = B if bounds is None else len(bounds) - 1
    state = [None] * 5
    if carried:
        earlier, tail = latte_state(N, 4, 3, 5), window_state(N, 7, 2, 6, 5)
        state = [x.requires_grad_() for x in (*earlier, *tail[:2])] + [tail.mask]
    mask = key_mask(B, 20) if masked else None
    args = (*inputs, mask, bounds, *state, 8, 0.4, 0.0)
    assert set(torch.library.opcheck(cpp_backend.macchiato_op, args).values()) == {"SUCCESS"}


def test_it_serves_what_is_causal():
    inputs = macchiato_inputs(1, 5)
    with pytest.raises(ValueError, match="backend 'cpu' is not available for this op"):
        macchiato_attention(*inputs, window=4, causal=False, backend="cpu")
    macchiato_attention(*inputs, window=4, causal=False)
    native, torchs = (
        macchiato_attention(*inputs, window=4, backend=b)[0] for b in ("cpu", "torch")
    )
    assert torch.equal(macchiato_attention(*inputs, window=4)[0], native)
    torch.testing.assert_close(native, torchs)
