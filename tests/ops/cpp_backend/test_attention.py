"""Native Latte, Macchiato, window: equations, gradients, any logits, laws to the bit, contracts."""

from __future__ import annotations

import math

import calls
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

from latte.ops import (
    LatteState,
    WindowState,
    cpp_backend,
    latte_attention,
    macchiato_attention,
    sliding_window_attention,
)

FLAGS = pytest.mark.parametrize(
    ("masked", "packed", "carried"),
    [(m, p, c) for m in (False, True) for p in (False, True) for c in (False, True)],
)


OPS = pytest.mark.parametrize("op", ["macchiato", "latte", "window"])


def of(op, five):
    """The inputs of an op among Macchiato's."""
    latent_q, latent_k, q, k, v = five
    return {"latte": (latent_q[..., 1:], latent_k, v), "window": (q, k, v)}.get(op, tuple(five))


def attend(backend, window=16, tail_mask=None, op="macchiato", **options):
    """A function of the op's inputs and, if they are given, of its state's tensors."""
    options = {"output_final_state": True, "backend": backend, **options}

    def latte(q, k, v, *state):
        return latte_attention(
            q, k, v, initial_state=LatteState(*state) if state else None, **options
        )

    def near(q, k, v, *tail):
        tail = WindowState(*tail, tail_mask) if tail else None
        return sliding_window_attention(q, k, v, window=window, initial_state=tail, **options)

    def macchiato(latent_q, latent_k, q, k, v, *earlier):
        state = None
        if earlier:
            state = (LatteState(*earlier[:2]), WindowState(*earlier[2:], tail_mask))
        inputs = (latent_q, latent_k, q, k, v)
        return macchiato_attention(*inputs, window=window, initial_state=state, **options)

    return {"latte": latte, "window": near, "macchiato": macchiato}[op]


def compare(
    T, window, *, masked=False, packed=False, carried=False, scale=1.0, op="macchiato", **options
):
    sizes = {"H": 4, "G": 2, "L": 3, "K": 6, "D": 5}
    sizes |= {name: options.pop(name) for name in list(options) if name in sizes}
    B, cu = (1, boundaries(T)) if packed else (2, None)
    inputs = [*of(op, macchiato_inputs(B, T, **sizes, scale=scale))]
    if carried:
        N = B if cu is None else len(cu) - 1
        H, G, L, K, D = sizes.values()
        keys, values, tail_mask = window_state(N, window - 1, G, K, D)
        inputs += [*latte_state(N, H, L, D)] if op != "window" else []
        inputs += [keys, values] if op != "latte" else []
        options["tail_mask"] = tail_mask
    options |= {"window": window, "op": op, "cu_seqlens": cu}
    options["key_mask"] = key_mask(B, T) if masked else None
    found, wanted = (
        values_and_gradients(attend(b, **options), inputs) for b in ("cpu", "reference")
    )
    assert_same(found, wanted)


@FLAGS
@pytest.mark.parametrize("scale", [1.0, 1e4])
@OPS
def test_it_agrees_with_the_reference(op, scale, masked, packed, carried):
    options = {"masked": masked, "packed": packed, "carried": carried, "scale": scale, "op": op}
    for T, window in ((1, 16), (63, 1), (65, 65), (130, 17)):
        compare(T, window, **options)
    compare(257, 16, H=2, G=1, L=2, **options)


