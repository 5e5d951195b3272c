"""Saving, loading, Auto classes, tied weights, initialisation."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from latte.models import (
    PRESETS,
    LatteConfig,
    LatteForCausalLM,
    LatteForSequenceClassification,
    LatteModel,
    preset_config,
)


@pytest.mark.parametrize("preset", PRESETS)
def test_save_and_load_is_the_identity(build, tokens, tmp_path, preset):
    model = build(preset, dtype=torch.float32, tie_word_embeddings=True)
    ids = tokens(2, 9)
    model.save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")  # tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LatteForCausalLM
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    ours, theirs = model.config.to_dict(), loaded.config.to_dict()
    assert {key for key in ours if ours[key] != theirs[key]} <= {"_name_or_path", "dtype"}
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("probability", [None, 0.05, 0.7])
def test_the_windows_probability_is_what_it_starts_at(probability):
    torch.manual_seed(0)
    fields = {"window_probability": probability, "initializer_range": 0.002}  # logits near 0
    config = preset_config("latte-r-swa++", "tiny", **fields)
    model = LatteForCausalLM(config)
    found = []
    for layer in model.model.layers:
        layer.mixer.latents.register_forward_hook(
            lambda _m, _i, out: found.append(out[0].softmax(-1)[..., 0].mean())
        )
    with torch.no_grad():
        model(torch.randint(256, (2, 64)))
    expected = 1 / (16 + 1) if probability is None else probability  # 64 latents, 4 heads
    torch.testing.assert_close(torch.stack(found), torch.full((4,), expected), atol=0, rtol=0.05)
    biases = [name for name, _ in model.named_parameters() if "window_bias" in name]
    assert len(biases) == (0 if probability is None else 4)


def test_initial_fields_and_what_they_started_come_back(tmp_path):
    fields = {"window_probability": 0.3, "rglru_decay_range": [0.2, 0.4]}
    model = LatteForCausalLM(preset_config("latte-r-swa++", "tiny", **fields))
    latents = model.model.layers[1].mixer.latents
    decay = torch.exp(-8 * F.softplus(latents.input.rglru.theta))
    assert decay.min() >= 0.2 - 1e-5 and decay.max() <= 0.4 + 1e-5
    with torch.no_grad():
        latents.window_bias.fill_(1.5)  # as if trained
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.rglru_decay_range == model.config.rglru_decay_range == (0.2, 0.4)
    assert loaded.config.window_probability == 0.3
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name


def test_auto_classes(build, tmp_path):
    build("latte-r-swa++", dtype=torch.float32).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is LatteConfig
    backbone = AutoModel.from_pretrained(tmp_path)
    assert type(backbone) is LatteModel
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert type(classifier) is LatteForSequenceClassification
    assert classifier.score.weight.shape == (5, 16)
    theta = build("latte-r-swa++", dtype=torch.float32).model.layers[0].mixer.latents.input.rglru
    for model in (backbone, classifier.model):
        assert torch.equal(model.layers[0].mixer.latents.input.rglru.theta, theta.theta)
    from_config = AutoModelForCausalLM.from_config(preset_config("swa++", "tiny"))
    assert type(from_config) is LatteForCausalLM


def test_untied_head_is_saved(build, tokens, tmp_path):
    model = build("latte++", dtype=torch.float32)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(tokens(1, 5)).logits, loaded(tokens(1, 5)).logits)


def test_sharded_checkpoint_and_dtype(build, tokens, tmp_path):
    model = build("latte-conv-swa++", dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(tokens(1, 5)).logits, loaded(tokens(1, 5)).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_weights_missing_from_a_checkpoint_are_initialised(config, tmp_path):
    """from_pretrained builds on the meta device: what it does not load, _init_weights must fill."""
    LatteForCausalLM(config("latte-r-swa++", initializer_range=0.02)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {n: w for n, w in load_file(path).items() if ".layers.1." not in n}
    save_file(kept, path, metadata={"format": "pt"})
    mixer = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[1].mixer
    rglru = mixer.latents.input.rglru
    check_decay(rglru.theta)
    assert rglru.input_gate.bias.abs().max() == 0
    assert 0.2 < rglru.input_gate.weight.std() * rglru.input_gate.weight.shape[-1] ** 0.5 < 2
    assert (mixer.latents.input.norm.weight == 1).all()
    assert 0.01 < mixer.q_proj.weight.std() < 0.03
    assert 0.005 < mixer.o_proj.weight.std() < 0.015  # 0.02 / sqrt(2 * 2 layers)


def test_embeddings_begin_at_a_scale_of_their_own(config, tmp_path):
    fields = {"initializer_range": 0.1, "embedding_initializer_range": 0.01, "pad_token_id": 0}
    model = LatteForCausalLM(config("swa++", **fields))
    embeddings = model.model.embed_tokens.weight
    assert 0.008 < embeddings[1:].std() < 0.012 and not embeddings[0].any()
    assert 0.08 < model.model.layers[0].mixer.v_proj.weight.std() < 0.12
    with torch.no_grad():
        embeddings[0] = 1.0
    model.save_pretrained(tmp_path)
    loaded = LatteForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, embeddings)


def check_decay(theta):
    decay = torch.exp(-8 * F.softplus(theta.float()))
    assert decay.min() >= 0.899 and decay.max() <= 0.9995


def test_initialisation(config):
    wide = config("latte-r-swa++", hidden_size=512, num_attention_heads=4, initializer_range=0.02)
    torch.manual_seed(0)
    model = LatteForCausalLM(wide)
    mixer = model.model.layers[0].mixer
    theta = mixer.latents.input.rglru.theta
    check_decay(theta)
    squares = torch.exp(-8 * F.softplus(theta.detach())) ** 2
    # Uniform: mean and standard deviation of U(0.81, 0.998).
    assert abs(squares.mean() - (0.81 + 0.998) / 2) < 0.01
    assert abs(squares.std() - (0.998 - 0.81) / 12**0.5) < 0.01
    assert abs(mixer.v_proj.weight.std() - 0.02) < 0.001
    assert abs(mixer.o_proj.weight.std() - 0.01) < 0.001
    assert abs(model.model.layers[1].mlp.down_proj.weight.std() - 0.01) < 0.001
    assert abs(model.model.embed_tokens.weight.std() - 0.02) < 0.001
    conv = LatteForCausalLM(config("latte-conv++")).model.layers[0].mixer.latents.input.conv
    assert conv.bias.abs().max() == 0 and 0.1 < conv.weight.abs().max() <= 3**-0.5


def test_resizing_the_embeddings_keeps_them_tied(config):
    model = LatteForCausalLM(config("latte++", tie_word_embeddings=True))
    model.resize_token_embeddings(50)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[49, 3]])).logits.shape == (1, 2, 50)


def test_a_truncated_or_edited_config_is_one_clear_line(config, tmp_path):
    LatteForCausalLM(config("latte++")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"num_latents": 13}))
    with pytest.raises(ValueError, match="num_latents must be a multiple of") as caught:
        AutoConfig.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
