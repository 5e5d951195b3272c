"""Recipes that train a plain model of Transformers, such as a base to convert."""

import json
from pathlib import Path

import pytest

from latte.errors import LatteError
from latte.train.recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "conversion" / "base.yaml"
SMALL = [
    "model.overrides={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,"
    " num_attention_heads: 2, num_key_value_heads: 2}",
    "data.tokenizer=byte",
    "data.block_length=32",
    "training.batch_size=2",
    "training.warmup_steps=1",
    "training.torch_compile=false",
    "data.max_validation_tokens=64",
]


def test_a_plain_llama_is_trained_and_loads(tmp_path, words):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    from latte.train.run import train

    recipe = load_recipe(
        RECIPE,
        [
            *SMALL,
            *[f"data.{key}={value}" for key, value in words.items()],
            "training.max_steps=2",
            f"output_dir={tmp_path}/run",
        ],
    )
    result = train(recipe, quiet=True)
    assert result.finished
    model = AutoModelForCausalLM.from_pretrained(result.folder)
    assert isinstance(model, LlamaForCausalLM)
    assert model.config.max_position_embeddings == 32
    assert json.loads((result.folder / "recipe.json").read_text())["model"]["architecture"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.architecture=bert-of-none", "no causal language model"),
        ("model.overrides={hidden_sice: 3}", "unknown field 'hidden_sice' of LlamaConfig"),
    ],
)
def test_a_model_that_cannot_be_built_is_named_at_once(tmp_path, override, message):
    from latte.train.run import train

    recipe = load_recipe(RECIPE, [override, f"output_dir={tmp_path}/run"])
    with pytest.raises(LatteError, match=message):
        train(recipe, quiet=True)
    assert not (tmp_path / "run").exists()


def test_documents_may_share_a_block_as_rows(tmp_path, words):
    from latte.data.preparing import prepare_text

    recipe = load_recipe(RECIPE, [*SMALL, *[f"data.{key}={value}" for key, value in words.items()]])
    text = prepare_text(recipe.data, progress=False)
    batch = text.collator(recipe.data)(list(text.blocks(recipe.data, 2, 0)))
    assert batch["input_ids"].shape == (2, 32)
    assert "cu_seq_lens_q" not in batch


def test_an_encoder_becomes_a_decoder():
    """BERT's own default would let a token see the one that it is to predict."""
    import torch
    from transformers import AutoModelForCausalLM

    from latte.train.run import architecture_config

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = architecture_config("bert", {"vocab_size": 9, "num_attention_heads": 2, **sizes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        one, other = model(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])).logits
    torch.testing.assert_close(one[:3], other[:3])
    assert architecture_config("xlm", {}).causal
