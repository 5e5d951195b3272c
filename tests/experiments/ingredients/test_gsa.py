"""Gated slot attention: its op beside the recurrence, and its mixer."""

import pytest
import torch
from torch.nn import functional as F

from experiments.ingredients.gsa import (
    CHUNK,
    GatedSlotAttention,
    gated_slots,
    gated_slots_reference,
    slot_states,
)
from tests.experiments.ingredients.mixers import NARROW, TOLERANCE, gsa, inputs

LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 15, 16, 17, 100)

# The output for the inputs of `waves`, by the plain recurrence of flash-linear-attention 0.6.0 in
# fp32: a row for each token, with the two values of each of two heads.
PUBLISHED = [
    [-0.482059, -0.034163, 0.486538, 0.563095],
    [-0.207121, -0.299854, -0.338773, 0.056641],
    [0.201884, 0.366652, -0.001211, -0.151900],
    [-0.508153, -0.195478, 0.150154, 0.338529],
    [0.048364, -0.185941, -0.510157, -0.356033],
    [0.067043, 0.233865, 0.183986, -0.134765],
]


def given(length, strength=4.0):
    """q, k (2, T, 3, 4), v (2, T, 3, 6) and the log-decay (2, T, 3, 5), with gradients."""
    generator = torch.Generator().manual_seed(length)
    parts = [
        torch.randn(2, length, 3, width, dtype=torch.float64, generator=generator)
        for width in (4, 4, 6, 5)
    ]
    parts[3] = F.logsigmoid(strength * parts[3])
    return [x.requires_grad_() for x in parts]


def waves(width, start):
    """Sines of whole numbers, (1, 6, 2, width)."""
    return torch.arange(start, start + 12 * width, dtype=torch.float64).sin().view(1, 6, 2, width)


def recurrence_and_chunks(parts):
    return gated_slots_reference(*parts), gated_slots(*parts)[0]


def gradients(out, parts):
    generator = torch.Generator().manual_seed(0)
    return torch.autograd.grad(out, parts, torch.randn(out.shape, generator=generator).to(out))


# ---- the op


def test_it_is_the_published_recurrence():
    parts = [waves(3, 0), waves(3, 100), waves(2, 200), F.logsigmoid(waves(4, 300))]
    for out in recurrence_and_chunks(parts):
        expected = torch.tensor(PUBLISHED, dtype=torch.float64).view(1, 6, 2, 2)
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_the_recurrence_and_so_are_their_gradients(length):
    parts = given(length)
    expected, out = recurrence_and_chunks(parts)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    torch.testing.assert_close(gradients(out, parts), gradients(expected, parts), **TOLERANCE)
    states = slot_states(*parts[1:])
    torch.testing.assert_close(gated_slots(*parts)[1], states[:, -1], **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", ["none", "all", "alternate", "some"])
def test_any_decay_is_finite_and_right(pattern, dtype):
    parts = [x.detach().to(dtype) for x in given(40)]
    decay = parts[3]
    decay[:] = {"none": 0.0, "all": -100.0}.get(pattern, -0.1)
    if pattern == "alternate":
        decay[:, ::2] = -100.0
    if pattern == "some":
        decay[:, 5, :, 1], decay[:, 6], decay[:, 20:30] = -100.0, 0.0, -100.0
    parts = [x.requires_grad_() for x in parts]
    expected, out = recurrence_and_chunks(parts)
    tolerance = TOLERANCE if dtype == torch.float64 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(out, expected, **tolerance)
    found = gradients(out, parts)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found, gradients(expected, parts), **tolerance)


# ---- the mixer


@pytest.mark.parametrize("options", [{}, NARROW], ids=str)
def test_the_mixer_is_what_it_says(options):
    layer, x = gsa(**options), inputs()
    groups = layer.num_key_value_heads

    def per_head(flat, heads=groups):
        return flat.unflatten(-1, (heads, -1)).repeat_interleave(4 // heads, 2)

    q = per_head(F.silu(layer.q_proj(x)), 4)
    k, v = per_head(F.silu(layer.k_proj(x))), per_head(F.silu(layer.v_proj(x)))
    kept = torch.sigmoid(per_head(layer.decay_proj(x))) ** (1 / 8)
    y = F.silu(gated_slots_reference(q, k, v, kept.log())).flatten(-2)
    y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.output_norm.weight
    torch.testing.assert_close(layer(x)[0], layer.o_proj(y), **TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": False}, "expected causal=True"),
        ({"value_dim": 0}, "value_dim must be a positive integer, got 0"),
        ({"num_slots": 6}, "num_slots must be a multiple of num_heads"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=f"GatedSlotAttention: {message}"):
        GatedSlotAttention(16, 4, **{"num_slots": 12, **options})


def test_weights_cannot_be_shown():
    with pytest.raises(ValueError, match="GatedSlotAttention has no attention weights to show"):
        gsa().with_weights(inputs())
