"""A run of causal Latte in the linear domain, with a single reference for all its tokens.

With r a logit of the past, ``e_s = exp(k_s - r)`` and ``alpha_t = m_0 + sum_{s<=t} e_s``, every
quantity of the model is a cumulative sum:

    y_t = sum_l p_t[l] / alpha_t[l] (m_0 mu_0 + sum_{s<=t} e_s[l] v_s)

No logarithm, and no rescaling between chunks. The reference is the largest logit before the run,
or the first one of the sequence; alpha is then at least 1, and the run ends before the first key
that exceeds r by ``REACH`` (:func:`run_length`). Both depend on the past alone, so that future
inputs cannot change the past, not even its rounding.

Shape suffixes: X rows (batch x heads), S tokens of the run, N chunks, C chunk length
(S = N C), L latents, D value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.torch_backend.batching import CHUNK, Carry

# exp(k - r) is as exact as its argument: at 16 half a unit in the last place of fp32 is 1e-6.
REACH = 16.0


class Scaled(NamedTuple):
    """Keys of a run in the linear domain, relative to ``reference``."""

    reference_XL: Tensor
    e_XSL: Tensor
    alpha_XSL: Tensor
    mass_XL: Tensor  # of the state that the run starts from
    top_XL: Tensor  # the largest logit by the end
    empty_XL: Tensor | None  # rows that have seen nothing by the end; None if there are none


def reference_logits(k_XSL: Tensor, start: Carry, seen_XS: Tensor | None) -> Tensor:
    """(X, L): the largest logit up to the first token, or the first one that is visible.

    ``seen_XS`` is True from the first visible source on; None if all sources are visible.
    """
    first_XL = torch.maximum(k_XSL[:, 0], start.top)
    if seen_XS is None:
        return first_XL
    index_X = seen_XS.to(torch.uint8).argmax(1)
    later_XL = k_XSL[torch.arange(k_XSL.shape[0], device=k_XSL.device), index_X]
    first_XL = torch.where(torch.isneginf(first_XL), later_XL, first_XL)
    return torch.where(torch.isneginf(first_XL), 0.0, first_XL)


def run_length(k_XSL: Tensor, reference_XL: Tensor) -> int:
    """How many tokens this reference can serve."""
    limit_X1L = (reference_XL + REACH)[:, None]
    if not (k_XSL.amax(1, keepdim=True) > limit_X1L).any():
        return k_XSL.shape[1]
    return int((k_XSL > limit_X1L).any(0).any(-1).to(torch.uint8).argmax())


def scaled_keys(
    k_XSL: Tensor, reference_XL: Tensor, start: Carry, seen_XS: Tensor | None
) -> Scaled:
    """exp(k - r), its running sum and the first state's mass."""
    e_XSL = (k_XSL - reference_XL[:, None]).exp_()
    mass_XL = start.mass * torch.exp(start.top - reference_XL)
    alpha_XSL = e_XSL.cumsum(1).add_(mass_XL[:, None])
    empty_XL = None
    if seen_XS is not None:
        # Nothing seen yet: alpha = 0, and whatever is divided by it is 0 as well.
        unseen_XSL = ~seen_XS[..., None] & (start.mass == 0)[:, None]
        alpha_XSL = torch.where(unseen_XSL, 1.0, alpha_XSL)
        empty_XL = unseen_XSL[:, -1]
    top_XL = torch.maximum(k_XSL.amax(1), start.top)
    return Scaled(reference_XL, e_XSL, alpha_XSL, mass_XL, top_XL, empty_XL)


def chunk(x_XSD: Tensor) -> Tensor:
    """(X, S, D) -> (X N, C, D); S is a multiple of ``CHUNK``, or smaller."""
    return x_XSD.reshape(-1, min(CHUNK, x_XSD.shape[1]), x_XSD.shape[-1])


