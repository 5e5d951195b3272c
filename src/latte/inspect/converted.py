"""The probabilities of a converted decoder's layers.

The window's weights are read off the layer's own branch, with the identity matrix as its values:
so query and key norms, grouped heads, soft caps and sinks are what they are in the model.

Shape suffixes: B batch, T tokens read, P tokens shown, H query heads, G key/value heads, L latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from latte.conversion.attention import MacchiatoAttention, Tokens
from latte.inspect.mixing import Mixing
from latte.layers import MixerState, Piece
from latte.layers.latent_input import state_probabilities
from latte.ops import sliding_window_attention


def converted_mixing(layer: MacchiatoAttention, arguments: Mapping[str, Any], shown: int) -> Mixing:
    """The probabilities of a layer, whichever way it mixes: learned, or as one of the controls."""
    x_BTE, tokens = arguments["hidden_states"], arguments["tokens"]
    local = layer.project(x_BTE, arguments["position_embeddings"], tokens)
    q, k, v, sink_q = local
    identity = torch.eye(shown, dtype=q.dtype, device=q.device)
    values_BPGP = identity[None, :, None].expand(1, -1, v.shape[2], -1)
    local = local._replace(
        q=q[:, :shown],
        k=k[:, :shown],
        v=values_BPGP,
        sink_q=None if sink_q is None else sink_q[:, :shown],
    )
    if layer.mixing == "base":
        weights, _ = sliding_window_attention(
            *local[:3], window=layer.base_window, scale=layer.scale, softcap=layer.softcap
        )
        return Mixing(window_HPP=_by_head(weights), width=layer.base_window)
    near = None
    if layer.mixing != "latents":
        shared = {"key_mask": None, "cu_seqlens": None, "output_final_state": False}
        weights, _ = layer.window_branch(local, Tokens(None, None), MixerState(), shared)
        near = _by_head(weights)
    if layer.mixing == "window":
        return Mixing(window_HPP=near, width=layer.window)
    wide = x_BTE.to(layer.latents.k_proj.weight.dtype)
    latent_q, latent_k, _ = layer.latents(Piece(wide))
    latent_q, latent_k = (x[0].to(v.dtype).float() for x in (latent_q, latent_k))
    delay = layer.window if layer.delay_latents else 0
    if near is None:
        return Mixing(state_probabilities(latent_q[..., 1:], window=False), latent_k, delay=delay)
    states_THS = state_probabilities(latent_q, window=True)
    # While no token has reached the latents, all of the distribution is the window's.
    states_THS[:delay] = torch.eye(states_THS.shape[-1], device=states_THS.device)[0]
    return Mixing(states_THS, latent_k, near, layer.window, delay)


def _by_head(weights_BPHP: Tensor) -> Tensor:
    return weights_BPHP[0].transpose(0, 1).float()
