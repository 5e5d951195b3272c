"""The classifier: pooling over real tokens, losses, bidirectional layers."""

import pytest
import torch

from latte.models import PRESETS


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("preset", PRESETS)
def test_padding_does_not_matter(build, tokens, preset, side):
    model = build(preset, "classifier", is_causal=False, num_labels=3)
    ids = tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    mask = mask.flip(1) if side == "right" else mask
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        alone = model(ids[1][mask[1].bool()][None]).logits
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits[1:], alone, atol=1e-10, rtol=1e-10)


def test_pooling_is_the_mean_of_real_tokens(build, tokens):
    model = build("latte-r-swa++", "classifier", is_causal=False)
    ids = tokens(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]])
    with torch.no_grad():
        out = model(ids, attention_mask=mask, output_hidden_states=True)
        hidden = out.hidden_states[-1]
        means = torch.stack([hidden[0].mean(0), hidden[1, 2:5].mean(0)])
        torch.testing.assert_close(out.logits, means @ model.score.weight.T)
        empty = model(ids, attention_mask=torch.zeros_like(mask)).logits
    assert empty.abs().max() == 0


@pytest.mark.parametrize(
    ("num_labels", "labels", "kind"),
    [
        (3, torch.tensor([2, 0]), "single_label_classification"),
        (1, torch.tensor([0.5, -1.0]), "regression"),
        (3, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), "multi_label_classification"),
    ],
)
def test_losses(build, tokens, num_labels, labels, kind):
    model = build(
        "latte++",
        "classifier",
        dtype=torch.float32,
        is_causal=False,
        num_labels=num_labels,
        problem_type=kind,
    )
    with torch.no_grad():
        out = model(tokens(2, 5), labels=labels)
    expected = {
        "single_label_classification": torch.nn.functional.cross_entropy,
        "regression": lambda x, y: torch.nn.functional.mse_loss(x[:, 0], y),
        "multi_label_classification": torch.nn.functional.binary_cross_entropy_with_logits,
    }[kind](out.logits, labels)
    torch.testing.assert_close(out.loss, expected)


def test_bidirectional_rglru_has_both_directions(build):
    mixer = build("latte-r-swa++", "classifier", is_causal=False).model.layers[0].mixer
    assert not mixer.causal
    assert mixer.latents.input.backward_rglru.reverse and not mixer.latents.input.rglru.reverse
