"""Sinks, and latents that see a source when it leaves the window: the equation by loops."""

from __future__ import annotations

import pytest
import torch

from latte.ops import Partition, Sinks, macchiato_attention, sliding_window_attention
from tests.ops.helpers import assert_same, macchiato_inputs, randn

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
