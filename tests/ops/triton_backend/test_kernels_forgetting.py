"""Latents that forget, on kernels: against the reference in fp64, and against laws.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, N states, W window.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    assert_same,
    boundaries,
    key_mask,
    latte_inputs,
    latte_state,
    macchiato_inputs,
    randn,
    relative_error,
    values_and_gradients,
    window_state,
)

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_helpers import DEVICE, Fences, judged, same_when_compiled  # noqa: E402

from latte.ops import LatteState, WindowState, latte_attention, macchiato_attention  # noqa: E402
from latte.ops.triton_backend import launch, segments  # noqa: E402

W = 16


def decays(B, T, H, L, mean=0.2, seed=5):
    """Uniform between twice the mean and 0; latent 0 never forgets."""
    g = -2 * mean * torch.rand(B, T, H, L, generator=torch.Generator().manual_seed(seed)).double()
    g[..., 0] = 0.0
    return g


def latte(backend, q, k, v, g, *state, **options):
    earlier = LatteState(*state) if state else None
    options = {"initial_state": earlier, "output_final_state": True, **options}
    return latte_attention(q, k, v, log_decay=g, backend=backend, **options)


def macchiato(backend, latent_q, latent_k, q, k, v, g, *earlier, tail_mask=None, **options):
    state = None
    if earlier:
        state = (LatteState(*earlier[:3]), WindowState(*earlier[3:], tail_mask))
    options = {"initial_state": state, "output_final_state": True, "window": W, **options}
    return macchiato_attention(latent_q, latent_k, q, k, v, log_decay=g, backend=backend, **options)


def compare(
    T, *, mixed=False, masked=False, packed=False, carried=False, scale=1.0, mean=0.2, L=3, D=5
):
    """Values and all gradients of random inputs in fp32."""
    B, H, G = 1, 1, 1
    cu = boundaries(T) if packed else None
    options = {"key_mask": key_mask(B, T).to(DEVICE) if masked else None}
    options["cu_seqlens"] = None if cu is None else cu.to(DEVICE)
    inputs = [*(macchiato_inputs(B, T, H, G, L, 6, D, scale) if mixed else ())]
    inputs = [*(inputs or latte_inputs(B, T, H, L, D, scale)), decays(B, T, H, L, mean)]
    if carried:
        N = B if cu is None else len(cu) - 1
        inputs += [*latte_state(N, H, L, D, scale=scale), -randn(N, H, L).abs()]
        if mixed:
            keys, values, flags = window_state(N, W - 1, G, 6, D)
            inputs += [keys, values]
            options["tail_mask"] = flags.to(DEVICE)
    return judged([x.float() for x in inputs], macchiato if mixed else latte, **options)


@pytest.fixture(params=[None, 1, 2], ids=["whole", "a chunk each", "two chunks each"])
def cut(request, monkeypatch):
    """One segment, or segments of so many chunks; the scans over them take two at a time."""
    if request.param is not None:
        monkeypatch.setitem(launch.SCAN, "U", 2)
        monkeypatch.setattr(segments, "SHORTEST", request.param)
    return request.param


@pytest.mark.parametrize("mean", [1e-8, 0.2, 2.0, 50.0])
@pytest.mark.parametrize(
    ("masked", "packed", "carried"),
    [(False, False, False), (False, False, True), (True, True, True)],
)
def test_agrees_with_the_reference(cut, masked, packed, carried, mean):
    compare(40, masked=masked, packed=packed, carried=carried, mean=mean)


@pytest.mark.parametrize("mean", [0.2, 6.0])
@pytest.mark.parametrize(
    ("masked", "packed", "carried"), [(False, False, True), (True, True, True)]
)
def test_macchiato_agrees_with_the_reference(cut, masked, packed, carried, mean):
    compare(40, mixed=True, masked=masked, packed=packed, carried=carried, mean=mean)


@pytest.mark.parametrize("mixed", [False, True])
def test_wide_values(mixed):
    """Several tiles of D, each of which gives a part of the gradient."""
    compare(20, mixed=mixed, carried=True, D=40, mean=0.3)


@pytest.mark.parametrize("kind", ["jump", "dominant", "at once", "large"])
def test_extreme_logits_and_decays(kind, monkeypatch):
    """What is far above or below its past, and what forgets all of it at one token."""
    monkeypatch.setattr(segments, "SHORTEST", 1)
    q, k, v, g = [*latte_inputs(1, 37, 1, 3, 4), decays(1, 37, 1, 3)]
    if kind == "jump":
        k[:, 12:15] += 120.0
    elif kind == "dominant":
        k[:, 12] += 1e3
        g -= 30.0
    elif kind == "at once":
        g[:, 20] = -300.0
    else:
        k += 1e4
    got = judged([x.float() for x in (q, k, v, g)], latte)
    assert all(torch.isfinite(x).all() for x in got)


@pytest.mark.parametrize("mean", [0.1, 20.0])
def test_causal_to_the_last_bit(mean):
    q, k, v = (x.float().to(DEVICE) for x in latte_inputs(1, 37, 1, 3, 5))
    g = decays(1, 37, 1, 3, mean).float().to(DEVICE)
    out, _ = latte("triton", q, k, v, g)
    for x, later in ((k, 500.0), (g, -30.0)):
        x[:, 20:] += later
        again, _ = latte("triton", q, k, v, g)
        assert torch.equal(out[:, :20], again[:, :20])
        assert not torch.equal(out[:, 20:], again[:, 20:])
        x[:, 20:] -= later


@pytest.mark.parametrize("mixed", [False, True])
def test_split_equals_whole_and_decoding(mixed):
    """The last two tokens come alone, with padding: they go to decoding's kernel."""
    op = macchiato if mixed else latte
    inputs = macchiato_inputs(1, 20, 2, 1) if mixed else latte_inputs(1, 20)
    inputs = [x.float().to(DEVICE) for x in (*inputs[:-1], inputs[-1])]
    g = decays(1, 20, 2, 3).float().to(DEVICE)
    g = g[:, 0, :, :].expand(1, 20, 2, 3) if mixed else g
    mask = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)
    mask[:, 18] = False
    inputs = [x[:1] for x in inputs]
    whole, last = op("triton", *inputs, g, key_mask=mask)
    state, outs = None, []
    for a, b in ((0, 9), (9, 18), (18, 19), (19, 20)):
        now = [x[:, a:b] for x in inputs]
        out, state = op("triton", *now, g[:, a:b], key_mask=mask[:, a:b], initial_state=state)
        outs.append(out)
    state, last = (x[0] if mixed else x for x in (state, last))
    assert_same([torch.cat(outs, 1), *state], [whole, *last], 3e-6)


