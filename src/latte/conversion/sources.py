"""Sources beyond the window: the sinks, and the sources of late latents without a window.

**Sinks** (arXiv 2309.17453). The first ``n`` tokens of a sequence share the window's softmax for
every query. Rotary positions must not leave the range on which the base was trained. So a query
sees the sinks no further away than the window's edge: its rotation towards them is that of position
``min(t, W + n - 1)``. They are an argument of the op: :class:`latte.ops.Sinks`.

**Delay.** The latents read only tokens that have left the window. At query t they have read the
sources s <= t - W. So every source is either in the window, s > t - W, or read by the latents. The
op of both branches does this itself. The latents without a window, which are a control, get keys
and values that are shifted by W tokens.

Shape suffixes: B batch, T tokens, N states (B, or packed sequences), n sinks, H query heads, G
key/value heads, K key width, D value width, L latents per head, W window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.layers import MixerState, MixingLogits
from latte.layers.state import Piece
from latte.ops import latte_attention
from latte.ops.state import LateSources, WindowState, final_window_state
from latte.ops.tensors import Sequences


def sink_keys(k_BTGK: Tensor, v_BTGD: Tensor, num_sinks: int, piece: Piece) -> WindowState:
    """The sinks of every sequence, (N, n, ...), for these tokens and for the state after them.

    A query does not see a sink that comes later than the query.
    """
    n, (B, T) = num_sinks, k_BTGK.shape[:2]
    cu_seqlens, earlier, real = piece.cu_seqlens, piece.state.sinks, piece.real
    if cu_seqlens is not None:
        start_N1 = cu_seqlens[:-1, None].long()
        slots_Nn = start_N1 + torch.arange(n, device=k_BTGK.device)
        mask = slots_Nn < cu_seqlens[1:, None]
        index = slots_Nn.clamp_max(max(T - 1, 0))
        return WindowState(k_BTGK[0, index], v_BTGD[0, index], mask & real[0, index])
    first = slice(None if piece.key_mask is not None else n)  # all are real: only these are sinks
    parts = [(k_BTGK[:, first], v_BTGD[:, first], real[:, first])]
    if earlier is not None:
        parts.insert(0, tuple(earlier))  # type: ignore[arg-type]
    keys, values, mask = (torch.cat(xs, 1) for xs in zip(*parts, strict=True))
    short = n - mask.shape[1]
    if short > 0:
        keys, values = (F.pad(x, (0, 0, 0, 0, 0, short)) for x in (keys, values))
        mask = F.pad(mask, (0, short))
    # Real tokens first, in their order: a stable sort by "is padding".
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :n]
    rows = torch.arange(B, device=order.device)[:, None]
    return WindowState(keys[rows, order], values[rows, order], mask[rows, order])


def late_latents(
    logits: MixingLogits,
    log_decay: Tensor | None,
    v_BTGD: Tensor,
    piece: Piece,
    window: int | None,
) -> tuple[Tensor, MixerState]:
    """The latents alone, (B, T, H, D). They read ``window`` tokens late, or at once if None."""
    latent_q, latent_k = logits.latent_q, logits.latent_k
    assert latent_q is not None and latent_k is not None
    keys, values, shifted, pending = latent_k, v_BTGD, piece, None
    if window is not None:
        sequences, before = Sequences(piece.key_mask, piece.cu_seqlens), piece.state.pending
        late = LateSources.of(latent_k, v_BTGD, window, sequences, before, None)
        keys, values, shifted = late.keys, late.values, piece._replace(key_mask=late.mask)
        if piece.output_final_state:
            # A window of W + 1 keeps the W tokens before the next token.
            pending = final_window_state(latent_k, v_BTGD, window + 1, *sequences[:2], before)
    out, latent = piece.across(latte_attention)(
        latent_q[..., 1:],
        keys,
        values,
        initial_state=piece.state.latent,
        log_decay=log_decay,
        **shifted.sequences,
    )
    return out, MixerState(latent=latent, pending=pending)
