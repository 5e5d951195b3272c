"""A run of causal Latte in the linear domain, with a single reference for all its tokens.

With r a logit of the past, ``e_s = exp(k_s - r)`` and ``alpha_t = m_0 + sum_{s<=t} e_s``, every
quantity of the model is a cumulative sum:

    y_t = sum_l p_t[l] / alpha_t[l] (m_0 mu_0 + sum_{s<=t} e_s[l] v_s)

There is no logarithm, and no rescaling between chunks. The reference is the largest logit before
the run, or the first one of the sequence. alpha is then at least 1. The run ends before the first
key that exceeds r by ``REACH`` (:func:`run_length`). The reference and the end depend only on the
past. Therefore future inputs cannot change the past, not even its rounding.

Where latents forget, a run has a reference for each chunk (:class:`Maxima`). Inside a chunk the
logits are ``k_s - G_s``, with G the log-decay since the chunk's start. Between chunks all sums are
rescaled. Log-decay is never summed over more than a chunk in fp32.

Shape suffixes: X rows (batch x heads), S tokens of the run, N chunks, C chunk length
(S = N C), L latents, D value width.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.torch_backend.batching import CHUNK, Carry

# exp(k - r) is as exact as its argument: at 16 half a unit in the last place of fp32 is 1e-6.
REACH = 16.0
# With decay the past loses weight as fast as the present gains it. At 40 the error is 2e-6.
FORGETTING_REACH = 40.0
# Tokens of a chunk where the decay is so fast that 40 is too little for CHUNK.
SHORT_CHUNK = 8
# Chunks whose states are summed by a product with a triangle of ones.
BY_PRODUCT = 8


class Scaled(NamedTuple):
    """Keys of a run in the linear domain, relative to ``reference``."""

    reference_XL: Tensor  # at the end of the run
    e_XSL: Tensor
    alpha_XSL: Tensor
    mass_XL: Tensor | None  # of the state that the run starts from, if it starts from one
    top_XL: Tensor  # the largest logit by the end
    empty_XL: Tensor | None  # rows that have seen nothing by the end; None if there are none
    rescale_XNL: Tensor | None = None  # of sums from a chunk to the next; None: there is none
    size: int = CHUNK  # of a chunk


def reference_logits(k_XSL: Tensor, start: Carry | None, seen_XS: Tensor | None) -> Tensor:
    """(X, L): the largest logit up to the first token, or the first one that is visible.

    It is 0 in rows without visible sources, and -inf where that logit is -inf: such a latent has
    no reference. ``seen_XS`` is True from the first visible source on; None if all sources are
    visible.
    """
    first_XL = k_XSL[:, 0] if start is None else torch.maximum(k_XSL[:, 0], start.top)
    if seen_XS is None:
        return first_XL
    index_X = seen_XS.to(torch.uint8).argmax(1)
    later_XL = k_XSL[torch.arange(k_XSL.shape[0], device=k_XSL.device), index_X]
    first_XL = torch.where(torch.isneginf(first_XL), later_XL, first_XL)
    return first_XL.masked_fill(torch.isneginf(first_XL) & ~seen_XS[:, -1:], 0.0)


def run_length(k_XSL: Tensor, top_XL: Tensor, reference_XL: Tensor) -> int:
    """How many tokens this reference can serve; ``top_XL`` is the largest logit of all of them."""
    if torch.isneginf(reference_XL).any():
        return 0
    limit_XL = reference_XL + REACH
    if not (top_XL > limit_XL).any():
        return k_XSL.shape[1]
    return int((k_XSL > limit_XL[:, None]).any(0).any(-1).to(torch.uint8).argmax())


def scaled_keys(
    k_XSL: Tensor,
    top_XL: Tensor,
    reference_XL: Tensor,
    start: Carry | None,
    seen_XS: Tensor | None,
) -> Scaled:
    """exp(k - r), its running sum and the first state's mass; ``top_XL`` is the largest key."""
    e_XSL = (k_XSL - reference_XL[:, None]).exp_()
    alpha_XSL, mass_XL, empty_XL = e_XSL.cumsum(1), None, None
    if start is not None:
        mass_XL = start.mass * torch.exp(start.top - reference_XL)
        alpha_XSL.add_(mass_XL[:, None])
        top_XL = torch.maximum(top_XL, start.top)
    if seen_XS is not None:
        # Nothing seen yet: alpha = 0, and whatever is divided by it is 0 as well.
        unseen_XSL = ~seen_XS[..., None]
        if start is not None:
            unseen_XSL = unseen_XSL & (start.mass == 0)[:, None]
        alpha_XSL.masked_fill_(unseen_XSL, 1.0)
        empty_XL = unseen_XSL[:, -1]
    return Scaled(reference_XL, e_XSL, alpha_XSL, mass_XL, top_XL, empty_XL)


