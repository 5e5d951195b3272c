"""Latents without a window: a control of converted layers, and a way to train them.

Shape suffixes: B batch, T tokens, H query heads, D value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.layers import LatteMacchiato
from latte.layers.mixer import Context, MixerState, Projected
from latte.ops import latte_attention
from latte.ops.state import LateSources, final_window_state
from latte.ops.tensors import Sequences


def latents_alone(
    layer: LatteMacchiato, projected: Projected, context: Context
) -> tuple[Tensor, MixerState]:
    """The latents without the window, (B, T, H, D), and the state after the tokens.

    If there are keys of a window, a sequence's first W tokens have its output, because delayed
    latents have nothing for them.
    """
    late, has_window = layer.window if layer.delay_latents else None, projected.q is not None
    latents = projected._replace(latent_q=projected.latent_q[..., int(has_window) :])
    out, after = late_latents(latents, context, late)
    if has_window and late is not None:
        window, _ = layer.window_branch(projected, context)
        began = context.positions(out) >= late
        out = torch.where(began[..., None, None], out, window)
    return out, after


def late_latents(
    projected: Projected, context: Context, window: int | None
) -> tuple[Tensor, MixerState]:
    """The latents without a window, (B, T, H, D), and the state.

    They read ``window`` tokens late, or at once if None: at query t the sources s <= t - W. The op
    of both branches does this itself. Here keys and values are shifted by W tokens.
    """
    keys, values, mask, state = projected.latent_k, projected.v, context.key_mask, projected.state
    pending = None
    if window is not None:
        sequences = Sequences(mask, context.cu_seqlens)
        late = LateSources.of(keys, values, window, sequences, state.pending, None)
        if context.output_final_state:
            # A window of W + 1 keeps the W tokens before the next token.
            tokens = keys, values, window + 1, *sequences[:2]
            pending = final_window_state(*tokens, state.pending)
        keys, values, mask = late.keys, late.values, late.mask
    out, latent = context.across(latte_attention)(
        projected.latent_q,
        keys,
        values,
        key_mask=mask,
        cu_seqlens=context.cu_seqlens,
        initial_state=state.latent,
        output_final_state=context.output_final_state,
        log_decay=projected.log_decay,
    )
    return out, state._replace(latent=latent, pending=pending)
