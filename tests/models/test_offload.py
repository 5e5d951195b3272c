"""Models whose weights accelerate keeps elsewhere, and brings when a module is called."""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.utils import send_to_device

from latte.layers.mixer import MixerState
from latte.models import LatteCache
from latte.models.cache import tensors_in
from latte.ops import LatteState
from tests.models.modeldb import named, tokens

ROWS = named(
    ["latte-r-swa++", "latte-conv-swa-f++", "latte-gated", "latte-hybrid", "linear++"]
    + ["transformer++"]
    + ["llama: plain", "llama: both, conv", "gemma3_text: both", "qwen3: plain"]
)


def on_the_cpu(model, _):
    cpu_offload(model, execution_device="cpu", offload_buffers=True)


def on_the_disk(model, folder):
    disk_offload(model, folder, execution_device="cpu", offload_buffers=True)


def by_a_device_map(model, folder):
    places = {"model.embed_tokens": "cpu", "model.norm": "disk", "lm_head": "cpu"}
    others = [name for name, _ in model.model.named_children()]
    places |= {f"model.{x}": "cpu" for x in others if x not in ("embed_tokens", "norm", "layers")}
    count = len(model.model.layers)
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(count)}
    dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


@pytest.mark.parametrize("offload", [on_the_cpu, on_the_disk, by_a_device_map])
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_offloaded_models_decode_what_the_model_does(row, offload, tmp_path):
    plain, ids, found = row.model(), tokens(2, 8), []
    moved = copy.deepcopy(plain)
    offload(moved, str(tmp_path))
    with torch.no_grad():
        for model in (plain, moved):
            cache = LatteCache(model.config)
            logits = [model(x, past_key_values=cache).logits for x in ids.split([5, 1, 1, 1], 1)]
            found.append((torch.cat(logits, 1), cache.layers[-1].state))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_state_can_be_sent_to_a_device(parts):
    """With and without a total log-decay, and within a layer's state."""
    latent = LatteState(*(torch.ones(2, 3), torch.ones(2, 3, 4), torch.ones(2, 3))[:parts])
    state = MixerState(torch.ones(2), latent)
    sent = send_to_device(state, "meta")
    assert (
        type(sent) is MixerState and type(sent.latent) is LatteState and len(sent.latent) == parts
    )
    assert all(x.is_meta for x in tensors_in(sent))