class Maxima(NamedTuple):
    """Running maxima of the chunks of a run with decay, which are subtracted before exponentials.

    G is the sum of the log-decays from the chunk's start to the token, its own included. Sums over
    several chunks are in fp64.
    """

    lost_XNCL: Tensor  # G
    top_XNL: Tensor  # the largest k - G of a chunk
    reference_XNL: Tensor  # maximum of what is before the chunk and of its first key
    total_XNL: Tensor  # G at the chunk's end, fp64
    last_XL: Tensor  # the largest logit by the end of the run, seen from there, fp64
    own_XNCL: Tensor  # k - G

    @classmethod
    def of(
        cls, k_XSL: Tensor, g: Tensor, start: Carry | None, seen_XS: Tensor | None, size: int
    ) -> Maxima:
        """The maxima of chunks of ``size`` tokens, or of one chunk if there are fewer."""
        X, S, L = k_XSL.shape
        C = min(size, S)
        shape = (X, S // C, C, L)
        lower = triangle(C, 0, False, (g.dtype, g.device))
        lost = torch.bmm(lower.expand(X * (S // C), C, C), chunk(g, C)).view(shape)
        own = k_XSL.view(shape) - lost
        top, total = own.amax(2), lost[:, :, -1].double()
        # Relative to the start of the run: subtract the log-decay before the chunk.
        before = F.pad(total.cumsum(1), (0, 0, 1, 0))
        first = torch.full_like(top[:, 0], -torch.inf) if start is None else start.top
        tops = torch.cat([first[:, None].double(), top - before[:, :-1]], 1).cummax(1).values
        tops += before
        reference = torch.maximum(tops[:, :-1].to(k_XSL.dtype), own[:, :, 0])
        if seen_XS is not None:
            # If nothing comes before and the first token is masked: the first valid token, or any.
            index = seen_XS.view(X, S // C, C).to(torch.uint8).argmax(2)
            later = own.gather(2, index[:, :, None, None].expand(-1, -1, 1, L))[:, :, 0]
            reference = torch.where(torch.isneginf(reference), later, reference)
            unseen = ~seen_XS.view(X, S // C, C)[:, :, -1:]
            reference = reference.masked_fill(torch.isneginf(reference) & unseen, 0.0)
        return cls(lost, top, reference, total, tops[:, -1], own)

    def length(self) -> int:
        """How many tokens these references can serve. A reference of -inf is none."""
        if torch.isneginf(self.reference_XNL).any():
            return 0
        if not (self.top_XNL - self.reference_XNL > FORGETTING_REACH).any():
            return self.own_XNCL.shape[1] * self.own_XNCL.shape[2]
        reach = self.reference_XNL[:, :, None] + FORGETTING_REACH
        beyond = (self.own_XNCL > reach).any(0).any(-1)
        return int(beyond.view(-1).to(torch.uint8).argmax())


def forgetting_keys(k_XSL: Tensor, maxima: Maxima, start: Carry | None, masked: bool) -> Scaled:
    """:func:`scaled_keys` with a reference for each chunk; ``masked``: some sources may be."""
    X, S, L = k_XSL.shape
    reference, shape = maxima.reference_XNL, maxima.lost_XNCL.shape
    # In this order, because the difference of large logits is exact, and G is small.
    e = (k_XSL.view(shape) - reference[:, :, None]).sub_(maxima.lost_XNCL).exp_()
    C = shape[2]
    lower = triangle(C, 0, False, (e.dtype, e.device))
    alpha = torch.bmm(lower.expand(X * shape[1], C, C), e.flatten(0, 1)).view(shape)
    ends = reference.double() + maxima.total_XNL
    # At most 1, except for the rounding of references, or where nothing has been seen.
    rescale = (ends[:, :-1] - reference[:, 1:]).clamp_(max=32.0).exp_().to(e.dtype)
    mass = None
    if start is not None:
        mass = start.mass * (start.top - reference[:, 0]).exp()
    before, _ = running_states(mass, alpha[:, :, -1], rescale=rescale)
    alpha += before[:, :, None]
    alpha = alpha.view(X, S, L)
    empty = None
    if masked:
        empty = alpha[:, -1] == 0
        alpha.masked_fill_(alpha == 0, 1.0)
    top = maxima.last_XL.to(e.dtype)
    return Scaled(ends[:, -1], e.view(X, S, L), alpha, mass, top, empty, rescale, C)


def decay_gradient(dk_XSL: Tensor, dlog_mass_XL: Tensor | None) -> Tensor:
    """The gradient of ``log_decay``. The decay of a token acts on all tokens before it.

    dg_u = dA_0 + sum_{s<u} dk_s, with dA_0 the gradient of the log-mass before the first token.
    """
    dk = chunk(dk_XSL, CHUNK)
    C = dk.shape[1]
    before = triangle(C, -1, False, (dk.dtype, dk.device))
    dg_XNCL = torch.bmm(before.expand(len(dk), C, C), dk).view(len(dk_XSL), -1, *dk.shape[1:])
    ends_XNL = dg_XNCL[:, :, -1] + dk.view(dg_XNCL.shape)[:, :, -1]
    dg_XNCL += running_states(dlog_mass_XL, ends_XNL)[0][:, :, None]
    return dg_XNCL.view(dk_XSL.shape)


def chunk(x_XSD: Tensor, size: int) -> Tensor:
    """(X, S, D) -> (X N, C, D); S is a multiple of ``size``, or smaller."""
    return x_XSD.reshape(-1, min(size, x_XSD.shape[1]), x_XSD.shape[-1])


@functools.lru_cache(maxsize=16)
def triangle(size: int, diagonal: int, upper: bool, like: tuple[Any, ...]) -> Tensor:
    """Ones on one side of a diagonal, (size, size); ``like`` is the dtype and the device."""
    ones = torch.ones(size, size, dtype=like[0], device=like[1])
    return ones.triu_(diagonal) if upper else ones.tril_(diagonal)


def running_states(
    start: Tensor | None, sums_XN: Tensor, back: bool = False, rescale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Exclusive running sum over the chunks, (X, N, ...), and what follows the last one (X, ...).

    The sum starts from zero if ``start`` is None. A product computes it for few chunks, a loop for
    many (``cumsum`` over a strided dimension takes ten times as long). ``back`` sums from the end.
    ``rescale`` (X, N-1, ...), if there is one, multiplies what goes from a chunk to the next.
    """
    X, N = sums_XN.shape[:2]
    last = 0 if back else N - 1
    if N <= BY_PRODUCT and rescale is None:
        sides = triangle(N, 1 if back else -1, back, (sums_XN.dtype, sums_XN.device))
        flat = sums_XN.view(X, N, -1)
        if start is None:
            before_XN = torch.bmm(sides.expand(X, N, N), flat)
        else:
            before_XN = torch.baddbmm(start.reshape(X, 1, -1), sides.expand(X, N, N), flat)
        before_XN = before_XN.view(sums_XN.shape)
        return before_XN, before_XN[:, last] + sums_XN[:, last]
    before_XN = torch.empty_like(sums_XN)
    sums, before = sums_XN.unbind(1), before_XN.unbind(1)
    order = list(range(N))
    order = order[::-1] if back else order
    if start is None:
        before[order[0]].zero_()
    else:
        before[order[0]].copy_(start)
    steps = zip(order[:-1], order[1:], strict=True)
    if rescale is None:
        for n, following in steps:
            torch.add(before[n], sums[n], out=before[following])
    else:
        scaled = (sums_XN[:, 1:] if back else sums_XN[:, :-1]) * rescale
        added, factors = scaled.unbind(1), rescale.unbind(1)
        for n, following in steps:
            i = min(n, following)
            torch.addcmul(added[i], before[n], factors[i], out=before[following])
    return before_XN, before[last] + sums[last]


def chunk_states(keys: Scaled, v_XSD: Tensor, mean_XLD: Tensor | None) -> tuple[Tensor, Tensor]:
    """States before every chunk (X, N, L, D) and after the last (X, L, D), unnormalised."""
    X, _, L = keys.e_XSL.shape
    e, v = (chunk(x, keys.size) for x in (keys.e_XSL, v_XSD))
    sums_XNLD = torch.bmm(e.transpose(1, 2), v).view(X, -1, L, v_XSD.shape[-1])
    start = None
    if keys.mass_XL is not None and mean_XLD is not None:
        start = keys.mass_XL[..., None] * mean_XLD
    return running_states(start, sums_XNLD, rescale=_over_values(keys.rescale_XNL))


def _over_values(rescale_XNL: Tensor | None) -> Tensor | None:
    return None if rescale_XNL is None else rescale_XNL[..., None]


def carry(keys: Scaled, last_XLD: Tensor) -> Carry:
    """The state after the run. A row that has seen nothing stays empty."""
    alpha_XL = keys.alpha_XSL[:, -1]
    mean_XLD = last_XLD / alpha_XL[..., None]
    mass_XL = alpha_XL * torch.exp(keys.reference_XL - keys.top_XL).to(alpha_XL.dtype)
    if keys.empty_XL is not None:
        mass_XL = torch.where(keys.empty_XL, 0.0, mass_XL)
    return Carry(keys.top_XL, mass_XL, mean_XLD)


def state_after(keys: Scaled, v_XSD: Tensor, mean_XLD: Tensor | None) -> Carry:
    """The state after the run, without its outputs."""
    return carry(keys, chunk_states(keys, v_XSD, mean_XLD)[1])


def forward(
    p_XSL: Tensor, keys: Scaled, v_XSD: Tensor, mean_XLD: Tensor | None
) -> tuple[Tensor, Carry]:
    """Outputs (X, S, D) of one segment, and the state after it."""
    states_XNLD, last_XLD = chunk_states(keys, v_XSD, mean_XLD)
    ratio = chunk(p_XSL / keys.alpha_XSL, keys.size)
    scores = torch.bmm(ratio, chunk(keys.e_XSL, keys.size).transpose(1, 2)).tril_()
    out = torch.bmm(scores, chunk(v_XSD, keys.size))
    out.baddbmm_(ratio, states_XNLD.flatten(0, 1))
    return out.view(v_XSD.shape), carry(keys, last_XLD)


def backward(
    p_XSL: Tensor,
    keys: Scaled,
    v_XSD: Tensor,
    mean_XLD: Tensor | None,
    dy_XSD: Tensor,
    dlog_mass_XL: Tensor,
    dmean_XLD: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients (p dp, dk, dv, dlog_mass_0, dmean_0) from those of the outputs and the last state.

    The last two are None for a run that starts from nothing.

    With delta_t[l] = <dy_t, mu_t[l]> and the reverse state R_s = sum_{t>=s} p_t / alpha_t dy_t:
    dk_s[l] = e_s (<R_s, v_s> - sum_{t>=s} p_t delta_t / alpha_t), dv_s = sum_l e_s R_s.
    """
    X, S, L = p_XSL.shape
    states_XNLD, last_XLD = chunk_states(keys, v_XSD, mean_XLD)
    ratio_XSL = p_XSL / keys.alpha_XSL
    ratio, e, v, dy = (chunk(x, keys.size) for x in (ratio_XSL, keys.e_XSL, v_XSD, dy_XSD))

    # (C, C) each: a_ts without the other chunks, and <dy_t, v_s>.
    scores = torch.bmm(ratio, e.transpose(1, 2)).tril_()
    pairs = torch.bmm(dy, v.transpose(1, 2)).tril_()

    # delta_t alpha_t = <dy_t, unnormalised state at t>
    delta = torch.bmm(pairs, e)
    delta.baddbmm_(dy, states_XNLD.flatten(0, 1).transpose(1, 2))
    delta_XSL = delta.view(X, S, L).div_(keys.alpha_XSL)
    pulled_XSL = p_XSL * delta_XSL
    lost_XSL = pulled_XSL / keys.alpha_XSL

    # Reverse states, by chunk: the gradients that later chunks and the final state give a source.
    alpha_XL = keys.alpha_XSL[:, -1]
    last_mean_XLD = last_XLD / alpha_XL[..., None]
    reverse_XLD = dmean_XLD / alpha_XL[..., None]
    scalar_XL = (reverse_XLD * last_mean_XLD).sum(-1) - dlog_mass_XL / alpha_XL
    sums_XNLD = torch.bmm(ratio.transpose(1, 2), dy).view(states_XNLD.shape)
    C = ratio.shape[1]
    rescale = keys.rescale_XNL
    later_XNLD, reverse_XLD = running_states(
        reverse_XLD, sums_XNLD, back=True, rescale=_over_values(rescale)
    )
    scalars_XNL = lost_XSL.view(X, -1, C, L).sum(2)
    scalars_XNL, scalar_XL = running_states(scalar_XL, scalars_XNL, back=True, rescale=rescale)
    later = later_XNLD.flatten(0, 1)

    dv = torch.bmm(scores.transpose(1, 2), dy)
    dv.baddbmm_(e, later)
    dk = torch.bmm(pairs.transpose(1, 2), ratio)
    dk.baddbmm_(v, later.transpose(1, 2))
    # sum over t >= s inside the chunk. Never as total - prefix: that cancels.
    upper = triangle(C, 0, True, (p_XSL.dtype, p_XSL.device))
    dk -= torch.bmm(upper.expand(dk.shape[0], C, C), lost_XSL.view(-1, C, L))
    dk_XNCL = dk.view(X, -1, C, L)
    dk_XNCL -= scalars_XNL[:, :, None]
    dk_XSL = dk.view(X, S, L).mul_(keys.e_XSL)

    grads = pulled_XSL, dk_XSL, dv.view(X, S, -1)
    if keys.mass_XL is None or mean_XLD is None:
        return *grads, None, None
    dmean0_XLD = keys.mass_XL[..., None] * reverse_XLD
    dlog_mass0_XL = (dmean0_XLD * mean_XLD).sum(-1) - keys.mass_XL * scalar_XL
    return *grads, dlog_mass0_XL, dmean0_XLD
