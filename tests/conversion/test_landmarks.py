"""Landmarks: the closed form against rotations one by one, and what they give every family."""

import pytest
import torch

from latte import LatteError
from latte.conversion import convert
from latte.conversion.attention_distillation import watch
from latte.conversion.landmarks import (
    Sample,
    Survey,
    calibration_rows,
    clusters,
    landmarks,
    rotary_mean,
    set_landmarks,
    turned,
)
from latte.conversion.step import RotaryTable
from latte.layers.weights import mixture, window_share
from tests.conversion.bases import NAMES, WINDOW, base, converted, tokens


def rotation(model, layer, offsets):
    """The base's own rotary table at these offsets, (n, K) cosines and sines."""
    rotary = RotaryTable(model.model, layer.layer_kind)
    cos, sin = rotary(torch.zeros(1, 1, 1), offsets[None])
    return cos[0].double(), sin[0].double()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_mean_rotation_is_that_of_all_pairs(family):
    """c' D k = mean over pairs of tokens of (c rotated to t) . (k rotated to s), t - s >= W."""
    model, length = converted(family, latent_input="none"), 40
    layer = next(x.self_attn for x in model.model.layers if x.self_attn.converted)
    torch.manual_seed(0)
    c, k = torch.randn(2, layer.head_dim, dtype=torch.float64)
    positions = torch.arange(length)
    cos, sin = rotation(model, layer, positions)
    table = cos[None], sin[None]
    rows = (x.expand(1, length, 1, -1) for x in (c, k))
    c_T, k_T = (x[0, :, 0] for x in layer._apply_rotary(*rows, *table, unsqueeze_dim=2))
    products = c_T @ k_T.T
    far = positions[:, None] - positions[None] >= layer.window
    expected = products[far].mean()
    mean = rotary_mean(model, layer, length)
    torch.testing.assert_close(turned(c[None], *mean)[0] @ k, expected, rtol=1e-6, atol=1e-7)


def test_clusters_are_found():
    torch.manual_seed(1)
    centres = torch.nn.functional.normalize(torch.randn(3, 16), dim=-1)
    q = 5 * centres.repeat_interleave(50, 0) + 0.1 * torch.randn(150, 16)
    with pytest.raises(LatteError, match="queries are not finite"):
        clusters(torch.full_like(q, torch.nan), 3, torch.Generator())
    u, c = clusters(q, 3, torch.Generator().manual_seed(0))
    nearest = (u @ centres.T).max(1)
    assert sorted(nearest.indices.tolist()) == [0, 1, 2]
    assert nearest.values.min() > 0.99
    torch.testing.assert_close(c.norm(dim=-1), torch.full((3,), 5.0), rtol=0.02, atol=0)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("family", NAMES)
def test_the_window_begins_with_the_mass_that_it_has_in_the_base(family, joint):
    # Without sinks, which the model sees nearer than the base does.
    model = converted(family, joint_softmax=joint, latent_input="none", delay_latents=True)
    if not any(layer.self_attn.converted for layer in model.model.layers):
        pytest.skip("a window in every layer")
    rows = [tokens(48, 4)]
    set_landmarks(model, rows)
    survey, shares = Survey(), {}

    class Watch(Survey):
        def __call__(self, layer, x, near, context):
            latent_q = mixture(layer, layer.with_logits(x, near, context), context)
            shares[layer.layer_idx] = window_share(latent_q)[:, layer.window :: 4]
            return super().__call__(layer, x, near, context)

    watch(model, Watch(), input_ids=rows[0])
    watch(model, survey, input_ids=rows[0])
    assert shares
    for index, share in shares.items():
        mass = torch.cat([sample.mass for sample in survey.samples[index]]).mean(0)
        # The samples' own bias; sinks are nearer for the model than for the base.
        torch.testing.assert_close(share.float().mean((0, 1)), mass, rtol=0.1, atol=0.05)


