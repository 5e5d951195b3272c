"""One segment of causal Latte for any finite logits: no factor ever exceeds 1.

With M_t the largest logit up to t and m_t = sum_{s<=t} exp(k_s - M_t), for s <= u <= t the factors
of exp(k_s - A_t) = exp(k_s - M_u) * exp(M_u - M_t) / m_t are both at most 1, so that nothing
overflows and underflow is harmless. The state before a chunk is one reference. Inside a chunk
neighbouring halves are paired at every scale, C/2, C/4, ... 1, with u the left half's last token;
the diagonal is left. Slower than ``linear_domain``, and never wrong.

Where latents forget, what is forgotten from s to u belongs to the first factor and the rest to the
second. Both are summed from u, and the references stay rounded logits that all share.

Shape suffixes: X rows (batch x heads), S tokens, N chunks, C chunk length, P pairs of halves,
h length of a half, L latents, D value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.torch_backend.batching import CHUNK, Carry, divide, exp_difference


def running_mass(k_XNCL: Tensor, g_XNCL: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(M_t, m_t) inside each chunk, by doubling, and the log-decay from its start to t."""
    M, m, lost = k_XNCL, (~torch.isneginf(k_XNCL)).to(k_XNCL.dtype), g_XNCL
    step = 1
    while step < M.shape[2]:
        early, late = slice(None, -step), slice(step, None)
        since = None if lost is None else lost[:, :, late]  # over the later of the two spans
        top = torch.maximum(plus(M[:, :, early], since), M[:, :, late])
        mass = m[:, :, early] * exp_difference(M[:, :, early], top, since)
        mass += m[:, :, late] * exp_difference(M[:, :, late], top)
        M, m = torch.cat([M[:, :, :step], top], 2), torch.cat([m[:, :, :step], mass], 2)
        if lost is not None:
            lost = torch.cat([lost[:, :, :step], lost[:, :, early] + lost[:, :, late]], 2)
        step *= 2
    return M, m, lost


def plus(a: Tensor, b: Tensor | None) -> Tensor:
    """a + b, or a."""
    return a if b is None else a + b


