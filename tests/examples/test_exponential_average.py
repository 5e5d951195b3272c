"""The example of a mixer of one's own: its laws, and that it trains and generates by its name."""

from pathlib import Path

import pytest
import torch

from latte.lab.evaluate.checkpoint import load_checkpoint
from latte.lab.train.recipe import load_recipe
from latte.lab.train.run import train
from latte.models import LatteCache, LatteForCausalLM, preset_config
from latte.models.registry import load_plugin

EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}


@pytest.fixture(scope="module")
def example():
    return load_plugin(EXAMPLES / "exponential_average.py")


@pytest.fixture
def layer(example):
    torch.manual_seed(0)
    return example.ExponentialAverage(16, 4, num_averages=3, num_key_value_heads=2).double()


def inputs(batch, length):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, length, 16, dtype=torch.float64, generator=generator)


def test_it_is_its_recurrence(layer):
    x = inputs(2, 150)  # several chunks
    with torch.no_grad():
        out, state = layer(x, output_final_state=True)
        v = layer.v_proj(x).unflatten(-1, (2, 4)).repeat_interleave(2, 2)
        p, a = layer.q_proj(x).unflatten(-1, (4, 3)).softmax(-1), layer.theta.sigmoid()[..., None]
        h, rows = torch.zeros(2, 4, 3, 4).double(), []
        for t in range(150):
            h = a * h + (1 - a) * v[:, t, :, None]
            rows.append(torch.einsum("bhn,bhnd->bhd", p[:, t], h))
        expected = layer.o_proj(torch.stack(rows, 1).flatten(-2))
    torch.testing.assert_close(out, expected, **TOLERANCE)
    torch.testing.assert_close(state.own, h, **TOLERANCE)


@pytest.mark.parametrize("cut", [1, 64, 90])
def test_pieces_make_the_whole_and_padding_does_not_count(layer, cut):
    x, mask = inputs(2, 100), torch.ones(2, 100, dtype=torch.bool)
    mask[1, :30] = False
    whole, end = layer(x, mask, output_final_state=True)
    first, state = layer(x[:, :cut], mask[:, :cut], output_final_state=True)
    second, last = layer(x[:, cut:], mask[:, cut:], state=state, output_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1)[mask], whole[mask], **TOLERANCE)
    torch.testing.assert_close(last, end, **TOLERANCE)
    bare, _ = layer(x[1:, 30:])
    torch.testing.assert_close(whole[1:, 30:], bare, **TOLERANCE)


def test_it_is_causal_and_packed_sequences_are_separate(layer):
    x, bounds = inputs(1, 90), torch.tensor([0, 70, 71, 90], dtype=torch.int32)
    changed = x.clone()
    changed[:, 40:] += 1
    assert torch.equal(layer(x)[0][:, :40], layer(changed)[0][:, :40])
    out, states = layer(x, cu_seqlens=bounds, output_final_state=True)
    for n, (a, b) in enumerate(((0, 70), (70, 71), (71, 90))):
        alone, state = layer(x[:, a:b], output_final_state=True)
        torch.testing.assert_close(out[:, a:b], alone, **TOLERANCE)
        torch.testing.assert_close(states.own[n : n + 1], state.own, **TOLERANCE)


def test_tokens_can_be_taken_back(layer):
    x = inputs(2, 20)
    _, state = layer(x[:, :5], output_final_state=True)
    _, later = layer(x[:, 5:], state=state.record(), output_final_state=True)
    _, expected = layer(x[:, :12], output_final_state=True)
    found = layer.rollback(later, 8)._replace(recorded=None)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    with pytest.raises(ValueError, match="expected causal=True"):
        type(layer)(16, 4, causal=False)


def test_a_model_of_it_generates_from_its_state(example):
    torch.manual_seed(0)
    config = preset_config("exponential-average++", num_averages=2, initializer_range=0.3)
    model = LatteForCausalLM(config).double().eval()
    assert model.model.layers[0].mixer.theta.shape == (4, 2)
    assert not config.state_grows(0)
    ids = torch.randint(0, 250, (2, 9))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
    assisted = model.generate(ids[:1], assistant_model=model, **options)
    assert torch.equal(assisted, cached[:1])
    cache, sizes = LatteCache(config), []
    with torch.no_grad():
        for _ in range(2):
            model(ids, past_key_values=cache)
            sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1]


def test_the_recipe_trains_and_its_checkpoint_loads(tmp_path):
    recipe = load_recipe(
        EXAMPLES / "exponential_average.yaml",
        [
            "data.tokenizer=byte",
            "data.block_length=32",
            "data.max_validation_tokens=64",
            "model.overrides.hidden_size=16",
            "model.overrides.num_hidden_layers=1",
            "model.overrides.intermediate_size=24",
            "training.max_steps=2",
            "training.warmup_steps=1",
            f"output_dir={tmp_path / 'run'}",
        ],
    )
    train(recipe)
    model, _ = load_checkpoint(tmp_path / "run")
    assert model.config.mixer == "exponential_average" and model.config.num_averages == 8
