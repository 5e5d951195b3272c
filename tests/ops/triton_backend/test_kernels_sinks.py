"""Sinks, late latents and the joint softmax on the kernels: values, gradients, laws, manners.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, N states, W window, n sinks.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    flat,
    key_mask,
    latte_state,
    macchiato_inputs,
    randn,
    relative_error,
    values_and_gradients,
    window_state,
)
from kernel_helpers import DEVICE, Fences, judged, macchiato, same_when_compiled

from latte.ops import LatteState, Sinks, WindowState, macchiato_attention, sliding_window_attention
from latte.ops.triton_backend import launch, segments
from latte.ops.triton_backend.macchiato import macchiato_op

KINDS = ("sinks", "delay", "joint", "all")


def far(
    backend, *tensors, masks, alone=False, n=0, delay=False, joint=False, forgets=False, **options
):
    """An op of its inputs, what latents forget, n sinks and its state, as far as it has them.

    ``masks``: of the sinks, the window's tail and the pending sources, and the sinks' position.
    """
    tensors, (sink_mask, tail_mask, pending_mask, position) = list(tensors), masks
    options = {"output_final_state": True, "backend": backend, **options}
    inputs = [tensors.pop(0) for _ in range(3 if alone else 5)]
    if forgets:
        options["log_decay"] = tensors.pop(0)
    if n:
        options["sinks"] = Sinks(*(tensors.pop(0) for _ in range(3)), sink_mask, position)
    if alone:
        if tensors:
            options["initial_state"] = WindowState(*tensors, tail_mask)
        return sliding_window_attention(*inputs, **options)
    if tensors:
        state = [LatteState(*tensors[:2]), WindowState(*tensors[2:4], tail_mask)]
        state += [WindowState(*tensors[4:], pending_mask)] if delay else []
        options["initial_state"] = tuple(state)
    return macchiato_attention(*inputs, delay=delay, joint=joint, **options)


def case(
    T, W=16, *, masked=False, packed=False, carried=False, scale=1.0, n=3, delay=True, joint=True,
    alone=False, forgets=False, B=1, H=2, G=1, L=3, K=6, D=5, **options,
):  # fmt: skip
    """Inputs of :func:`far` in fp64, and its options."""
    cu = boundaries(T) if packed else None
    N = B if cu is None else len(cu) - 1
    inputs = [*macchiato_inputs(B, T, H, G, L, K, D, scale)][2 if alone else 0 :]
    if forgets:
        inputs.append(-randn(B, T, H, L, seed=50).abs())
    if n:
        shapes = ((B, T, H, K), (N, n, G, K), (N, n, G, D))
        far_q, far_k, far_v = (randn(*shape, seed=40 + i) for i, shape in enumerate(shapes))
        inputs += [far_q * scale, far_k * scale, far_v]
    sink_mask = torch.ones(N, n, dtype=torch.bool)
    sink_mask[0, n // 2 + 1 :] = False
    masks = [sink_mask, None, None, None]
    if carried:
        keys, values, flags = window_state(N, W - 1, G, K, D)
        inputs += [] if alone else [*latte_state(N, H, L, D, scale=scale)]
        inputs += [keys, values]
        masks[1:] = flags, randn(N, W, seed=31) > -0.5, torch.arange(N) * (W // 2) + n
        if delay and not alone:
            inputs += [randn(N, W, H, L, seed=32), randn(N, W, G, D, seed=33)]
    options |= {"n": n, "window": W, "alone": alone, "forgets": forgets}
    options |= {} if alone else {"delay": delay, "joint": joint}
    options["masks"] = tuple(None if x is None else x.to(DEVICE) for x in masks)
    options["key_mask"] = key_mask(B, T).to(DEVICE) if masked else None
    options["cu_seqlens"] = None if cu is None else cu.to(DEVICE)
    return inputs, options


def compare(T, W=16, **options):
    """The kernels against the reference in fp32: values and all gradients."""
    inputs, options = case(T, W, **options)
    return judged([x.float() for x in inputs], far, **options)


def of_kind(kind):
    """Options of :func:`case`: one of the three, or all."""
    return {
        "n": 3 if kind in ("sinks", "all") else 0,
        "delay": kind in ("delay", "all"),
        "joint": kind in ("joint", "all"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_each_agrees_with_the_reference(kind):
    compare(40, **of_kind(kind))


@pytest.mark.parametrize(("packed", "carried"), [(False, True), (True, False)])
def test_masks_packing_and_states(packed, carried):
    # The log-mass of packed sequences that go on is not there to be judged by.
    compare(50, masked=True, packed=packed, carried=carried, H=1)


@pytest.mark.slow
def test_packed_sequences_go_on():
    compare(50, masked=True, packed=True, carried=True, joint=False)


def test_a_window_alone_has_sinks_too():
    compare(40, alone=True, masked=True, carried=True, softcap=2.0)


def test_more_sinks_than_are_taken_at_once_and_groups_of_heads():
    compare(24, W=4, n=19, softcap=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_there_is(kind, carried, packed, masked):
    more = of_kind(kind)
    # The log-mass of packed sequences that go on is not there to be judged by.
    more["joint"] &= not (packed and carried)
    for T, W in ((1, 3), (17, 1), (66, 16), (50, 100)):
        compare(T, W, masked=masked, packed=packed, carried=carried, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("L", "K", "D"), [(1, 1, 1), (16, 64, 70), (35, 5, 16), (3, 130, 5), (256, 3, 40)]
)
def test_widths(L, K, D):
    compare(40, L=L, K=K, D=D, H=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_latents_that_forget(kind):
    compare(40, forgets=True, carried=True, **of_kind(kind))


def test_large_logits():
    got = compare(37, scale=100.0, masked=True, H=1)
    assert all(torch.isfinite(x).all() for x in got[:1])


@pytest.mark.parametrize("kind", ["jump", "window closed", "window alone"])
def test_extreme_latent_logits(kind):
    """Late sources beyond a reference's reach; shares of the window that are 0 or 1 in fp32."""
    inputs, options = case(40, H=1)
    if kind == "jump":
        inputs[1][:, 13:] += 120.0
    else:
        inputs[0][..., 0] = -1e4 if kind == "window closed" else 1e4
    got = judged([x.float() for x in inputs], far, **options)
    assert all(torch.isfinite(x).all() for x in got)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_segments_agree_with_the_reference(kind, monkeypatch):
    """Cut into single chunks, scanned two at a time; the widths are more than one tile."""
    monkeypatch.setitem(launch.SCAN, "U", 2)
    monkeypatch.setattr(segments, "SHORTEST", 1)
    compare(70, W=34, masked=True, D=70, **of_kind(kind))


