"""Griffin's recurrent block (arXiv 2402.19427, section 2.3) as a mixer, for models of both kinds.

    y_t = W_o (gelu(W_g x_t) * RG-LRU(conv(W_v x))_t)

Shape suffixes: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers import RGLRU, CausalConv1d, Mixer, MixerState, Piece, Projected
from latte.layers.recurrent import DECAY_RANGE

TAPS = 4  # of Griffin's convolution


class RecurrentBlock(Mixer):
    """A convolution and an RG-LRU of the values, times a gate.

    Griffin's, but for the biases of its three linear maps.

    Args:
        hidden_size, num_heads, causal: Arguments of :class:`Mixer`; it must be causal. The gates of
            the RG-LRU have a block for each head.
        decay_range: Argument of :class:`latte.layers.RGLRU`.
    """

    carries: ClassVar[tuple[str, ...]] = ("short_conv",)  # and rglru

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        decay_range: Sequence[float] = DECAY_RANGE,
        causal: bool = True,
    ) -> None:
        super().__init__(hidden_size, num_heads, causal=causal)
        if not causal:
            raise ValueError("RecurrentBlock: expected causal=True, it reads the past")
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.short_conv = CausalConv1d(hidden_size, TAPS)
        self.rglru = RGLRU(hidden_size, num_heads, decay_range=decay_range)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        return {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "decay_range": config.rglru_decay_range,
            "causal": config.is_causal,
        }

    def _project(self, piece: Piece) -> Projected:
        v, state = self.v_proj(piece.x), piece.state
        shared = piece.key_mask, piece.cu_seqlens
        mixed, tail = self.short_conv(v, *shared, state.short_conv, piece.output_final_state)
        h, last = self.rglru(mixed, *shared, state.rglru, piece.output_final_state)
        after = MixerState(short_conv=tail, rglru=last)
        return Projected(self._heads(v, self.num_heads), after=after, extra=h)

    def _attend(self, projected: Projected, piece: Piece) -> tuple[Tensor, MixerState]:
        out_BTE = projected.extra * F.gelu(self.gate_proj(piece.x), approximate="tanh")
        return self._heads(out_BTE, self.num_heads), MixerState()
