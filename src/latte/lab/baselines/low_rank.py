"""Attention through a few summaries of the sequence, at linear cost.

Luna (Ma et al., arXiv 2106.01540) packs the sequence into memories and unpacks them. Linformer
(Wang et al., arXiv 2006.04768) projects keys and values along the sequence.

Shape suffixes: B batch, T tokens, E hidden size, H heads, K width of a head, L memories,
R projected length, M longest sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.lab.baselines.base import BaselineMixer, masked
from latte.layers.checks import check_multiple, check_positive
from latte.ops.tensors import computation_dtype, full_precision


@full_precision
def causal_products(x_BTHK: Tensor, y_BTHK: Tensor, z_BTHD: Tensor, chunk: int = 64) -> Tensor:
    """``f(X, Y, Z)_t = X_t sum_{s<=t} Y_s^T Z_s / t``, the paper's causal function, without 1/t.

    It is computed in chunks. The sum over earlier chunks is one matrix per chunk, and the rest is a
    masked product. It is exactly causal.
    """
    T = x_BTHK.shape[1]
    C = max(1, min(chunk, T))
    short = -T % C
    x, y, z = (
        F.pad(u, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, C)).transpose(2, 3)
        for u in (x_BTHK, y_BTHK, z_BTHD)
    )  # (B, J, H, C, .)
    sums = (y.mT @ z).cumsum(1)
    before = F.pad(sums[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    out = x @ before + (x @ y.mT).tril() @ z
    return out.transpose(2, 3).flatten(1, 2)[:, :T]


class Luna(BaselineMixer):
    """Linear unified nested attention with L memories, P (L, E), learnt in every layer.

    The bidirectional form has pack and unpack attention:

        Y_P = softmax(P W_q (X W_k)^T / sqrt(K)) X W_v
        Y   = softmax(X W_q' (Y_P W_k')^T / sqrt(K)) Y_P W_v'

    The causal form has f of :func:`causal_products` over t = 1..T. It has softplus in place of the
    softmax that would look ahead (the paper also names elu + 1):

        A_pack   = softplus(P W_q (X W_k)^T / sqrt(K))
        A_unpack = softmax(f(X W_q', X W_k', A_pack^T))
        Y        = f(A_unpack, A_pack^T, X W_v)

    All of this is done per head, and followed by an output projection. In the paper's bidirectional
    models, the packed memories are the P of the next layer. Here every layer has its own P.

    Args:
        num_memories: Number L of memories.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, num_memories: int = 16, causal: bool = True
    ) -> None:
        super().__init__(hidden_size, causal)
        check_multiple("Luna", hidden_size=hidden_size, num_heads=num_heads)
        check_positive("Luna", num_memories=num_memories)
        self.num_heads = num_heads
        self.memories = nn.Parameter(torch.empty(num_memories, hidden_size))
        self.pack_q = nn.Linear(hidden_size, hidden_size, bias=False)
        self.pack_k = nn.Linear(hidden_size, hidden_size, bias=False)
        self.pack_v = nn.Linear(hidden_size, hidden_size, bias=False)
        self.unpack_q = nn.Linear(hidden_size, hidden_size, bias=False)
        self.unpack_k = nn.Linear(hidden_size, hidden_size, bias=False)
        if not causal:
            self.unpack_v = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"memories": torch.randn_like(self.memories)}

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (self.num_heads, -1))

    def _mix(self, x_BTE: Tensor, key_mask: Tensor | None) -> Tensor:
        q_LHK = self._heads(self.pack_q(self.memories))
        x_BTE = masked(x_BTE, key_mask)
        k_BTHK, v_BTHK, q_BTHK = (
            self._heads(project(x_BTE)) for project in (self.pack_k, self.pack_v, self.unpack_q)
        )
        pack_BTHL = torch.einsum("lhk,bthk->bthl", q_LHK, k_BTHK) / math.sqrt(q_LHK.shape[-1])
        if self.causal:
            keys_BTHK = self._heads(self.unpack_k(x_BTE))
            out = self._causal(pack_BTHL, q_BTHK, keys_BTHK, v_BTHK, key_mask)
        else:
            out = self._bidirectional(pack_BTHL, q_BTHK, v_BTHK, key_mask)
        return self.o_proj(out.to(v_BTHK.dtype).flatten(2))

    def _bidirectional(
        self, pack_BTHL: Tensor, q_BTHK: Tensor, v_BTHK: Tensor, key_mask: Tensor | None
    ) -> Tensor:
        if key_mask is not None:
            hidden = ~key_mask[..., None, None]
            # A row without any token has equal weights, on values that are zero.
            hidden = hidden & key_mask.any(1)[:, None, None, None]
            pack_BTHL = pack_BTHL.masked_fill(hidden, -torch.inf)
        packed_BLE = torch.einsum("bthl,bthk->blhk", pack_BTHL.softmax(1), v_BTHK).flatten(2)
        k_BLHK, v_BLHK = (self._heads(p(packed_BLE)) for p in (self.unpack_k, self.unpack_v))
        logits = torch.einsum("bthk,blhk->bthl", q_BTHK, k_BLHK) / math.sqrt(q_BTHK.shape[-1])
        return torch.einsum("bthl,blhk->bthk", logits.softmax(-1), v_BLHK)

    def _causal(
        self,
        pack_BTHL: Tensor,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHK: Tensor,
        key_mask: Tensor | None,
    ) -> Tensor:
        dtype = computation_dtype(pack_BTHL.dtype)
        pack, q, k, v = (
            x.to(dtype) for x in (F.softplus(pack_BTHL.to(dtype)), q_BTHK, k_BTHK, v_BTHK)
        )
        if key_mask is None:
            count = torch.arange(1, pack.shape[1] + 1, device=pack.device)[None].to(dtype)
        else:
            pack = pack.masked_fill(~key_mask[..., None, None], 0.0)
            count = key_mask.cumsum(1).clamp_min(1).to(dtype)  # padding is not counted in t
        count = count[..., None, None]
        unpack = (causal_products(q, k, pack) / count).softmax(-1)
        return causal_products(unpack, pack, v) / count

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_heads={self.num_heads}"


class Linformer(BaselineMixer):
    """``head = softmax(Q (E K)^T / sqrt(K)) F V`` with E and F (R, M), eq. 7.

    E and F are shared by the heads of a layer ("headwise sharing"). A sequence shorter than M uses
    their first T columns. A masked token's key and value are zero before they are projected. E and
    F mix all positions, so the layer is bidirectional only. Their columns belong to positions, so
    left padding shifts a sequence.

    Args:
        max_length: Length M of the longest sequence. A longer one is refused.
        projected_length: Projected length R; M / 4 if None.
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
        check_multiple("Linformer", hidden_size=hidden_size, num_heads=num_heads)
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
