"""A model read on a text: p(l|t), p(s|l,t) and the window's weights of every layer, in one pass.

Shape suffixes: T tokens read, P tokens shown (P <= T, the first ones), H heads, L latents, S
states of p(l|t): the window, if there is one, and then the latents.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from latte.conversion.attention import MacchiatoAttention
from latte.errors import LatteError
from latte.layers import Mixer
from latte.layers.latent_input import state_probabilities
from latte.layers.mixer import softmax_weights


@dataclass(frozen=True)
class Mixing:
    """One layer's probabilities over one text, whatever kind of layer it is.

    Args:
        states_THS: p(l|t), fp32; None for a layer without latents.
        latent_k_THL: key logits: p(s|l,t) is their softmax over s <= t - ``delay``.
        window_HPP: the window's softmax p(s|l=0,t); of a layer without latents p(s|t) itself.
        width: keys that the window sees, self included; None is everything earlier.
        delay: tokens that pass before a latent sees one.
    """

    states_THS: Tensor | None = None
    latent_k_THL: Tensor | None = None
    window_HPP: Tensor | None = None
    width: int | None = None
    delay: int = 0

    @property
    def heads(self) -> int:
        parts = (self.states_THS, self.window_HPP)
        return next(x.shape[axis] for x, axis in zip(parts, (1, 0), strict=True) if x is not None)

    @property
    def latents(self) -> int:
        """L, 0 for a layer without latents."""
        return 0 if self.latent_k_THL is None else self.latent_k_THL.shape[2]

    @property
    def names(self) -> list[int]:
        """The number of each state: 0 is the window, 1 to L are the latents."""
        if self.states_THS is None:
            return []
        return list(range(self.latents + 1 - self.states_THS.shape[2], self.latents + 1))

    def latent_weights(self, head: int, shown: int) -> Tensor:
        """p(s|l,t) of the first tokens, (L, P, P); rows without a visible source are zero."""
        assert self.latent_k_THL is not None
        token = torch.arange(shown, device=self.latent_k_THL.device)
        seen = token[None] <= token[:, None] - self.delay
        logits = self.latent_k_THL[:shown, head].T[:, None].expand(-1, shown, -1)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return weights.masked_fill(~seen, 0.0)

    def state_weights(self, head: int, shown: int) -> Tensor:
        """p(s|state,t) of the first tokens for every state of ``names``, (S, P, P)."""
        parts = self.latent_weights(head, shown)
        if self.window_HPP is not None:
            parts = torch.cat([self.window_HPP[None, head, :shown, :shown], parts])
        return parts

    def source_weights(self, head: int, shown: int) -> Tensor:
        """p(s|t) of the first tokens, (P, P): the mixture of the window and the latents."""
        if self.states_THS is None:
            assert self.window_HPP is not None
            return self.window_HPP[head, :shown, :shown]
        p_PS = self.states_THS[:shown, head]
        return torch.einsum("ts,stu->tu", p_PS, self.state_weights(head, shown))


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


def find_layers(model: nn.Module, chosen: Sequence[int] | None = None) -> dict[int, nn.Module]:
    """The layers that mix tokens, by number from 0; all of them, or those chosen.

    Raises:
        LatteError: the model has none of ours, or no layer of that number.
    """
    found = [m for m in model.modules() if isinstance(m, Mixer | MacchiatoAttention)]
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
            kept[number] = _mixing_of(module, given, shown)

        hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        device = next(model.parameters()).device
        model.base_model(torch.tensor([list(input_ids)], device=device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return kept


def _mixing_of(layer: nn.Module, arguments: Mapping[str, Any], shown: int) -> Mixing:
    """The probabilities of a layer on the arguments of its ``forward``, by name, on the CPU.

    Args:
        shown: tokens whose window weights are kept, which takes O(shown^2) memory per head.
    """
    window = width = None
    delay = 0
    if isinstance(layer, MacchiatoAttention):
        names = ("hidden_states", "position_embeddings", "tokens")
        x_BTE, rotation, tokens = (arguments[name] for name in names)
        latent_q, latent_k, q, _ = layer.mixing_logits(x_BTE, rotation, tokens)
        if q is not None:
            window = layer.window_weights(x_BTE, rotation, tokens, shown)
            width = layer.base_window if layer.mixing == "base" else layer.window
        if latent_k is not None and layer.delay_latents:
            delay = layer.window
    else:
        assert isinstance(layer, Mixer)
        if not layer.causal:
            raise LatteError("a bidirectional model cannot be inspected: expected a causal one")
        x_BTE, options = arguments["x_BTE"], {"rotary": arguments.get("rotary")}
        latent_q, latent_k, q, k = layer.mixing_logits(x_BTE, **options)
        if q is not None and k is not None:
            width = layer.window
            near = (q[:, :shown].float(), k[:, :shown].float())
            window = softmax_weights(*near, window=width, softcap=layer.softcap)
        elif latent_q is None:
            # Undirected linear attention has weights, but neither latents nor a softmax.
            window = layer.attention_weights(x_BTE[:, :shown], **options)
    states = None
    if latent_q is not None:
        states = state_probabilities(latent_q.float(), window=q is not None)
        if q is not None:
            # While no token has reached the latents, all of the distribution is the window's.
            states[:, :delay] = torch.eye(states.shape[-1], device=states.device)[0]
    states_THS, latent_k_THL, window_HPP = (
        None if x is None else x[0].float().cpu() for x in (states, latent_k, window)
    )
    return Mixing(states_THS, latent_k_THL, window_HPP, width, delay)
