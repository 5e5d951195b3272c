"""Every family: the base's weights, its window exactly, its own attention exactly."""

import pytest
import torch

from latte.conversion.attention_distillation import base_output
from latte.conversion.modeling import FAMILIES
from latte.lab.train.conversion_trainer import mixing
from tests.conversion.bases import NAMES, WINDOW, base_logits, converted, full_layers, tokens

EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("family", NAMES)
def test_p0_of_one_is_the_base_with_a_window_on_every_layer(family):
    ids = tokens()
    wanted = base_logits(family, ids, WINDOW)
    model = converted(family, mixing="window")
    torch.testing.assert_close(model(ids).logits, wanted, **EXACT)
    # The same by the weights alone: a window logit that leaves the latents nothing.
    model = converted(family)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.latents.window_bias.fill_(1e4)
    torch.testing.assert_close(model(ids).logits, wanted, **EXACT)
    # A window that holds everything is full attention.
    everything = converted(family, mixing="window", local_window=64)
    torch.testing.assert_close(everything(ids).logits, base_logits(family, ids, None), **EXACT)


@pytest.mark.parametrize("family", NAMES)
def test_the_base_control_is_the_base(family):
    ids = tokens()
    model = converted(family, mixing="base")
    torch.testing.assert_close(model(ids).logits, base_logits(family, ids, "own"), **EXACT)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen2"])
def test_layers_with_a_window_of_their_own_keep_it(family):
    ids, full = tokens(30), full_layers(family)
    model = converted(family, mixing="window", converted_layers=full)
    wanted = base_logits(family, ids, "own", of_full=WINDOW)
    torch.testing.assert_close(model(ids).logits, wanted, **EXACT)
    model = converted(family, mixing="base", converted_layers=full)
    torch.testing.assert_close(model(ids).logits, base_logits(family, ids, "own"), **EXACT)
    assert [name for name in dict(model.named_parameters()) if ".latents." in name]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_kept_layers_have_full_attention(family):
    """With a window that holds everything in the others, the model is the base."""
    ids, full = tokens(30), full_layers(family)
    options = {"mixing": "window", "converted_layers": full[1:], "num_sinks": 2}
    model = converted(family, local_window=64, **options)
    torch.testing.assert_close(model(ids).logits, base_logits(family, ids, "own"), **EXACT)
    # And a token beyond all windows changes what follows, by the kept layer alone.
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 1) % 50
    for layers, reaches in ((full[1:], True), (full, False)):
        model = converted(family, mixing="window", converted_layers=layers)
        changed = (model(other).logits - model(ids).logits)[:, 28:].abs().max()
        assert bool(changed > 1e-6) == reaches


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_kept_layers_with_a_window(family):
    """The kept layers are windows with sinks, as wide as asked; the others do not change."""
    ids, full = tokens(30), full_layers(family)
    options = {"converted_layers": full[1:], "num_sinks": 2, "delay_latents": True}
    options["latent_input"] = "none"
    whole = converted(family, **options)
    wide = converted(family, **options, kept_window=30)
    torch.testing.assert_close(wide(ids).logits, whole(ids).logits, **EXACT)
    assert whole.config.state_grows(full[0]) and not wide.config.state_grows(full[0])
    # As wide as the window of the other layers, it is their control without latents.
    narrow = converted(family, **options, kept_window=WINDOW, mixing="window")
    control = converted(family, num_sinks=2, mixing="window", converted_layers=full)
    torch.testing.assert_close(narrow(ids).logits, control(ids).logits, **EXACT)
    assert (narrow(ids).logits - wide(ids).logits).abs().max() > 1e-6
    # As the base, and as its own teacher, the model has full attention.
    based = converted(family, **options, kept_window=WINDOW, mixing="base")
    torch.testing.assert_close(based(ids).logits, base_logits(family, ids, "own"), **EXACT)
    with mixing(narrow, "base"):
        found = narrow(ids).logits
    torch.testing.assert_close(found, base_logits(family, ids, "own"), **EXACT)
    learned = converted(family, **options, kept_window=WINDOW)

    def teacher(layer, _, near, context):
        return base_output(layer, near, context)

    taught = learned.model(ids, teacher=teacher, use_cache=False).last_hidden_state
    torch.testing.assert_close(taught, based.model(ids).last_hidden_state, **EXACT)


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 4), (0, 0)])
def test_layers_that_there_are_not(layers):
    with pytest.raises(ValueError, match="converted_layers must be rising numbers of some of 4"):
        converted("llama", converted_layers=layers)


@pytest.mark.parametrize("family", NAMES)
def test_latents_change_the_logits_and_reach_beyond_the_window(family):
    ids = tokens(30)
    model = converted(family)
    logits = model(ids).logits
    assert (logits - base_logits(family, ids, WINDOW)).abs().max() > 1e-3
    # Four layers of a window of 5 reach 16 tokens back; the first of 30 is out of that.
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 1) % 50
    assert (model(other).logits - logits)[:, 20:].abs().max() > 1e-6
    window = converted(family, mixing="window")
    assert torch.equal(window(other).logits[:, 20:], window(ids).logits[:, 20:])


@pytest.mark.parametrize("latent_input", ["none", "conv", "rglru"])
def test_the_window_starts_at_the_probability_asked_for(latent_input):
    from transformers import set_seed

    from latte.layers.weights import window_share

    set_seed(0)
    kind, language_model = type(converted("llama").config), FAMILIES["llama"][1]
    config = kind(hidden_size=64, num_attention_heads=4, num_key_value_heads=4,
                  num_hidden_layers=2, intermediate_size=64, vocab_size=50, num_latents=32,
                  latent_input=latent_input, window_probability=0.9)  # fmt: skip
    model = language_model(config)
    shares = []
    for layer in model.model.layers:
        layer.self_attn.latents.register_forward_hook(
            lambda _m, _i, out: shares.append(window_share(out[0]))
        )
    model(tokens())
    assert len(shares) == 2
    assert abs(torch.stack(shares).mean() - 0.9) < 0.02


def test_gradient_checkpointing_changes_no_gradient():
    ids = tokens()
    gradients = []
    for checkpointing in (False, True):
        model = converted("gemma2").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        latents = model.model.layers[1].self_attn.latents
        gradients.append([p.grad for p in latents.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-12, atol=1e-12)


def test_half_precision_keeps_the_logits_weights_wide(tmp_path):
    model = converted("qwen3").to(torch.float32)
    model.save_pretrained(tmp_path)
    loaded = FAMILIES["qwen3"][1].from_pretrained(tmp_path, dtype=torch.bfloat16)
    attention = loaded.model.layers[0].self_attn
    assert attention.q_proj.weight.dtype == torch.bfloat16
    assert {p.dtype for p in attention.latents.parameters()} == {torch.float32}
    ids = tokens()
    low, high = loaded(ids).logits.float(), model(ids).logits
    assert low.isfinite().all()
    assert (low - high).norm() < 0.1 * high.norm()


@pytest.mark.parametrize("option", [{}, {"num_sinks": 2, "delay_latents": True}])
@pytest.mark.parametrize("family", NAMES)
def test_autocast_is_near_to_full_precision(family, option):
    model = converted(family, **option).float().train()
    ids = tokens()
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - exact) < 0.05 * exact
    for name, parameter in model.named_parameters():
        if ".latents." in name:
            assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name