def test_many_tiles_of_values_have_one_delta():
    """Backward the latents take one tile of D after the other: the mixture's delta is their sum."""
    compare(20, W=5, D=70, H=1)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_low_precision_errs_at_most_twice_the_reference(dtype):
    inputs, options = case(70, W=20, L=16, K=64, D=64)
    low = [x.to(DEVICE, dtype) for x in inputs]

    def run(backend, inputs):
        carried = {"output_final_state": False}
        return values_and_gradients(lambda *x: far(backend, *x, **options | carried), inputs)

    want = run("reference", [x.to(F64) for x in low])
    for a, b, e in zip(run("triton", low), run("reference", low), want, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e)


def fp32(T, W=6, **more):
    """Inputs in fp32, and the options but for what goes with a span of them."""
    inputs, options = case(T, W, **more)
    return [x.float().to(DEVICE) for x in inputs], options


def spans(inputs, options, cuts, backend="triton"):
    """The outputs of the spans between the cuts, each from the state that the last one left."""
    outs, state, first = [], None, 5
    keys, values = inputs[first + 1 :]
    given = {x: options[x] for x in ("window", "delay", "joint")}
    for a, b in zip(cuts, cuts[1:], strict=False):
        part = [x[:, a:b] for x in inputs[:first]]
        position = torch.full((inputs[0].shape[0],), a, device=DEVICE)
        sinks = Sinks(inputs[first][:, a:b], keys, values, options["masks"][0], position)
        around = {"initial_state": state, "output_final_state": True, "backend": backend}
        out, state = macchiato_attention(*part, sinks=sinks, **given, **around)
        outs.append(out)
    return torch.cat(outs, 1), state


