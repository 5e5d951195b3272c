"""``generate`` as on a GPU: the prompt on PyTorch, every token after it on the step's kernels.

Against the same weights in fp64 on PyTorch. B rows, T tokens.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from kernel_helpers import DEVICE
from transformers import GenerationConfig

from latte.models import LatteCache, LatteForCausalLM, preset_config
from latte.ops import decoding

PRESETS = ["latte-conv++", "latte-r-swa++"]
NEW = 4


def models(preset):
    """A small model in fp32, and the same in fp64."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_latents": 12}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    sizes |= {"initializer_range": 0.4, "tie_word_embeddings": False}
    if "swa" in preset:
        sizes["sliding_window"] = 4
    single = LatteForCausalLM(preset_config(preset, "tiny", **sizes)).eval().to(DEVICE)
    return single, copy.deepcopy(single).double()


def prompt(B=3, T=6):
    ids = torch.randint(3, 40, (B, T), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids * mask, mask


def generate(model, ids, mask, **options):
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    config = GenerationConfig(
        **settings, return_dict_in_generate=True, output_logits=True, suppress_tokens=[0]
    )
    return model.generate(ids, attention_mask=mask, generation_config=config)


@contextmanager
def steps_on(backend):
    """What steps run on if nobody names a backend; prompts stay on PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "named_backend", lambda: backend)
        yield


@pytest.fixture
def served(monkeypatch):
    """The steps' kernels that were launched, by name."""
    names = []

    def counted(name):
        op = getattr(decoding, name)

        def call(*args):
            names.append(name)
            return op(*args)

        return call

    for name in ("latte_step_op", "macchiato_step_op"):
        monkeypatch.setattr(decoding, name, counted(name))
    return names


@pytest.mark.parametrize("preset", PRESETS)
def test_a_left_padded_batch(preset, served):
    single, double = models(preset)
    ids, mask = prompt()
    want = generate(double, ids, mask)
    assert not served
    with steps_on("triton"):
        got = generate(single, ids, mask)
    assert torch.equal(got.sequences, want.sequences)
    for a, e in zip(got.logits, want.logits, strict=True):
        assert (a.double() - e).abs().max() <= 1e-4 * e.abs().max()
    # One launch per layer and token after the first, which the prompt gives.
    op = "macchiato_step_op" if "swa" in preset else "latte_step_op"
    assert served == [op] * 2 * (NEW - 1)


def test_beams(served):
    single, double = models("latte-r-swa++")
    ids, mask = prompt(2)
    beams = {"num_beams": 2, "max_new_tokens": 3}
    want = generate(double, ids, mask, **beams)
    with steps_on("triton"):
        got = generate(single, ids, mask, **beams)
    assert torch.equal(got.sequences, want.sequences) and served


def test_taking_tokens_back(served):
    """Steps leave the states that an undo log starts from as they were."""
    single, double = models("latte-r-swa++")
    ids = prompt(2, 9)[0][1:]
    logits = []
    for model, backend in ((double, "torch"), (single, "triton")):
        cache = LatteCache(model.config)
        for layer in cache.layers:
            layer.activate_past_recording()
        with torch.no_grad(), steps_on(backend):
            for t in (slice(0, 5), slice(5, 6), slice(6, 7), slice(7, 8)):
                model(ids[:, t], past_key_values=cache)
            cache.crop(-2)
            logits.append(model(ids[:, 8:9], past_key_values=cache).logits.double())
    assert served
    assert (logits[1] - logits[0]).abs().max() <= 1e-4 * logits[0].abs().max()
