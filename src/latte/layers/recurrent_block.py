"""Griffin's recurrent block (arXiv 2402.19427, section 2.3) as a mixer.

Shape suffixes: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.mixer import Context, Mixer, MixerState, Projected
from latte.layers.parts import CausalConv1d, Rotary
from latte.layers.projections import project
from latte.layers.recurrent import DECAY_RANGE, RGLRU
from latte.layers.step import StepState
from latte.ops.step import in_dtype


class RecurrentBlock(Mixer):
    """``y_t = W_o (gelu(W_g x_t) * RG-LRU(conv(W_v x))_t)``: Griffin's, without its three biases.

    It has no attention weights.

    Args:
        hidden_size, num_heads, causal: Arguments of :class:`Mixer`; it must be causal. The gates of
            the RG-LRU have a block for each head.
        short_conv_size: Number of taps of the convolution.
        decay_range: Argument of :class:`RGLRU`.

    Raises:
        ValueError: It is not to be causal, or sizes do not fit.
    """

    carries = ("short_conv",)  # and rglru, which every mixer may have
    splits = True
    stepped = ("short_conv", "rglru")
    uses: ClassVar[tuple[str, ...]] = ("short_conv_size",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        short_conv_size: int = 4,
        decay_range: Sequence[float] = DECAY_RANGE,
        causal: bool = True,
    ) -> None:
        super().__init__(hidden_size, num_heads, causal=causal)
        if not causal:
            raise ValueError("RecurrentBlock: expected causal=True, it reads the past")
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.short_conv = CausalConv1d(hidden_size, short_conv_size)
        self.rglru = RGLRU(hidden_size, num_heads, decay_range=decay_range)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        return {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "short_conv_size": config.short_conv_size,
            "decay_range": config.rglru_decay_range,
            "causal": config.is_causal,
        }

    def with_weights(  # type: ignore[override]
        self, *given: Any, **named: Any
    ) -> tuple[Tensor, MixerState | None, None]:
        """As :meth:`forward`, and None in the place of weights."""
        return *self.forward(*given, **named), None

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        v, gate = project(x_BTE, self.v_proj, self.gate_proj)
        tokens, carry = (context.key_mask, context.cu_seqlens), context.output_final_state
        shards = context.shards
        mixed, tail = self.short_conv(v, *tokens, state.short_conv, carry, shards=shards)
        h, last = self.rglru(mixed, *tokens, state.rglru, carry, shards=shards)
        state = state._replace(short_conv=tail, rglru=last)
        return Projected(self._heads(v, self.num_heads), state, extra=(h, gate))

    def _attend(
        self, x_BTE: Tensor, projected: Projected, context: Context
    ) -> tuple[Tensor, MixerState]:
        h_BTE, gate_BTE = projected.extra
        out_BTE = h_BTE * F.gelu(gate_BTE, approximate="tanh")
        return self._heads(out_BTE, self.num_heads), projected.state

    def _step(self, x_BE: Tensor, state: StepState, rotary: Rotary | None) -> Tensor:
        assert state.short_conv is not None and state.rglru is not None
        real, parts = state.step_context.real, self._modules
        maps = parts["v_proj"], parts["gate_proj"]
        v_BE, gate_BE = state.step_context.plan.linear_maps(x_BE, *maps)
        mixed_BE = self.short_conv.step(v_BE, state.short_conv, real)
        h_BE = in_dtype(self.rglru.step(mixed_BE, state.rglru, real), gate_BE.dtype)
        return self._heads(h_BE * F.gelu(gate_BE, approximate="tanh"), self.num_heads)