def test_products_in_bf16_keep_the_decays_digits():
    """What is forgotten is summed to 16 bits and more, whatever the inputs' precision."""
    low = [x.bfloat16().to(DEVICE) for x in latte_inputs(1, 70, 1, 16, 16)]
    g = decays(1, 70, 1, 16, 0.05).float().to(DEVICE)

    def run(backend, *inputs):
        out, state = latte(backend, *inputs)
        return values_and_gradients(lambda *x: latte(backend, *x), inputs), state

    got, state = run("triton", *low, g)
    want, exact = run("reference", *(x.double() for x in (*low, g)))
    judge, _ = run("reference", *low, g)
    for a, b, e in zip(
        got[:1] + got[4:7], judge[:1] + judge[4:7], want[:1] + want[4:7], strict=True
    ):
        assert relative_error(a, e) <= 2 * relative_error(b, e)
    assert relative_error(got[7], want[7]) < 5e-3  # of dk in bf16, each of which it sums
    assert (state.log_mass - exact.log_mass).abs().max() < 2e-3


def test_memory_is_neither_read_nor_written_beyond(monkeypatch):
    fences = Fences()
    fences.guard(monkeypatch)
    monkeypatch.setattr(segments, "SHORTEST", 1)
    cu = boundaries(37).to(DEVICE)
    inputs = [*latte_inputs(1, 37, 1, 3, 5), decays(1, 37, 1, 3)]
    leaves = [fences.of(x.float().to(DEVICE)).requires_grad_() for x in inputs]
    out, state = latte("triton", *leaves, cu_seqlens=cu)
    total = out.sum() + state.mean.sum() + state.log_mass.nan_to_num(neginf=0.0).sum()
    grads = torch.autograd.grad(total, leaves)
    assert not any(torch.isnan(x).any() for x in (out, *state, *grads))
    fences.check()


def test_compiles_in_one_graph():
    inputs = [*latte_inputs(1, 8, 1, 3, 5), decays(1, 8, 1, 3)]
    same_when_compiled(lambda *x: latte("triton", *x), [x.float().to(DEVICE) for x in inputs])
