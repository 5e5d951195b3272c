"""What a model keeps: tables, page, figure and lines say the same of made-up states.

Shape suffixes: N kept tokens, M slots, G groups.
"""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from latte.lab.inspect import report
from latte.lab.inspect.kept import (
    FILES,
    KeptTokens,
    build_page,
    collect_kept,
    outline,
    summary,
    write_kept,
)
from latte.lab.inspect.mixing import find_layers
from latte.lab.inspect.report import inspect_model, write_report
from tests.conversion.bases import converted
from tests.helpers import read_csv

TOKENS = ["<s>", "the", " code", " is", " 74193", "\n", "</script>", " so", " it", " is"]


def state(positions_GM, scores_GM, seen=10):
    """A state of one sequence, written by group."""
    positions = torch.tensor(positions_GM).T[None]
    scores = torch.tensor(scores_GM, dtype=torch.float32).T[None]
    return SimpleNamespace(positions=positions, scores=scores, seen=torch.tensor([seen]))


GONE = -torch.inf
# Layer 2 keeps two tokens in each of two groups, layer 5 one token in one of them. The window has
# three slots.
STATES = {
    2: (state([[4, 2, 7, 8, 9], [4, 6, 7, -1, 9]], [[5, 1.5, 0, 0, 0], [3, 2, 0, GONE, 0]]), 2),
    5: (state([[4, -1, -1, 8, 9], [-1] * 5], [[torch.inf, GONE, GONE, 0, 0], [GONE] * 5]), 2),
}
KEPT = {layer: KeptTokens.of_state(*given) for layer, given in STATES.items()}


def test_the_tables(tmp_path):
    write_kept(tmp_path, TOKENS, KEPT, "a model, 10 tokens")
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
    found = [
        (int(r["layer"]), int(r["group"]), int(r["rank"]), int(r["position"]), float(r["score"]))
        for r in read_csv(tmp_path / "kept.csv")
    ]
    assert found == [
        *((2, 0, 1, 4, 5.0), (2, 0, 2, 2, 1.5)),
        *((2, 1, 1, 4, 3.0), (2, 1, 2, 6, 2.0)),
        (5, 0, 1, 4, torch.inf),
    ]
    tokens = read_csv(tmp_path / "kept_summary.csv")
    assert [tuple(row.values()) for row in tokens] == [
        ("2", " code", "1", "1", "1.5"),
        ("4", " 74193", "2", "3", "inf"),
        ("6", "</script>", "1", "1", "2"),
    ]
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_the_lines():
    said = outline(TOKENS, KEPT)
    assert "up to 2 in each of 4 groups of 2 layers, 3 different ones of 10" in said
    assert said.index("' 74193' at 4 (3 of 4)") < said.index("' code' at 2 (1 of 4)")
    assert KEPT[2].window == 7 and KEPT[5].window == 8


def test_the_page_has_the_text_and_what_is_kept():
    page = build_page(TOKENS, KEPT, "<a> & b")
    assert "&lt;a&gt; &amp; b" in page and "{{" not in page and page.count("</script>") == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert data["tokens"] == TOKENS
    assert data["layers"] == [
        {"number": 2, "window": 7, "groups": [[[4, 5.0], [2, 1.5]], [[4, 3.0], [6, 2.0]]]},
        {"number": 5, "window": 8, "groups": [[[4, "Infinity"]], []]},  # as JavaScript reads it
    ]


def test_nothing_has_left_the_window(tmp_path):
    empty = {0: KeptTokens.of_state(state([[-1, -1, 0, 1]], [[GONE, GONE, 0, 0]], 2), 2)}
    write_kept(tmp_path, TOKENS[:2], empty, "short")
    assert summary(TOKENS[:2], empty) == [] and read_csv(tmp_path / "kept_summary.csv") == []
    assert "none has left the window yet" in outline(TOKENS[:2], empty)


def test_models_without_kept_tokens_have_no_such_files(make_model, byte, tmp_path):
    model = make_model("latte-r-swa++")
    assert collect_kept(model, [1, 2, 3], find_layers(model)) == {}
    inspection = inspect_model(model, byte, "a text", shown=4, read=8)
    assert not inspection.kept and not set(write_report(inspection, tmp_path)) & set(FILES)


def test_a_models_own(make_model, byte, tmp_path):
    """The tokens with the largest scores of all that have left the window, of each group."""
    from latte.models import LatteConfig

    if not hasattr(LatteConfig, "kept_sizes"):
        pytest.skip("layers keep no tokens yet")
    model = make_model(
        *("latte-r-swa++",),
        **{"kept_tokens": 4, "kept_block": 4, "delay_latents": True, "joint_softmax": True},
    )
    inspection = inspect_model(model, byte, "the mean of all " * 8, shown=32, read=96)
    assert list(inspection.kept) == [0, 1] and set(FILES) <= set(write_report(inspection, tmp_path))
    for found in inspection.kept.values():
        assert found.positions_NG.shape == (4, found.groups)
        assert bool((found.positions_NG >= 0).all()) and found.window <= 96 - 16 + 1
        assert bool((found.positions_NG < found.window + 4).all())
        assert bool((found.scores_NG.diff(dim=0) <= 0).all())


def test_a_text_is_read_to_the_end_of_the_range(byte, monkeypatch):
    """Beyond it a text is read in parts, and a part alone has no weights of the whole."""
    monkeypatch.setattr(report, "tokenize", lambda _, __, limit: ([*range(40)] * 10)[:limit])
    fields = {"delay_latents": True, "joint_softmax": True, "latent_input": "none"}
    model = converted("llama", **fields, kept_tokens=4, kept_block=4, max_position_embeddings=64)
    inspection = inspect_model(model, byte, "a text", shown=32, read=200)
    assert len(inspection.tokens) == 64 and inspection.shown == 32
    alone = inspect_model(model, byte, "a text", shown=32, read=32)
    for layer, found in inspection.layers.items():
        torch.testing.assert_close(found.states_THS[:32], alone.layers[layer].states_THS[:32])
