"""Scores: summed over tokens, the same at any batching, segmenting and number of processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from latte.errors import LatteError
from latte.lab.data import byte_tokenizer
from latte.lab.data.preparing import held_out_text
from latte.lab.evaluate.lengths import evaluate_lengths, table, write_rows
from latte.lab.train.recipe import DataSection
from latte.lab.train.scoring import _share, score


@pytest.fixture(params=["latte-r-swa++", "latte++", "transformer++"])
def subject(request: Any, make_recipe: Any) -> tuple[Any, Any]:
    """(model with large weights, held-out text)."""
    from latte.lab.data.preparing import prepare_text
    from latte.lab.train.run import build_model

    recipe = make_recipe(request.param)
    text = prepare_text(recipe.data, progress=False)
    recipe.model.overrides["initializer_range"] = 0.2
    if request.param == "latte++":
        recipe.model.overrides.pop("sliding_window")
    return build_model(recipe, text).eval(), text.held_out(400)


def direct(
    model: Any, text: Any, length: int, part: tuple[int, int] = (0, 10**6)
) -> tuple[float, int]:
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
def test_score_is_the_sum_over_windows(subject: tuple[Any, Any], length: int) -> None:
    model, text = subject
    nll, tokens = direct(model, text, length)
    found = score(model, text, length, segment=32, batch_tokens=300)
    assert found.tokens == tokens == text.num_targets
    assert found.nll == pytest.approx(nll, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(nll / math.log(2) / text.num_bytes, rel=1e-5)


def test_logits_of_a_large_vocabulary_are_bounded(
    subject: tuple[Any, Any], monkeypatch: Any
) -> None:
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


def test_segments_and_batches_change_nothing(subject: tuple[Any, Any]) -> None:
    model, text = subject
    whole = score(model, text, 200, segment=1000, batch_tokens=200)
    for segment, batch_tokens in ((1, 10_000), (7, 1), (64, 400), (200, 10_000)):
        found = score(model, text, 200, segment=segment, batch_tokens=batch_tokens)
        assert found.nll == pytest.approx(whole.nll, rel=1e-5), (segment, batch_tokens)
        assert (found.tokens, found.text_bytes) == (whole.tokens, whole.text_bytes)


def test_scores_are_divided_by_position_in_the_window(subject: tuple[Any, Any]) -> None:
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


def test_the_model_keeps_its_mode_and_the_random_state(subject: tuple[Any, Any]) -> None:
    model, text = subject
    model.train()
    before = torch.random.get_rng_state()
    score(model, text, 32)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), before)


def test_processes_share_all_batches_in_equal_rounds() -> None:
    batches = [{"number": torch.tensor(n)} for n in range(5)]
    taken = [
        [(int(batch["number"]), mine) for batch, mine in _share(iter(batches), rank, 3)]
        for rank in range(3)
    ]
    assert [len(rounds) for rounds in taken] == [2, 2, 2]
    counted = sorted(number for rounds in taken for number, mine in rounds if mine)
    assert counted == [0, 1, 2, 3, 4]


def test_rows_of_all_lengths_score_the_same_tokens(subject: tuple[Any, Any], tmp_path: Any) -> None:
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


def tensors_in(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """All tensors that lists, tuples and objects hold, once each."""
    if id(value) in seen or isinstance(value, str | int | float | type(None)):
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    return [tensor for part in parts for tensor in tensors_in(part, seen)]


def test_memory_is_constant_in_the_length(subject: tuple[Any, Any]) -> None:
    """Latte's cache after 4 segments is as large as after 1; softmax's grows."""
    model, _ = subject

    def cache_bytes(segments: int) -> int:
        cache = None
        with torch.no_grad():
            for _ in range(segments):
                output = model(
                    input_ids=torch.ones(1, 32, dtype=torch.long),
                    past_key_values=cache,
                    use_cache=True,
                )
                cache = output.past_key_values
        return sum(t.numel() * t.element_size() for t in tensors_in(cache.layers, set()))

    one, four = cache_bytes(1), cache_bytes(4)
    assert one > 0
    if model.config.mixer == "softmax":
        assert four > 3 * one
    else:
        assert four == one


def test_held_out_text_is_that_of_the_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key of the section that chooses it counts: a dataset's configuration and split."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name: str, config: str, *, split: str, **_: Any) -> Any:
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
