"""p(l|t), p(s|l,t) and the window's weights of every layer, collected in one pass over a text.

Shape suffixes: T tokens read, P tokens shown (P <= T, the first ones), H heads, L latents, S
states of p(l|t): the window, if there is one, and then the latents.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from latte.conversion.attention import MacchiatoAttention
from latte.errors import LatteError
from latte.inspect.converted import converted_mixing
from latte.inspect.mixing import Mixing
from latte.layers import Mixer
from latte.layers.latent_input import state_probabilities
from latte.layers.mixer import softmax_weights


@dataclass(frozen=True)
class Inspection:
    """A model on a text.

    Args:
        label: what figures call the model.
        tokens: labels of all tokens read; the first ``shown`` are shown with all their weights.
        layers: by number, from 0.
        at: positions of tokens that the reader asked for.
    """

    label: str
    tokens: list[str]
    shown: int
    layers: dict[int, Mixing]
    at: tuple[int, ...] = ()

    @property
    def has_latents(self) -> bool:
        return any(mixing.latents for mixing in self.layers.values())


def is_mixer(module: nn.Module) -> bool:
    """Whether :func:`mixing_of` knows this kind of layer."""
    return isinstance(module, Mixer | MacchiatoAttention)


def mixing_of(layer: nn.Module, arguments: Mapping[str, Any], shown: int) -> Mixing:
    """The probabilities of a layer on the arguments of its ``forward``, by name.

    Args:
        shown: tokens whose window weights are kept, which takes O(shown^2) memory per head.
    """
    if isinstance(layer, MacchiatoAttention):
        return converted_mixing(layer, arguments, shown)
    assert isinstance(layer, Mixer)
    x_BTE = arguments["x_BTE"]
    if not layer.causal:
        raise LatteError("a bidirectional model cannot be inspected: expected a causal one")
    options = {"rotary": arguments.get("rotary")}
    latent_q, latent_k, q, k = layer.mixing_logits(x_BTE, **options)
    window = width = None
    if q is not None and k is not None:
        width = layer.window
        window = softmax_weights(
            q[:, :shown].float(), k[:, :shown].float(), window=width, softcap=layer.softcap
        )
    elif latent_q is None:
        # Undirected linear attention has weights, but neither latents nor a softmax.
        window = layer.attention_weights(x_BTE[:, :shown], **options)
    return Mixing(
        None if latent_q is None else state_probabilities(latent_q, window=q is not None)[0],
        None if latent_k is None else latent_k[0].float(),
        None if window is None else window[0].float(),
        width,
    )


def find_layers(model: nn.Module, chosen: Sequence[int] | None = None) -> dict[int, nn.Module]:
    """The layers that mix tokens, by number from 0; all of them, or those chosen.

    Raises:
        LatteError: the model has none of ours, or no layer of that number.
    """
    found = [module for module in model.modules() if is_mixer(module)]
    if not found:
        raise LatteError(
            f"{type(model).__name__} has no layer of Latte: expected a checkpoint of latte train "
            "or latte convert"
        )
    wanted = range(len(found)) if chosen is None else sorted(set(chosen))
    for number in wanted:
        if not 0 <= number < len(found):
            raise LatteError(
                f"layers: expected numbers from 0 to {len(found) - 1}, since the model has "
                f"{len(found)} layers, got {number}"
            )
    return {number: found[number] for number in wanted}


@torch.no_grad()
def collect(
    model: Any, input_ids: Sequence[int], layers: Mapping[int, nn.Module], shown: int
) -> dict[int, Mixing]:
    """Run the model over one text and keep what its layers do."""
    kept: dict[int, Mixing] = {}
    hooks = []
    for number, layer in layers.items():

        def keep(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], number: int = number
        ) -> None:
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            kept[number] = _to_cpu(mixing_of(module, given, shown))

        hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        device = next(model.parameters()).device
        model.base_model(torch.tensor([list(input_ids)], device=device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return kept


def _to_cpu(mixing: Mixing) -> Mixing:
    states, keys, window = (
        None if x is None else x.cpu()
        for x in (mixing.states_THS, mixing.latent_k_THL, mixing.window_HPP)
    )
    return replace(mixing, states_THS=states, latent_k_THL=keys, window_HPP=window)
