"""Kept tokens: of the sources that have left the window, those with the largest scores stay exact.

The tokens of a sequence are divided into blocks of C. An update comes before the first query of
each block. Sources that are W or more tokens behind this query then leave the window. For each
group of key heads the N sources with the largest scores, of all that have left, are kept; of equal
scores the later source. The latents read all others, once and for good. Between two updates a query
sees the last W to W + C - 1 tokens.

Positions, windows and blocks count valid tokens alone, from the first token of the sequence on. So
results do not depend on padding, packing, or where a call begins.

Shape suffixes: B batch, T tokens, N states (B, or the packed sequences), M slots of a state, H
query heads, G key/value heads, L latents, K key width, D value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.tensors import computation_dtype


class Kept(NamedTuple):
    """Which of the tokens that have left the window stay visible.

    Attributes:
        scores: Score of each source and group of key heads, (B, T, G), floating point. The choice
            has no gradient. A source with a score of -inf or NaN is never kept.
        count: Number of kept tokens, N. 0 keeps none.
        block: Number of tokens from one update to the next, C.
        packed: Whether the state has keys, values and latent keys in 8 bits
            (:mod:`latte.ops.mxint8`). Those of all sources are then rounded to the numbers of this
            format before they are used, so a cut in a sequence changes nothing. Sinks are not.
    """

    scores: Tensor
    count: int  # type: ignore[assignment]
    block: int = 64
    packed: bool = False


class KeptState(NamedTuple):
    """The tokens that a sequence holds exactly: N kept ones, then the last W + C - 1, oldest first.

    A place among the last tokens is empty if its token was kept, or read by the latents. Kept
    tokens are in the order of their scores, the largest first, and of equal scores the later first.
    In a packed state keys, values and latent keys are uint8 rows of :func:`latte.ops.mxint8.pack`,
    without gradients.

    Attributes:
        keys: Keys, (N, M, G, K), with M = count + window + block - 1.
        values: Values, (N, M, G, D).
        scores: Scores, (N, M, G), in fp32 (fp64 for fp64 inputs); -inf in an empty place.
        positions: Positions in the sequence, (N, M, G) int64; -1 in an empty place.
        seen: Number of valid tokens so far, (N,) int64.
        latent_keys: Latent keys, (N, M, H, L); None without latents.
        log_decay: Sum of the latents' log-decays since the token left the window, (N, M, H, L), in
            fp32 (fp64 for fp64 inputs); None without decay.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    positions: Tensor
    seen: Tensor
    latent_keys: Tensor | None = None
    log_decay: Tensor | None = None

    @classmethod
    def empty(
        cls,
        k_BTGK: Tensor,
        v_BTGD: Tensor,
        kept: Kept,
        window: int,
        sequences: int,
        latent_k_BTHL: Tensor | None = None,
        log_decay_BTHL: Tensor | None = None,
    ) -> KeptState:
        """The state before the first token, for a number of sequences and inputs like these."""
        shape = (sequences, kept.count + window + kept.block - 1)

        def zeros(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.new_zeros(*shape, *x.shape[2:])

        keys, values = k_BTGK.new_zeros(*shape, *k_BTGK.shape[2:]), zeros(v_BTGD)
        scores = comparable(kept.scores[:0]).new_full((*shape, k_BTGK.shape[2]), -torch.inf)
        positions = torch.full(scores.shape, -1, device=scores.device)
        seen = positions.new_zeros(sequences)
        late = zeros(latent_k_BTHL), zeros(log_decay_BTHL)
        return cls(keys, values, scores, positions, seen, *late)  # type: ignore[arg-type]

    def is_of(self, count: int, window: int, block: int) -> bool:
        """Whether the tokens are in the places that calls with these numbers give them."""
        P, device = window + block - 1, self.positions.device
        last_N1 = self.seen[:, None] - 1
        left_N1 = last_N1.div(block, rounding_mode="floor") * block - window  # the last that left
        place_NP = last_N1 + 1 - P + torch.arange(P, device=device)
        there_NP = (place_NP >= 0) & (place_NP > left_N1)
        wanted_NP = torch.where(there_NP, place_NP, -1)
        kept_NCG, recent_NPG = self.positions.split([count, P], 1)
        gone_N11 = left_N1.clamp_min(-1)[..., None]
        fits = (recent_NPG == wanted_NP[..., None]).all() & (kept_NCG <= gone_N11).all()
        return bool(fits)


class KeptLatents(NamedTuple):
    """The inputs of the latents in a call with kept tokens.

    Attributes:
        q: Query logits, (B, T, H, L+1). Column 0 belongs to all exact keys.
        k: Key logits, (B, T, H, L).
        log_decay: Log-decays, (B, T, H, L), 0 at masked tokens, or None.
        log_mass: Log-mass of the initial state, (N, H, L), or None.
        mean: Mean of the initial state, (N, H, L, D), or None.
    """

    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    log_mass: Tensor | None
    mean: Tensor | None


def comparable(scores: Tensor) -> Tensor:
    """Scores in the dtype of the sums, without gradient; -inf for NaN."""
    scores = scores.detach().to(computation_dtype(scores.dtype))
    return torch.where(scores.isnan(), -torch.inf, scores)


def risen(scores: Tensor, positions: Tensor, rise: float) -> Tensor:
    """Scores (..., G), at least fp32, plus ``rise`` times the positions (...) of their tokens."""
    scores = scores.to(computation_dtype(scores.dtype))
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    return scores + (positions.to(wide) * rise).to(scores.dtype)[..., None]


def taken(x_BSGX: Tensor, index_NMG: Tensor, there_NMG: Tensor, fill: float = 0) -> Tensor:
    """The sources of these places, (N, M, G, ...); ``fill`` where there is none.

    x has a row for each row of the index, or one row for all.
    """
    N, _, G = index_NMG.shape
    row = torch.arange(N, device=index_NMG.device)[:, None, None]
    row = row if x_BSGX.shape[0] == N else torch.zeros_like(row)
    found = x_BSGX[row, index_NMG, torch.arange(G, device=row.device)]
    there = there_NMG.view(*there_NMG.shape, *[1] * (found.ndim - 3))
    return torch.where(there, found, torch.as_tensor(fill, dtype=found.dtype, device=row.device))
