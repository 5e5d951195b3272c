"""Single tokens of a converted decoder: by few calls, and no module is passed over.

That they give the results of the whole sequence is a law in ``tests/models/test_laws.py``.
"""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from latte.models import LatteCache
from latte.ops import cpp_backend
from tests.conversion.bases import NAMES, converted, tokens

EXACT = {"rtol": 1e-9, "atol": 1e-9}
BOTH = {"num_sinks": 3, "delay_latents": True, "latent_input": "none"}


def read(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_adapter_is_not_passed_over(family):
    model, ids = converted(family, **BOTH).float(), tokens(8, 1)
    plain, layer = model(ids[:, :7], use_cache=False).logits[:, 6:], model.model.layers[1]
    layer.mlp.gate_proj = Twice(layer.mlp.gate_proj)
    layer.self_attn.q_proj = Twice(layer.self_attn.q_proj)
    whole = model(ids[:, :7], use_cache=False).logits[:, 6:]
    assert (whole - plain).abs().max() > 1e-3
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :6])
    torch.testing.assert_close(read(model, cache, ids[:, 6:7]), whole, rtol=1e-4, atol=1e-4)


class Twice(torch.nn.Module):
    """An adapter around a linear map."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


def test_what_is_asked_of_a_step_is_answered():
    model, ids = converted("llama", **BOTH), tokens(8)
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :6])
    with torch.no_grad():
        out = model(ids[:, 6:7], past_key_values=cache, output_hidden_states=True)
        assert len(out.hidden_states) == 5 and out.hidden_states[0].shape == (2, 1, 32)
        plain = model(ids[:, 7:8], past_key_values=cache, return_dict=False)
    assert isinstance(plain, tuple)
    torch.testing.assert_close(plain[0], model(ids, use_cache=False).logits[:, 7:], **EXACT)


@pytest.mark.parametrize("family", NAMES)
def test_generation_takes_steps(family):
    model, ids = converted(family, **BOTH), tokens(4)
    cache = LatteCache(model.config)
    model.generate(ids, max_new_tokens=3, past_key_values=cache, eos_token_id=None)
    assert cache.get_seq_length() == 6 and cache.layers[0].is_written_in_place


@pytest.mark.parametrize(("family", "most"), [("llama", 16), ("gemma3_text", 22)])
def test_a_step_takes_few_operations(family, most):
    """Counted as the profiler does, nested ones too; a count is the same on every machine."""
    if cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    model, ids = converted(family, **BOTH).float(), tokens(9, 1)
    cache = LatteCache(model.config)
    with torch.inference_mode():
        read(model, cache, ids[:, :7])
        read(model, cache, ids[:, 7:8])
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            read(model, cache, ids[:, 8:])
    names = [event.name for event in seen.events()]
    layers = model.config.num_hidden_layers
    kernels = sum(name.startswith("latte::") for name in names)
    others = sum(name.startswith("aten::") for name in names)
    assert kernels <= 12 * layers + 2
    assert others <= most * layers + 130  # once: the embedding, masks and rotary tables


@pytest.mark.skipif(cpp_backend.ABSENT is not None, reason=str(cpp_backend.ABSENT))
@pytest.mark.parametrize("part", ["latents.k_proj", "o_proj", "v_proj"])
def test_all_layers_are_one_kernel_until_a_part_is_hooked(part):
    """Little is read between two calls, so what a call costs is seen."""
    kept = {"kept_tokens": 4, "kept_block": 2, "local_window": 4, "joint_softmax": True}
    model = converted("llama", **BOTH, **kept).float()
    ids, cache, calls = tokens(16, 1), LatteCache(model.config), []
    whole = model(ids, use_cache=False).logits
    read(model, cache, ids[:, :13])
    read(model, cache, ids[:, 13:14])
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = [read(model, cache, ids[:, 14:15])]
    kernels = [event.name for event in seen.events() if event.name.startswith("latte::cpu_")]
    assert kernels == ["latte::cpu_layers", "latte::cpu_rms_norm", "latte::cpu_linear"]
    linear = model.model.layers[1].self_attn.get_submodule(part)
    linear.register_forward_hook(lambda *_: calls.append(1))
    found.append(read(model, cache, ids[:, 15:]))
    assert len(calls) == 1
    torch.testing.assert_close(torch.cat(found, 1), whole[:, 14:], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(cpp_backend.ABSENT is not None, reason=str(cpp_backend.ABSENT))
def test_weights_that_have_moved_in_memory_are_read():
    """One call for all layers looks at weights once, until their memory is another."""
    kept = {"kept_tokens": 4, "kept_block": 2, "local_window": 4, "joint_softmax": True}
    model, ids = converted("llama", **BOTH, **kept).float(), tokens(16, 1)
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :13])
    read(model, cache, ids[:, 13:14])
    twins = [copy.deepcopy(cache) for _ in range(2)]
    before = read(model, twins[0], ids[:, 14:15])
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = 1.5 * weight.data
    found = read(model, cache, ids[:, 14:15])
    assert not torch.equal(found, before)
    torch.testing.assert_close(found, read(copy.deepcopy(model), twins[1], ids[:, 14:15]))