@FLAGS
@pytest.mark.parametrize("op", ["macchiato", "window"])
def test_a_soft_cap_and_a_wide_window_agree_with_the_reference(op, masked, packed, carried):
    compare(130, 150, masked=masked, packed=packed, carried=carried, softcap=2.0, op=op)


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize(("L", "K", "D"), [(1, 1, 1), (16, 64, 32), (33, 17, 96)])
@OPS
def test_odd_widths_and_groups_agree_with_the_reference(op, G, L, K, D):
    compare(70, 20, G=G, L=L, K=K, D=D, masked=True, carried=True, op=op)


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
@pytest.mark.parametrize("op", ["macchiato", "latte"])
def test_extreme_logits(op, kind):
    """fp64 as exact as ever; fp32 errs at most twice as much as the reference in fp32."""
    low = [x.float() for x in of(op, extreme(kind, 130))]
    exact = [x.double() for x in low]
    native, equations = attend("cpu", op=op), attend("reference", op=op)
    want = values_and_gradients(equations, exact)
    assert_same(values_and_gradients(native, exact), want)
    judge = values_and_gradients(equations, low)
    for a, b, e in zip(values_and_gradients(native, low), judge, want, strict=True):
        finite = torch.isfinite(e)
        assert torch.equal(torch.isfinite(a), finite)
        floor = 16 * torch.finfo(torch.float32).eps * max(1.0, e[finite].norm().item())
        error, plain = ((x.double() - e)[finite].norm().item() for x in (a, b))
        assert error <= max(2 * plain, floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@OPS
def test_low_precision_errs_at_most_twice_the_reference(op, dtype):
    low = [x.to(dtype) for x in of(op, macchiato_inputs(1, 257, 2, 2, 5, 32, 32))]
    native, equations = attend("cpu", 64, op=op), attend("reference", 64, op=op)
    want = values_and_gradients(equations, [x.double() for x in low])
    judge = values_and_gradients(equations, low)
    for a, b, e in zip(values_and_gradients(native, low), judge, want, strict=True):
        assert a.dtype == b.dtype
        # States are fp32 in any case, and here within an ulp of it.
        assert relative_error(a, e) <= 2 * relative_error(b, e) + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", ["plain", "rising apart", "jump"])
@pytest.mark.parametrize("bad", [1e3, math.nan])
@OPS
def test_later_tokens_change_no_bit_of_earlier_ones(op, kind, bad):
    inputs = [x.float() for x in of(op, extreme(kind, 200))]
    before, _ = attend("cpu", op=op)(*inputs)
    for cut in (1, 63, 64, 70, 133):
        changed = [torch.cat([x[:, :cut], bad * x[:, cut:]], 1) for x in inputs]
        after, _ = attend("cpu", op=op)(*changed)
        assert torch.equal(after[:, :cut], before[:, :cut])
        shorter, _ = attend("cpu", op=op)(*(x[:, :cut] for x in inputs))
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
@OPS
def test_a_sequence_that_is_not_finite_stays_alone(op, bad):
    inputs, native = [x.float() for x in of(op, macchiato_inputs(3, 130))], attend("cpu", op=op)
    sound = values_and_gradients(native, inputs)
    for x in inputs:
        x[1, 65] = bad
    for x, y in zip(values_and_gradients(native, inputs), sound, strict=True):
        assert torch.equal(x[[0, 2]], y[[0, 2]])
    assert not torch.isfinite(native(*inputs)[0][1, 65:81]).any()


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


@OPS
def test_bits_do_not_depend_on_other_heads(op):
    """Of long sequences, which several heads go through together."""
    inputs = [x.float() for x in of(op, macchiato_inputs(2, 1100, 5, 5))]
    fn = attend("cpu", op=op, output_final_state=False)
    with calls.threads(1):
        together = values_and_gradients(fn, inputs)
        for h in range(5):
            out = fn(*(x[:, :, h : h + 1] for x in inputs))[0]
            assert torch.equal(out, together[0][:, :, h : h + 1])
    with calls.threads(4):  # other heads go together
        again = values_and_gradients(fn, inputs)
    assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True))


def test_gradients_by_differences_and_of_gradients():
    cu = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    inputs = [*macchiato_inputs(1, 5, 2, 1, 2, 3, 2), randn(3, 2, 2), randn(3, 2, 2, 2)]
    inputs += [randn(3, 2, 1, 3), randn(3, 2, 1, 2)]
    fn = attend("cpu", 3, key_mask=None, cu_seqlens=cu, tail_mask=randn(3, 2) > -1.0, softcap=1.5)
    leaves = [x.requires_grad_() for x in inputs]

    def outputs(*xs):
        out, (latents, _) = fn(*xs)
        return out, *latents

    assert torch.autograd.gradcheck(outputs, leaves)
    few = macchiato_inputs(1, 3, 1, 1, 2, 2, 1)
    for op in ("macchiato", "latte", "window"):
        fn = attend("cpu", 2, output_final_state=False, op=op)
        leaves = [x.clone().requires_grad_() for x in of(op, few)]
        assert torch.autograd.gradgradcheck(lambda *xs, fn=fn: fn(*xs)[0], leaves)


@OPS
def test_they_keep_the_contract_of_a_custom_op(op):
    """Once plain, and with all that an op may be given; the rest is compiled in other tests."""
    bounds, kinds = boundaries(20).long(), ["test_schema", "test_faketensor"]
    earlier = (*latte_state(6, 4, 3, 5), -randn(1, 20, 4, 3).abs())
    tail = window_state(6, 7, 2, 6, 5)
    local = {"latte": (), "window": (8, 0.4, 0.0), "macchiato": (8, 0.4, 0.0, False, False)}[op]
    near, far = (3 if op != "latte" else 0), (3 if op != "window" else 0)
    more = [None] * {"latte": 0, "window": 5, "macchiato": 8}[op]  # sinks, pending: test_sinks.py
    full = [key_mask(1, 20), bounds, *earlier[:far], *tail[:near], *more]
    rest = ([None] * len(full), full)
    for around in rest:
        inputs = of(op, macchiato_inputs(1, 20, G=4 if op == "latte" else 2))
        args = [x.requires_grad_() for x in inputs] + around + [*local]
        called = getattr(cpp_backend, f"{op}_op")
        found = torch.library.opcheck(called, tuple(args), test_utils=kinds)
        assert set(found.values()) == {"SUCCESS"}


def test_they_serve_what_is_causal():
    for op in ("macchiato", "latte", "window"):
        inputs = of(op, macchiato_inputs(1, 5))
        options = {"window": 4, "op": op, "output_final_state": False}
        with pytest.raises(ValueError, match="backend 'cpu' is not available for this op"):
            attend("cpu", causal=False, **options)(*inputs)
        attend(None, causal=False, **options)(*inputs)
        native, torchs = (attend(b, **options)(*inputs)[0] for b in ("cpu", "torch"))
        assert torch.equal(attend(None, **options)(*inputs)[0], native)
        torch.testing.assert_close(native, torchs)
    with pytest.raises(ValueError, match="backend 'cpu' is not available for this op"):
        sliding_window_attention(*inputs, window=None, backend="cpu")
