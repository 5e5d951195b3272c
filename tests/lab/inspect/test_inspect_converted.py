"""`latte inspect` on converted decoders: its weights are those that their layers mix values by.

Shape suffixes: B batch, T tokens, P tokens shown, H query heads, G key/value heads.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from latte.conversion.attention import MacchiatoAttention
from latte.conversion.attention_distillation import _enter
from latte.conversion.config import CONFIGS
from latte.conversion.modeling import FAMILIES
from latte.lab.inspect.mixing import Inspection, collect, find_layers, summary_rows
from latte.lab.inspect.report import outline, write_report
from latte.layers import Piece

WINDOW, READ, SHOWN = 5, 24, 18
SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
OWN = {"gemma2": {"attn_logit_softcapping": 2.0, "sliding_window": 9, "query_pre_attn_scalar": 24}}


@pytest.fixture
def look():
    """look(family, **fields) -> (model, Inspection, p(s|t) (H, P, P) of its last layer alone)."""

    def run(family, **fields):
        values = {"local_window": WINDOW, "num_latents": 12, "window_probability": 0.5}
        config = CONFIGS[family](**SHAPE, **OWN.get(family, {}), **(values | fields))
        torch.manual_seed(0)
        model = FAMILIES[family][1](config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "latents" in name or name.endswith(("q_proj.weight", "k_proj.weight")):
                    parameter.add_(0.5 * torch.randn_like(parameter))
        own = {}

        def read(layer, args, kwargs):
            given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
            x, tokens = given["hidden_states"], given["tokens"]
            local = layer.project(x, given["position_embeddings"], tokens)
            identity = torch.eye(READ)[None, :, None].expand(
                1, -1, SHAPE["num_key_value_heads"], -1
            )
            out, _, _ = layer.mix(local._replace(v=identity), Piece(x))
            own["weights"] = out[0].transpose(0, 1)[:, :SHOWN, :SHOWN]

        last = [m for m in model.modules() if isinstance(m, MacchiatoAttention)][-1]
        hook = last.register_forward_pre_hook(read, with_kwargs=True)
        ids = torch.randint(50, (READ,), generator=torch.Generator().manual_seed(0)).tolist()
        layers = collect(model, ids, find_layers(model), SHOWN)
        hook.remove()
        return model, Inspection("converted", ["x"] * READ, SHOWN, layers), own["weights"]

    return run


@pytest.mark.parametrize("family", ["gemma2", "llama", "qwen3"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"latent_input": "none", "delay_latents": True},
        {"num_sinks": 2, "delay_latents": True},
        {"delay_latents": True, "forgetting": "gated", "half_life_range": [2.0, 9.0]},
        {"mixing": "window"},
        {"mixing": "latents"},
        {"mixing": "base"},
    ],
    ids=["plain", "delayed", "sinks", "forgetting", "window", "latents", "base"],
)
def test_weights_are_those_of_the_layer(look, family, fields):
    _, inspection, own = look(family, **fields)
    assert list(inspection.layers) == [0, 1]
    mixing = inspection.layers[1]
    for head in range(4):
        weights = mixing.source_weights(head, SHOWN)
        torch.testing.assert_close(weights, own[head], atol=2e-6, rtol=1e-4)
    latents = fields.get("mixing") not in ("window", "base")
    assert inspection.has_latents == latents and mixing.heads == 4
    if latents:
        assert mixing.latents == 3
        torch.testing.assert_close(mixing.states_THS.sum(-1), torch.ones(READ, 4))
    rows = summary_rows(inspection)
    has_window = latents and fields.get("mixing") != "latents"
    assert all((row.window_share is not None) == has_window for row in rows)


def test_delayed_latents_are_not_asked_before_they_see(look):
    _, inspection, _ = look("llama", delay_latents=True)
    mixing = inspection.layers[0]
    assert mixing.delay == WINDOW
    assert (mixing.states_THS[:WINDOW, :, 0] == 1).all()
    assert (mixing.states_THS[WINDOW:, :, 0] < 1).all()


def test_the_report_of_a_converted_model(look, tmp_path):
    model, inspection, _ = look("llama", delay_latents=True, num_sinks=1)
    hooks = {hook for module in model.modules() for hook in module._forward_pre_hooks.values()}
    assert hooks == {_enter}  # the layers' own: what looked on is gone
    written = write_report(inspection, tmp_path)
    assert {"usage.csv", "collapse.png", "window_share.png", "index.html"} <= set(written)
    assert "of   3" in outline(inspection) and "no latent has read" not in outline(inspection)


def test_a_text_that_no_latent_has_read_is_named(look):
    _, inspection, _ = look("llama", delay_latents=True)
    short = replace(inspection, tokens=inspection.tokens[:WINDOW])
    assert f"the text of {WINDOW} tokens is not longer than the window" in outline(short)