@pytest.mark.parametrize("cut", [2, 20])
def test_split_equals_whole(cut):
    inputs, options = fp32(37)
    whole, last = spans(inputs, options, [0, 37])
    both, state = spans(inputs, options, [0, cut, 37])
    assert_same([both, *flat(state)], [whole, *flat(last)], 2e-6)


@pytest.mark.parametrize(("t", "change"), [(7, 1.0), (32, 1e4)])
def test_the_future_cannot_change_the_past(t, change):
    inputs, options = fp32(37, H=1)
    before, _ = far("triton", *inputs, **options)
    for x in inputs[:6]:
        x[:, t:] += change
    inputs[2][:, t:] *= -1.0
    after, _ = far("triton", *inputs, **options)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


def test_packed_equals_separate():
    cu, (inputs, options) = [0, 0, 17, 21, 60], fp32(60, H=1)
    mask = torch.ones(4, 3, dtype=torch.bool, device=DEVICE)
    keys, values = (randn(4, 3, 1, n, seed=n).float().to(DEVICE) for n in (6, 5))
    given = {x: options[x] for x in ("window", "delay", "joint")} | {"backend": "triton"}

    def run(own, sinks, **more):
        return macchiato_attention(*own[:5], sinks=Sinks(own[5], *sinks), **given, **more)[0]

    bounds = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    packed = run(inputs, (keys, values, mask), cu_seqlens=bounds)
    for n, (a, b) in enumerate(zip(cu, cu[1:], strict=False)):
        part, sinks = [x[:, a:b] for x in inputs[:6]], (x[n : n + 1] for x in (keys, values, mask))
        assert torch.equal(packed[:, a:b], run(part, sinks))


def test_strided_inputs():
    inputs, options = fp32(18, B=2)
    want, _ = far("triton", *inputs, **options)
    strided = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for x in inputs]
    assert torch.equal(far("triton", *strided, **options)[0], want)


def test_rows_are_one_distribution():
    inputs, options = fp32(40, H=1, scale=3.0)
    inputs[4], inputs[7] = torch.ones_like(inputs[4]), torch.ones_like(inputs[7])
    out, _ = far("triton", *inputs, **options)
    assert_same([out], [torch.ones_like(out)], 2e-6)


def test_the_first_window_is_the_window_alone():
    """No source has left it yet: late latents and sinks add nothing."""
    inputs, options = fp32(30, W=20)
    latent_k = inputs[1].requires_grad_()
    out, _ = far("triton", *inputs, **options)
    near, _ = sliding_window_attention(*inputs[2:5], window=20, backend="triton")
    assert_same([out[:, :20]], [near[:, :20]], 1e-6)
    (dk,) = torch.autograd.grad(out[:, :20].sum(), latent_k)
    assert not dk.any()


def test_without_any_of_them_nothing_is_another():
    """No sinks, no delay and two softmaxes: the bits are those of the kernels without these."""
    inputs, options = fp32(30, n=0, delay=False, joint=False)
    none = Sinks(inputs[2], *(x[:, :0] for x in inputs[3:]), options["masks"][0])
    plain, given = macchiato("triton", *inputs, window=6)[0], {"window": 6, "backend": "triton"}
    again = macchiato_attention(*inputs, sinks=none, delay=False, joint=False, **given)[0]
    assert torch.equal(plain, again)


