"""Sinks beside the window, and latents that see a source when it leaves the window.

The equation by loops, the custom ops' contracts, and what is refused.
"""

from __future__ import annotations

import pytest
import torch

from latte.ops import (
    Partition,
    Sinks,
    cpp_backend,
    macchiato_attention,
    sliding_window_attention,
)
from latte.ops.torch_backend import macchiato as torch_macchiato
from latte.ops.torch_backend.window import window_op as torch_window_op
from tests.ops.helpers import (
    assert_same,
    boundaries,
    key_mask,
    latte_state,
    macchiato_inputs,
    randn,
    window_state,
)

NATIVE = pytest.mark.skipif(cpp_backend.ABSENT is not None, reason="no native kernels")


def sink_inputs(B, T, N, n, H, G, K, D):
    """Queries (B, T, H, K), keys (N, n, G, K) and values (N, n, G, D) of sinks."""
    shapes = ((B, T, H, K), (N, n, G, K), (N, n, G, D))
    return [randn(*shape, seed=40 + i) for i, shape in enumerate(shapes)]


W = 6


def sequence(T, n=2, B=2, seed=0):
    """Macchiato's inputs, the sinks' queries, and their keys and values: the first n tokens'."""
    inputs = list(macchiato_inputs(B, T, seed=seed))
    return inputs, randn(B, T, 4, 6, seed=seed + 20), [x[:, :n] for x in inputs[3:]]


def mix(inputs, sink_q, kept, position=None, **options):
    """Both branches, delayed, with sinks that are all there."""
    mask = torch.ones(kept[0].shape[:2], dtype=torch.bool)
    sinks = Sinks(sink_q, *kept, mask, position)
    partition = Partition(sinks, delay=True)
    return macchiato_attention(*inputs, window=W, partition=partition, **options)


@pytest.mark.parametrize("decay", [None, "static"])
def test_it_is_the_equation(decay):
    """Spelled out with loops; a decay that stands still counts the tokens since the source."""
    T, n = 17, 2
    inputs, sink_q, kept = sequence(T, n, 1)
    latent_q, latent_k, q, k, v = inputs
    g = None if decay is None else -randn(4, 3, seed=60).abs()
    out, _ = mix(inputs, sink_q, kept, log_decay=g, backend="reference")
    for t in range(T):
        for h in range(4):
            near = range(max(0, t - W + 1), t + 1)
            far = [j for j in range(n) if t - j >= W]
            logits = [sink_q[0, t, h] @ kept[0][0, j, h // 2] for j in far]
            logits = torch.stack(logits + [q[0, t, h] @ k[0, s, h // 2] for s in near]) / 6**0.5
            values = torch.stack(
                [kept[1][0, j, h // 2] for j in far] + [v[0, s, h // 2] for s in near]
            )
            y = logits.softmax(-1) @ values
            if t >= W:
                p = latent_q[0, t, h].softmax(-1)
                past = torch.arange(t - W + 1)
                y = p[0] * y
                for latent in range(3):
                    weights = latent_k[0, past, h, latent]
                    weights = weights if g is None else weights + g[h, latent] * (t - past)
                    y = y + p[latent + 1] * (weights.softmax(-1) @ v[0, past, h // 2])
            assert_same([out[0, t, h]], [y], 1e-12)


@NATIVE
def test_native_ops_keep_the_contract_of_a_custom_op():
    kinds, bounds = ["test_schema", "test_faketensor"], boundaries(20).long()
    inputs = [x.requires_grad_() for x in macchiato_inputs(1, 20)]
    sinks = sink_inputs(1, 20, 6, 2, 4, 2, 6, 5)
    sinks += [torch.ones(6, 2, dtype=torch.bool), torch.full((1, 20), 2)]
    pending = [randn(6, 8, 4, 3), randn(6, 8, 2, 5), torch.ones(6, 8, dtype=torch.bool)]
    around = [key_mask(1, 20), bounds, *latte_state(6, 4, 3, 5), None]
    tail = window_state(6, 7, 2, 6, 5)
    args = (*inputs, *around, *tail, *sinks, *pending, 8, 0.4, 0.0, True, True)
    checks = torch.library.opcheck(cpp_backend.macchiato_op, args, test_utils=kinds)
    args = (*inputs[2:], *around[:2], *tail, *sinks, 8, 0.4, 0.0, True)
    checks |= torch.library.opcheck(cpp_backend.window_op, args, test_utils=kinds)
    assert set(checks.values()) == {"SUCCESS"}


def test_ops_of_pytorch_keep_their_contracts():
    inputs = [x.requires_grad_() for x in macchiato_inputs(2, 20)]
    sinks = sink_inputs(2, 20, 2, 2, 4, 2, 6, 5)
    sinks = [x.requires_grad_() for x in sinks]
    sinks += [torch.ones(2, 2, dtype=torch.bool), torch.full((2, 20), 2)]
    none, local = [None] * 5, (8, 0.4, 0.0)
    checks = torch.library.opcheck(torch_window_op, (*inputs[2:], *none, *sinks, *local, True))
    late = [randn(2, 20, 2, 5).requires_grad_(), key_mask(2, 20), key_mask(2, 20)]
    args = (*inputs, *none, *[None] * 3, *sinks, *late, *local)
    checks |= torch.library.opcheck(torch_macchiato.causal_op, args)
    assert set(checks.values()) == {"SUCCESS"}


def test_no_sinks_are_none():
    inputs, sink_q, kept = sequence(9)
    none = Sinks(sink_q, *(x[:, :0] for x in kept), torch.ones(2, 0, dtype=torch.bool))
    plain, _ = sliding_window_attention(*inputs[2:], window=W)
    again, _ = sliding_window_attention(*inputs[2:], window=W, partition=Partition(none))
    assert torch.equal(again, plain)
    empty = [x[:, :0] for x in inputs]
    sinks = Sinks(sink_q[:, :0], *kept, torch.ones(2, 2, dtype=torch.bool))
    out, state = macchiato_attention(
        *empty, window=W, partition=Partition(sinks, delay=True), output_final_state=True
    )
    assert out.shape == (2, 0, 4, 5) and not state.pending.mask.any()
    again, _ = mix(inputs, sink_q, kept, initial_state=state)
    assert_same([again], [mix(inputs, sink_q, kept)[0]], 1e-12)
