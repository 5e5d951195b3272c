"""Steps of `generate` that are captured as a graph, here one of PyTorch's operations on a CPU."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig

from latte.models import captured
from latte.models.cache import LatteCache, tensors_in
from latte.ops import notices, use_backend
from tests.models import modeldb

PRESET, NEW = "latte-r-swa++", 12


class Recorded(TorchDispatchMode):
    """A graph: it repeats the operations on the same tensors, and calls nothing of the host."""

    made: list[Recorded] = []

    def __init__(self):
        super().__init__()
        self.operations, self.replays = [], 0
        self.made.append(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in func.name(), "a step waits for the GPU"
        out = func(*args, **kwargs or {})
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.operations:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    @classmethod
    def record(cls, cache):
        """As :func:`captured.record`, which computes nothing: the cache is as it was."""

        def made(call):
            graph, buffers = cls(), [layer.buffers for layer in cache().layers]
            context = buffers[0].step_context
            written = [context.position, context.steps, *context.slots.values()]
            written += [*tensors_in(tuple(x.parts for x in buffers))]
            before = [x.clone() for x in written]
            with graph:
                output = call()
            for x, old in zip(written, before, strict=True):
                x.copy_(old)
            return graph.replay, output

        return made


@pytest.fixture
def gpu(monkeypatch):
    """Models on a CPU are taken for models on a GPU. The list gets the graphs."""
    caches = []
    made = LatteCache.__init__

    def remember(self, *args, **options):
        made(self, *args, **options)
        caches.append(self)

    monkeypatch.setattr(LatteCache, "__init__", remember)
    monkeypatch.setattr(captured, "DEVICE", "cpu")
    monkeypatch.setattr(captured, "FEWEST_STEPS", NEW)
    monkeypatch.setattr(captured, "record", Recorded.record(lambda: caches[-1]))
    monkeypatch.setattr(Recorded, "made", [])
    monkeypatch.setattr(notices, "_given", set())
    return Recorded.made


def generate(model, rows=2, new=NEW, **settings):
    ids = modeldb.tokens(rows, 9)
    mask = torch.ones_like(ids)
    mask[-1, :3] = 0
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | settings
    config = GenerationConfig(max_new_tokens=new, suppress_tokens=[0], **settings)
    torch.manual_seed(1)
    return model.generate(ids, attention_mask=mask, generation_config=config)


REPLAYED = PRESET, "latte-gated", "latte-hybrid", "llama: both", "llama: kept tokens"


@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_steps_make_the_same_tokens(gpu, name):
    model = modeldb.BY_NAME[name].model()
    expected = generate(model, cache_implementation="dynamic")
    assert not gpu
    found = generate(model)
    assert torch.equal(found, expected)
    assert len(gpu) == 1 and gpu[0].replays == NEW - 2  # one by the prompt, one before capturing


def test_the_cache_that_comes_back_is_a_dynamic_one(gpu):
    model = modeldb.BY_NAME[PRESET].model()
    caches = []
    for kind in (None, "dynamic"):
        settings = {"return_dict_in_generate": True, "cache_implementation": kind}
        caches.append(generate(model, **settings).past_key_values)
    assert len(gpu) == 1
    found, expected = caches
    assert not found.is_static and found.get_seq_length() == expected.get_seq_length()
    for cache in (*caches, copy.deepcopy(found)):
        cache.activate_past_recording()
    with torch.no_grad():
        logits = [model(modeldb.tokens(2, 3), past_key_values=x).logits for x in caches]
    torch.testing.assert_close(*logits)
    found.crop(-2)


def test_a_step_that_cannot_be_captured_goes_on_without(gpu, monkeypatch):
    model = modeldb.BY_NAME[PRESET].model()
    expected = generate(model, cache_implementation="dynamic")

    def fails(call):
        call_with = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            call()
        finally:
            call_with.remove()

    monkeypatch.setattr(captured, "record", fails)
    with pytest.warns(UserWarning, match=r"cannot be captured \(ZeroDivisionError: division"):
        assert torch.equal(generate(model), expected)


SILENT = {
    "a few tokens": {"new": NEW - 1},
    "a cache that was chosen": {"cache_implementation": "dynamic"},
    "no compiling": {"disable_compile": True},
}
TOLD = {
    "beams": ({"num_beams": 2}, "expected greedy search or sampling, got beam_search"),
    "hidden states": (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "expected output_hidden_states=False",
    ),
}


@pytest.mark.parametrize("settings", [*SILENT.values(), *TOLD.values()], ids=[*SILENT, *TOLD])
def test_who_wants_something_else_gets_it(gpu, settings):
    settings, told = settings if isinstance(settings, tuple) else (settings, None)
    with pytest.warns(UserWarning, match=told) if told else warnings.catch_warnings():
        generate(modeldb.BY_NAME[PRESET].model(), **settings)
    assert not gpu


def test_hooks_settings_and_models_without_a_step(gpu, monkeypatch):
    model = copy.deepcopy(modeldb.BY_NAME[PRESET].model())

    def reason(model=model, mode="sample"):
        return captured.why_not(model, GenerationConfig(), mode, NEW)

    assert reason() is None
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert "without hooks" in reason()
    hook.remove()
    assert reason() is None and "got assisted_generation" in reason(mode="assisted_generation")
    assert reason(modeldb.BY_NAME["transformer++"].model()) == ""  # its state grows
    with use_backend("reference"):
        assert reason() == ""
    model.hf_device_map = {"a": 0, "b": 1}
    assert "got one on several" in reason()
    del model.hf_device_map
    monkeypatch.setenv(captured.SETTING, "0")
    assert reason() == ""
    monkeypatch.delenv(captured.SETTING)
    monkeypatch.setattr(captured, "DEVICE", "cuda")
    assert reason() == ""
    generate(model)
    assert not gpu
