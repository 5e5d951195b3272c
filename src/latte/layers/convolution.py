"""The causal depthwise convolution of eq. 18. Shapes: B batch, T tokens, E channels, K taps."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from latte.layers.validation import check_input, check_positive
from latte.ops import causal_conv1d


class CausalConv1d(nn.Module):
    """``y_t = b + sum_i w_i x_{t-K+1+i}``, i = 0..K-1, per channel and without an activation."""

    def __init__(self, hidden_size: int, kernel_size: int = 3) -> None:
        super().__init__()
        check_positive("CausalConv1d", hidden_size=hidden_size, kernel_size=kernel_size)
        self.hidden_size = hidden_size
        self.weight = nn.Parameter(torch.empty(hidden_size, kernel_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    def forward(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, T, E) and the last K-1 inputs (B, K-1, E), if asked for."""
        check_input("CausalConv1d", x_BTE, self.hidden_size)
        return causal_conv1d(
            x_BTE,
            self.weight.to(x_BTE.dtype),
            self.bias.to(x_BTE.dtype),
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            initial_state=state,
            output_final_state=output_final_state,
        )

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, kernel_size={self.weight.shape[1]}"
