"""The latents without a window, which are a control: they read tokens W late, or at once.

With delay the latents read only tokens that have left the window: at query t, the sources s <= t -
W. The op of both branches does this itself. The latents alone get keys and values that are shifted
by W tokens.

Shape suffixes: B batch, T tokens, H query heads, D value width, W window.
"""

from __future__ import annotations

from torch import Tensor

from latte.layers import Context, MixerState, Projected
from latte.ops import latte_attention
from latte.ops.state import LateSources, final_window_state
from latte.ops.tensors import Sequences


def late_latents(
    projected: Projected, context: Context, window: int | None
) -> tuple[Tensor, MixerState]:
    """The latents alone, (B, T, H, D). They read ``window`` tokens late, or at once if None."""
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
        projected.latent_q[..., 1:],
        keys,
        values,
        key_mask=mask,
        cu_seqlens=context.cu_seqlens,
        initial_state=state.latent,
        output_final_state=context.output_final_state,
        log_decay=projected.log_decay,
    )
    return out, state._replace(latent=latent, pending=pending)
