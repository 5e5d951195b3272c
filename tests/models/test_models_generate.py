"""``generate`` with the cache does what it does without: going on, drafts, pieces, weights."""

import pytest
import torch
from transformers import GenerationConfig, pipeline

from latte.models import PRESETS, LatteCache, LatteForCausalLM
from tests.models import modeldb

NEW = 6  # more than a window


@pytest.fixture(scope="module")
def generate():
    def run(model, ids, **options):
        settings = {
            "max_new_tokens": NEW,
            "do_sample": False,
            "pad_token_id": 0,
            "suppress_tokens": [0],  # in a prompt, generate would take it for padding
        }
        config = GenerationConfig(**(settings | options.pop("config", {})))
        return model.generate(ids, generation_config=config, **options)

    return run


@pytest.mark.parametrize("preset", PRESETS)
def test_continuing_from_a_cache(build, tokens, generate, preset):
    model, ids = build(preset), tokens(2, 10)
    cache = LatteCache(model.config)
    first = generate(model, ids, past_key_values=cache, config={"max_new_tokens": 5})
    assert cache.get_seq_length() == 14  # the last token has not been through the model yet
    more = torch.cat([first, tokens(2, 4, seed=3)], 1)
    assert torch.equal(generate(model, more, past_key_values=cache), generate(model, more))


@pytest.mark.parametrize("preset", PRESETS)
def test_chunked_prefill(build, tokens, generate, preset):
    model, ids = build(preset), tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    whole = generate(model, ids, attention_mask=mask)
    for size, kind in ((1, "dynamic"), (4, "dynamic"), (4, "static")):
        config = {"prefill_chunk_size": size, "cache_implementation": kind}
        assert torch.equal(whole, generate(model, ids, attention_mask=mask, config=config))


@pytest.mark.parametrize("preset", PRESETS)
def test_prompt_lookup(build, tokens, generate, preset):
    # A repetitive prompt, so that drafts are found; most are rejected and must be taken back.
    model, ids = build(preset), tokens(1, 5).repeat(1, 4)
    rejected = []
    crop = LatteCache.crop

    def spy(self, count):
        rejected.append(-count)
        crop(self, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatteCache, "crop", spy)
        out = generate(model, ids, config={"prompt_lookup_num_tokens": 3, "max_new_tokens": 10})
    assert torch.equal(out, generate(model, ids, config={"max_new_tokens": 10}))
    assert sum(rejected) > 0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("draft", ["itself", "another"])
def test_assisted_decoding(build, tokens, generate, preset, draft):
    model, ids = build(preset), tokens(1, 8)
    assistant = model if draft == "itself" else build(preset, num_hidden_layers=1)
    expected = generate(model, ids, config={"max_new_tokens": 10})
    out = generate(model, ids, assistant_model=assistant, config={"max_new_tokens": 10})
    assert torch.equal(out, expected)


def test_early_exit(build, tokens, generate):
    """The draft is the model's own first layer; the text is the model's, and the model is whole."""
    model, ids = build("latte-r-swa++"), tokens(1, 8)
    expected = generate(model, ids, config={"max_new_tokens": 8})
    out = generate(model, ids, config={"max_new_tokens": 8, "assistant_early_exit": 1})
    assert torch.equal(out, expected)
    assert model.config.num_hidden_layers == 2


def test_other_caches_are_refused(build, tokens, generate):
    model, ids = build("latte-r-swa++"), tokens(2, 6)
    with pytest.raises(ValueError, match="cache_implementation must be None"):
        generate(model, ids, config={"cache_implementation": "quantized"})


def test_generating_from_embeddings(build, tokens, generate):
    model, ids = build("latte-conv-swa++"), tokens(2, 6)
    embeds = model.get_input_embeddings()(ids)
    out = generate(model, None, inputs_embeds=embeds)
    assert torch.equal(out, generate(model, ids)[:, 6:])


def test_attentions_while_generating_are_those_without_a_cache(build, tokens, generate):
    model, ids = build("latte-r-swa++"), tokens(1, 6)
    asked = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 2}
    whole = generate(model, ids, config=asked | {"use_cache": False}).attentions[-1]
    cached = generate(model, ids, config=asked).attentions[-1]
    assert whole[0].shape == (1, 4, 7, 7)
    for rows, row in zip(whole, cached, strict=True):
        torch.testing.assert_close(row, rows[:, :, -1:], atol=1e-10, rtol=1e-10)


def test_a_bidirectional_model_generates_nothing(config):
    with pytest.raises(ValueError, match="needs is_causal=True"):
        LatteForCausalLM(config("latte++", is_causal=False))


def test_continuous_batching_is_refused(build, tokens):
    """Paged attention would take layers with states for layers of full attention."""
    with pytest.raises(ValueError, match="a state of Latte has no pages"):
        build("latte-r-swa++").generate_batch(tokens(2, 4).tolist())


def test_stop_strings_and_their_tokenizer(build, tokens, generate):
    from latte.lab.data.tokenizers import byte_tokenizer

    model, ids = build("latte-r-swa++"), tokens(1, 6)
    first = int(generate(model, ids)[0, 6])
    stopped = generate(model, ids, stop_strings=[chr(first)], tokenizer=byte_tokenizer())
    assert stopped[0, 6:].tolist() == [first]


@pytest.mark.parametrize("name", ["latte-r-swa++", "transformer++", "llama: plain"])
def test_a_pipeline_goes_on_with_every_text_as_alone(name, tmp_path):
    """From a folder, in a padded batch, without a warning that it knows no such model."""
    model, letters = modeldb.BY_NAME[name].make().float(), modeldb.tokenizer()
    for part in (model, letters):
        part.save_pretrained(tmp_path)
    writer = pipeline("text-generation", model=str(tmp_path))
    assert type(writer.model) is type(model)
    settings = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "eos_token_id": [],
        "bad_words_ids": [[0]],
    }
    texts = ["hello", "a", "padding"]
    together = writer(texts, batch_size=3, return_tensors=True, **settings)
    for text, (found,) in zip(texts, together, strict=True):
        ids = letters(text, return_tensors="pt")["input_ids"]
        expected = model.generate(ids, pad_token_id=0, **settings)[0].tolist()
        assert found["generated_token_ids"][-len(expected) :] == expected
