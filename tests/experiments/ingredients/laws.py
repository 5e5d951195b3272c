"""What holds for every mixer of the plugin, and for every model of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from latte.models import LatteCache
from latte.models.modeling import language_model
from latte.models.registry import find_model, load_plugin

load_plugin("experiments.ingredients.model")
TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}


def inputs(batch: int = 2, length: int = 40) -> torch.Tensor:
    """Random inputs of a mixer, (batch, length, 16), fp64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, length, 16, dtype=torch.float64, generator=generator)


def model_of(preset: str, **fields: Any) -> Any:
    """A small model of three layers, with other values of its config's fields."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "num_latents": 8}
    config = find_model(preset).config("tiny", **sizes, initializer_range=0.5, **fields)
    torch.manual_seed(0)
    return language_model(config).eval()


# ---- a mixer; `part` names the part of its state that is compared


def check_causal_and_learning(layer: Any) -> None:
    x = inputs()
    changed = x.clone()
    changed[:, 25:] += 1
    out = layer(x)[0]
    torch.testing.assert_close(layer(changed)[0][:, :25], out[:, :25], atol=0, rtol=0)
    assert not torch.allclose(layer(changed)[0][:, 25:], out[:, 25:])
    out.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def check_pieces_and_padding(layer: Any, part: str) -> None:
    x, mask = inputs(), torch.ones(2, 40, dtype=torch.bool)
    mask[1, :9], mask[0, 35:] = False, False
    whole, end = layer(x, mask, output_final_state=True)
    first, state = layer(x[:, :17], mask[:, :17], output_final_state=True)
    second, last = layer(x[:, 17:], mask[:, 17:], state=state, output_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1)[mask], whole[mask], **TOLERANCE)
    torch.testing.assert_close(getattr(last, part), getattr(end, part), **TOLERANCE)
    torch.testing.assert_close(whole[1:, 9:], layer(x[1:, 9:])[0], **TOLERANCE)


def check_packed(layer: Any, part: str | None = None) -> None:
    x, bounds = inputs(1), torch.tensor([0, 15, 40], dtype=torch.int32)
    packed, end = layer(x, cu_seqlens=bounds, output_final_state=True)
    for row, (start, stop) in enumerate([(0, 15), (15, 40)]):
        alone, state = layer(x[:, start:stop], output_final_state=True)
        torch.testing.assert_close(packed[:, start:stop], alone, **TOLERANCE)
        if part is not None:
            held = getattr(end, part)[row : row + 1]
            torch.testing.assert_close(held, getattr(state, part), **TOLERANCE)


def check_taken_back(layer: Any) -> None:
    x = inputs()
    _, state = layer(x[:, :10], output_final_state=True)
    _, recorded = layer(x[:, 10:30], state=state.record(), output_final_state=True)
    _, wanted = layer(x[:, :25], output_final_state=True)
    again, _ = layer(x[:, 25:], state=layer.rollback(recorded, 5))
    torch.testing.assert_close(again, layer(x[:, 25:], state=wanted)[0], **TOLERANCE)


# ---- a model


def check_steps(model: Any) -> None:
    tokens = torch.randint(260, (2, 30), generator=torch.Generator().manual_seed(0))
    cache = LatteCache(model.config)
    with torch.no_grad():
        steps = [
            model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            for t in range(30)
        ]
        whole = model(tokens).logits
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-4, rtol=1e-4)
    assert model.generate(tokens[:, :5], max_new_tokens=4, do_sample=False).shape == (2, 9)


def check_saved(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
