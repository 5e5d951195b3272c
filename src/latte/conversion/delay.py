"""Latents that are fed only with tokens that have left the window.

At query t the latents have seen the sources s <= t - W, so that every source is either in the
window, s > t - W, or with the latents. It is the plain op on keys and values moved W tokens on.

Shape suffixes: B batch, T tokens, N states (B, or packed sequences), W window, H query heads, G
value heads, L latents per head, D value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.layers import MixerState
from latte.layers.parts import token_positions
from latte.layers.state import real_tokens
from latte.ops.state import WindowState
from latte.ops.window_state import final_window_state


def delayed(
    latent_k: Tensor,
    v: Tensor,
    window: int,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: MixerState,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys (B, T, H, L), values (B, T, G, D) and their mask (B, T), moved W tokens on.

    The last result, (B, T) bool, says which queries see any latent mass.
    """
    B, T = latent_k.shape[:2]
    real = real_tokens(latent_k, key_mask)
    earlier = state.pending
    if earlier is None:
        blank = (x.new_zeros(B, window, *x.shape[2:]) for x in (latent_k, v, real))
        earlier = WindowState(*blank)
    moved_k, moved_v, moved_mask = (
        torch.cat([old.to(new.dtype), new], 1)[:, :T]
        for old, new in zip(earlier, (latent_k, v, real), strict=True)
    )
    if cu_seqlens is not None:
        slots = token_positions(latent_k[..., 0], None, cu_seqlens)
        moved_mask = moved_mask & (slots >= window)
        # A sequence's sources come in order: once there is one, there is one for all that follow.
        counted = moved_mask.long().cumsum(1)
        first = torch.arange(T, device=slots.device)[None] - slots
        before = torch.nn.functional.pad(counted, (1, 0)).gather(1, first)
        return moved_k, moved_v, moved_mask, counted > before
    seen = moved_mask.long().cumsum(1) > 0
    if state.latent is not None:
        seen = seen | ~torch.isneginf(state.latent.log_mass).all((1, 2))[:, None]
    return moved_k, moved_v, moved_mask, seen


def pending_state(
    latent_k: Tensor,
    v: Tensor,
    window: int,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: MixerState,
) -> WindowState:
    """The last W tokens' latent keys and values, which have yet to reach the latents."""
    # A window of W + 1 keeps the W tokens before the next.
    return final_window_state(latent_k, v, window + 1, key_mask, cu_seqlens, state.pending)
