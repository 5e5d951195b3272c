"""Attention transfer: each layer learns its base's own attention, given the base's inputs.

A layer can learn more than the output, because its weights are probabilities. Full attention is
itself a mixture of the window and the rest:

    y_t = m_t SWA_t + (1 - m_t) REST_t,
    m_t = sum_{s in window} a_ts = exp(LSE_window - LSE_full),

So p(l=0|t) should be m_t, and the latents should give REST_t. A forward pass with a
:class:`Teacher` runs the base (its full attention, of quadratic cost) and compares every layer with
it. This needs no second model, and no gradient through more than one layer's attention.

No gradient passes from one layer to another, so plain autograd would need only the sum of the
losses. But some code needs gradients that arrive at a block's output. FSDP2 is an example: it
gathers a block's weights for the backward pass and frees them after it. Therefore each layer's loss
is passed on with the hidden states, and the blocks' outputs are chained,

    h_in -> [detached: the layer and its loss, of their own] -> h_out, loss = carry(h_in, ...)

by an identity whose gradient for h_in is zero (one number, expanded to all elements). The backward
pass of layer n then begins when that of layer n + 1 has ended. The gradients of the losses are not
changed.

Shape suffixes: B batch, T tokens, E hidden size, S sources, C queries of a chunk, H query
heads, G key/value heads, R = H / G, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.conversion.attention import MacchiatoAttention, Projections
from latte.layers.latent_input import window_odds
from latte.layers.parts import token_positions
from latte.layers.state import Piece, map_tensors

CHUNK_ELEMENTS = 2**25  # number of attention weights in memory at a time, per layer
SAMPLE_EVERY = 4  # the mass of every fourth query is computed


class Teacher:
    """Runs the base's attention in every layer, and collects the errors of the mixture.

    Give it to a forward pass as ``teacher=``, then call :meth:`loss`. A teacher is for one pass.

    ``output`` and ``mass`` are the layers' own errors. The loss uses the same values, passed on
    with the hidden states (:func:`carry`). So its backward pass goes from the last layer to the
    first.
    """

    def __init__(self) -> None:
        self.output: list[Tensor] = []
        self.mass: list[Tensor] = []
        self._carried: list[tuple[Tensor, Tensor]] = []
        self._hidden: Tensor | None = None  # a layer's input while it runs, then its output

    def enter(self, x_BTE: Tensor) -> Tensor:
        """The input for a layer to read, without a gradient."""
        self._hidden = x_BTE
        return x_BTE.detach()

    def leave(self, x_BTE: Tensor, converted: bool = True) -> Tensor:
        """A layer's output, connected in autograd to the layer's errors and to all earlier errors.

        Layers that are not converted have no errors.
        """
        if not converted:
            assert self._hidden is not None  # a layer that is left has been entered
            (self._hidden,) = carry(self._hidden, x_BTE.detach())
            return self._hidden
        if len(self._carried) == len(self.output):  # gradient checkpointing computes it again
            return x_BTE
        assert self._hidden is not None  # a layer that is left has been entered
        x_BTE, output, mass = carry(self._hidden, x_BTE.detach(), self.output[-1], self.mass[-1])
        self._carried.append((output, mass))
        self._hidden = x_BTE
        return x_BTE

    def __call__(self, layer: MacchiatoAttention, local: Projections, piece: Piece) -> Tensor:
        """The base's output of a layer (B, T, E); records the layer's two errors."""
        with torch.no_grad():
            target_BTHK, mass_BTH = base_attention(layer, local, piece)
            target_BTE = layer.o_proj(target_BTHK.to(local.v.dtype).flatten(-2))
        fixed, piece = map_tensors(Tensor.detach, local), map_tensors(Tensor.detach, piece)
        logits, log_decay, _ = layer.logits(fixed, piece)
        out_BTHK, _ = layer.combine(logits, log_decay, fixed, piece)
        out_BTE = layer.o_proj(out_BTHK.flatten(-2))
        output = relative_error(out_BTE, target_BTE, piece.real)
        mixture = layer.mixture(logits, fixed, piece)
        mass = mass_divergence(mixture, mass_BTH, piece.real)
        # If more are recorded already, gradient checkpointing computes this layer again.
        if layer.converted_before == len(self.output):
            self.output.append(output)
            self.mass.append(mass)
        return target_BTE

    def errors(self) -> tuple[Tensor, Tensor]:
        """Means over the layers: the output's relative squared error, the mass's divergence."""
        assert self._hidden is not None  # there was a forward pass
        output, mass = (torch.stack(errors).mean() for errors in zip(*self._carried, strict=True))
        output, mass = carry(self._hidden, output, mass)  # begin at the last layer's output
        return output, mass

    def loss(self, mass_weight: float = 1.0) -> Tensor:
        """``output error + mass_weight * KL(m || p(l=0))``, a mean over layers."""
        output, mass = self.errors()
        return output + mass_weight * mass


def relative_error(out_BTE: Tensor, target_BTE: Tensor, real_BT: Tensor) -> Tensor:
    """``sum |out - target|^2 / sum |target|^2`` over real tokens, at least fp32."""
    out, target = _wide(out_BTE), _wide(target_BTE)
    real = real_BT[..., None].to(out.dtype)
    size = (target.square() * real).sum()
    return ((out - target).square() * real).sum() / size.clamp_min(torch.finfo(size.dtype).tiny)


def mass_divergence(latent_q: Tensor, mass_BTH: Tensor, real_BT: Tensor) -> Tensor:
    """KL of Bernoulli(m) from Bernoulli(p(l=0)), a mean over real tokens and heads."""
    odds = window_odds(latent_q)
    mass = mass_BTH.to(odds.dtype).clamp(0.0, 1.0)
    cross = F.binary_cross_entropy_with_logits(odds, mass, reduction="none")
    entropy = -(torch.xlogy(mass, mass) + torch.xlogy(1 - mass, 1 - mass))
    real = real_BT[..., None].to(odds.dtype)
    return ((cross - entropy) * real).sum() / (real.sum() * mass.shape[-1]).clamp_min(1.0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def base_attention(
    layer: MacchiatoAttention, local: Projections, piece: Piece
) -> tuple[Tensor, Tensor]:
    """The base's own attention, and the mass of it that the converted layer's window sees.

    Returns:
        Output (B, T, H, K) and m_t (B, T, H), both at least fp32.
    """
    q, k, v = (_wide(x) for x in local[:3])
    if piece.cu_seqlens is None:
        return _attention(layer, q, k, v, piece.key_mask)
    parts = []
    bounds = piece.cu_seqlens.tolist()
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        own = slice(start, stop)
        mask = None if piece.key_mask is None else piece.key_mask[:, own]
        parts.append(_attention(layer, q[:, own], k[:, own], v[:, own], mask))
    outs, masses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(masses, 1)


def _attention(
    layer: MacchiatoAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    q_BTGRK = q.unflatten(2, (k.shape[2], -1))
    place = torch.arange(T, device=q.device)
    sinks = None
    if layer.num_sinks:
        sinks = token_positions(q[..., 0], key_mask).expand(B, T) < layer.num_sinks
    rows = max(1, CHUNK_ELEMENTS // max(1, B * H * T))
    outs, masses = [], []
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        logits = torch.einsum("btgrk,bsgk->bgrts", q_BTGRK[:, start:stop], k[:, :stop])
        logits = logits * layer.scale
        if layer.softcap is not None:
            logits = layer.softcap * torch.tanh(logits / layer.softcap)
        gap = place[start:stop, None] - place[None, :stop]
        seen = gap >= 0
        if layer.base_window is not None:
            seen = seen & (gap < layer.base_window)
        seen = seen[None] if key_mask is None else seen & key_mask[:, None, :stop]
        seen = seen[:, None, None]  # (B or 1, 1, 1, C, S)
        weights = logits.masked_fill(~seen, torch.finfo(logits.dtype).min / 2).softmax(-1)
        weights = weights * (seen & seen.any(-1, keepdim=True))
        outs.append(torch.einsum("bgrts,bsgk->btgrk", weights, v[:, :stop]).flatten(2, 3))
        near = (gap < layer.window)[None]
        if sinks is not None:
            near = near | sinks[:, None, :stop]
        mass = (weights * near[:, None, None]).sum(-1)
        masses.append(mass.flatten(1, 2).transpose(1, 2))
    return torch.cat(outs, 1), torch.cat(masses, 1)


def base_output(layer: MacchiatoAttention, local: Projections, piece: Piece) -> Tensor:
    """The base's own attention of a layer, output projection included, (B, T, E)."""
    out_BTHK, _ = layer.full_attention(local, piece)
    return layer.o_proj(out_BTHK.flatten(-2))


