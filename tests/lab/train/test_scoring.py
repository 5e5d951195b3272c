"""Scores: summed over tokens, the same at any batching, segmenting and number of processes."""

import math

import pytest
import torch

from latte.errors import LatteError
from latte.lab.data import byte_tokenizer
from latte.lab.data.preparing import held_out_text
from latte.lab.evaluate.lengths import evaluate_lengths, table, write_rows
from latte.lab.train.recipe import DataSection
from latte.lab.train.scoring import score


@pytest.fixture(params=["latte-r-swa++", "latte++", "transformer++"])
def subject(request, make_recipe):
    """(model with large weights, held-out text)."""
    from latte.lab.data.preparing import prepare_text
    from latte.lab.train.run import build_model

    recipe = make_recipe(request.param)
    text = prepare_text(recipe.data, progress=False)
    recipe.model.overrides["initializer_range"] = 0.2
    if request.param == "latte++":
        recipe.model.overrides.pop("sliding_window")
    return build_model(recipe, text).eval(), text.held_out(400)


def direct(model, text, length, part=(0, 10**6)):
    """Window by window, without batches, segments or caches; a part of each window."""
    nll, tokens = 0.0, 0
    for ids, _ in text.documents():
        ids = torch.from_numpy(ids)
        for start in range(0, len(ids) - 1, length):
            end = min(start + length, len(ids) - 1)
            with torch.no_grad():
                logits = model(input_ids=ids[None, start:end]).logits[0]
            losses = torch.log_softmax(logits.double(), -1)
            losses = losses[torch.arange(end - start), ids[start + 1 : end + 1]][slice(*part)]
            nll -= float(losses.sum())
            tokens += len(losses)
    return nll, tokens


@pytest.mark.parametrize("length", [1, 48, 129])
def test_score_is_the_sum_over_windows(subject, length):
    model, text = subject
    nll, tokens = direct(model, text, length)
    found = score(model, text, length, segment=32, batch_tokens=300)
    assert found.tokens == tokens == text.num_targets
    assert found.nll == pytest.approx(nll, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(nll / math.log(2) / text.num_bytes, rel=1e-5)


def test_logits_of_a_large_vocabulary_are_bounded(subject, monkeypatch):
    """As many windows side by side as their logits allow, and one at least."""
    model, text = subject
    whole, rows = score(model, text, 48), []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )
    for windows in (3, 0):
        limit = 4 * 48 * model.config.vocab_size * windows
        monkeypatch.setattr("latte.lab.train.scoring.BATCH_LOGIT_BYTES", limit)
        rows.clear()
        assert score(model, text, 48).nll == pytest.approx(whole.nll, rel=1e-5)
        assert max(rows) == max(1, windows)
    hook.remove()


def test_segments_and_batches_change_nothing(subject):
    model, text = subject
    whole = score(model, text, 200, segment=1000, batch_tokens=200)
    for segment, batch_tokens in ((1, 10_000), (7, 1), (64, 400), (200, 10_000)):
        found = score(model, text, 200, segment=segment, batch_tokens=batch_tokens)
        assert found.nll == pytest.approx(whole.nll, rel=1e-5), (segment, batch_tokens)
        assert (found.tokens, found.text_bytes) == (whole.tokens, whole.text_bytes)


def test_scores_are_divided_by_position_in_the_window(subject):
    model, text = subject
    asked = {"segment": 32, "batch_tokens": 300, "positions": [5, 32, 40, 900]}
    found = score(model, text, 100, **asked)
    assert [first for first, _, _ in found.by_position] == [0, 5, 32, 40]  # none in 900
    assert sum(n for _, n, _ in found.by_position) == found.tokens
    assert sum(nll for *_, nll in found.by_position) == pytest.approx(found.nll, rel=1e-12)
    # The first parts of windows of 100, window by window.
    for first, n, nll in found.by_position[:2]:
        expected, tokens = direct(model, text, 100, (first, {0: 5, 5: 32}[first]))
        assert (n, nll) == (tokens, pytest.approx(expected, rel=1e-5))


def test_the_model_keeps_its_mode_and_the_random_state(subject):
    model, text = subject
    model.train()
    before = torch.random.get_rng_state()
    score(model, text, 32)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), before)


def test_rows_of_all_lengths_score_the_same_tokens(subject, tmp_path):
    model, text = subject
    rows = evaluate_lengths(model, text, [16, 64], progress=False)
    assert rows[0].tokens == rows[1].tokens and rows[0].text_bytes == rows[1].text_bytes
    assert len(table(rows).splitlines()) == 4
    write_rows(tmp_path / "rows.csv", {"m": rows})
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0].startswith("model,length,tokens") and len(lines) == 3
    assert not (tmp_path / "positions.csv").exists()
    rows = evaluate_lengths(model, text, [16, 64], progress=False, positions=[4, 16])
    assert "4 to 15 of 16" in table(rows) and "16 to 63 of 64" in table(rows)
    write_rows(tmp_path / "rows.csv", {"m": rows})
    assert (tmp_path / "rows.csv").read_text().splitlines()[0] == lines[0]
    parts = (tmp_path / "positions.csv").read_text().splitlines()
    assert parts[0] == "model,length,first,last,tokens,loss,perplexity" and len(parts) == 6
    with pytest.raises(LatteError, match="positions: expected rising numbers of at least 1, got"):
        evaluate_lengths(model, text, [16], positions=[4, 4])


def test_held_out_text_is_that_of_the_run(tmp_path, monkeypatch):
    """Every key of the section that chooses it counts: a dataset's configuration and split."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name, config, *, split, **_):
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"story": ["the held-out story"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    section = DataSection(
        corpus="hub:some/stories",
        field="story",
        hub_config="english",
        hub_validation_split="validation",
        cache_dir=str(tmp_path),
    )
    tokenizer = byte_tokenizer()
    ((ids, _),) = held_out_text(section, tokenizer).documents()
    assert asked == [("some/stories", "english", "validation")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the held-out story"
