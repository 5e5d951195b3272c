"""Controls of a model with kept tokens: the same weights, and other scores."""

import json
from pathlib import Path

import pytest
import torch

from experiments.kept import layers
from experiments.kept.controls import set_scores
from experiments.kept.run import scores_in
from experiments.sides import side
from latte.conversion import convert
from latte.errors import LatteError
from latte.lab.data import byte_tokenizer
from tests.conversion.bases import tokens
from tests.helpers import read_csv


@pytest.fixture(scope="module")
def folder(save_llama, tmp_path_factory):
    where = tmp_path_factory.mktemp("kept")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    save_llama(where / "base", 4, num_key_value_heads=2, **sizes)
    byte_tokenizer().save_pretrained(where / "base")
    shape = {"window": 4, "num_sinks": 2, "num_latents": 8, "kept_tokens": 3, "kept_block": 2}
    convert(where / "base", where / "ours", delay_latents=True, joint_softmax=True, **shape)
    return where / "ours"


def kept(folder, fields, cut=40):
    """The positions (M, G) that the first layer holds after 40 tokens, read in two calls."""
    model, _ = side(f"x={folder}{fields}").load()
    ids = tokens(40, 3)
    with torch.no_grad():
        cache = None
        for part in (ids[:, :cut], ids[:, cut:]):
            if part.shape[1]:
                cache = model(part, past_key_values=cache, use_cache=True).past_key_values
    return model, cache.layers[0].state.kept.positions[0]


def test_the_latest_tokens_are_a_wider_window(folder):
    _, positions = kept(folder, ",scores=latest", cut=17)
    # A block of 2 tokens began at 38, so the window has 35 to 39, and three more are kept.
    assert sorted(set(positions.flatten().tolist()) - {-1}) == list(range(32, 40))


def test_scores_of_a_model_are_read_from_its_folder(folder, tmp_path):
    model, _ = side(f"x={folder}").load()
    found = scores_in(Path(folder))
    assert sorted(found) == [0, 1]
    for index, scores in found.items():
        weights = scores.state_dict()
        own = model.model.layers[index].self_attn.latents.kept_scores.state_dict()
        assert weights.keys() == own.keys()
        assert all(torch.equal(weights[name], own[name].float()) for name in own)
    with pytest.raises(LatteError, match="expected a model with kept tokens"):
        scores_in(tmp_path)


def test_random_tokens_are_kept(folder):
    _, first = kept(folder, ",scores=random")
    _, again = kept(folder, ",scores=random")
    assert torch.equal(first, again)
    left = first[first < 35]
    assert len(left[left >= 2]) == 3 * first.shape[1] and left.min() < 25
    assert not torch.equal(first[:3, 0], first[:3, 1])


def test_keys_far_from_the_mean_are_kept(folder):
    model, positions = kept(folder, ",scores=keydiff", cut=17)
    layer = model.model.layers[0].self_attn
    with torch.no_grad():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens(40, 3)))
        scores = layer.latents.kept_scores(x)[0]
    for group in range(positions.shape[1]):
        best = sorted(range(2, 35), key=lambda s: (-float(scores[s, group]), -s))[:3]
        assert set(best) <= set(positions[:, group].tolist())
    assert scores.min() >= -1 and scores.std() > 0


def test_other_scores_need_kept_tokens(folder):
    with pytest.raises(LatteError, match="expected random, latest or keydiff, got 'best'"):
        kept(folder, ",scores=best")
    with pytest.raises(LatteError, match="expected a model with kept tokens"):
        kept(folder, ",kept_tokens=0,scores=random")
    model, tokenizer = side(f"x={folder}").load()
    set_scores(model, tokenizer, "latest")  # of a model that is there


def test_layers_that_keep_every_token_are_the_base(folder, tmp_path):
    text = tmp_path / "text.jsonl"
    words = "The river was wide, and nobody had crossed it since the summer. " * 120
    text.write_text("\n".join(json.dumps({"text": f"{words}{i}"}) for i in range(4)))
    given = [str(folder.parent / "base"), str(folder), "--text", f"text={text}", "--kept", "1,400"]
    given += ["--texts", "1", "--asked", "0", "--length", "300"]
    table = tmp_path / "kept_layers.csv"
    assert layers.main([*given, "--output", str(table)]) == 0
    found = {(x["rows"], x["layer"], x["kept"]): float(x["kl"]) for x in read_csv(table)}
    numbers = {(layer, kept) for layer in ("0", "1", "all") for kept in ("1", "400")}
    assert {name[1:] for name in found} == numbers | {("all", "own")}
    assert found["text", "all", "400"] < 0.2 * found["text", "all", "own"]
    before = table.read_bytes()
    assert layers.main([*given, "--output", str(table)]) == 0
    assert table.read_bytes() == before
