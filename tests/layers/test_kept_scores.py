"""Scores of kept tokens in layers, and the options that ask for them."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from latte.errors import LatteError
from latte.layers import LatteMacchiato
from latte.layers.kept_scores import KeptScores
from latte.models import LatteConfig
from tests.conversion.bases import converted

DIVIDED = {"delay_latents": True, "joint_softmax": True}
W, C, N = 5, 4, 3


def layer(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 4, "num_latents": 8, "num_key_value_heads": 2}
    return LatteMacchiato(**sizes, window=W, kept_tokens=N, kept_block=C, **DIVIDED, **options)


def test_the_latest_tokens_are_kept_before_scores_are_fitted():
    x = torch.randn(1, 23, 16)
    _, state = layer()(x, output_final_state=True)
    left = 20 - W  # the last one that has left the window at the update before token 22
    assert state.kept.positions[0, :N].tolist() == [[left - i] * 2 for i in range(N)]


def test_a_step_has_the_scores_of_the_forward():
    scores = KeptScores(16, 2).double()
    torch.nn.init.normal_(scores.down.weight)
    x = torch.randn(3, 16, dtype=torch.float64)
    assert torch.equal(scores.step(x), scores(x[:, None])[:, 0])


def test_a_step_passes_over_no_hook_of_its_maps():
    scores, x = KeptScores(16, 2), torch.randn(3, 16)
    torch.nn.init.normal_(scores.down.weight)
    scores.down.register_forward_hook(lambda module, given, out: out + 1)
    torch.testing.assert_close(scores.step(x), scores(x[:, None])[:, 0])


def test_scores_decide_what_is_kept_and_have_no_gradient():
    mixer, x = layer(), torch.randn(1, 40, 16)
    torch.nn.init.normal_(mixer.latents.kept_scores.down.weight, std=10.0)
    out, state = mixer(x, output_final_state=True)
    scores = mixer.latents.kept_scores(x)[0]
    best = scores[: 36 - W + 1].topk(N, 0).values
    assert torch.equal(state.kept.scores[0, :N], best)
    out.sum().backward()
    with_gradients = {name for name, p in mixer.named_parameters() if p.grad is not None}
    assert not any("kept_scores" in name for name in with_gradients) and with_gradients


def test_a_loaded_model_asks_for_no_gradients_that_do_not_come(tmp_path):
    """Distributed training waits for each gradient that is asked for."""
    converted("llama", **DIVIDED, kept_tokens=N, latent_input="none").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    model(torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    without = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    assert not without


@pytest.mark.parametrize("half_life", [1e-3, 8.0, 1e6])
def test_with_a_half_life_older_tokens_count_less(half_life):
    """A weight is exp(score): it halves with each half-life that has passed."""
    mixer, x = layer(kept_half_life=half_life), torch.randn(1, 40, 16)
    torch.nn.init.normal_(mixer.latents.kept_scores.down.weight, std=10.0)
    _, state = mixer(x, output_final_state=True)
    left = 36 - W + 1  # sources that have left the window at the last update
    ages = 40 - torch.arange(left, dtype=torch.float64)[:, None]
    weight = mixer.latents.kept_scores(x)[0, :left].double() - ages * math.log(2) / half_life
    best = weight.topk(N, 0).indices.sort(0).values
    kept = state.kept.positions[0, :N].sort(0).values
    assert torch.equal(kept, best)
    if half_life < 1:
        assert kept[:, 0].tolist() == [*range(left - N, left)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kept_tokens": 3}, "kept_tokens=3 needs delay_latents=True and joint_softmax=True"),
        ({"kept_tokens": 3, "delay_latents": True}, "joint_softmax=True, got True and False"),
        ({"kept_half_life": 0.0}, "kept_half_life must be a number above 0, got 0.0"),
        ({"kept_tokens": 2, "mixer": "swa", "num_latents": None, **DIVIDED}, "mixer='swa'"),
    ],
)
def test_options_that_do_not_fit(options, said):
    with pytest.raises(LatteError, match=said):
        LatteConfig(hidden_size=16, num_attention_heads=4, **{"num_latents": 8, **options})


def test_a_number_for_each_layer_of_a_base():
    numbers = [3, 0, 2, 0]
    model = converted("llama", **DIVIDED, kept_tokens=numbers, kept_block=C)
    assert [x.kept_tokens for x in model.model.mixers] == numbers
    assert [hasattr(x.latents, "kept_scores") for x in model.model.mixers] == [
        number > 0 for number in numbers
    ]
    with pytest.raises(LatteError, match="one for each of 4 layers, got 2 numbers"):
        converted("llama", **DIVIDED, kept_tokens=[3, 2])
