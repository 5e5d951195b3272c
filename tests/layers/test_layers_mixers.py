"""Every mixer on its own: weights give outputs, pieces make the whole, bad input is refused."""

import pytest
import torch

from latte.layers import (
    LatteAttention,
    LatteMacchiato,
    LinearAttention,
    MixerState,
    SlidingWindowAttention,
    SoftmaxAttention,
)
from latte.layers.mixer import EMPTY, Context
from latte.layers.rollback import map_tensors

TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}
SIZE = {"hidden_size": 16, "num_heads": 4}
GROUPED = {"num_key_value_heads": 2}

MIXERS = {
    "latte": lambda **o: LatteAttention(**SIZE, num_latents=12, **GROUPED, **o),
    "latte-conv": lambda **o: LatteAttention(**SIZE, num_latents=12, latent_input="conv", **o),
    "latte-rglru": lambda **o: LatteAttention(**SIZE, num_latents=12, latent_input="rglru", **o),
    "macchiato": lambda **o: LatteMacchiato(**SIZE, num_latents=12, window=4, **GROUPED, **o),
    "macchiato-conv": lambda **o: LatteMacchiato(
        **SIZE, num_latents=12, window=5, latent_input="conv", softcap=2.0, **o
    ),
    "macchiato-rglru": lambda **o: LatteMacchiato(
        **SIZE, num_latents=4, window=1, latent_input="rglru", rope_theta=None, head_dim=6, **o
    ),
    "macchiato-sinks": lambda **o: LatteMacchiato(
        **SIZE, num_latents=8, window=4, num_sinks=2, **GROUPED, **o
    ),
    "macchiato-divided": lambda **o: LatteMacchiato(
        **SIZE,
        num_latents=8,
        window=3,
        num_sinks=2,
        delay_latents=True,
        joint_softmax=True,
        forgetting="gated",
        latent_input="conv",
        **o,
    ),
    "window": lambda **o: SlidingWindowAttention(**SIZE, window=4, **GROUPED, **o),
    "window-rglru": lambda **o: SlidingWindowAttention(
        **SIZE, window=3, input_mixing="rglru", softcap=3.0, **o
    ),
    "softmax": lambda **o: SoftmaxAttention(**SIZE, **GROUPED, **o),
    "linear": lambda **o: LinearAttention(**SIZE, num_features=12, **GROUPED, **o),
    "linear-exp": lambda **o: LinearAttention(**SIZE, num_features=8, feature_map="exp", **o),
}


@pytest.fixture
def mixer():
    def make(name, **options):
        torch.manual_seed(0)
        layer = MIXERS[name](**options).double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1.5)  # logits large enough to matter
        return layer

    return make


def inputs(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 16, dtype=torch.float64, generator=generator)


def half_masked():
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, :4] = False
    return mask


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MIXERS)
def test_attention_weights_reproduce_the_output(mixer, name, causal):
    if name in ("macchiato-sinks", "macchiato-divided") and not causal:
        with pytest.raises(ValueError, match="need causal=True|needs causal=True"):
            mixer(name, causal=causal)
        return
    layer, x, mask = mixer(name, causal=causal), inputs(2, 11), half_masked()
    with torch.no_grad():
        out, state = layer(x, key_mask=mask)
        weights = layer.attention_weights(x, key_mask=mask)
        source = layer.input(x, EMPTY, Context(mask))[0] if name == "window-rglru" else x
        v = layer.v_proj(source).unflatten(-1, (layer.num_key_value_heads, -1))
        v = v.repeat_interleave(4 // layer.num_key_value_heads, 2)
        rebuilt = layer.o_proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(-2))
    assert state is None
    real = mask[..., None]
    torch.testing.assert_close(out * real, rebuilt * real, **TOLERANCE)
    rows = weights.sum(-1).transpose(1, 2)[mask]
    torch.testing.assert_close(rows, torch.ones_like(rows), **TOLERANCE)
    assert weights[1, :, :, :4].abs().max() == 0
    if causal:
        assert weights.triu(1).abs().max() == 0


@pytest.mark.parametrize("name", sorted(MIXERS.keys() - {"macchiato-sinks", "macchiato-divided"}))
def test_mixing_logits_are_what_the_weights_are_made_of(mixer, name):
    layer, x = mixer(name), inputs(2, 11)
    with torch.no_grad():
        latent_q, latent_k, q, k = layer.mixing_logits(x)
        weights = layer.attention_weights(x)
    seen = torch.ones(11, 11, dtype=torch.bool).tril()
    if name.startswith("linear"):
        assert latent_q is latent_k is q is k is None
        return
    window = getattr(layer, "window", None)
    states = [] if q is None else [local_weights(layer, q, k, seen, window)]
    if latent_k is not None:
        assert latent_q.shape[-1] == latent_k.shape[-1] + len(states)
        keys = latent_k.permute(3, 0, 2, 1)[..., None, :]  # (L, B, H, 1, T)
        states += list(keys.masked_fill(~seen, -torch.inf).softmax(-1))
        p = latent_q.softmax(-1).permute(3, 0, 2, 1)[..., None]
        total = sum(share * state for share, state in zip(p, states, strict=True))
    else:
        (total,) = states
    torch.testing.assert_close(total, weights, **TOLERANCE)


