"""Linformer: keys and values projected along the sequence (Wang et al., arXiv 2006.04768).

Shape suffixes: B batch, T tokens, E hidden size, H heads, K width of a head, R projected length,
M longest sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from latte.layers.checks import check_divides, check_positive
from latte.rivals.base import ComparatorMixer, masked


class Linformer(ComparatorMixer):
    """``head = softmax(Q (E K)^T / sqrt(K)) F V`` with E and F (R, M), eq. 7.

    E and F are shared by the heads of a layer ("headwise sharing"), and a sequence shorter than
    M uses their first T columns. A masked token's key and value are zero before they are
    projected. Since E and F mix all places, the layer is bidirectional only; it holds the place
    of a token in its columns, so that left padding moves a sequence.

    Args:
        max_length: M, the longest sequence; a longer one is refused.
        projected_length: R; M / 4 if None.
    """

    directions = (False,)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        max_length: int,
        projected_length: int | None = None,
        causal: bool = False,
    ) -> None:
        super().__init__(hidden_size, causal)
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads}
        check_divides("Linformer", "num_heads", "hidden_size", **sizes)
        check_positive("Linformer", max_length=max_length)
        length = max(1, max_length // 4) if projected_length is None else projected_length
        check_positive("Linformer", projected_length=length)
        self.num_heads, self.max_length = num_heads, max_length
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key_projection = nn.Parameter(torch.empty(length, max_length))
        self.value_projection = nn.Parameter(torch.empty(length, max_length))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        # N(0, 1/R), the random projections of the paper's theorem.
        scale = 1.0 / math.sqrt(self.key_projection.shape[0])
        return {
            "key_projection": scale * torch.randn_like(self.key_projection),
            "value_projection": scale * torch.randn_like(self.value_projection),
        }

    def _mix(self, x_BTE: Tensor, key_mask: Tensor | None) -> Tensor:
        T = x_BTE.shape[1]
        if T > self.max_length:
            raise ValueError(
                f"Linformer: expected at most max_length={self.max_length} tokens, got {T}"
            )
        x_BTE = masked(x_BTE, key_mask)
        q, k, v = (
            project(x_BTE).unflatten(-1, (self.num_heads, -1))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        k_BRHK = torch.einsum("rt,bthk->brhk", self.key_projection[:, :T].to(k.dtype), k)
        v_BRHK = torch.einsum("rt,bthk->brhk", self.value_projection[:, :T].to(v.dtype), v)
        logits = torch.einsum("bthk,brhk->bhtr", q, k_BRHK) / math.sqrt(q.shape[-1])
        out = torch.einsum("bhtr,brhk->bthk", logits.softmax(-1), v_BRHK)
        return self.o_proj(out.flatten(2))

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, num_heads={self.num_heads}, max_length={self.max_length}, "
            f"projected_length={self.key_projection.shape[0]}"
        )
