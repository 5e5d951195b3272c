"""RG-LRU, convolution, positions, feed-forward: against their formulas spelt out."""

import pytest
import torch
from torch.nn import functional as F

from latte.layers import (
    GELUMLP,
    RGLRU,
    BlockDiagonalLinear,
    CausalConv1d,
    LatentInput,
    LatentLogits,
    LatteAttention,
    LatteMacchiato,
    RMSNorm,
    RotaryEmbedding,
    SinusoidalPositions,
    SlidingWindowAttention,
    SwiGLU,
)
from latte.layers.mixer import EMPTY, Context
from latte.layers.parts import apply_rotary
from latte.layers.rollback import advance_position
from latte.ops.tensors import token_positions

TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}


def inputs(batch, length, width=8):
    return torch.randn(
        batch, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def rglru_by_hand(layer, x):
    r, i = torch.sigmoid(layer.recurrence_gate(x)), torch.sigmoid(layer.input_gate(x))
    a = torch.exp(-8 * r * F.softplus(layer.theta))
    h, out = i[:, 0] * x[:, 0], []  # a = 0 and factor 1 at the start
    for t in range(x.shape[1]):
        if t:
            h = a[:, t] * h + torch.sqrt(1 - a[:, t] ** 2) * (i[:, t] * x[:, t])
        out.append(h)
    return torch.stack(out, 1)


@pytest.mark.parametrize("reverse", [False, True])
def test_rglru_is_its_formula(reverse):
    torch.manual_seed(0)
    layer, x = RGLRU(8, num_blocks=2, reverse=reverse).double(), inputs(2, 13)
    out, _ = layer(x)
    expected = rglru_by_hand(layer, x.flip(1)).flip(1) if reverse else rglru_by_hand(layer, x)
    torch.testing.assert_close(out, expected, **TOLERANCE)


def test_rglru_carries_its_state_in_fp32():
    layer, x = RGLRU(8, num_blocks=2), inputs(2, 13).float()
    whole, end = layer(x, output_final_state=True)
    first, state = layer(x[:, :5], output_final_state=True)
    second, last = layer(x[:, 5:], state=state, output_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(last, end, atol=1e-6, rtol=1e-5)
    half = layer.to(torch.bfloat16)
    out, state = half(x.bfloat16(), output_final_state=True)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32


def test_rglru_decay_starts_in_its_ring():
    torch.manual_seed(0)
    decay = torch.exp(-8 * F.softplus(RGLRU(4096, num_blocks=8).theta.detach().double()))
    assert decay.min() >= 0.9 - 1e-4 and decay.max() <= 0.999 + 1e-4
    position = (decay**2 - 0.9**2) / (0.999**2 - 0.9**2)  # uniform in [0, 1]
    counts = torch.histc(position, bins=8, min=0, max=1)
    assert counts.min() > 400 and counts.max() < 630


def initial_decays(layer: RGLRU) -> torch.Tensor:
    return torch.exp(-8 * F.softplus(layer.theta.detach().double()))


@pytest.mark.parametrize("low_high", [(0.01, 0.3), (0.5, 0.5), (0.9, 0.9999999)])
def test_rglru_decay_starts_in_a_range_of_choice(low_high):
    torch.manual_seed(0)
    low, high = low_high
    decay = initial_decays(RGLRU(512, num_blocks=8, decay_range=low_high))
    assert decay.min() >= low - 1e-5 and decay.max() <= high + 1e-6 and decay.max() < 1
    assert decay.max() - decay.min() >= 0.9 * (high - low)


@pytest.mark.parametrize("bad", [(0.9,), (0.0, 0.9), (0.9, 1.0), (0.9, 0.5), 0.5, "ab"])
def test_rglru_decay_range_is_checked(bad):
    with pytest.raises(ValueError, match="RGLRU: decay_range must be two numbers with 0 < low"):
        RGLRU(8, decay_range=bad)


def test_every_layer_passes_the_decay_range_on():
    layers = [
        LatteAttention(16, 2, 4, latent_input="rglru", rglru_decay_range=(0.2, 0.3), causal=False),
        LatteMacchiato(16, 2, 4, latent_input="rglru", rglru_decay_range=(0.2, 0.3)),
        SlidingWindowAttention(16, 2, input_mixing="rglru", rglru_decay_range=(0.2, 0.3)),
    ]
    found = [m for layer in layers for m in layer.modules() if isinstance(m, RGLRU)]
    assert len(found) == 4  # one per direction in the bidirectional layer
    for rglru in found:
        decay = initial_decays(rglru)
        assert decay.min() >= 0.2 - 1e-5 and decay.max() <= 0.3 + 1e-5


def test_the_windows_probability_is_checked():
    with pytest.raises(ValueError, match="window_probability must be between 0 and 1, got 1.5"):
        LatteMacchiato(16, 2, 4, window_probability=1.5)
    with pytest.raises(ValueError, match="needs window_logit=True"):
        LatentLogits(16, 2, 4, window_probability=0.5)


def test_block_diagonal_map_keeps_blocks_apart():
    layer, x = BlockDiagonalLinear(8, 2).double(), inputs(1, 1)
    blocks = [x[..., 4 * n : 4 * n + 4] @ layer.weight[n] for n in range(2)]
    torch.testing.assert_close(layer(x), torch.cat(blocks, -1) + layer.bias, **TOLERANCE)
    with pytest.raises(ValueError, match="hidden_size must be a multiple of num_blocks"):
        BlockDiagonalLinear(8, 3)


@pytest.mark.parametrize("taps", [1, 3, 4])
def test_convolution_is_its_formula(taps):
    layer, x = CausalConv1d(8, taps).double(), inputs(2, 9)
    with torch.no_grad():
        layer.bias.normal_()
    expected = layer.bias + sum(
        layer.weight[:, taps - 1 - i] * F.pad(x, (0, 0, i, 0))[:, :9] for i in range(taps)
    )
    out, tail = layer(x, output_final_state=True)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert tail.shape == (2, taps - 1, 8)
    again, _ = layer(x, state=tail)
    torch.testing.assert_close(again, layer(torch.cat([x, x], 1))[0][:, 9:], **TOLERANCE)


def test_bidirectional_latent_input_sums_both_directions_then_norms():
    torch.manual_seed(0)
    layer, x = LatentInput(8, "rglru", num_blocks=2, causal=False).double(), inputs(2, 7)
    both = layer.rglru(x)[0] + layer.backward_rglru(x)[0]
    expected = both / both.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(layer(x, EMPTY, Context())[0], expected, **TOLERANCE)


def test_positions_count_real_tokens_in_their_own_sequence():
    x = torch.zeros(2, 6, 4)
    assert token_positions(x).tolist() == [[0, 1, 2, 3, 4, 5]]
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 0]]).bool()
    assert token_positions(x, mask).tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 4]]
    start = torch.tensor([0, 7])
    assert token_positions(x, mask, start=start)[1].tolist() == [7, 8, 9, 10, 11, 11]
    bounds = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    assert token_positions(x[:1], None, bounds).tolist() == [[0, 1, 0, 1, 2, 3]]
    packed_mask = torch.tensor([[1, 0, 0, 1, 1, 1]]).bool()
    assert token_positions(x[:1], packed_mask, bounds)[0, 3:].tolist() == [0, 1, 2]
    assert advance_position(None, packed_mask, bounds, x[:1]).tolist() == [1, 0, 3]
    assert advance_position(start, mask, None, x).tolist() == [3, 12]
    assert advance_position(None, None, None, x).tolist() == [6, 6]