def local_weights(layer, q, k, seen, window):
    logits = torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(4 // k.shape[2], 2))
    logits = logits / q.shape[-1] ** 0.5
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    near = seen if window is None else seen & ~seen.tril(-window)
    return logits.masked_fill(~near, -torch.inf).softmax(-1)


@pytest.mark.parametrize("cut", [1, 6, 10])
@pytest.mark.parametrize("name", MIXERS)
def test_pieces_make_the_whole(mixer, name, cut):
    layer, x, mask = mixer(name), inputs(2, 11), half_masked()
    whole, end = layer(x, mask, output_final_state=True)
    first, state = layer(x[:, :cut], mask[:, :cut], output_final_state=True)
    second, last = layer(x[:, cut:], mask[:, cut:], state=state, output_final_state=True)
    joined = torch.cat([first, second], 1)
    torch.testing.assert_close(joined[mask], whole[mask], **TOLERANCE)
    assert last.position.tolist() == end.position.tolist() == [11, 7]
    torch.testing.assert_close(last.latent, end.latent, **TOLERANCE)
    torch.testing.assert_close(last.linear, end.linear, **TOLERANCE)
    torch.testing.assert_close(last.rglru, end.rglru, **TOLERANCE)
    torch.testing.assert_close(last.conv, end.conv, **TOLERANCE)
    # Gradients flow through the state.
    torch.manual_seed(0)
    target = torch.randn_like(whole) * mask[..., None]
    expected = torch.autograd.grad((whole * target).sum(), layer.v_proj.weight)
    actual = torch.autograd.grad((joined * target).sum(), layer.v_proj.weight)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", MIXERS)
def test_packed_sequences_are_separate(mixer, name):
    layer, x = mixer(name), inputs(1, 12)
    bounds = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    carry = name != "softmax"  # its state has the length of the sequence
    out, states = layer(x, cu_seqlens=bounds, output_final_state=carry)
    for n, (a, b) in enumerate(((0, 5), (5, 6), (6, 12))):
        alone, state = layer(x[:, a:b], output_final_state=True)
        torch.testing.assert_close(out[:, a:b], alone, **TOLERANCE)
        if carry:
            entry = map_tensors(lambda t, n=n: t[n : n + 1], states)
            torch.testing.assert_close(entry.latent, state.latent, **TOLERANCE)
            torch.testing.assert_close(entry.linear, state.linear, **TOLERANCE)
            torch.testing.assert_close(entry.rglru, state.rglru, **TOLERANCE)
            assert entry.position.tolist() == state.position.tolist()


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "softmax"])
def test_rollback_gives_the_earlier_state_back(mixer, name):
    layer, x, mask = mixer(name), inputs(2, 11), half_masked()
    _, state = layer(x[:, :3], mask[:, :3], output_final_state=True)
    recording = state.record()
    for a, b in ((3, 5), (5, 6), (6, 11)):
        _, recording = layer(x[:, a:b], mask[:, a:b], state=recording, output_final_state=True)
    for length in range(3, 12):
        _, expected = layer(x[:, :length], mask[:, :length], output_final_state=True)
        found = layer.rollback(recording, 11 - length)
        assert found.recorded.length == 0
        torch.testing.assert_close(found._replace(recorded=None), expected, **TOLERANCE)
    with pytest.raises(ValueError, match="cannot take 9 tokens back: 8 have been recorded"):
        layer.rollback(recording, 9)
    with pytest.raises(ValueError, match="0 have been recorded"):
        layer.rollback(state, 1)


@pytest.mark.parametrize("name", ["macchiato", "window", "softmax"])
def test_rotary_positions_are_relative(mixer, name):
    layer, x = mixer(name), inputs(1, 8)
    start = torch.zeros(1, dtype=torch.long)
    near, _ = layer(x, state=MixerState(position=start))
    far, _ = layer(x, state=MixerState(position=start + 1_000_000))
    torch.testing.assert_close(near, far, atol=1e-7, rtol=1e-7)
    layer.rotary = None
    assert not torch.allclose(layer(x)[0], near, atol=1e-3)


