"""Layers fitted one by one from recorded inputs: their errors in the model, and less."""

import copy

import pytest
import torch
from safetensors import safe_open

from latte.conversion.landmarks import set_landmarks
from latte.conversion.recording import FitOptions, LayerFit, record
from latte.conversion.step import RotaryTable
from tests.conversion.bases import converted, tokens
from tests.conversion.test_attention_distillation import errors

FIELDS = {"latent_input": "none", "delay_latents": True}


@pytest.fixture
def recorded(tmp_path):
    """recorded(family, **fields) -> the model, its rows and their files."""

    def run(family, **fields):
        model = converted(family, **(FIELDS | fields)).float()
        rows = [*tokens(40, 5)]
        set_landmarks(model, [torch.stack(rows)])
        return model, rows, record(model, rows, tmp_path / "rows")

    return run


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize(
    ("family", "scaling"),
    [("llama", None), ("llama", "longrope"), ("llama", "dynamic")]
    + [("gemma2", None), ("gemma3_text", None), ("qwen3", None)],
)
def test_a_layer_alone_has_the_errors_that_it_has_in_the_model(
    family, scaling, sinks, joint, recorded
):
    model, rows, files = recorded(family, scaling=scaling, num_sinks=sinks, joint_softmax=joint)
    found = errors(model, rows[0][None])
    layers = [x.self_attn for x in model.model.layers if x.self_attn.converted]
    for place, layer in enumerate(layers):
        fit = LayerFit(
            copy.deepcopy(layer), RotaryTable(model.model, layer.layer_kind), files[:2], 1
        )
        output, _ = fit.errors(fit.train[0])
        # Inputs and targets are kept in bf16, of 8 digits.
        torch.testing.assert_close(output, found.output[place], rtol=0.05, atol=2e-4)


def test_a_fit_lowers_the_error_and_keeps_the_best(recorded):
    model, _, files = recorded("llama", num_sinks=2, joint_softmax=True)
    layer = model.model.layers[1].self_attn
    files = [files[0], files[0]]  # a random text says nothing of another: judged by its own row
    fit = LayerFit(copy.deepcopy(layer), RotaryTable(model.model, layer.layer_kind), files, 1)
    latents, scores = fit.fit(FitOptions(steps=40, eval_steps=10, learning_rate=3e-2))
    assert scores[0].step == 0 and scores[-1].step <= 40

    def loss(score):
        return score.output + 0.1 * score.mass

    best = min(scores, key=loss)
    assert loss(best) < 0.9 * loss(scores[0])
    assert all(score.window == scores[0].window for score in scores)
    layer.latents.load_state_dict(latents)
    again = LayerFit(layer, RotaryTable(model.model, layer.layer_kind), files, 1)
    assert again.score(0).output == pytest.approx(best.output, rel=1e-5)
    unchanged = dict(model.model.layers[1].self_attn.named_parameters())
    for name, value in fit.layer.named_parameters():
        assert name.startswith("latents.") or torch.equal(value, unchanged[name])


def test_a_fit_ends_when_nothing_is_gained(recorded):
    model, _, files = recorded("llama")
    layer = model.model.layers[0].self_attn
    fit = LayerFit(layer, RotaryTable(model.model, layer.layer_kind), files, 1)
    _, scores = fit.fit(FitOptions(steps=50, eval_steps=1, patience=2, learning_rate=1e-9))
    assert [score.step for score in scores] == [0, 1, 2]


def test_rows_that_are_there_are_not_recorded_again(recorded, tmp_path):
    model, rows, files = recorded("llama")
    changed = [file.stat().st_mtime_ns for file in files]
    files[3].unlink()
    told = []
    assert record(model, rows, tmp_path / "rows", told.append) == files
    assert told == [1, 2, 3, 4, 5]
    again = [file.stat().st_mtime_ns for file in files]
    assert again[:3] + again[4:] == changed[:3] + changed[4:] and again[3] > changed[3]


def test_layers_that_are_kept_are_not_recorded(recorded):
    _, _, files = recorded("llama", converted_layers=(0, 2))
    with safe_open(str(files[0]), framework="pt") as opened:
        assert sorted(opened.keys()) == ["0", "2"]
        assert opened.get_tensor("2").shape == (40, 32)
