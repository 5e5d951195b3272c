"""What `latte inspect` says: weights are the model's own, statistics are right, files are whole.

Shape suffixes: T tokens, P tokens shown, H heads, L latents, S states.
"""

import base64
import json
import math
import re
import zlib

import numpy as np
import pytest
import torch

from latte.errors import LatteError
from latte.lab.inspect.mixing import Inspection, LayerMixing, share_rows, summary_rows, usage_rows
from latte.lab.inspect.report import (
    build_page,
    inspect_model,
    labels,
    outline,
    read_text,
    tokenize,
    write_report,
)
from latte.models import PRESETS
from tests.helpers import read_csv

TEXT = "the latent mean of a token, and the <b>state</b> & sum\nof the window. " * 2


@pytest.fixture
def seen(make_model, byte):
    """seen(preset, **options) -> (model, Inspection of it)."""

    def run(preset, text=TEXT, **options):
        model = make_model(preset)
        return model, inspect_model(model, byte, text, **{"shown": 48, "read": 96} | options)

    return run


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_those_of_the_model(seen, byte, preset):
    model, inspection = seen(preset)
    ids = torch.tensor([tokenize(byte, TEXT, 96)])
    with torch.no_grad():
        attentions = model(ids, output_attentions=True, use_cache=False).attentions
    assert list(inspection.layers) == [0, 1] and len(inspection.tokens) == 96
    windowed = preset.endswith("swa++") or preset == "transformer++"
    for mixing, expected in zip(inspection.layers.values(), attentions, strict=True):
        assert mixing.heads == 2
        for head in range(2):
            weights = mixing.source_weights(head, 48)
            torch.testing.assert_close(weights, expected[0, head, :48, :48], atol=2e-6, rtol=1e-4)
        if mixing.states_THS is not None:
            assert mixing.states_THS.shape == (96, 2, 8 + windowed)
            ones = torch.ones(96, 2)
            torch.testing.assert_close(mixing.states_THS.sum(-1), ones)
            assert mixing.names[0] == (0 if windowed else 1) and mixing.names[-1] == 8
    latents = preset.startswith("latte")
    assert inspection.has_latents == latents
    assert ("no latents" in outline(inspection)) != latents


def test_half_lives_of_latents_that_forget(seen, byte):
    """Of the text they are what its rates make of them; the weights are the model's own."""
    model, inspection = seen("latte-r-swa-f++")
    ids = torch.tensor([tokenize(byte, TEXT, 96)])
    rates = []
    for layer in model.model.layers:
        layer.mixer.latents.register_forward_hook(lambda _m, _i, out: rates.append(out[2]))
    with torch.no_grad():
        attentions = model(ids, output_attentions=True, use_cache=False).attentions
    rows = usage_rows(inspection)
    for index, (rate, weights) in enumerate(zip(rates, attentions, strict=True)):
        mine = [row for row in rows if row.layer == index]
        assert all(row.half_life is None for row in mine if row.state == 0)
        found = [row.half_life for row in mine if row.state]
        expected = math.log(2.0) / -rate[0].double().mean(0)
        assert found == pytest.approx(expected.flatten().tolist(), rel=1e-5)
        assert all(row.learnt_half_life > 0 for row in mine if row.state)
        shown = inspection.layers[index].source_weights(0, 48)
        torch.testing.assert_close(shown, weights[0, 0, :48, :48], atol=2e-6, rtol=1e-4)
    inspection.layers[0].half_lives_2HL[0, 0, 0] = math.inf  # nothing is forgotten
    page = build_page(inspection, summary_rows(inspection))
    assert re.search(r'"half_lives":\[\["Infinity",[\d.]+,', page)


def test_layers_can_be_chosen(seen):
    _, both = seen("latte-r-swa++")
    _, one = seen("latte-r-swa++", layers=[1, 1])
    assert list(one.layers) == [1]
    torch.testing.assert_close(one.layers[1].states_THS, both.layers[1].states_THS)


