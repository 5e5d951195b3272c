"""The comparators' models: the family's in everything but what mixes the tokens."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from latte.errors import LatteError
from latte.lab.baselines.config import ComparatorConfig
from latte.lab.baselines.modeling import ComparatorForCausalLM, ComparatorModel
from tests.lab.baselines.baselines import MIXERS, names

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 20, "state_size": 8,
    "initializer_range": 0.2,
}  # fmt: skip
CAUSAL, BOTH_WAYS = (names(MIXERS, field) for field in ("causal", "both_ways"))


def made(mixer, kind=ComparatorForCausalLM, **overrides):
    torch.manual_seed(0)
    fields = {**SIZES, "is_causal": MIXERS[mixer].causal, **overrides}
    return kind(ComparatorConfig(mixer=mixer, **fields))


def ids(batch=2, length=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 40, (batch, length), generator=generator)


@pytest.mark.parametrize("mixer", CAUSAL)
def test_save_and_load_is_the_identity(tmp_path, mixer):
    model = made(mixer).eval()
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is ComparatorConfig
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is ComparatorForCausalLM and type(loaded.model) is ComparatorModel
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, loaded(ids()).logits)
        assert torch.equal(
            AutoModel.from_pretrained(tmp_path)(ids()).last_hidden_state,
            model.model(ids()).last_hidden_state,
        )


@pytest.mark.parametrize("mixer", MIXERS)
def test_missing_weights_are_drawn_as_at_the_start(tmp_path, mixer):
    """A classifier from a language model draws its head alone; the mixers keep their weights."""
    model = made(mixer, ComparatorModel)
    model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    for (name, ours), theirs in zip(
        model.named_parameters(), classifier.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert torch.isfinite(classifier.score.weight).all()


@pytest.mark.parametrize("mixer", CAUSAL)
def test_generation_reads_the_text_anew(mixer):
    model = made(mixer, initializer_range=0.4, tie_word_embeddings=False).double().eval()
    out = model.generate(ids(), max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = ids()
    with torch.no_grad():
        for _ in range(4):
            token = model(expected).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, token], 1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(ids(), use_cache=True), "S5 models take no cache"),
        (
            lambda m: m(ids(1), cu_seq_lens_q=torch.tensor([0, 4, 9], dtype=torch.int32)),
            "S5 models take no packed sequences",
        ),
        (lambda m: m(ids(), output_attentions=True), "S5 models take no output_attentions"),
    ],
)
def test_what_they_cannot_do_is_one_line(call, message):
    with pytest.raises(ValueError, match=message):
        call(made("s5"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixer": "hyena"}, "ComparatorConfig: .*mixer"),
        ({"state_size": 0}, "state_size must be at least 1, got 0"),
        ({"mixer": "s5", "chunk_size": 4}, "chunk_size is for mixer='mega', got mixer='s5'"),
        ({"latent_input": "conv"}, "ComparatorConfig: .*latent_input"),
        ({"hidden_size": -1}, "hidden_size must be at least 1"),
    ],
)
def test_bad_fields_are_one_line(fields, message):
    with pytest.raises(LatteError, match=message) as error:
        ComparatorConfig(**fields)
    assert "\n" not in str(error.value)


def test_a_language_model_is_causal():
    with pytest.raises(LatteError, match="needs is_causal=True"):
        made("linformer")


@pytest.mark.parametrize("mixer", CAUSAL)
def test_checkpointing_changes_nothing(mixer):
    model = made(mixer).double().train()
    found = []
    for checkpoint in (False, True):
        if checkpoint:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids(), labels=ids()).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=1e-12)
