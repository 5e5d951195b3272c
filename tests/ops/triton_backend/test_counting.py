"""How many kernels a layer launches on a GPU without compiling, and that nothing waits for it."""

import os
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from latte.models import LatteForCausalLM, preset_config  # noqa: E402
from tests.ops.triton_backend.counting import as_on_a_gpu  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter launches nothing"
)
IDS = torch.ones(2, 40, dtype=torch.long)
# Of a layer. Matrix products are 11 of the forward pass's, and 21 of the backward pass's.
MOST = {False: {"forward": 24, "backward": 40}, True: {"forward": 32, "backward": 51}}  # autocast
OF_LLAMA = 1.2  # times the kernels of Llama's step
LAYERS = 12  # of the models whose steps are compared


def latte(layers):
    return LatteForCausalLM(preset_config("latte-r-swa++", "tiny", num_hidden_layers=layers))


def llama(layers):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=300, num_hidden_layers=layers, **sizes)
    return LlamaForCausalLM(config)


def training(model, lowered):
    """Kernels of the passes, and synchronisations."""
    model.train()
    with as_on_a_gpu() as count:
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            loss = model(IDS, labels=IDS).loss
        forward = count.total
        loss.backward()
    return {"forward": forward, "backward": count.total - forward, "waits": count.waits.total()}


def step(model):
    """Kernels of one token after others, and synchronisations."""
    model.eval()
    with torch.no_grad(), as_on_a_gpu() as count:
        cache = model(IDS, use_cache=True).past_key_values
        model(IDS[:, :1], past_key_values=cache)
        before, waited = count.total, count.waits.total()
        model(IDS[:, :1], past_key_values=cache)
    return {"step": count.total - before, "waits": count.waits.total() - waited}


def a_layer(measured, make):
    """The same of one layer, and of the rest of a model with one layer."""
    measured(make(1))  # fills what is kept between calls
    one, two = measured(make(1)), measured(make(2))
    layer = {name: two[name] - one[name] for name in one}
    return layer, {name: one[name] - layer[name] for name in one}


@pytest.mark.parametrize("lowered", MOST, ids=["plain", "autocast"])
def test_a_layer_in_training(lowered):
    layer, rest = a_layer(partial(training, lowered=lowered), latte)
    assert layer["waits"] == rest["waits"] == 0
    for name, most in MOST[lowered].items():
        assert layer[name] <= most


def test_a_step_of_decoding_beside_llamas():
    ours, other = (a_layer(step, make) for make in (latte, llama))
    whole = [layer["step"] * LAYERS + rest["step"] for layer, rest in (ours, other)]
    assert whole[0] <= OF_LLAMA * whole[1]
    assert ours[0]["waits"] == ours[1]["waits"] == 0
