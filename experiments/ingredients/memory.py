"""Which tokens a trial keeps exactly, and what its latents are read by: options of ``TrialMixer``.

Shape suffixes: B batch, T tokens, N chunks, C tokens of a chunk, H query heads, G key/value heads,
D value width, L latents per head, W width of a content key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.layers.parts import in_chunks
from latte.ops import latte_attention
from latte.ops.tensors import full_precision

# How tokens are scored. "map": by a linear map of the layer's input, which is added to the logits
# of all exact keys and so has a gradient. "surprise": by how badly the latents answer for the value
# (:func:`surprise`). "write": by how far a token moves the latents, its surprise times its mass,
# the sum of exp(latent_k); compare HOLA (arXiv 2607.02303). "random": by chance. "latest": all
# alike, so that the latest tokens stay, as in a wider window.
KEPT_BY = ("none", "latest", "random", "map", "surprise", "write")
CHUNK = 32  # tokens whose weights on each other, in every latent, are held at once


@torch.no_grad()
def surprise(
    latent_k_BTHL: Tensor,
    v_BTHD: Tensor,
    log_decay_BTHL: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """``|v_s - sum_l p(l|s) mu_{s-1}[l]|``, (B, T, H), p(l|s) = softmax of the key logits of s.

    The latents here have read all tokens before s, also those in the window. Those of the first
    token of a sequence have read none, and answer 0.
    """
    asked_BTHL = F.pad(latent_k_BTHL[:, 1:], (0, 0, 0, 0, 0, 1))
    answer, _ = latte_attention(
        asked_BTHL, latent_k_BTHL, v_BTHD, cu_seqlens=cu_seqlens, log_decay=log_decay_BTHL
    )
    answer = F.pad(answer[:, :-1], (0, 0, 0, 0, 1, 0))
    if cu_seqlens is not None:
        answer[:, cu_seqlens[:-1].long()] = 0
    return (v_BTHD - answer).float().norm(dim=-1)


@full_precision
def content_logits(
    q_BTHW: Tensor,
    k_BTHW: Tensor,
    latent_k_BTHL: Tensor,
    log_decay_BTHL: Tensor,
    log_mass_BTHL: Tensor,
) -> Tensor:
    """``q_t . sum_{s<=t} p(s|l,t) k_s``, (B, T, H, L): what each latent's mean key answers.

    By chunks, in a time that is linear in T. No number above 0 is exponentiated, so that every
    logit is safe.

    Args:
        q_BTHW, k_BTHW: Content queries and keys. The logits are not scaled.
        latent_k_BTHL, log_decay_BTHL: Key logits and log-decays of the latents.
        log_mass_BTHL: Log-mass of each latent after each token.
    """
    T = q_BTHW.shape[1]
    C = min(CHUNK, T)
    q, k, logit, decay, mass = (
        in_chunks(x, -(-T // C), C).movedim(3, 1)  # (B, H, N, C, ...)
        for x in (q_BTHW, k_BTHW, latent_k_BTHL, log_decay_BTHL, log_mass_BTHL)
    )
    total = decay.cumsum(-2)
    # Of query t and source s of a chunk, and of the chunks before: (..., t, s, L) and (..., t, L).
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)[..., None]
    read, written = total - mass, logit - total
    weights = read[..., :, None, :] + written[..., None, :, :]
    weights = weights.masked_fill(later, -torch.inf).clamp_max(0.0).exp()
    near = ((q @ k.mT)[..., None, :] @ weights).squeeze(-2)
    first = F.pad(mass[:, :, :-1, -1:], (0, 0, 0, 0, 1, 0), value=-torch.inf)
    share = (first + read).clamp_max(0.0).exp()
    added = weights[..., -1, :, :].mT @ k  # (B, H, N, L, W)
    mean, before = torch.zeros_like(added[:, :, 0]), []
    for n in range(added.shape[2]):
        before.append(mean)
        mean = share[:, :, n, -1, :, None] * mean + added[:, :, n]
    far = share * (q @ torch.stack(before, 2).mT)
    return (near + far).movedim(1, 3).flatten(1, 2)[:, :T]