def sampled_masses(
    layer: MacchiatoAttention, local: Projections, piece: Piece, places_S: Tensor
) -> tuple[Tensor, Tensor]:
    """The share of the base's attention within the window, for some queries without padding.

    Args:
        places_S: Positions of the queries in the row, (S,) int64.

    Returns:
        The base's mass m_t inside the window and on the sinks, and the logsumexp of the logits
        there; both (B, S, H), at least fp32.
    """
    q, k = _wide(local.q)[:, places_S], _wide(local.k)
    logits = torch.einsum("bsgrk,btgk->bsgrt", q.unflatten(2, (k.shape[2], -1)), k) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    token_T = torch.arange(k.shape[1], device=k.device)
    gap_ST = places_S[:, None] - token_T
    seen_ST = gap_ST >= 0
    if layer.base_window is not None:
        seen_ST = seen_ST & (gap_ST < layer.base_window)
    near_ST = seen_ST & ((gap_ST < layer.window) | (token_T < layer.num_sinks))
    near, full = (
        logits.masked_fill(~mask[None, :, None, None], -torch.inf).logsumexp(-1).flatten(2)
        for mask in (near_ST, seen_ST)
    )
    return torch.exp(near - full), near


class Watcher:
    """A teacher that only watches. The base runs unchanged, and hidden states pass through.

    Give a subclass to :func:`watch`. Its ``__call__`` gets every converted layer, and returns
    :func:`base_output`.
    """

    def enter(self, x_BTE: Tensor) -> Tensor:
        return x_BTE

    def leave(self, x_BTE: Tensor, converted: bool = True) -> Tensor:
        return x_BTE


