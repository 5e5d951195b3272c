"""One segment of causal Latte for any finite logits: no factor ever exceeds 1.

For s <= t and any reference r with k_s <= r <= A_t, exp(k_s - A_t) = exp(k_s - r) exp(r - A_t)
with both factors at most 1. Chunks take the log-mass before them as the reference of the state.
Inside a chunk neighbouring halves are paired at every scale, C/2, C/4, ... 1, with the left
half's last A as reference; the diagonal is left. Slower than ``fast.py``, and never wrong.

Shape suffixes: X rows (batch x heads), S tokens, N chunks, C chunk length, P pairs of halves,
h length of a half, L latents, D value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64


def exp_difference(a: Tensor, b: Tensor) -> Tensor:
    """exp(a - b) for a <= b, and 0 where a is -inf, also when b is."""
    return torch.exp(a - torch.where(torch.isneginf(b), 0.0, b))


def running_log_mass(k_XNCL: Tensor) -> Tensor:
    """logsumexp over s <= t inside each chunk, by doubling (C is a power of two, or the length)."""
    A = k_XNCL
    step = 1
    while step < A.shape[2]:
        A = torch.cat([A[:, :, :step], torch.logaddexp(A[:, :, step:], A[:, :, :-step])], 2)
        step *= 2
    return A


class Prepared(NamedTuple):
    """Log-masses of a segment and the states around its chunks."""

    A_XNCL: Tensor  # logsumexp over all sources up to t, the earlier state included
    bounds_A: list[Tensor]  # N+1 times (X, L): before every chunk, and after the last
    bounds_mu: list[Tensor]  # N+1 times (X, L, D)
    weight_XNCL: Tensor  # exp(k_s - A at the chunk's end): what a source is worth afterwards


def chunked(x_XSD: Tensor) -> Tensor:
    """(X, S, D) -> (X, N, C, D)."""
    X, S, D = x_XSD.shape
    return x_XSD.reshape(X, -1, min(CHUNK, S), D)


def prepare(k_XSL: Tensor, v_XSD: Tensor, log_mass_XL: Tensor, mean_XLD: Tensor) -> Prepared:
    """Scan the chunks' states in order."""
    k_XNCL, v_XNCD = chunked(k_XSL), chunked(v_XSD)
    local_XNCL = running_log_mass(k_XNCL)
    end_XNL = local_XNCL[:, :, -1]
    bounds_A = [log_mass_XL]
    for n in range(k_XNCL.shape[1]):
        bounds_A.append(torch.logaddexp(bounds_A[-1], end_XNL[:, n]))
    after_XNL = torch.stack(bounds_A[1:], 1)
    before_XNL = torch.stack(bounds_A[:-1], 1)
    weight_XNCL = exp_difference(k_XNCL, after_XNL[:, :, None])
    added_XNLD = weight_XNCL.mT @ v_XNCD
    decay_XNL = exp_difference(before_XNL, after_XNL)
    bounds_mu = [mean_XLD]
    for n in range(k_XNCL.shape[1]):
        bounds_mu.append(decay_XNL[:, n, :, None] * bounds_mu[-1] + added_XNLD[:, n])
    A_XNCL = torch.logaddexp(local_XNCL, before_XNL[:, :, None])
    return Prepared(A_XNCL, bounds_A, bounds_mu, weight_XNCL)


