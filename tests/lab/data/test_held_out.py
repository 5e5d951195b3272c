import math

import numpy as np
import pytest

from latte.errors import LatteError
from latte.lab.data import EvaluationText, bits_per_byte, perplexity

TEXTS = ["first ü text", "x", "another, somewhat longer document\n" * 3]


def scored(view, C):
    """(document, place, target) of everything that the windows score."""
    result = []
    for window in view.windows(C):
        assert len(window.input_ids) == len(window.targets) == len(window.target_bytes) <= C
        for i, target in enumerate(window.targets):
            if target != -100:
                result.append((window.document, window.start + i + 1, int(target)))
    return result


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("C", [1, 2, 7, 64, 1000])
def test_every_token_once_at_any_length(token_file, C, join):
    tokens = token_file(TEXTS)
    view = EvaluationText(tokens, join=join)
    found = scored(view, C)
    assert len(found) == len(set(found)) == view.num_targets == len(tokens) - len(TEXTS)
    assert [target for *_, target in found] == [
        int(token) for d in range(3) for token in tokens.document(d)[1:]
    ]
    total = sum(window.target_bytes.sum() for window in view.windows(C))
    assert total == view.num_bytes == tokens.num_bytes
    assert 257 not in {target for *_, target in found}
    assert view.num_documents == (1 if join else 3)


def test_windows_continue_the_document(token_file):
    view = EvaluationText(token_file(TEXTS[2:]))
    (ids, sizes), = view.documents()  # fmt: skip
    windows = list(view.windows(10))
    assert np.concatenate([w.input_ids for w in windows]).tolist() == ids[:-1].tolist()
    assert np.concatenate([w.targets for w in windows]).tolist() == ids[1:].tolist()
    assert np.concatenate([w.target_bytes for w in windows]).tolist() == sizes[1:].tolist()
    assert sizes[0] == sizes[-1] == 0


def test_batches_hold_what_the_windows_hold(token_file):
    view = EvaluationText(token_file(TEXTS))
    batches = list(view.batches(16, 4))
    targets = [b["targets"][b["targets"] != -100].tolist() for b in batches]
    expected = [t for w in view.windows(16) for t in w.targets]
    assert sorted(sum(targets, [])) == sorted(expected)
    assert sum(b["target_bytes"].sum().item() for b in batches) == view.num_bytes
    for batch in batches:
        assert batch["input_ids"].shape == batch["targets"].shape == batch["attention_mask"].shape
        assert ((batch["targets"] != -100) == batch["attention_mask"].bool()).all()


def test_limit_is_spread_and_deterministic(token_file):
    tokens = token_file([f"document number {i:03d}" for i in range(100)])
    view = EvaluationText(tokens, max_tokens=200)
    assert view.num_targets == 200 == len(scored(view, 16))
    assert view.num_bytes == sum(w.target_bytes.sum() for w in view.windows(16))
    again = EvaluationText(tokens, max_tokens=200)
    assert [ids.tolist() for ids, _ in again.documents()] == [
        i.tolist() for i, _ in view.documents()
    ]
    numbers = [
        int(bytes(ids[17:20].astype(np.uint8))) for ids, _ in view.documents() if len(ids) > 20
    ]
    assert numbers == sorted(numbers) and numbers[0] < 25 and numbers[-1] > 75
    assert EvaluationText(tokens, max_tokens=10**9).num_targets == len(tokens) - 100


def test_bytes_without_byte_level_tokens(token_file):
    tokens = token_file(TEXTS)
    tokens.byte_lengths = None
    for limit in (None, 60):
        view = EvaluationText(tokens, max_tokens=limit)
        total = sum(w.target_bytes.sum() for w in view.windows(7))
        assert total == pytest.approx(view.num_bytes)
    assert EvaluationText(tokens).num_bytes == tokens.num_bytes


def test_scores():
    # A fair coin a byte is one bit; perplexity counts tokens, not bytes.
    assert bits_per_byte(100 * math.log(2), 100) == pytest.approx(1)
    assert perplexity(100 * math.log(5), 100) == pytest.approx(5)
    assert perplexity(1e6, 1) == math.inf
    with pytest.raises(LatteError, match="at least one scored"):
        perplexity(1.0, 0)
    with pytest.raises(LatteError, match="at least one scored"):
        bits_per_byte(1.0, 0)


def test_errors(token_file):
    tokens = token_file(TEXTS)
    with pytest.raises(LatteError, match="max_tokens must be"):
        EvaluationText(tokens, max_tokens=0)
    with pytest.raises(LatteError, match="context_length must be"):
        next(EvaluationText(tokens).windows(0))
    with pytest.raises(LatteError, match="batch_size must be"):
        next(EvaluationText(tokens).batches(8, 0))
