"""What holds for every comparator's layer: causality, padding, gradients, refusals."""

import pytest
import torch

from latte.lab.baselines.low_rank import Linformer, Luna
from latte.lab.baselines.mega import Mega
from latte.lab.baselines.state_spaces import H3, S5
from tests.lab.baselines.baselines import LAYERS, names

CAUSAL, BOTH_WAYS = (names(LAYERS, field) for field in ("causal", "both_ways"))


def build(name, **options):
    return LAYERS[name].build(**options)


def inputs(batch=2, length=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 16, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_cannot_change_the_past(name):
    layer, x = build(name), inputs()
    other = x.clone()
    other[:, 7:] += 3.0
    with torch.no_grad():
        one, two = layer(x), layer(other)
    if LAYERS[name].exact:
        assert torch.equal(one[:, :7], two[:, :7])
    else:
        torch.testing.assert_close(one[:, :7], two[:, :7], atol=1e-13, rtol=1e-13)
    assert not torch.allclose(one[:, 7:], two[:, 7:])


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_bidirectional_layers_see_the_future(name):
    layer, x = build(name, causal=False), inputs()
    other = x.clone()
    other[:, 10] += 1.0
    with torch.no_grad():
        difference = (layer(x) - layer(other)).abs().amax(-1)
    # Chunks of attention alone do not reach back, but the average does.
    assert (difference > 1e-9).all()


@pytest.mark.parametrize(
    ("name", "causal"), [(name, True) for name in CAUSAL] + [(name, False) for name in BOTH_WAYS]
)
def test_padding_changes_nothing(name, causal):
    """On the right always; on the left where no place counts from the row's first token."""
    layer, x = build(name, causal=causal), inputs(1, 7)
    junk = torch.full((1, 3, 16), 1e3, dtype=torch.float64)
    mask = torch.tensor([[True] * 7 + [False] * 3])
    with torch.no_grad():
        bare = layer(x)
        right = layer(torch.cat([x, junk], 1), mask)[:, :7]
        left = layer(torch.cat([junk, x], 1), mask.flip(1))[:, 3:]
    torch.testing.assert_close(right, bare, atol=1e-12, rtol=1e-12)
    if LAYERS[name].from_the_first:
        assert not torch.allclose(left, bare)
    else:
        torch.testing.assert_close(left, bare, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_a_row_without_tokens_is_finite(name):
    layer, x = build(name), inputs()
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0] = False
    x.requires_grad_()
    out = layer(x, mask)
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_a_batch_and_no_tokens(name):
    layer, x = build(name), inputs(3, 1)
    with torch.no_grad():
        together = layer(x)
        apart = torch.cat([layer(x[i : i + 1]) for i in range(3)])
        assert layer(x[:, :0]).shape == (3, 0, 16)
    torch.testing.assert_close(together, apart, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_stays_close(name):
    layer, x = build(name).float(), inputs().float()
    with torch.no_grad():
        exact = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = layer(x)
    assert (exact - rounded.float()).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mega(16, attention_width=3), "attention_width must be even, got 3"),
        (lambda: Mega(16, chunk_size=0), "chunk_size must be a positive integer, got 0"),
        (lambda: Mega(16, num_averages=0), "num_averages must be a positive integer"),
        (lambda: H3(16, head_dim=3), "hidden_size must be a multiple of head_dim"),
        (lambda: H3(16, num_states=5), "num_states must be even, got 5"),
        (lambda: H3(16, causal=False), "H3: expected causal=True, the only direction"),
        (lambda: S5(16, num_states=12, num_blocks=4), "even number of states, got num_states=12"),
        (lambda: S5(16, num_blocks=3), "num_states must be a multiple of num_blocks"),
        (lambda: Luna(16, 3), "hidden_size must be a multiple of num_heads"),
        (lambda: Luna(16, 4, num_memories=0), "num_memories must be a positive integer"),
        (lambda: Linformer(16, 4, max_length=8, causal=True), "Linformer: expected causal=False"),
        (lambda: Linformer(16, 4, max_length=0), "max_length must be a positive integer"),
        (lambda: build("linformer")(inputs(1, 15)), "at most max_length=14 tokens, got 15"),
        (lambda: build("s5")(inputs()[..., :8]), r"x must have shape \(B, T, hidden_size=16\)"),
        (lambda: build("h3")(inputs(), torch.ones(2, 11)), r"key_mask must be bool \(B, T\)=\(2,"),
        (
            lambda: build("mega")(inputs(), torch.ones(2, 10, dtype=torch.bool)),
            r"key_mask must be bool .* got torch.bool \(2, 10\)",
        ),
    ],
)
def test_bad_sizes_are_one_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