def halves(x_XNCD: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Views of the left and the right halves, (X, N, P, h, D) each, of all pairs at scale h."""
    X, N, C, D = x_XNCD.shape
    pairs = x_XNCD.view(X, N, C // (2 * h), 2, h, D)
    return pairs[:, :, :, 0], pairs[:, :, :, 1]


def scales(k_XNCL: Tensor, A_XNCL: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For every scale h: exp(k_left - r) and exp(r - A_right), both at most 1."""
    h = k_XNCL.shape[2] // 2
    while h >= 1:
        k_left, _ = halves(k_XNCL, h)
        A_left, A_right = halves(A_XNCL, h)
        reference = A_left[..., -1:, :]
        yield h, exp_difference(k_left, reference), exp_difference(reference, A_right)
        h //= 2


def forward(
    p_XSL: Tensor, k_XSL: Tensor, v_XSD: Tensor, log_mass_XL: Tensor, mean_XLD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (X, S, D) of one segment, and the state after it. S divides into chunks of 2^n."""
    k_XNCL, v_XNCD, p_XNCL = chunked(k_XSL), chunked(v_XSD), chunked(p_XSL)
    s = prepare(k_XSL, v_XSD, log_mass_XL, mean_XLD)
    before_XNL, mu_XNLD = torch.stack(s.bounds_A[:-1], 1), torch.stack(s.bounds_mu[:-1], 1)
    out_XNCD = (p_XNCL * exp_difference(before_XNL[:, :, None], s.A_XNCL)) @ mu_XNLD
    for h, left, right in scales(k_XNCL, s.A_XNCL):
        _, p_right = halves(p_XNCL, h)
        v_left, _ = halves(v_XNCD, h)
        _, out_right = halves(out_XNCD, h)
        out_right += (p_right * right) @ left.mT @ v_left
    out_XNCD += (p_XNCL * exp_difference(k_XNCL, s.A_XNCL)).sum(-1, keepdim=True) * v_XNCD
    return out_XNCD.view(v_XSD.shape), s.bounds_A[-1], s.bounds_mu[-1]


def backward(
    p_XSL: Tensor,
    k_XSL: Tensor,
    v_XSD: Tensor,
    log_mass_XL: Tensor,
    mean_XLD: Tensor,
    dy_XSD: Tensor,
    dlog_mass_XL: Tensor,
    dmean_XLD: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dlog_mass_0, dmean_0); the equations are those of ``fast.py``.

    Between chunks the reverse state is the gradient with respect to the (log-mass, mean) there,
    which is bounded like the state itself.
    """
    k_XNCL, v_XNCD, p_XNCL = chunked(k_XSL), chunked(v_XSD), chunked(p_XSL)
    dy_XNCD = chunked(dy_XSD)
    s = prepare(k_XSL, v_XSD, log_mass_XL, mean_XLD)
    before_XNL, mu_XNLD = torch.stack(s.bounds_A[:-1], 1), torch.stack(s.bounds_mu[:-1], 1)
    from_state_XNCL = exp_difference(before_XNL[:, :, None], s.A_XNCL)
    own_XNCL = exp_difference(k_XNCL, s.A_XNCL)
    own_pairs_XNC1 = (dy_XNCD * v_XNCD).sum(-1, keepdim=True)

    delta_XNCL = from_state_XNCL * (dy_XNCD @ mu_XNLD.mT) + own_XNCL * own_pairs_XNC1
    for h, left, right in scales(k_XNCL, s.A_XNCL):
        v_left, _ = halves(v_XNCD, h)
        _, dy_right = halves(dy_XNCD, h)
        _, delta_right = halves(delta_XNCL, h)
        delta_right += right * (dy_right @ v_left.mT @ left)
    pulled_XNCL = p_XNCL * delta_XNCL
    dq_XNCL = pulled_XNCL - p_XNCL * pulled_XNCL.sum(-1, keepdim=True)

    p_own_XNCL = p_XNCL * own_XNCL
    dk_XNCL = p_own_XNCL * (own_pairs_XNC1 - delta_XNCL)
    dv_XNCD = p_own_XNCL.sum(-1, keepdim=True) * dy_XNCD
    for h, left, right in scales(k_XNCL, s.A_XNCL):
        _, p_right = halves(p_XNCL, h)
        _, pulled_right = halves(pulled_XNCL, h)
        v_left, _ = halves(v_XNCD, h)
        _, dy_right = halves(dy_XNCD, h)
        dk_left, _ = halves(dk_XNCL, h)
        dv_left, _ = halves(dv_XNCD, h)
        weighted = p_right * right
        asked = (dy_right @ v_left.mT).mT @ weighted
        dk_left += left * (asked - (pulled_right * right).sum(-2, keepdim=True))
        dv_left += left @ (weighted.mT @ dy_right)

    # Reverse over the chunks, with the gradient of the state after each of them.
    weighted_XNCL = p_XNCL * from_state_XNCL
    to_mean_XNLD = weighted_XNCL.mT @ dy_XNCD
    to_scalar_XNL = (pulled_XNCL * from_state_XNCL).sum(2)
    dA_XL, dmu_XLD = dlog_mass_XL, dmean_XLD
    for n in reversed(range(k_XNCL.shape[1])):
        worth_XCL, mu_after_XLD, mu_XLD = s.weight_XNCL[:, n], s.bounds_mu[n + 1], s.bounds_mu[n]
        lost_XL = (dmu_XLD * mu_after_XLD).sum(-1) - dA_XL
        dk_XNCL[:, n] += worth_XCL * (v_XNCD[:, n] @ dmu_XLD.mT - lost_XL[:, None])
        dv_XNCD[:, n] += worth_XCL @ dmu_XLD
        decay_XL = exp_difference(s.bounds_A[n], s.bounds_A[n + 1])
        kept_XLD = decay_XL[..., None] * dmu_XLD
        dmu_XLD = to_mean_XNLD[:, n] + kept_XLD
        dA_XL = (dmu_XLD * mu_XLD).sum(-1) - to_scalar_XNL[:, n] - decay_XL * lost_XL
    shape = p_XSL.shape
    return dq_XNCL.view(shape), dk_XNCL.view(shape), dv_XNCD.view(v_XSD.shape), dA_XL, dmu_XLD
