"""A forward over a batch: gradients, bounds, both directions, weights (its laws: test_laws.py)."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from latte.models import PRESETS, inputs
from tests.models import modeldb

TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_past_has_no_gradient_from_the_future(build, tokens, preset):
    model, ids = build(preset), tokens(2, 23)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds).logits
    (gradient,) = torch.autograd.grad(logits[:, :11].square().sum(), embeds)
    assert gradient[:, 11:].abs().max() == 0
    assert gradient[:, :11].abs().amax(-1).min() > 0


def test_positions_that_start_anew_are_bounds(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(1, 24)
    bounds = torch.tensor([0, 7, 8, 24], dtype=torch.int32)
    places = torch.cat([torch.arange(n) for n in bounds.diff().tolist()])[None]
    with torch.no_grad():
        packed = model(ids, cu_seq_lens_q=bounds, labels=ids)
        placed = model(ids, position_ids=places, labels=ids)  # as Transformers' collators send it
    assert torch.equal(placed.logits, packed.logits) and placed.loss == packed.loss
    with torch.no_grad():  # one sequence, and rows with a mask, stay whole
        whole = model(ids, use_cache=False).logits
        for given in ({}, {"attention_mask": torch.ones_like(ids)}):
            found = model(ids, position_ids=torch.arange(24)[None], use_cache=False, **given)
            assert torch.equal(found.logits, whole)
        masked = model(ids, position_ids=places, attention_mask=torch.ones_like(ids))
    assert not torch.allclose(masked.logits[:, 7:], packed.logits[:, 7:], rtol=0.1)


@pytest.mark.parametrize("starts", [(0, 7), (0,)])
def test_positions_are_read_once(build, tokens, starts, monkeypatch):
    """Reading them waits for a GPU. The loss takes the bounds that the decoder has found."""
    reads, find = [], inputs.packed_bounds
    monkeypatch.setattr(inputs, "packed_bounds", lambda *given: reads.append(given) or find(*given))
    ends = (*starts[1:], 24)
    places = torch.cat([torch.arange(b - a) for a, b in zip(starts, ends, strict=True)])[None]
    build("latte-r-swa++")(tokens(1, 24), position_ids=places, labels=tokens(1, 24))
    assert len(reads) == 1


def test_indices_of_sequences_are_bounds(build, tokens):
    """They come with bounds or positions from some collators, and alone from others."""
    model, ids = build("latte-r-swa++"), tokens(1, 24)
    bounds = torch.tensor([0, 7, 8, 24], dtype=torch.int32)
    index = torch.repeat_interleave(bounds.diff())[None].int()
    flash = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": 16,
        "max_length_k": 16,
    }
    for decoder in (model, model.model):  # TRL calls the decoder
        with torch.no_grad():
            expected = decoder(ids, cu_seq_lens_q=bounds)[0]
            for given in ({}, flash, {"attention_mask": torch.ones_like(ids)}):
                assert torch.equal(decoder(ids, seq_idx=index, **given)[0], expected)
    with pytest.raises(ValueError, match=r"seq_idx changes within a row: .* got seq_idx \(2, 24\)"):
        model(ids.expand(2, 24), seq_idx=index.expand(2, 24))
    with pytest.raises(ValueError, match="packed sequences cannot be carried on"):
        model(ids, seq_idx=index, use_cache=True)
    converted = modeldb.BY_NAME["llama: window"].model()
    for each in (model, converted):
        with pytest.raises(
            ValueError, match=r"seq_idx must be a tensor \(B=1, T=24\) or .* \(24,\)"
        ):
            each(ids, labels=ids, seq_idx=index[0])


@pytest.mark.parametrize("name", ["latte-r-swa++", "llama: plain"])
def test_an_empty_last_sequence_takes_no_label(tokens, name):
    model, ids = modeldb.BY_NAME[name].model(), tokens(1, 12)
    with torch.no_grad():
        losses = [
            model(ids, labels=ids, cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32)).loss
            for bounds in ([0, 5, 12], [0, 0, 5, 12, 12])
        ]
        parts = [model(x, labels=x, num_items_in_batch=10).loss for x in (ids[:, :5], ids[:, 5:])]
    torch.testing.assert_close(losses, [sum(parts)] * 2)


HOLD = ["latte-r-swa++", "latte-conv++", "latte-gated", "latte-hybrid", "swa++"]
HOLD += ["llama: plain", "llama: kept"]
HOLD_NOT = ["latte", "latte++", "latte-r++", "transformer++", "linear++", "llama: base"]


@pytest.mark.parametrize("side", ["new tokens", "cached tokens"])
@pytest.mark.parametrize("name", HOLD + HOLD_NOT)
def test_padding_after_cached_tokens_takes_no_places(tokens, name, side):
    """Where a layer keeps its last tokens, padding would stand among them."""
    model, ids = modeldb.BY_NAME[name].model(), tokens(2, 16)
    mask = torch.ones_like(ids)
    mask[1, 9:12] = 0
    cut = 9 if side == "new tokens" else 12
    real = mask[1].bool()
    with torch.no_grad():
        cache = model(ids[:, :cut], attention_mask=mask[:, :cut], use_cache=True).past_key_values

        given = {"attention_mask": mask, "past_key_values": cache}
        if name in HOLD:
            with pytest.raises(ValueError, match="attention_mask: row 1 has padding between"):
                model(ids[:, cut:], **given)
            mask[1] = 1  # the cache is as it was
        found = model(ids[:, cut:], **given).logits
        torch.testing.assert_close(found[0], model(ids[:1]).logits[0, cut:], **TOLERANCE)
        if name in HOLD_NOT:
            alone = model(ids[1:, real]).logits[0, 9:]
            torch.testing.assert_close(found[1, 12 - cut :], alone, **TOLERANCE)


@pytest.mark.parametrize("name", ["latte-r-swa++", "llama: plain"])
def test_names_of_attention_functions(name, tmp_path):
    """Software passes the usual ones, which choose nothing; others promise what is not there."""
    modeldb.BY_NAME[name].make().float().save_pretrained(tmp_path)
    for given in (None, "eager", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=given)
        model.set_attn_implementation("sdpa")
        assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="expected 'eager' or 'sdpa', .* got 'flash_attention_2'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match="got 'flex_attention'"):
        model.set_attn_implementation("flex_attention")


def test_positions_that_start_anew_need_a_single_row(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(2, 8)
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match=r"a single row \(B = 1\), got position_ids \(2, 8\)"):
        model(ids, position_ids=places)
    model(ids, position_ids=places, attention_mask=torch.ones_like(ids))
    model(ids, position_ids=torch.arange(8).expand(2, 8) * 3)
    with pytest.raises(ValueError, match="start again within a row"):
        model(ids, position_ids=torch.zeros(2, 8, dtype=torch.long))


@pytest.mark.parametrize("preset", ["latte-r-swa++", "latte++", "latte-conv++"])
def test_positions_that_do_not_fit_are_refused(build, tokens, preset):
    model, ids = build(preset), tokens(2, 8)
    for wrong in (torch.arange(8), torch.zeros(2, 5).long(), torch.arange(8)[None, None], [[0]]):
        with pytest.raises(ValueError, match=r"position_ids must be a tensor \(B=2, T=8\) or"):
            model(ids, position_ids=wrong)
    assert model(ids, position_ids=torch.arange(8)[None]).logits.shape[:2] == (2, 8)


def test_positions_that_leave_some_out_are_of_one_sequence(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(2, 8)
    places = torch.tensor([[0, 1, 5, 6, 7, 20, 21, 22]])
    with torch.no_grad():
        alone = model(ids[:1], position_ids=places).logits
        both = model(ids, position_ids=places.expand(2, 8)).logits
    torch.testing.assert_close(alone[0], both[0])


def test_a_compiled_graph_reads_no_positions_on_the_host(build, tokens):
    model, ids = build("latte-r-swa++", "model"), tokens(1, 24)
    places = torch.arange(24)[None]
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(ids, position_ids=places, use_cache=False).last_hidden_state
        whole = model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, whole, **TOLERANCE)


@pytest.mark.parametrize("preset", PRESETS)
def test_bidirectional_sees_both_sides_and_ignores_padding(build, tokens, preset):
    model, ids = build(preset, "model", is_causal=False), tokens(2, 10)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 5) % 40
    with torch.no_grad():
        hidden = model(ids, attention_mask=mask).last_hidden_state
        alone = model(ids[1:, :7]).last_hidden_state
        other = model(changed, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(hidden[1:, :7], alone, **TOLERANCE)
    # Two layers with a window of 4 reach back from the last token to the fifth at least.
    assert (hidden[0, 6:9] - other[0, 6:9]).abs().amax(-1).min() > 1e-6
    torch.testing.assert_close(hidden[1], other[1], **TOLERANCE)


def test_shapes_that_do_not_fit_are_refused(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(2, 6)
    with pytest.raises(ValueError, match=r"attention_mask must be \(B=2, past \+ T=0 \+ 6\)"):
        model(ids, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="packed sequences cannot be carried on"):
        model(ids[:1], cu_seq_lens_q=torch.tensor([0, 6], dtype=torch.int32), use_cache=True)
    for name, value in (
        ("input_ids", ids.tolist()),
        ("attention_mask", [[1] * 6] * 2),
        ("cu_seq_lens_q", [0, 6]),
    ):
        with pytest.raises(ValueError, match=f"{name} must be a tensor, got list"):
            model(**{"input_ids": ids, name: value})
    with pytest.raises(TypeError, match="atention_mask"):
        model(ids, atention_mask=torch.ones(2, 6))
    bidirectional = build("latte-r-swa++", "model", is_causal=False)
    with pytest.raises(ValueError, match="a bidirectional model cannot be carried on"):
        bidirectional(ids, use_cache=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_attention_weights_are_probabilities_and_causal(build, tokens, preset):
    model, ids = build(preset), tokens(2, 9)
    with torch.no_grad():
        out = model(ids, output_attentions=True, output_hidden_states=True, use_cache=False)
        plain = model(ids, use_cache=False)
    assert len(out.attentions) == 2 and len(out.hidden_states) == 3
    assert torch.equal(out.logits, plain.logits)
    for weights in out.attentions:
        assert weights.shape == (2, 4, 9, 9)
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9).double(), **TOLERANCE)
        assert weights.triu(1).abs().max() == 0


def test_hidden_states_end_with_the_normed_ones(build, tokens):
    model, ids = build("latte++", "model"), tokens(1, 5)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    assert out.hidden_states[0].shape == (1, 5, 16)


@pytest.mark.parametrize("preset", ["latte-r-swa++", "latte++"])
def test_embeddings_are_multiplied_once_and_before_positions_are_added(build, tokens, preset):
    plain, ids = build(preset), tokens(2, 9)
    larger = build(preset, embedding_multiplier=8.0)  # the same weights: equal seeds
    given = 4.0 if preset == "latte++" else 1.0  # sqrt(16) beside sinusoidal positions
    with torch.no_grad():
        embeds = plain.get_input_embeddings()(ids)
        expected = plain(inputs_embeds=embeds * (8.0 / given), use_cache=False).logits
        torch.testing.assert_close(larger(ids, use_cache=False).logits, expected, **TOLERANCE)
        assert not torch.allclose(plain(ids, use_cache=False).logits, expected, rtol=0.1)
        head = larger(ids[:, :5], use_cache=True)
        tail = larger(ids[:, 5:], past_key_values=head.past_key_values).logits
    torch.testing.assert_close(tail, expected[:, 5:], **TOLERANCE)


def test_tuple_output(build, tokens):
    model, ids = build("latte++"), tokens(1, 5)
    with torch.no_grad():
        logits = model(ids, use_cache=False, return_dict=False)[0]
        assert torch.equal(logits, model(ids).logits)
