"""What calls do on the host, up to their launches: which kernels, compiled how often, which tables.

Shapes: B batch, T tokens, H heads, L latents, D value width.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from latte.ops import latte_attention, macchiato_attention, sliding_window_attention  # noqa: E402
from latte.ops.triton_backend.segments import Parts  # noqa: E402
from tests.ops.triton_backend.launches import BF16, Case, launching, run  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter specialises nothing"
)
# Multiples of 4: beside them (B, T, 4, 33), the latents' logits with a window's, has a batch stride
# that is a multiple of 16, which loads must know of, as other strides are.
LENGTHS = (4, 64, 128, 200, 1000)


@pytest.mark.parametrize(
    "case",
    [
        Case("latte", BF16),
        Case("latte", BF16, "plain"),
        Case("latte", BF16, "state", causal=False),
        Case("macchiato", BF16),
        Case("macchiato", BF16, "plain", causal=False),
        Case("window", BF16, "plain"),
        Case("recurrent", BF16, "state", D=48),
        Case("recurrent", BF16, D=48, cut=True),
        Case("convolved", BF16, "plain", D=48),
        Case("convolved", BF16, D=48),
        Case("rowwise", BF16, D=48),
    ],
    ids=lambda case: f"{case.op}-{case.kind}",
)
def test_a_new_length_compiles_nothing_anew(case):
    """Neither 1 nor a multiple of 16, for the length or for a number of chunks, is a case apart."""
    keys = defaultdict(set)

    def key(name, kernel, args, options):
        binder = kernel.device_caches[90][-1]
        del options["grid"]
        _, specialization, fixed = binder(*args, debug=False, **options)
        # One kernel goes over the parts either way.
        keys[name, options.get("DOWN")].add(f"{specialization} {fixed}")

    for T in LENGTHS:
        run(case._replace(T=T), key)
    assert keys and {name: len(k) for name, k in keys.items()} == dict.fromkeys(keys, 1)


def test_no_rows_launch_nothing():
    """B = 0: empty outputs, states and gradients."""

    def never(name, *_):
        raise AssertionError(f"{name} was launched")

    B, T, H, L, D = 0, 5, 2, 3, 4
    q, k, v = (torch.randn(B, T, H, n, requires_grad=True) for n in (L, L, D))
    local = [torch.randn(B, T, H, D, requires_grad=True) for _ in "qk"]
    latent_q = torch.randn(B, T, H, L + 1, requires_grad=True)
    calls = [
        (lambda *x: latte_attention(*x, backend="triton"), (q, k, v)),
        (lambda *x: latte_attention(*x, causal=False, backend="triton"), (q, k, v)),
        (
            lambda *x: sliding_window_attention(*x, window=3, backend="triton"),
            (*local, v),
        ),
        (lambda *x: macchiato_attention(*x, backend="triton"), (latent_q, k, *local, v)),
    ]
    with launching(never):
        for call, inputs in calls:
            out, _ = call(*inputs)
            assert out.shape == (B, T, H, D)
            grads = torch.autograd.grad(out.sum(), inputs)
            assert [g.shape for g in grads] == [x.shape for x in inputs]


def test_tables_of_packed_calls_are_made_once():
    """For one tensor of bounds, until somebody writes to it."""
    cu = torch.tensor([0, 70, 130])
    first = Parts.of(1, 130, 64, cu)
    assert Parts.of(1, 130, 64, cu).table is first.table
    assert Parts.of(1, 130, 32, cu).table is not first.table
    assert Parts.of(1, 130, 64, cu.clone()).table is not first.table
    cu[1] = 64
    changed = Parts.of(1, 130, 64, cu)
    assert changed.bounds.tolist() == [0, 64, 130] and changed.first.tolist() == [0, 1, 3]
    with torch.inference_mode():
        cu = torch.tensor([0, 70, 130])
        Parts.of(1, 130, 64, cu)
        cu[1] = 64
        assert Parts.of(1, 130, 64, cu).bounds.tolist() == [0, 64, 130]


def test_both_passes_share_the_tables(monkeypatch):
    """Of each size of parts there is one table, whichever pass and kernel asks first."""
    made = []
    make = Parts._packed
    monkeypatch.setattr(Parts, "_packed", lambda T, C, *rest: made.append(C) or make(T, C, *rest))
    run(Case("macchiato", BF16), lambda *_: None)
    assert made and len(made) == len(set(made))


def test_strided_bounds_are_read_as_they_are():
    """Every second of the numbers in memory, in int64, which the kernels read."""
    cu = torch.tensor([0, 9, 70, 9, 130])[::2]
    parts = Parts.of(1, 130, 64, cu)
    assert parts.bounds.is_contiguous() and parts.bounds.tolist() == [0, 70, 130]


@pytest.mark.parametrize("bounds", [[0, 70, 129], [0, 70, 131], [1, 70, 130], [0, 90, 70, 130]])
def test_wrong_bounds_do_not_pass_in_silence(bounds):
    """Also where nothing may wait for a GPU to look at them."""
    with pytest.raises(RuntimeError, match="cu_seqlens must rise from 0 to T=130"):
        Parts.of(1, 130, 64, torch.tensor(bounds))
