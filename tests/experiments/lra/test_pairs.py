"""Pairs of texts through one encoder."""

from __future__ import annotations

import pytest
import torch

from experiments.lra.pairs import LatteForPairClassification
from latte.models import preset_config

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_latents": 4}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = preset_config(
        "latte-r-swa++", "tiny", **SIZES, intermediate_size=16, sliding_window=4,
        is_causal=False, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    return LatteForPairClassification(config).eval()


def test_logits_are_the_head_of_both_means(model):
    ids = torch.randint(0, 260, (4, 2, 9))
    u, v = (model.model(ids[:, i]).last_hidden_state.mean(1) for i in (0, 1))
    wanted = model.head(torch.cat([u, v, u * v, u - v], dim=-1))
    result = model(ids, labels=torch.tensor([0, 1, 2, 0]))
    torch.testing.assert_close(result.logits, wanted)
    loss = torch.nn.functional.cross_entropy(wanted, torch.tensor([0, 1, 2, 0]))
    torch.testing.assert_close(result.loss, loss)


def test_padding_changes_nothing(model):
    ids = torch.randint(0, 260, (2, 2, 9))
    mask = torch.ones_like(ids)
    mask[0, 0, 5:] = mask[1, 1, 3:] = 0
    result = model(ids, mask).logits
    assert not torch.allclose(result, model(ids).logits)
    torch.testing.assert_close(result, model(ids + 7 * (1 - mask), mask).logits)
    longer = torch.nn.functional.pad(ids, (0, 4), value=1), torch.nn.functional.pad(mask, (0, 4))
    torch.testing.assert_close(result, model(*longer).logits)


def test_saved_and_loaded(model, tmp_path):
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 260, (2, 2, 5))
    again = LatteForPairClassification.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("shape", [(4, 9), (4, 3, 9)])
def test_other_shapes_are_refused(model, shape):
    with pytest.raises(ValueError, match=r"must be \(B, 2, T\)"):
        model(torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(torch.zeros(4, 2, 9, dtype=torch.long), torch.ones(4, 9))
