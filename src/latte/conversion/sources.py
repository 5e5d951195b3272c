"""Sources beyond the plain ops: first tokens that stay visible, latents that are fed late.

**Sinks** (arXiv 2309.17453). The first ``n`` tokens of a sequence share the window's softmax
wherever the query is. So that rotary positions never leave the range the base was trained on, a
query sees them no further away than the window's edge: its rotation towards the sinks is that of
position ``min(t, W + n - 1)``. Linear in time and memory: queries are read in blocks of one window.

**Delay.** The latents are fed only with tokens that have left the window: at query t they have
seen the sources s <= t - W, so that every source is either in the window, s > t - W, or with the
latents. It is the plain op on keys and values moved W tokens on.

Shape suffixes: B batch, T tokens, N states (B, or packed sequences), n sinks, H query heads, G
key/value heads, R = H / G, K key width, D value width, L latents per head, W window, Z blocks of C
queries, P keys before a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.layers.parts import in_chunks, token_positions
from latte.layers.state import Piece
from latte.ops.state import WindowState, final_window_state


def sink_keys(k_BTGK: Tensor, v_BTGD: Tensor, num_sinks: int, piece: Piece) -> WindowState:
    """The sinks of every sequence, (N, n, ...), to be seen by these tokens and to be carried on.

    A sink that comes later than a query is hidden from it by its position.
    """
    n, (B, T) = num_sinks, k_BTGK.shape[:2]
    cu_seqlens, earlier, real = piece.cu_seqlens, piece.state.sinks, piece.real
    if cu_seqlens is not None:
        start_N1 = cu_seqlens[:-1, None].long()
        slots_Nn = start_N1 + torch.arange(n, device=k_BTGK.device)
        mask = slots_Nn < cu_seqlens[1:, None]
        index = slots_Nn.clamp_max(max(T - 1, 0))
        return WindowState(k_BTGK[0, index], v_BTGD[0, index], mask & real[0, index])
    parts = [(k_BTGK, v_BTGD, real)]
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


def attention_with_sinks(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    sink_q_BTHK: Tensor | None,
    sinks: WindowState,
    piece: Piece,
    *,
    window: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, WindowState | None]:
    """Softmax over the window's W keys and the sinks that have left it: (B, T, H, D), and a tail.

    Args:
        sink_q_BTHK: the queries, rotated for the sinks (see the head of this module).
        sinks: as :func:`sink_keys` gives them.
    """
    B, T, H, K = q_BTHK.shape
    G, n = k_BTGK.shape[2], sinks.mask.shape[1]
    assert sink_q_BTHK is not None, "sinks need their own rotation of the queries"
    wide = torch.promote_types(q_BTHK.dtype, torch.float32)
    key_mask, cu_seqlens, tail, real = (
        piece.key_mask,
        piece.cu_seqlens,
        piece.state.window,
        piece.real,
    )
    place_BT = token_positions(q_BTHK[..., 0], key_mask, cu_seqlens, piece.state.position)
    # A step of decoding needs no whole block of queries.
    P, C = window, max(1, min(window, T))
    Z = -(-T // C)
    q, sink_q = (in_chunks(x, Z, C).to(wide) for x in (q_BTHK, sink_q_BTHK))
    k, v, visible = (
        _with_past(x, None if tail is None else tail[i], P, C, Z)
        for i, x in enumerate((k_BTGK, v_BTGD, real))
    )
    R = H // G
    q_ZGR, sink_ZGR = (x.unflatten(3, (G, R)) for x in (q, sink_q))  # (B, Z, C, G, R, K)
    near = torch.einsum("bzcgrk,bzmgk->bzgrcm", q_ZGR, k.to(wide)) * scale
    sequence_B = None
    if cu_seqlens is None:
        sink_k, sink_v, sink_mask = sinks
        far = torch.einsum("bzcgrk,bngk->bzgrcn", sink_ZGR, sink_k.to(wide)) * scale
    else:
        token = torch.arange(T, device=q.device)
        sequence_B = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
        own = WindowState(*(in_chunks(x[sequence_B][None], Z, C) for x in sinks))
        sink_k, sink_v, sink_mask = own
        far = torch.einsum("bzcgrk,bzcngk->bzgrcn", sink_ZGR, sink_k.to(wide)) * scale
    if softcap is not None:
        near, far = (softcap * torch.tanh(x / softcap) for x in (near, far))

    # The keys of a block begin P tokens before its queries.
    c = torch.arange(C, device=q.device)
    gap_CM = c[:, None] + P - torch.arange(P + C, device=q.device)[None]
    seen_near = ((gap_CM >= 0) & (gap_CM < window)) & visible[:, :, None]
    place = in_chunks(place_BT.expand(B, T), Z, C)
    if sequence_B is not None:
        ids = _with_past(sequence_B[None], None, P, C, Z, fill=-1)
        seen_near = seen_near & (ids[:, :, None] == ids[:, :, P:, None])
        mask_far = sink_mask
    else:
        mask_far = sink_mask[:, None, None]
    # Sink j is told apart from the window's keys by its position, which counts real tokens.
    gone = place[..., None] - torch.arange(n, device=q.device) >= window
    seen_far = gone & mask_far
    lowest = torch.finfo(wide).min / 2
    near = near.masked_fill(~seen_near[:, :, None, None], lowest)
    far = far.masked_fill(~seen_far[:, :, None, None], lowest)
    weights = torch.softmax(torch.cat([near, far], -1), -1)
    alive = seen_near.any(-1) | seen_far.any(-1)
    weights = weights * alive[:, :, None, None, :, None]
    out = torch.einsum("bzgrcm,bzmgd->bzcgrd", weights[..., : P + C], v.to(wide))
    pattern = "bzgrcn,bngd->bzcgrd" if cu_seqlens is None else "bzgrcn,bzcngd->bzcgrd"
    out = out + torch.einsum(pattern, weights[..., P + C :], sink_v.to(wide))
    out = out.flatten(3, 4).flatten(1, 2)[:, :T].to(v_BTGD.dtype)
    if not piece.output_final_state:
        return out, None
    return out, final_window_state(k_BTGK, v_BTGD, window, key_mask, cu_seqlens, tail)


def _with_past(x: Tensor, tail: Tensor | None, P: int, C: int, Z: int, fill: int = 0) -> Tensor:
    """Each block with the P tokens before it, (B, Z, P + C, ...); the tail is before the first."""
    past = x.new_full((x.shape[0], P, *x.shape[2:]), fill)
    if tail is not None and tail.shape[1]:
        past = torch.cat([past[:, tail.shape[1] :], tail.to(x.dtype)], 1)
    behind = x.new_full((x.shape[0], Z * C - x.shape[1], *x.shape[2:]), fill)
    whole = torch.cat([past, x, behind], 1)
    if Z == 1:
        return whole[:, None]
    blocks = whole.unflatten(1, (Z + 1, C))  # more than one block: P is C
    return torch.cat([blocks[:, :-1], blocks[:, 1:]], 2)


def delayed(
    latent_k: Tensor, v: Tensor, window: int, piece: Piece
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys (B, T, H, L), values (B, T, G, D) and their mask (B, T), moved W tokens on.

    The last result, (B, T) bool, says which queries see any latent mass.
    """
    B, T = latent_k.shape[:2]
    cu_seqlens, state, real = piece.cu_seqlens, piece.state, piece.real
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
        before = F.pad(counted, (1, 0)).gather(1, first)
        return moved_k, moved_v, moved_mask, counted > before
    seen = moved_mask.long().cumsum(1) > 0
    if state.latent is not None:
        seen = seen | ~torch.isneginf(state.latent.log_mass).all((1, 2))[:, None]
    return moved_k, moved_v, moved_mask, seen


def pending_state(latent_k: Tensor, v: Tensor, window: int, piece: Piece) -> WindowState:
    """The last W tokens' latent keys and values, which have yet to reach the latents."""
    # A window of W + 1 keeps the W tokens before the next.
    masks = piece.key_mask, piece.cu_seqlens
    return final_window_state(latent_k, v, window + 1, *masks, piece.state.pending)
