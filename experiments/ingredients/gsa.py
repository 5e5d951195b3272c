"""Gated slot attention (arXiv 2409.07146), the nearest earlier work to latents that forget.

Each head has M slots, and each slot holds a key and a value. A token's gate lets every slot forget
a part of what it holds, and writes the token's own key and value in its place:

    K_t = a_t K_{t-1} + (1 - a_t) k_t^T       (M, K), with a factor a_t per slot
    V_t = a_t V_{t-1} + (1 - a_t) v_t^T       (M, D)
    o_t = V_t^T softmax(K_t q_t)

Latte's latents are read by logits of the query's token alone. A slot is read by the key that it
holds. Slots begin as zeros, so that the weights of the tokens in a slot sum to less than 1.

Shape suffixes: B batch, T tokens, N chunks, C tokens of a chunk, E hidden size, H query heads, G
key/value heads, M slots per head, K key width, D value width, W = K + D.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from latte.layers import Context, Mixer, MixerState, Projected, RMSNorm
from latte.layers.checks import check_multiple, check_positive
from latte.layers.parts import in_chunks
from latte.ops.tensors import full_precision

CHUNK = 8  # tokens whose weights on each other, in every slot, are held at once
DAMPING = 8.0  # the paper's: a_t is the eighth root of a sigmoid


# --- the op ------------------------------------------------------------------------------------


def gated_slots_reference(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHD: Tensor, log_decay_BTHM: Tensor
) -> Tensor:
    """The output of each head, (B, T, H, D), token by token.

    Args:
        q_BTHK, k_BTHK, v_BTHD: Queries, keys and values. The logits are not scaled.
        log_decay_BTHM: Logarithm of the factor a_t of each slot: finite, at most 0.
    """
    slots_BTHMW = slot_states(k_BTHK, v_BTHD, log_decay_BTHM)
    K_BTHMK, V_BTHMD = slots_BTHMW.split([k_BTHK.shape[-1], v_BTHD.shape[-1]], -1)
    p_BTHM = torch.einsum("bthmk,bthk->bthm", K_BTHMK, q_BTHK).softmax(-1)
    return torch.einsum("bthm,bthmd->bthd", p_BTHM, V_BTHMD)


def slot_states(k_BTHK: Tensor, v_BTHD: Tensor, log_decay_BTHM: Tensor) -> Tensor:
    """The slots after each token, (B, T, H, M, W): their keys, then their values."""
    kv_BTHW = torch.cat([k_BTHK, v_BTHD], -1)
    slots, found = _empty(kv_BTHW, log_decay_BTHM), []
    for kv_BHW, log_decay_BHM in zip(kv_BTHW.unbind(1), log_decay_BTHM.unbind(1), strict=True):
        kept, written = log_decay_BHM.exp(), -torch.expm1(log_decay_BHM)
        slots = kept[..., None] * slots + written[..., None] * kv_BHW[..., None, :]
        found.append(slots)
    return torch.stack(found, 1)


@full_precision
def gated_slots(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHD: Tensor,
    log_decay_BTHM: Tensor,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`gated_slots_reference` by chunks, in a time that is linear in T.

    After token t, the weight of token s in a slot is ``(1 - a_s) a_{s+1} ... a_t``. It is computed
    for each pair of a chunk. Earlier chunks are read from the slots. No number above 0 is
    exponentiated, so that every decay is safe. A token with log-decay 0 changes no slot. Only first
    derivatives are right.

    Args:
        q_BTHK, k_BTHK, v_BTHD, log_decay_BTHM: Arguments of the reference.
        initial: Slots before the first token, (B, H, M, W); None is zeros.

    Returns:
        The output (B, T, H, D), and the slots after the last token (B, H, M, W).
    """
    T, widths = q_BTHK.shape[1], [k_BTHK.shape[-1], v_BTHD.shape[-1]]
    C = min(CHUNK, T)
    kv_BTHW = torch.cat([k_BTHK, v_BTHD], -1)
    slots = _empty(kv_BTHW, log_decay_BTHM) if initial is None else initial
    q, kv, log_decay = (
        in_chunks(x, -(-T // C), C).movedim(3, 1)  # (B, H, N, C, ...)
        for x in (q_BTHK, kv_BTHW, log_decay_BTHM)
    )
    k, v = kv.split(widths, -1)
    total, written = log_decay.cumsum(-2), -torch.expm1(log_decay)
    end = total[..., -1:, :]

    # The slots before each chunk, (B, H, N, M, W).
    added = ((end - total).exp() * written).mT @ kv
    before = []
    for kept, new in zip(end.exp().mT.unbind(2), added.unbind(2), strict=True):
        before.append(slots)
        slots = torch.addcmul(new, kept, slots)
    slot_k, slot_v = torch.stack(before, 2).split(widths, -1)

    # The weights in a chunk, (B, H, N, C of t, C of s, M). Each has the factors exp(total_t) and
    # exp(-total_s). Gradients reach the decays through a 1 in the place of each factor, which
    # costs less than through all pairs.
    with torch.no_grad():
        later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)[..., None]
        since = total[..., :, None, :] - total[..., None, :, :]
        since = since.masked_fill_(later, -torch.inf).exp_()
    zero = total - total.detach()
    weights = since * (written * (1 - zero))[..., None, :, :]

    near, far = 1 + zero, total.exp()
    logits = near * ((q @ k.mT)[..., None, :] @ weights).squeeze(-2) + far * (q @ slot_k.mT)
    p = logits.softmax(-1)
    shares = (weights @ (near * p)[..., None]).squeeze(-1)
    out = shares @ v + (far * p) @ slot_v
    return out.movedim(1, 3).flatten(1, 2)[:, :T], slots


def _empty(kv_BTHW: Tensor, log_decay_BTHM: Tensor) -> Tensor:
    """The slots before the first token of a sequence, (B, H, M, W)."""
    (B, _, H, M), W = log_decay_BTHM.shape, kv_BTHW.shape[-1]
    return kv_BTHW.new_zeros(B, H, M, W)


# --- the mixer ---------------------------------------------------------------------------------


class GatedSlotAttention(Mixer):
    """Gated slot attention: ``norm(silu(o_t))``, o_t of :func:`gated_slots`.

    It follows the defaults of flash-linear-attention, whose authors are the paper's: queries, keys
    and values go through silu, the logits are not scaled, ``a_t = sigmoid(W x_t)^(1/8)``, the
    RMSNorm is over the channels of all heads, keys and values are as wide as ``hidden_size /
    num_heads``, and there are no positions, no short convolutions, no gate of the output and no
    biases. The number of slots is another: there 64 a head, here what is given.

    Args:
        hidden_size, num_heads, num_key_value_heads, head_dim, causal: Arguments of :class:`Mixer`;
            it must be causal.
        num_slots: Total number of slots over all heads.
        value_dim: Width D of a head's values; ``head_dim`` if None.
    """

    carries = ("own",)
    uses: ClassVar[tuple[str, ...]] = ("num_latents", "value_dim")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_slots: int,
        *,
        value_dim: int | None = None,
        rms_norm_eps: float = 1e-6,
        **heads: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, **heads)
        name = type(self).__name__
        if not self.causal:
            raise ValueError(f"{name}: expected causal=True, slots hold the past")
        H, G, K = self.num_heads, self.num_key_value_heads, self.head_dim
        D = K if value_dim is None else value_dim
        check_multiple(name, num_slots=num_slots, num_heads=num_heads)
        check_positive(name, value_dim=D)
        self.num_slots, self.value_dim = num_slots, D
        self.q_proj = nn.Linear(hidden_size, H * K, bias=False)
        self.k_proj = nn.Linear(hidden_size, G * K, bias=False)
        self.v_proj = nn.Linear(hidden_size, G * D, bias=False)
        self.decay_proj = nn.Linear(hidden_size, G * (num_slots // H), bias=False)
        self.output_norm = RMSNorm(H * D, eps=rms_norm_eps)
        self.o_proj = nn.Linear(H * D, hidden_size, bias=False)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        own = {"num_slots": config.num_latents, "value_dim": config.value_dim}
        return super().options(config) | own | {"rms_norm_eps": config.norm_eps}

    def mixing_flops(self, length: int) -> float:
        """2 * 2 * M * (K + D) per head: a write and a read of each slot."""
        return 4.0 * self.num_slots * (self.head_dim + self.value_dim)

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        """q, k (B, T, H, K), v and the log-decay, in at least fp32, for all query heads."""
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(x_BTE) for project in maps)
        wide = torch.promote_types(q.dtype, torch.float32)
        q = self._heads(q.to(wide), self.num_heads)
        q, k = self._features(q, self._heads(k.to(wide), self.num_key_value_heads))
        v = F.silu(self._heads(v.to(wide), self.num_key_value_heads))
        # Padding keeps what the slots hold.
        decay = self._log_decay(x_BTE, wide).masked_fill(~context.real(x_BTE)[..., None, None], 0.0)
        k, v, decay = (self._shared(x) for x in (k, v, decay))
        return Projected(v, state, log_decay=decay, features=(q, k))

    def _features(self, q_BTHK: Tensor, k_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """The queries and keys that slots are read and written by."""
        return F.silu(q_BTHK), F.silu(k_BTGK)

    def _log_decay(self, x_BTE: Tensor, wide: torch.dtype) -> Tensor:
        """The log-decay of each slot, (B, T, G, M), of dtype ``wide``."""
        decay = self._heads(self.decay_proj(x_BTE).to(wide), self.num_key_value_heads)
        return F.logsigmoid(decay) / DAMPING

    def _shared(self, heads_BTGW: Tensor) -> Tensor:
        """The part of each query head, (B, T, H, W), from that of the key/value heads."""
        return heads_BTGW.repeat_interleave(self.num_heads // self.num_key_value_heads, 2)

    def _weights(self, projected: Projected, context: Context) -> Tensor:
        raise ValueError(f"{type(self).__name__} has no attention weights to show")

    def _attend(
        self, x_BTE: Tensor, projected: Projected, context: Context
    ) -> tuple[Tensor, MixerState]:
        assert projected.features is not None and projected.log_decay is not None
        parts = [*projected.features, projected.v, projected.log_decay]
        lengths = [] if context.cu_seqlens is None else context.cu_seqlens.diff().tolist()
        if lengths:  # a row for each sequence, whose padding has log-decay 0
            parts = [pad_sequence(x[0].split(lengths), batch_first=True) for x in parts]
        q, k, v, log_decay = parts
        out_BTHD, slots = gated_slots(q, k, v, log_decay, projected.state.own)
        if lengths:
            pairs = zip(out_BTHD, lengths, strict=True)
            out_BTHD = torch.cat([row[:length] for row, length in pairs])[None]
        out = self.output_norm(F.silu(out_BTHD).flatten(-2).to(x_BTE.dtype))
        return self._heads(out, self.num_heads), projected.state._replace(own=slots)
