"""The models of flash-linear-attention as our harness builds, trains, keeps and reads them."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from latte.errors import LatteError
from latte.lab.baselines.catalogue import BASELINES
from latte.models import count_parameters, preset_config
from latte.models.modeling import language_model
from latte.models.registry import find_model, make_known
from tests.lab.baselines.training import losses, next_token_loss

NAMES = [name for name, c in BASELINES.items() if c.library == "flash-linear-attention"]
SMALL = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 64,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:According to Bo")


def build(name):
    torch.manual_seed(0)
    return language_model(find_model(name).config("tiny", **SMALL))


def some_ids(length):
    return torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", ["tiny", "small", "paper", "400m"])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_match_those_of_transformer(name, size):
    target = count_parameters(preset_config("transformer++", size))
    found = BASELINES[name].count(find_model(name).config(size))
    assert found == pytest.approx(target, rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_a_few_steps_lower_the_loss(name):
    model, ids = build(name).train(), some_ids(12)

    def loss():
        return next_token_loss(model(input_ids=ids, use_cache=False).logits, ids)

    found = losses(model, loss, steps=5, rate=1e-2)
    assert found[0] == pytest.approx(math.log(60), rel=0.1)
    assert found[-1] < found[0] - 0.3


@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_finite_gradients(name):
    """In fp16: of bf16 the interpreter makes nonsense."""
    model, ids = build(name).train(), some_ids(12)
    with torch.no_grad():
        exact = model(input_ids=ids, use_cache=False).logits
    with torch.autocast("cpu", torch.float16):
        rounded = model(input_ids=ids, use_cache=False).logits.float()
    assert 0 < (exact - rounded).abs().max() < 0.01 * exact.abs().max()
    next_token_loss(rounded, ids).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_keeps_and_generates(name, make_recipe):
    from latte.lab.evaluate.checkpoint import load_checkpoint
    from latte.lab.evaluate.generate import generate
    from latte.lab.train.metrics import read_metrics
    from latte.lab.train.run import train

    recipe = make_recipe(max_steps=2, batch_size=1)
    recipe.model.preset = name
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    recipe.model.overrides = {**sizes, "intermediate_size": 32}
    recipe.data.block_length, recipe.data.max_validation_tokens = 16, 20
    train(recipe, quiet=True)
    logged = read_metrics(recipe.output_dir, "train")
    # Untrained models are near uniform over 260 bytes, if the loss is over the right tokens.
    assert logged[0]["loss"] == pytest.approx(math.log(260), rel=0.1)
    model, tokenizer = load_checkpoint(Path(recipe.output_dir))
    assert model.config.model_type == name
    generate(model, tokenizer, "of the", max_new_tokens=2, seed=0, stream=False)


@pytest.mark.parametrize(("name", "kind"), [("mamba", "MambaConfig"), ("mamba2", "Mamba2Config")])
def test_transformers_mambas_stay_its_own(name, kind, tmp_path):
    """This library has models of the same types, which it registers in their place."""
    import fla.models

    take_the_place = {"model_type": name, "config": getattr(fla.models, kind), "exist_ok": True}
    AutoConfig.register(**take_the_place)
    model = language_model(find_model(name).config("tiny", hidden_size=32))
    assert type(model).__module__ == f"transformers.models.{name}.modeling_{name}"
    model.save_pretrained(tmp_path)
    AutoConfig.register(**take_the_place)
    make_known(name)  # as where checkpoints are loaded
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expand_k": "half"}, "comparator 'gla': TypeError: .*str.*; got expand_k='half'"),
        ({"attn_mode": "nope"}, "comparator 'gla': AssertionError: .*nope.*; got attn_mode='nope'"),
        ({"feature_map": "nope"}, "comparator 'gla': KeyError: 'nope'; got feature_map='nope'"),
        (
            {"fuse_linear_cross_entropy": True, "fuse_cross_entropy": True},
            "comparator 'gla': .fuse_cross_entropy. and .* at the same time.; got fuse_linear",
        ),
        ({"num_labels": 2}, "'gla' has no classifier in flash-linear-attention"),
        ({"is_causal": False}, "'gla' is causal, and cannot do otherwise"),
    ],
)
def test_bad_fields_are_one_line(fields, message):
    with pytest.raises(LatteError, match=message) as error:
        find_model("gla").config("tiny", **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("length", [40, 70])
@pytest.mark.parametrize("name", NAMES)
def test_the_future_cannot_change_the_past(name, length):
    model, ids = build(name).eval(), some_ids(length)
    other = ids.clone()
    other[:, length - 15 :] = 2
    with torch.no_grad():
        one, two = (model(input_ids=x, use_cache=False).logits for x in (ids, other))
    assert torch.equal(one[:, : length - 15], two[:, : length - 15])
    assert not torch.equal(one[:, length - 15 :], two[:, length - 15 :])