def test_recurrent_blocks_are_left_out(make_model, byte):
    def layers(number, **options):
        model = make_model("latte-hybrid", num_hidden_layers=number)
        return list(inspect_model(model, byte, TEXT, shown=8, read=16, **options).layers)

    assert layers(6) == [2, 5] and layers(6, layers=[5]) == [5]
    with pytest.raises(LatteError, match="layer 4 is a recurrent block.*numbers among 2, 5"):
        layers(6, layers=[2, 4])
    with pytest.raises(LatteError, match="recurrent blocks alone: expected a layer"):
        layers(2)


def test_a_page_that_would_be_huge(seen, monkeypatch):
    from latte.lab.inspect import report

    monkeypatch.setattr(report, "MOST_PAGE_BYTES", 4 * 32**2)
    seen("latte-r-swa++", shown=32)
    with pytest.raises(LatteError, match="expected at most 32 for the 4 heads of 2 layers, got 33"):
        seen("latte-r-swa++", shown=33)
    seen("latte-r-swa++", shown=33, layers=[0])


def test_a_bidirectional_model(byte):
    from latte.models import LatteForSequenceClassification, preset_config

    model = LatteForSequenceClassification(preset_config("latte++", "tiny", is_causal=False))
    with pytest.raises(LatteError, match="bidirectional model cannot be inspected"):
        inspect_model(model, byte, TEXT, shown=8, read=8)


def with_mixer(make_model, forward=None, **methods):
    """A model whose mixers' class defines these, with a `forward` of its own if it is given."""
    model = make_model("latte++")
    for block in model.model.layers:
        kind = type(block.mixer)
        own = {"forward": forward} if forward else {}
        block.mixer.__class__ = type("Own", (kind,), {**methods, **own})
    return model


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_mixer_that_tells_no_weights_is_one_line(make_model, byte, error):
    def mixing_logits(self, *args, **kwargs):
        raise error("Own has nothing\nto show")

    model = with_mixer(make_model, mixing_logits=mixing_logits)
    with pytest.raises(LatteError, match="^Own cannot be inspected: Own has nothing to show$"):
        inspect_model(model, byte, TEXT, shown=8, read=8)


def test_text_and_file_go_apart(tmp_path):
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("some words", encoding="utf-8")
    lines.write_text('{"text": " "}\n{"text": "second"}\n', encoding="utf-8")
    assert read_text("given", None) == "given"
    assert read_text("\udcffgiven", None) == "\ufffdgiven"  # a byte that is no UTF-8
    assert read_text(None, str(plain)) == "some words"
    assert read_text(None, str(lines)) == "second"
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\x00\x01")
    for text, file, message in [
        (None, None, "expected --text or --file, got neither"),
        ("a", str(plain), "got both"),
        ("  ", None, "--text: expected some text, got none"),
        (None, str(tmp_path / "none.txt"), "cannot be read"),
        (None, str(tmp_path), "cannot be read"),
        (None, str(tmp_path / "empty.txt"), "expected some text, found none"),
        (None, str(tmp_path / "binary"), "found a binary file"),
    ]:
        with pytest.raises(LatteError, match=re.escape(message)):
            read_text(text, file)


def test_labels_show_parts_of_characters_as_bytes(byte):
    ids = tokenize(byte, "aé\n", 10)
    assert labels(byte, ids) == ["<|startoftext|>", "a", "<C3>", "<A9>", "\n"]
    assert tokenize(byte, "x" * 10_000, 10) == tokenize(byte, "x" * 9, 10)


def mixture(p_TS, k_TL=None, window_PP=None, **options):
    """A LayerMixing of one head."""
    k_TL = torch.zeros(len(p_TS), p_TS.shape[1] - (window_PP is not None)) if k_TL is None else k_TL
    window = None if window_PP is None else window_PP[None]
    return LayerMixing(p_TS[:, None], k_TL[:, None], window, **options)


def inspection_of(mixing, shown=None):
    T = len(mixing.states_THS)
    return Inspection("hand made", ["x"] * T, T if shown is None else shown, {3: mixing})