def test_only_the_latent_logits_come_from_the_latent_input(mixer):
    layer, x = mixer("macchiato-rglru"), inputs(1, 6)
    with torch.no_grad():
        before = layer.mixing_logits(x)[2:]
        for parameter in layer.latents.parameters():
            parameter.add_(1.0)
        after = layer.mixing_logits(x)[2:]
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_a_window_logit_that_wins_leaves_the_window(mixer):
    """With p(0|t) = 1 Macchiato is sliding-window attention with the same weights."""
    layer, x = mixer("macchiato"), inputs(2, 11)
    window = mixer("window")
    window.load_state_dict({n: w for n, w in layer.state_dict().items() if "latents" not in n})
    with torch.no_grad():
        layer.latents.q_proj.weight.zero_()
        columns = layer.latents.q_proj.weight.view(4, 4, 16)
        columns[:, 0] = x[0, 5] * 1000  # positive for this token, whatever for the others
        out, expected = layer(x)[0][0, 5], window(x)[0][0, 5]
    torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LatteAttention(16, 4, 10), "num_latents must be a multiple of num_heads"),
        (lambda: LatteAttention(15, 4, 12), "hidden_size must be a multiple of num_heads"),
        (lambda: LatteAttention(16, 4, 12, num_key_value_heads=3), "multiple of num_key_value"),
        (lambda: LatteAttention(16, 4, 12, latent_input="fft"), "latent_input must be one of"),
        (lambda: LatteAttention(16, 0, 12), "num_heads must be a positive integer, got 0"),
        (lambda: LatteMacchiato(16, 4, 12, window=0), "window must be a positive integer"),
        (lambda: LatteMacchiato(16, 4, 12, window=2.5), "window must be a positive integer"),
        (lambda: LatteMacchiato(12, 4, 12), "head_dim must be even, got 3"),
        (lambda: LatteMacchiato(16, 4, 12, rope_theta=-1.0), "theta must be positive"),
        (lambda: LinearAttention(16, 4, 12, feature_map="cos"), "feature_map must be one of"),
        (lambda: LinearAttention(16, 4, 10), "num_features must be a multiple of num_heads"),
        (lambda: SlidingWindowAttention(16, 4, window=-1), "window must be a positive integer"),
    ],
)
def test_wrong_sizes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_wrong_inputs_are_refused(mixer):
    layer, x = mixer("macchiato"), inputs(2, 5)
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, hidden_size=16\)"):
        layer(x[..., :8])
    with pytest.raises(ValueError, match="state must be the MixerState that came out, got int"):
        layer(x, state=3)
    with pytest.raises(ValueError, match="a bidirectional layer has no state"):
        mixer("macchiato", causal=False)(x, output_final_state=True)
    with pytest.raises(ValueError, match="packed sequences cannot be recorded"):
        bounds = torch.tensor([0, 5], dtype=torch.int32)
        layer(x[:1], cu_seqlens=bounds, state=MixerState().record(), output_final_state=True)


@pytest.mark.parametrize(
    ("name", "other", "part"),
    [("latte", "window", "latent"), ("macchiato", "latte", "window"), ("linear", "latte", "linear"),
     ("window", "linear", "window")],
)  # fmt: skip
def test_the_state_of_another_mixer_is_refused(mixer, name, other, part):
    _, state = mixer(other)(inputs(2, 5), output_final_state=True)
    with pytest.raises(ValueError, match=f"state must hold '{part}', got another mixer's"):
        mixer(name)(inputs(2, 5), state=state)


@pytest.mark.parametrize(
    ("name", "other", "part"),
    [("latte", "macchiato", "window"), ("window", "macchiato", "latent")],
)
def test_a_state_with_more_than_a_mixer_reads_is_refused(mixer, name, other, part):
    _, state = mixer(other)(inputs(2, 5), output_final_state=True)
    with pytest.raises(ValueError, match=f"state must not hold '{part}', got another mixer's"):
        mixer(name)(inputs(2, 5), state=state)


def test_every_parameter_can_be_reset_after_meta():
    with torch.device("meta"):
        layer = LatteMacchiato(**SIZE, num_latents=12, window=4, latent_input="rglru",
                               window_probability=0.9)  # fmt: skip
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layer", ["latte", "macchiato", "rg-lru"])
def test_another_dtype_than_the_weights_is_a_value_error(layer, dtype):
    from latte.layers import RGLRU, LatteAttention, LatteMacchiato

    made = {
        "latte": lambda: LatteAttention(16, 2, 4),
        "macchiato": lambda: LatteMacchiato(16, 2, 4, window=4),
        "rg-lru": lambda: RGLRU(16, 2),
    }[layer]()
    x = torch.randn(1, 5, 16, dtype=dtype)
    with pytest.raises(ValueError, match=f"the layer's weights, torch.float32, got {dtype}"):
        made(x)
    assert made.to(dtype)(x)[0].dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):  # which casts by itself
        made.float()(x.to(torch.bfloat16))