def test_memory_is_neither_read_nor_written_beyond(monkeypatch):
    fences = Fences()
    inputs, options = case(40, 6, masked=True, packed=True, carried=True, joint=False)
    leaves = [fences.of(x.float().to(DEVICE)).requires_grad_() for x in inputs]
    fences.guard(monkeypatch)
    out, _ = far("triton", *leaves, **options | {"output_final_state": False})
    grads = torch.autograd.grad(out.sum(), leaves)
    assert not any(torch.isnan(x).any() for x in (out, *grads))
    fences.check()


@pytest.mark.slow
def test_compiles_in_one_graph():
    inputs, options = fp32(8, W=3, masked=True, carried=True)
    same_when_compiled(lambda *x: far("triton", *x, **options), inputs)


@pytest.mark.slow
def test_custom_op_keeps_its_contract():
    late = [randn(1, 5, 2, 5), key_mask(1, 5), torch.arange(5)[None] > 1]
    sinks = [randn(1, 5, 2, 6), randn(1, 2, 2, 6), randn(1, 2, 2, 5)]
    own = macchiato_inputs(1, 5, 2, 2)
    inputs = [x.float().requires_grad_() for x in (*own, *sinks, late[0])]
    flags = (torch.ones(1, 2, dtype=torch.bool), torch.arange(5)[None] - 2)
    around = (*[None] * 8, *inputs[5:8], *flags, inputs[8], *late[1:])
    numbers = (3, 0.4, 0.0, True, True)
    found = (x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in (*inputs[:5], *around))
    checks = torch.library.opcheck(macchiato_op, (*found, *numbers))
    assert set(checks.values()) == {"SUCCESS"}


def test_a_negative_scale_turns_the_sinks_queries_too():
    inputs, options = case(20, 5, H=1)
    judged([x.float() for x in inputs], far, **options | {"scale": -0.3})


STEPS = pytest.mark.parametrize(
    ("kind", "prompt", "new"),
    [
        ("all", 6, 5),
        pytest.param("all", 0, 12, marks=pytest.mark.slow),
        pytest.param("sinks", 5, 4, marks=pytest.mark.slow),
        pytest.param("delay", 0, 8, marks=pytest.mark.slow),
        ("joint", 0, 3),
    ],
)


@STEPS
def test_decoding_is_prefilling(kind, prompt, new, monkeypatch):
    """Token by token from a prompt, or from nothing, until sinks and sources have left the window.

    The first row's prompt is padding but for its last token; a later token of the last is masked.
    """
    monkeypatch.setattr(launch, "STEP_ELEMENTS", 64)
    T, W, B = prompt + new, 4, 2
    inputs, options = case(T, W, B=B, H=4, G=2, **of_kind(kind))
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, : max(prompt - 1, 0)] = False
    mask[-1, prompt + 1] = False
    mask = mask.to(DEVICE)
    options |= {"key_mask": mask, "masks": (options["masks"][0], None, None, None)}
    inputs = [x.to(DEVICE) for x in inputs]
    want, last = far("reference", *inputs, **options)
    low = [x.float() for x in inputs]
    given = {"window": W, "delay": options["delay"], "joint": options["joint"]}

    def read(backend, a, b, state):
        sinks = None
        if options["n"]:
            q, keys, values = low[5:]
            seen = mask[:, :a].sum(1)
            sinks = Sinks(q[:, a:b], keys, values, options["masks"][0], seen)
        part = [x[:, a:b] for x in low[:5]]
        around = {"initial_state": state, "key_mask": mask[:, a:b], "sinks": sinks}
        return macchiato_attention(
            *part, backend=backend, output_final_state=True, **given, **around
        )

    outs, state = [], None
    with torch.no_grad():
        if prompt:
            out, state = read("torch", 0, prompt, None)
            outs.append(out)
        for t in range(prompt, T):
            out, state = read("triton", t, t + 1, state)
            outs.append(out)
    assert_same([torch.cat(outs, 1), *flat(state)], [want, *flat(last)], 3e-6)
    assert all(torch.equal(a.mask, b.mask) for a, b in zip(state[1:], last[1:], strict=True))
