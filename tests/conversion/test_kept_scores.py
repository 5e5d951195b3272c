"""Scores of kept tokens: what later queries want, and the fit of a layer to it."""

import math

import pytest
import torch

from latte.conversion.attention_distillation import watch
from latte.conversion.kept_rows import AskedRow
from latte.conversion.kept_scores import (
    KeptFit,
    KeptFitOptions,
    KeptRecorder,
    fit_kept_scores,
    read_kept_scores,
    record_wanted,
    save_kept_scores,
    wanted,
)
from latte.conversion.recording import write_row
from latte.layers.kept_scores import KeptScores
from tests.conversion.bases import NAMES, converted, tokens

BLOCK, LENGTH, ASKED = 4, 26, 17


def wanted_by_definition(layer, near, asked):
    """One source at a time, from dense weights, for the sources that leave a window of a block."""
    q, k, v = (x[0].double() for x in (near.q, near.k, near.v))
    length, groups = k.shape[0], k.shape[1]
    q = q.unflatten(1, (groups, -1))
    logits = torch.einsum("tgrk,sgk->grts", q, k) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    seen = torch.ones(length, length).tril().bool()
    if layer.base_window is not None:
        seen &= torch.ones(length, length).triu(1 - layer.base_window).bool()
    weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
    found = torch.zeros(2, groups, length, dtype=torch.double)
    for source in range(layer.num_sinks, length):
        leaves = math.ceil((source + layer.window) / BLOCK) * BLOCK
        for row, first in enumerate((leaves, max(leaves, asked))):
            if first < length:
                most = weights[:, :, first:, source].amax((1, 2))
                found[row, :, source] = most * v[source].norm(dim=-1)
    return found


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("family", NAMES)
def test_what_later_queries_want_is_the_definition(family, sinks):
    model = converted(family, num_sinks=sinks).double()
    seen = []

    class Check(KeptRecorder):
        def __call__(self, layer, x, near, context):
            found = wanted(layer, near, BLOCK, ASKED)
            seen.append((found.double(), wanted_by_definition(layer, near, ASKED)))
            return super().__call__(layer, x, near, context)

    watch(model, Check(BLOCK, ASKED), input_ids=tokens(LENGTH))
    assert seen
    for found, expected in seen:
        size = found.shape[-1]
        torch.testing.assert_close(found, expected[..., :size], rtol=1e-5, atol=1e-7)
        assert not expected[..., size:].any()


def test_a_recording_continues_where_it_stopped(tmp_path):
    model = converted("llama", num_sinks=2)
    rows = [AskedRow(ids, 15) for ids in tokens(LENGTH, 3)]
    first = record_wanted(model, rows[:2], tmp_path, BLOCK)
    times = [file.stat().st_mtime_ns for file in first]
    done = []
    files = record_wanted(model, rows, tmp_path, BLOCK, done.append)
    assert files[:2] == first
    assert times == [file.stat().st_mtime_ns for file in first]
    assert done == [1, 2, 3]


def test_a_fit_finds_the_sources_that_are_wanted(tmp_path):
    """Sources whose input points in a direction are wanted; new rows have them at the top."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.nn.functional.normalize(torch.randn(16, generator=generator), dim=0)

    def row():
        x = torch.randn(200, 16, generator=generator)
        wants = torch.stack([x @ direction > 1.2, x @ direction < -1.2]).float() + 1e-3
        return x, wants

    files = []
    for number in range(8):
        x, wants = row()
        files.append(tmp_path / f"{number}.safetensors")
        write_row(files[-1], {"3": x, "3.wanted": wants.expand(2, 2, 200)})
    weights = KeptFit(3, files, 0).fit(KeptFitOptions(rows=4, learning_rate=1e-2, dropout=0.0))
    scores = KeptScores(16, 2)
    scores.load_state_dict(weights)
    x, wants = row()
    for group in range(2):
        many = int((wants[group] > 0.5).sum())
        top = scores(x)[:, group].topk(many).indices
        assert (wants[group][top] > 0.5).float().mean() > 0.7


def test_the_fit_of_a_model_is_deterministic_and_is_kept(tmp_path):
    model = converted("gemma3_text", num_sinks=2)
    rows = [AskedRow(ids, 15) for ids in tokens(LENGTH, 3)]
    options = KeptFitOptions(steps=3, rows=2)
    found = [
        fit_kept_scores(model, rows, tmp_path / name, block=BLOCK, options=options)
        for name in ("one", "two")
    ]
    assert found[0].keys() == {x.self_attn.layer_idx for x in model.model.layers
                               if x.self_attn.converted}  # fmt: skip
    save_kept_scores(tmp_path / "all", found[0])
    again = fit_kept_scores(model, rows, tmp_path / "one", block=BLOCK, options=options)
    for other in (found[1], again, read_kept_scores(tmp_path / "all")):
        for index, weights in found[0].items():
            torch.testing.assert_close(other[index], weights, rtol=0, atol=0)


def test_rows_within_the_window_say_what_is_expected(tmp_path):
    model = converted("llama", num_sinks=2)
    rows = [AskedRow(ids, 3) for ids in tokens(4, 2)]
    with pytest.raises(ValueError, match="longer than the window"):
        fit_kept_scores(model, rows, tmp_path, block=BLOCK)