def test_effective_numbers_and_collapse():
    T, L = 12, 4
    alike = inspection_of(mixture(torch.full((T, L), 1 / L)))
    (row,) = summary_rows(alike)
    assert (row.layer, row.latents, row.window_share) == (3, L, None)
    assert row.effective_latents == pytest.approx(L)
    assert row.effective_latents_per_token == pytest.approx(L)
    assert row.unused_latents == row.unused_among_latents == 0

    one = torch.zeros(T, L)
    one[:, 2] = 1.0
    (row,) = summary_rows(inspection_of(mixture(one)))
    assert row.effective_latents == pytest.approx(1)
    assert row.unused_latents == row.unused_among_latents == L - 1
    assert [r.unused for r in usage_rows(inspection_of(mixture(one)))] == [True, True, False, True]

    # Each token asks one latent, and all are asked alike: L on average, one per token.
    divided = torch.eye(L).repeat(T // L, 1)
    (row,) = summary_rows(inspection_of(mixture(divided)))
    assert row.effective_latents == pytest.approx(L)
    assert row.effective_latents_per_token == pytest.approx(1)


def test_the_window_is_told_from_the_latents():
    T, L = 10, 4
    p = torch.cat([torch.full((T, 1), 0.999), torch.full((T, L), 0.001 / L)], 1)
    p[:, 1:] = torch.tensor([0.5, 0.5, 0.0, 0.0]) * 0.001
    inspection = inspection_of(mixture(p, window_PP=torch.eye(T), width=1))
    (row,) = summary_rows(inspection)
    assert row.window_share == pytest.approx(0.999)
    assert row.effective_latents == pytest.approx(2)  # renormalised over l >= 1
    assert row.effective_states < 1.02
    assert (row.unused_latents, row.unused_among_latents) == (4, 2)
    assert [r.state for r in usage_rows(inspection)] == [0, 1, 2, 3, 4]
    first = usage_rows(inspection)[0]
    assert first.of_equal_share == pytest.approx(0.999 * 5) and not first.unused
    shares = share_rows(inspection)
    assert (shares[0].first_position, shares[-1].last_position) == (0, T - 1)
    assert all(share.window_share == pytest.approx(0.999) for share in shares)


@pytest.mark.parametrize("delay", [0, 3])
def test_distances_are_those_of_the_dense_weights(delay):
    T, L = 20, 3
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(T, L + 1, generator=generator).mul(2).softmax(-1)
    keys = torch.randn(T, L, generator=generator) * 30  # far beyond what exp of fp32 sums hold
    window = torch.rand(T, T, generator=generator).tril()
    window = window / window.sum(-1, keepdim=True)
    mixing = mixture(p, keys, window, width=T, delay=delay)
    weights = mixing.latent_weights(0, T).double()
    seen = torch.ones(T, T, dtype=torch.bool).tril(-delay)
    assert (weights * ~seen).abs().max() == 0
    torch.testing.assert_close(
        weights.sum(-1), seen.any(-1).double().expand(L, -1), rtol=1e-5, atol=0
    )
    back = torch.arange(T)[:, None] - torch.arange(T)
    parts = torch.cat([window.double()[None], weights])
    for row, part, asked in zip(
        usage_rows(inspection_of(mixing)), parts, p.double().T, strict=True
    ):
        asked = asked * part.sum(-1)  # before the delay a latent is not asked
        expected = (asked * (part * back).sum(-1)).sum() / asked.sum()
        assert row.mean_distance == pytest.approx(float(expected), rel=1e-4)


def test_the_report_of_a_model_with_window_and_latents(seen, tmp_path):
    _, inspection = seen("latte-conv-swa++", at=[30, 7, 30])
    written = write_report(inspection, tmp_path)
    assert sorted(written) == sorted(path.name for path in tmp_path.iterdir())
    usage, summary = read_csv(tmp_path / "usage.csv"), read_csv(tmp_path / "summary.csv")
    assert len(usage) == 2 * 2 * 9 and len(summary) == 2 * 2
    for layer in "01":
        mine = [row for row in usage if (row["layer"], row["head"]) == (layer, "1")]
        assert [row["state"] for row in mine] == [str(n) for n in range(9)]
        assert sum(float(row["mean_probability"]) for row in mine) == pytest.approx(1, abs=1e-4)
    for name in ("collapse.png", "effective.png", "window_share.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    weights = read_csv(tmp_path / "weights.csv")
    assert {row["position"] for row in weights} == {"7", "30"}
    whole = inspection.layers[1].source_weights(1, 48)[30]
    rows = [
        row for row in weights if (row["layer"], row["head"], row["position"]) == ("1", "1", "30")
    ]
    (most, *_) = [row for row in rows if row["state"] == "all"]
    assert int(most["source"]) == int(whole.argmax())
    assert float(most["p_source"]) == pytest.approx(float(whole.max()), rel=1e-4)
    states = {row["state"]: float(row["p_state"]) for row in rows if row["state"] != "all"}
    assert sum(states.values()) == pytest.approx(1, abs=1e-4) and len(states) == 9


def test_the_report_of_a_model_without_latents(seen, tmp_path):
    _, inspection = seen("swa++")
    assert write_report(inspection, tmp_path) == ["summary.csv", "index.html"]
    rows = read_csv(tmp_path / "summary.csv")
    assert all(row["latents"] == "0" and row["window_share"] == "" for row in rows)
    assert 1 < float(rows[0]["effective_sources"]) <= 16  # the window's width


def unpack(text, dtype, *shape):
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)


def test_the_page_holds_the_probabilities(seen):
    _, inspection = seen("latte-r-swa++")
    page = build_page(inspection, summary_rows(inspection))
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    data = json.loads(embedded[1])
    assert data["tokens"] == inspection.tokens[:48] and data["read"] == 96
    for layer, mixing in zip(data["layers"], inspection.layers.values(), strict=True):
        assert layer["names"] == list(range(9)) and layer["width"] == 16
        states = unpack(layer["states"], "<u2", 48, 2, 9) / 65535
        np.testing.assert_allclose(states, mixing.states_THS[:48], atol=1e-5)
        keys = unpack(layer["keys"], "<f4", 48, 2, 8)
        np.testing.assert_array_equal(keys, mixing.latent_k_THL[:48])
        window = unpack(layer["window"], "u1", 2, 48, 48).astype(float) ** 2
        window /= window.sum(-1, keepdims=True)
        np.testing.assert_allclose(window, mixing.window_HPP, atol=0.006)


def test_the_page_is_whole_and_harmless(seen, byte):
    """It loads nothing, and no text can become markup or end the script."""
    hostile = (
        "</script><script>alert(1)</script><!-- {{style}} \\u2028 <img src=x onerror=alert(1)>"
    )
    _, inspection = seen("latte++", text=hostile, shown=96)
    tokens = [hostile, *inspection.tokens[1:]]  # one token that is the whole of it
    inspection = Inspection('<i>"name"</i>', tokens, inspection.shown, inspection.layers)
    page = build_page(inspection, summary_rows(inspection))
    assert "alert" not in re.sub(r'(id="data">).*?(</script>)', r"\1\2", page, flags=re.S)
    assert page.count("<script") == page.count("</script>") == 2
    assert "<i>" not in page and "{{script}}" not in page and "{{data}}" not in page
    assert not re.search(r'(?:src|href)="(?!data:,")|https?://|@import|url\(', page)
    data = re.search(r'id="data">(.*?)</script>', page, re.S)[1]
    assert json.loads(data)["tokens"][0] == hostile


def test_sources_of_even_weights():
    T = 9
    (row,) = summary_rows(inspection_of(mixture(torch.ones(T, 1))))
    mean_entropy = sum(math.log(t + 1) for t in range(T)) / T
    assert row.effective_sources == pytest.approx(math.exp(mean_entropy))
    assert row.mean_distance == pytest.approx(sum(t / 2 for t in range(T)) / T)
