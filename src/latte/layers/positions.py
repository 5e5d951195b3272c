"""Token positions, and the two encodings of them: rotary and sinusoidal.

Neither encoding keeps a buffer: angles follow from the positions, in fp64 (where the device has
it), so that position 1,000,000 is as exact as position 1, and nothing is lost on the meta device.

Shape suffixes: B batch, T tokens, H heads, K width per head, E hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from latte.layers.validation import check_positive


class Rotary(NamedTuple):
    """Cosines and sines of the rotary angles, (B or 1, T, 1, K/2) each."""

    cos: Tensor
    sin: Tensor


def token_positions(
    x_BTE: Tensor,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Position of each token in its own sequence, (B or 1, T) int64.

    Masked tokens do not count, so that a padded sequence has the positions of the bare one; a
    packed sequence starts at 0; ``start`` (B,) continues an earlier piece.
    """
    T, device = x_BTE.shape[1], x_BTE.device
    if cu_seqlens is not None:
        token = torch.arange(T, device=device)
        sequence = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
        first = cu_seqlens.long()[sequence.clamp_min(0)]
        if key_mask is None:
            positions = (token - first)[None]
        else:
            counted = torch.nn.functional.pad(key_mask[0].long().cumsum(0), (1, 0))
            positions = (counted[1:] - 1 - counted[first]).clamp_min(0)[None]
        return positions if start is None else positions + start[sequence][None]
    if key_mask is None:
        positions = torch.arange(T, device=device)[None]
    else:
        positions = key_mask.long().cumsum(1) - 1
    if start is not None:
        positions = positions + start[:, None]
    return positions.clamp_min(0)


def _angles(positions_BT: Tensor, width: int, theta: float) -> Tensor:
    """``position * theta^(-2i/width)`` for i < width/2, (B, T, width/2)."""
    wide = torch.float32 if positions_BT.device.type == "mps" else torch.float64
    steps = torch.arange(0, width, 2, dtype=wide, device=positions_BT.device)
    return positions_BT[..., None].to(wide) * theta ** (-steps / width)


class RotaryEmbedding(nn.Module):
    """The rotary table of given positions (arXiv 2104.09864), for heads of an even width."""

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        check_positive("RotaryEmbedding", head_dim=head_dim)
        if head_dim % 2:
            raise ValueError(f"RotaryEmbedding: head_dim must be even, got {head_dim}")
        if not theta > 0:
            raise ValueError(f"RotaryEmbedding: theta must be positive, got {theta}")
        self.head_dim, self.theta = head_dim, theta

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary:
        """The table for heads of ``dtype``; half precisions are rotated in fp32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = _angles(positions_BT, self.head_dim, self.theta)[:, :, None]
        return Rotary(angles.cos().to(wide), angles.sin().to(wide))

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, theta={self.theta}"


def apply_rotary(x_BTHK: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs (i, i + K/2) of each head, the layout of Hugging Face and GPT-NeoX."""
    first, second = x_BTHK.chunk(2, -1)
    rotated = (
        first * rotary.cos - second * rotary.sin,
        second * rotary.cos + first * rotary.sin,
    )
    return torch.cat(rotated, -1).to(x_BTHK.dtype)


class SinusoidalPositions(nn.Module):
    """Fixed encodings (B, T, E) of given positions: sines in the first half, then cosines.

    The frequencies of arXiv 1706.03762; an odd ``hidden_size`` drops the last cosine.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        check_positive("SinusoidalPositions", hidden_size=hidden_size)
        self.hidden_size = hidden_size

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Tensor:
        angles = _angles(positions_BT, self.hidden_size + self.hidden_size % 2, 10000.0)
        return torch.cat([angles.sin(), angles.cos()], -1)[..., : self.hidden_size].to(dtype)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}"