def after(g_XNCL: Tensor) -> Tensor:
    """The log-decay after each token, to the end of its dimension."""
    later = g_XNCL[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return torch.cat([later, torch.zeros_like(g_XNCL[..., :1, :])], -2)


class Prepared(NamedTuple):
    """Masses of a segment and the states around its chunks."""

    M_XNCL: Tensor  # the earlier state included
    m_XNCL: Tensor
    bounds: list[Carry]  # N+1: before every chunk, and after the last
    from_state_XNCL: Tensor  # exp(A before the chunk - A_t)
    own_XNCL: Tensor  # exp(k_t - A_t)
    worth_XNCL: Tensor  # exp(k_s - A at the chunk's end)
    decay_XNL: Tensor  # exp(A before the chunk - A at its end)
    g_XNCL: Tensor | None  # what the latents forget


def chunked(x_XSD: Tensor) -> Tensor:
    """(X, S, D) -> (X, N, C, D)."""
    X, S, D = x_XSD.shape
    return x_XSD.reshape(X, -1, min(CHUNK, S), D)


def prepare(k_XSL: Tensor, v_XSD: Tensor, start: Carry, g_XSL: Tensor | None) -> Prepared:
    """Scan the chunks' states in order."""
    k_XNCL, v_XNCD = chunked(k_XSL), chunked(v_XSD)
    g_XNCL = None if g_XSL is None else chunked(g_XSL)
    M, m, lost = running_mass(k_XNCL, g_XNCL)
    total = None if lost is None else lost[:, :, -1:]
    tops, masses = [start.top], [start.mass]
    for n in range(k_XNCL.shape[1]):
        own = None if total is None else total[:, n, 0]
        top = torch.maximum(plus(tops[-1], own), M[:, n, -1])
        mass = masses[-1] * exp_difference(tops[-1], top, own)
        masses.append(mass + m[:, n, -1] * exp_difference(M[:, n, -1], top))
        tops.append(top)
    M0, m0 = torch.stack(tops[:-1], 1)[:, :, None], torch.stack(masses[:-1], 1)[:, :, None]
    M1, m1 = torch.stack(tops[1:], 1)[:, :, None], torch.stack(masses[1:], 1)[:, :, None]
    M_XNCL = torch.maximum(M, plus(M0, lost))
    from_state = m0 * exp_difference(M0, M_XNCL, lost)
    m_XNCL = m * exp_difference(M, M_XNCL) + from_state
    later = None if g_XNCL is None else after(g_XNCL)
    worth_XNCL = divide(exp_difference(k_XNCL, M1, later), m1)
    decay_XNL = divide(m0 * exp_difference(M0, M1, total), m1)[:, :, 0]
    added_XNLD = worth_XNCL.mT @ v_XNCD
    bounds = [start]
    for n in range(k_XNCL.shape[1]):
        mean = decay_XNL[:, n, :, None] * bounds[-1].mean + added_XNLD[:, n]
        bounds.append(Carry(tops[n + 1], masses[n + 1], mean))
    from_state_XNCL = divide(from_state, m_XNCL)
    own_XNCL = divide(exp_difference(k_XNCL, M_XNCL), m_XNCL)
    weights = (from_state_XNCL, own_XNCL, worth_XNCL, decay_XNL)
    return Prepared(M_XNCL, m_XNCL, bounds, *weights, g_XNCL)


def halves(x_XNCD: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Views of the left and the right halves, (X, N, P, h, D) each, of all pairs at scale h."""
    X, N, C, D = x_XNCD.shape
    pairs = x_XNCD.view(X, N, C // (2 * h), 2, h, D)
    return pairs[:, :, :, 0], pairs[:, :, :, 1]


def scales(k_XNCL: Tensor, s: Prepared) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For every scale h: exp(k_left - M_u) and exp(M_u - A_right), both at most 1."""
    h = k_XNCL.shape[2] // 2
    while h >= 1:
        k_left, _ = halves(k_XNCL, h)
        M_left, M_right = halves(s.M_XNCL, h)
        _, m_right = halves(s.m_XNCL, h)
        M_u = M_left[..., -1:, :]
        to_u = from_u = None
        if s.g_XNCL is not None:
            g_left, g_right = halves(s.g_XNCL, h)
            to_u, from_u = after(g_left), g_right.cumsum(-2)
        right = divide(exp_difference(M_u, M_right, from_u), m_right)
        yield h, exp_difference(k_left, M_u, to_u), right
        h //= 2


def forward(
    p_XSL: Tensor, k_XSL: Tensor, v_XSD: Tensor, start: Carry, g_XSL: Tensor | None
) -> tuple[Tensor, Carry]:
    """Outputs (X, S, D) of one segment, and the state after it. S divides into chunks of 2^n."""
    k_XNCL, v_XNCD, p_XNCL = chunked(k_XSL), chunked(v_XSD), chunked(p_XSL)
    s = prepare(k_XSL, v_XSD, start, g_XSL)
    mu_XNLD = torch.stack([b.mean for b in s.bounds[:-1]], 1)
    out_XNCD = (p_XNCL * s.from_state_XNCL) @ mu_XNLD
    for h, left, right in scales(k_XNCL, s):
        _, p_right = halves(p_XNCL, h)
        v_left, _ = halves(v_XNCD, h)
        _, out_right = halves(out_XNCD, h)
        out_right += (p_right * right) @ left.mT @ v_left
    out_XNCD += (p_XNCL * s.own_XNCL).sum(-1, keepdim=True) * v_XNCD
    return out_XNCD.view(v_XSD.shape), s.bounds[-1]


def state_after(k_XSL: Tensor, v_XSD: Tensor, start: Carry, g_XSL: Tensor | None) -> Carry:
    """The state after the segment, without its outputs."""
    return prepare(k_XSL, v_XSD, start, g_XSL).bounds[-1]


def backward(
    p_XSL: Tensor,
    k_XSL: Tensor,
    v_XSD: Tensor,
    start: Carry,
    dy_XSD: Tensor,
    dlog_mass_XL: Tensor,
    dmean_XLD: Tensor,
    g_XSL: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (p dp, dk, dv, dlog_mass_0, dmean_0); equations as in ``linear_domain``.

    Between chunks the reverse state is the gradient with respect to the (log-mass, mean) there,
    which is bounded like the state itself.
    """
    k_XNCL, v_XNCD, p_XNCL = chunked(k_XSL), chunked(v_XSD), chunked(p_XSL)
    dy_XNCD = chunked(dy_XSD)
    s = prepare(k_XSL, v_XSD, start, g_XSL)
    mu_XNLD = torch.stack([b.mean for b in s.bounds[:-1]], 1)
    own_pairs_XNC1 = (dy_XNCD * v_XNCD).sum(-1, keepdim=True)

    delta_XNCL = s.from_state_XNCL * (dy_XNCD @ mu_XNLD.mT) + s.own_XNCL * own_pairs_XNC1
    for h, left, right in scales(k_XNCL, s):
        v_left, _ = halves(v_XNCD, h)
        _, dy_right = halves(dy_XNCD, h)
        _, delta_right = halves(delta_XNCL, h)
        delta_right += right * (dy_right @ v_left.mT @ left)
    pulled_XNCL = p_XNCL * delta_XNCL

    p_own_XNCL = p_XNCL * s.own_XNCL
    dk_XNCL = p_own_XNCL * (own_pairs_XNC1 - delta_XNCL)
    dv_XNCD = p_own_XNCL.sum(-1, keepdim=True) * dy_XNCD
    for h, left, right in scales(k_XNCL, s):
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
    to_mean_XNLD = (p_XNCL * s.from_state_XNCL).mT @ dy_XNCD
    to_scalar_XNL = (pulled_XNCL * s.from_state_XNCL).sum(2)
    dA_XL, dmu_XLD = dlog_mass_XL, dmean_XLD
    for n in reversed(range(k_XNCL.shape[1])):
        lost_XL = (dmu_XLD * s.bounds[n + 1].mean).sum(-1) - dA_XL
        worth_XCL, decay_XL = s.worth_XNCL[:, n], s.decay_XNL[:, n]
        dk_XNCL[:, n] += worth_XCL * (v_XNCD[:, n] @ dmu_XLD.mT - lost_XL[:, None])
        dv_XNCD[:, n] += worth_XCL @ dmu_XLD
        dmu_XLD = to_mean_XNLD[:, n] + decay_XL[..., None] * dmu_XLD
        dA_XL = (dmu_XLD * s.bounds[n].mean).sum(-1) - to_scalar_XNL[:, n] - decay_XL * lost_XL
    shape = p_XSL.shape
    return pulled_XNCL.view(shape), dk_XNCL.view(shape), dv_XNCD.view(v_XSD.shape), dA_XL, dmu_XLD