def running_states(start: Tensor, sums_XN: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
    """Exclusive running sum over the chunks, (X, N, ...), and what follows the last one (X, ...).

    A plain loop: ``cumsum`` over a strided dimension takes ten times as long. ``back`` sums from
    the end.
    """
    before_XN = torch.empty_like(sums_XN)
    sums, before = sums_XN.unbind(1), before_XN.unbind(1)
    order = list(range(len(sums)))
    order = order[::-1] if back else order
    before[order[0]].copy_(start)
    for n, following in zip(order[:-1], order[1:], strict=True):
        torch.add(before[n], sums[n], out=before[following])
    return before_XN, before[order[-1]] + sums[order[-1]]


def chunk_states(keys: Scaled, v_XSD: Tensor, mean_XLD: Tensor) -> tuple[Tensor, Tensor]:
    """States before every chunk (X, N, L, D) and after the last (X, L, D), unnormalised."""
    X, _, L = keys.e_XSL.shape
    sums_XNLD = torch.bmm(chunk(keys.e_XSL).mT, chunk(v_XSD)).view(X, -1, L, v_XSD.shape[-1])
    return running_states(keys.mass_XL[..., None] * mean_XLD, sums_XNLD)


def carry(keys: Scaled, last_XLD: Tensor) -> Carry:
    """The state after the run. A row that has seen nothing stays empty."""
    alpha_XL = keys.alpha_XSL[:, -1]
    mean_XLD = last_XLD / alpha_XL[..., None]
    mass_XL = alpha_XL * torch.exp(keys.reference_XL - keys.top_XL)
    if keys.empty_XL is not None:
        mass_XL = torch.where(keys.empty_XL, 0.0, mass_XL)
    return Carry(keys.top_XL, mass_XL, mean_XLD)


def state_after(keys: Scaled, v_XSD: Tensor, mean_XLD: Tensor) -> Carry:
    """The state after the run, without its outputs."""
    return carry(keys, chunk_states(keys, v_XSD, mean_XLD)[1])


def forward(p_XSL: Tensor, keys: Scaled, v_XSD: Tensor, mean_XLD: Tensor) -> tuple[Tensor, Carry]:
    """Outputs (X, S, D) of one segment, and the state after it."""
    states_XNLD, last_XLD = chunk_states(keys, v_XSD, mean_XLD)
    ratio = chunk(p_XSL / keys.alpha_XSL)
    scores = torch.bmm(ratio, chunk(keys.e_XSL).mT).tril_()
    out = torch.bmm(scores, chunk(v_XSD))
    out.baddbmm_(ratio, states_XNLD.flatten(0, 1))
    return out.view(v_XSD.shape), carry(keys, last_XLD)


def backward(
    p_XSL: Tensor,
    keys: Scaled,
    v_XSD: Tensor,
    mean_XLD: Tensor,
    dy_XSD: Tensor,
    dlog_mass_XL: Tensor,
    dmean_XLD: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dlog_mass_0, dmean_0) from those of the outputs and the last state.

    With delta_t[l] = <dy_t, mu_t[l]> and the reverse state R_s = sum_{t>=s} p_t / alpha_t dy_t:
    dk_s[l] = e_s (<R_s, v_s> - sum_{t>=s} p_t delta_t / alpha_t), dv_s = sum_l e_s R_s.
    """
    X, S, L = p_XSL.shape
    states_XNLD, last_XLD = chunk_states(keys, v_XSD, mean_XLD)
    ratio_XSL = p_XSL / keys.alpha_XSL
    ratio, e, v, dy = chunk(ratio_XSL), chunk(keys.e_XSL), chunk(v_XSD), chunk(dy_XSD)

    # (C, C) each: a_ts without the other chunks, and <dy_t, v_s>.
    scores = torch.bmm(ratio, e.mT).tril_()
    pairs = torch.bmm(dy, v.mT).tril_()

    # delta_t alpha_t = <dy_t, unnormalised state at t>
    delta = torch.bmm(pairs, e)
    delta.baddbmm_(dy, states_XNLD.flatten(0, 1).mT)
    delta_XSL = delta.view(X, S, L).div_(keys.alpha_XSL)
    pulled_XSL = p_XSL * delta_XSL
    dq_XSL = pulled_XSL - p_XSL * pulled_XSL.sum(-1, keepdim=True)
    pulled_XSL.div_(keys.alpha_XSL)

    # Reverse states, by chunk: what later chunks and the final state ask of a source.
    alpha_XL = keys.alpha_XSL[:, -1]
    last_mean_XLD = last_XLD / alpha_XL[..., None]
    reverse_XLD = dmean_XLD / alpha_XL[..., None]
    scalar_XL = (reverse_XLD * last_mean_XLD).sum(-1) - dlog_mass_XL / alpha_XL
    sums_XNLD = torch.bmm(ratio.mT, dy).view(states_XNLD.shape)
    C = ratio.shape[1]
    later_XNLD, reverse_XLD = running_states(reverse_XLD, sums_XNLD, back=True)
    scalars_XNL = pulled_XSL.view(X, -1, C, L).sum(2)
    scalars_XNL, scalar_XL = running_states(scalar_XL, scalars_XNL, back=True)
    later = later_XNLD.flatten(0, 1)

    dv = torch.bmm(scores.mT, dy)
    dv.baddbmm_(e, later)
    dk = torch.bmm(pairs.mT, ratio)
    dk.baddbmm_(v, later.mT)
    # sum over t >= s inside the chunk. Never as total - prefix: that cancels.
    upper = torch.ones(C, C, dtype=p_XSL.dtype, device=p_XSL.device).triu_()
    dk -= torch.matmul(upper, pulled_XSL.view(-1, C, L))
    dk_XNCL = dk.view(X, -1, C, L)
    dk_XNCL -= scalars_XNL[:, :, None]
    dk_XSL = dk.view(X, S, L).mul_(keys.e_XSL)

    dmean0_XLD = keys.mass_XL[..., None] * reverse_XLD
    dlog_mass0_XL = (dmean0_XLD * mean_XLD).sum(-1) - keys.mass_XL * scalar_XL
    return dq_XSL, dk_XSL, dv.view(X, S, -1), dlog_mass0_XL, dmean0_XLD