def watch(model: Any, teacher: Any, **inputs: Tensor) -> None:
    """Run the base inside a converted model, with a teacher that watches its layers.

    The inputs may be on another device.
    """
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    with torch.no_grad():
        model.model(**inputs, teacher=teacher, use_cache=False)


def run_teacher(model: Any, **inputs: Any) -> Teacher:
    """One forward pass of a converted model with its base as the teacher."""
    teacher = Teacher()
    model(**inputs, teacher=teacher, use_cache=False, logits_to_keep=1)
    return teacher


# --- losses passed on with the hidden states ---------------------------------------------------


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, previous: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a zero gradient for hidden states would take memory
        ctx.like = (previous.shape, previous.dtype, previous.device)
        return tuple(value.detach() for value in values)  # no copies, and not views for autograd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        shape, dtype, device = ctx.like
        return torch.zeros((), dtype=dtype, device=device).expand(shape), *grads


def carry(previous: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Return the values unchanged, and make ``previous`` part of their backward pass.

    Gradients of the values are not changed. The gradient of ``previous``, of any shape, is zero.
    """
    out: tuple[Tensor, ...] = _Carry.apply(previous, *values)  # type: ignore[no-untyped-call]
    return out


def hook_layer(layer: nn.Module) -> None:
    """Let a decoder layer tell the ``teacher`` among its keywords when it begins and ends.

    Hooks that are added later, as FSDP2's, run outside of these hooks. They see the hidden states
    that :meth:`Teacher.leave` returns.
    """
    layer.register_forward_pre_hook(_enter, with_kwargs=True)
    layer.register_forward_hook(_leave, with_kwargs=True)


def _enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    teacher = kwargs.get("teacher")
    return None if teacher is None else ((teacher.enter(args[0]), *args[1:]), kwargs)


def _leave(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x_BTE: Tensor) -> Any:
    teacher = kwargs.get("teacher")
    return None if teacher is None else teacher.leave(x_BTE, layer.self_attn.converted)


HOOKS = (_enter, _leave)  # hooks of a layer, without effect if there is no teacher
