"""Feed-forward networks. Shape suffixes: B batch, T tokens, E hidden size, M inner width."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.validation import check_positive


class GELUMLP(nn.Module):
    """``down(gelu(up(x)))``, with biases: the network of plain Latte (paper, section 5)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        check_positive("GELUMLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BTE)))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, three matrices without biases (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        check_positive("SwiGLU", hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTE)) * self.up_proj(x_BTE))
