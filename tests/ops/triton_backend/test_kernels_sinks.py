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
from kernel_helpers import DEVICE, Fences, judged, macchiato, same_when_compiled, window

from latte.ops import LatteState, Sinks, WindowState, macchiato_attention, sliding_window_attention
from latte.ops.triton_backend import launch, segments

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
    compare(50, **of_kind(kind))


@pytest.mark.parametrize(("packed", "carried"), [(False, True), (True, False)])
def test_masks_packing_and_states(packed, carried):
    # The log-mass of packed sequences that go on is not there to be judged by.
    compare(50, masked=True, packed=packed, carried=carried, H=1)


def test_packed_sequences_go_on():
    compare(50, masked=True, packed=True, carried=True, joint=False)


STEPS = pytest.mark.parametrize(
    ("kind", "prompt", "new"), [("all", 6, 9), ("sinks", 5, 4), ("delay", 0, 8), ("joint", 0, 4)]
)


@STEPS
def test_decoding_is_prefilling(kind, prompt, new, monkeypatch):
    """Token by token from a prompt, or from nothing, until sinks and sources have left the window.

    The first row's prompt is padding but for its last token; a later token of the last is masked.
    """
    monkeypatch.setattr(launch, "STEP_ELEMENTS", 64)
    T, W, B, n = prompt + new, 4, 2, 3
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