def test_landmarks_are_decided_by_the_seed_and_change_nothing_else():
    fields = {"latent_input": "none", "delay_latents": True}
    models = [converted("llama", **fields) for _ in range(3)]
    before = {n: p.clone() for n, p in models[0].named_parameters() if ".latents." not in n}
    for model, seed in zip(models, (0, 0, 1), strict=True):
        set_landmarks(model, [tokens(40, 2)], seed=seed)
    keys = [m.model.layers[0].self_attn.latents.k_proj.weight for m in models]
    assert torch.equal(keys[0], keys[1]) and not torch.equal(keys[0], keys[2])
    after = dict(models[0].named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_bias_of_the_queries_moves_the_keys_alone():
    """Clusters of q - b, whose logits are linear in x; the keys' logits are of whole queries."""
    plain, biased = (converted("qwen2", latent_input="none") for _ in range(2))
    layers = [model.model.layers[0].self_attn for model in (plain, biased)]
    sample = Sample(torch.randn(60, plain.config.hidden_size), None, *torch.rand(2, 60, 4))
    found = []
    for layer, size in zip(layers, (0.0, 3.0), strict=True):
        torch.nn.init.constant_(layer.q_proj.bias, size)
        q = layer.heads(sample.x[None].double())[0][0].float()
        generator = torch.Generator().manual_seed(0)
        mean_rotation = rotary_mean(plain, layer, 60)
        found.append(landmarks(layer, sample._replace(q=q), mean_rotation, generator))
    torch.testing.assert_close(found[0].q_HLE, found[1].q_HLE, rtol=1e-3, atol=1e-4)
    bias = torch.full((1, layers[0].head_dim), 3.0, dtype=torch.float64)
    moved = (layers[0].scale * turned(bias, *mean_rotation)).float()
    weight = layers[0].k_proj.weight.float().unflatten(0, (-1, layers[0].head_dim))[0]
    expected = found[0].k_HLE[0] + moved @ weight
    torch.testing.assert_close(found[1].k_HLE[0], expected, rtol=1e-3, atol=1e-4)


@pytest.fixture
def folder(tmp_path):
    base("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_the_converter_begins_with_them(folder):
    given = {"window": WINDOW, "num_latents": 8, "calibration": [tokens(40, 2)]}
    marked = convert(folder, **given)
    chosen = convert(folder, initial="landmarks", **given)
    drawn = convert(folder, initial="random", **given)
    key = "model.layers.0.self_attn.latents.k_proj.weight"
    assert torch.equal(marked.state_dict()[key], chosen.state_dict()[key])
    assert not torch.equal(marked.state_dict()[key], drawn.state_dict()[key])
    assert marked.config.num_sinks == 4 and marked.config.delay_latents
    assert marked.config.joint_softmax


def test_sixteen_latents_a_head_unless_said(folder):
    assert convert(folder, initial="random").config.num_latents == 16 * 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"initial": "best"}, "initial: expected one of auto, landmarks, random, got 'best'"),
        ({"initial": "landmarks", "latent_input": "conv"}, "initial=landmarks needs latent_input="),
        ({"initial": "landmarks"}, "has no tokenizer"),
        ({"calibration": []}, "calibration: expected some tokens, got none"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(folder, given, said):
    with pytest.raises(LatteError, match=said):
        convert(folder, num_latents=8, **given)


def test_without_a_text_latents_begin_at_random_and_it_is_said(folder):
    with pytest.warns(UserWarning, match="latents begin at random, .* has no tokenizer"):
        alone = convert(folder, num_latents=8)
    drawn = convert(folder, num_latents=8, initial="random")
    key = "model.layers.0.self_attn.latents.k_proj.weight"
    assert torch.equal(alone.state_dict()[key], drawn.state_dict()[key])


def test_calibration_rows_are_of_one_length_and_begin_as_documents():
    class Words:
        bos_token_id, eos_token_id = 7, 8

        def __call__(self, text, add_special_tokens):
            return type("Ids", (), {"input_ids": list(range(len(text.split())))})

    rows = calibration_rows(Words(), "a b " * 1300)
    assert [row.shape for row in rows] == [(1, 1024)] * 2
    assert all(row[0, 0] == 7 for row in rows) and rows[1][0, 1] == 1023
    assert [row.shape for row in calibration_rows(Words(), "a b " * 1300, 2000)] == [(1, 2000)]
    assert calibration_rows(Words(), "a b c")[0].tolist() == [[7, 0, 1, 2]]
    Words.bos_token_id = None
    assert calibration_rows(Words(), "a b c")[0].tolist() == [[8, 0, 1, 2]]
    assert len(calibration_rows(Words(), None)) == 8
    with pytest.raises(LatteError, match="calibration: expected some text, got none"):
        calibration_rows(Words(), "")