def test_rotary_is_a_rotation_by_position():
    rotary = RotaryEmbedding(6, theta=100.0)
    q = inputs(1, 5, 6).unsqueeze(2)
    table = rotary(torch.arange(5)[None], q.dtype)
    rotated = apply_rotary(q, table)
    pairs = torch.complex(q[..., :3], q[..., 3:])
    angles = torch.arange(5).double()[:, None] * 100.0 ** (-torch.arange(3).double() / 3)
    expected = pairs * torch.exp(1j * angles)[None, :, None]
    torch.testing.assert_close(rotated[..., :3], expected.real, **TOLERANCE)
    torch.testing.assert_close(rotated[..., 3:], expected.imag, **TOLERANCE)
    assert apply_rotary(q.bfloat16(), rotary(torch.arange(5)[None], torch.bfloat16)).dtype == (
        torch.bfloat16
    )


def test_positions_far_out_are_exact_in_fp32():
    far = torch.tensor([[1_000_003]])
    exact = RotaryEmbedding(8)(far, torch.float64)
    single = RotaryEmbedding(8)(far, torch.float32)
    torch.testing.assert_close(single.cos.double(), exact.cos, atol=1e-7, rtol=0)


@pytest.mark.parametrize("width", [8, 7])
def test_sinusoidal_positions(width):
    table = SinusoidalPositions(width)(torch.tensor([[0, 3]]), torch.float64)
    assert table.shape == (1, 2, width)
    angles = 3 * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8) if width == 8 else None
    if angles is not None:
        torch.testing.assert_close(table[0, 1], torch.cat([angles.sin(), angles.cos()]))
    assert table[0, 0].tolist() == [0.0] * 4 + [1.0] * (width - 4)


def test_feed_forward_networks_are_their_formulas():
    x = inputs(1, 3)
    gelu, swiglu = GELUMLP(8, 12).double(), SwiGLU(8, 12).double()
    torch.testing.assert_close(gelu(x), gelu.down_proj(F.gelu(gelu.up_proj(x))))
    expected = (F.silu(x @ swiglu.gate_proj.weight.T) * (x @ swiglu.up_proj.weight.T)) @ (
        swiglu.down_proj.weight.T
    )
    torch.testing.assert_close(swiglu(x), expected)
    assert sum(p.numel() for p in swiglu.parameters()) == 3 * 8 * 12
    assert sum(p.numel() for p in gelu.parameters()) == 2 * 8 * 12 + 8 + 12
    with pytest.raises(ValueError, match="intermediate_size must be a positive integer"):
        SwiGLU(8, 0)


def test_rms_norm_is_pytorchs_with_its_derivatives():
    norm = RMSNorm(8, eps=1e-3).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)

    def call(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, x)

    theirs = F.rms_norm(x, (8,), norm.weight, 1e-3)
    torch.testing.assert_close(call(x, norm.weight), theirs, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(call, (x, norm.weight))
    point, weight = x.detach(), norm.weight.detach()
    _, tangent = torch.func.jvp(call, (point, weight), (point, weight))
    expected = torch.func.jvp(
        lambda x, w: F.rms_norm(x, (8,), w, 1e-3), (point, weight), (point, weight)
    )[1]
    torch.testing.assert_close(tangent, expected)


def test_rotation_has_every_kind_of_derivative():
    rotary = RotaryEmbedding(8)(torch.arange(5)[None], torch.float64)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, rotary), x)
    assert torch.autograd.gradgradcheck(lambda x: apply_rotary(x, rotary), x)
    _, tangent = torch.func.jvp(lambda x: apply_rotary(x, rotary), (x.detach(),), (x.detach(),))
    torch.testing.assert_close(tangent, apply_rotary(x, rotary).detach())
