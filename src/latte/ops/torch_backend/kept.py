"""Kept tokens in linear time: blocks of queries as one custom op.

Which tokens are kept has been decided before (:mod:`latte.ops.torch_backend.kept_plan`). One
softmax covers the blocks that the window reaches, the kept keys, the sinks, and the latents' means
after the block's update. All queries of a block read the same of these, except for later keys in
the block.

Inputs and the latents' states between segments are saved; the backward pass computes the weights
again.

Shape suffixes: B batch, T tokens, N states, S slots of the layout (the kept tokens of the state,
the blocks before the first query's, those of the queries), Z blocks of C queries, z of them a
segment, H query heads, G key/value heads, R = H / G, L latents, M exact keys of a block, J kept
keys, n sinks, X = B G z, K key width, D value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.arguments import KeptInputs
from latte.ops.custom_ops import differentiable_op
from latte.ops.kept import KeptLatents, KeptState, taken
from latte.ops.tensors import (
    computation_dtype,
    without_masked,
)
from latte.ops.torch_backend.batching import Carry, divide, exp_difference
from latte.ops.torch_backend.kept_plan import Plan, plan_of
from latte.ops.torch_backend.window import SCORES_AT_ONCE

__all__ = ["attention", "plan_of", "state_after"]


class KeptCall(NamedTuple):
    """Arguments of the op: sources by slots, (B, S, ...), and queries by blocks, (B, Z C, ...)."""

    q: Tensor
    k: Tensor
    v: Tensor
    latent_q: Tensor | None
    latent_k: Tensor | None  # with decays in fp64, those up to when it left subtracted
    log_mass: Tensor | None
    mean: Tensor | None
    sink_q: Tensor | None
    sink_k: Tensor | None  # (B, Z or 1, n, G, K)
    sink_v: Tensor | None
    sinks_seen: Tensor | None  # (B, Z, n) bool
    real: Tensor
    kept: Tensor
    kept_there: Tensor
    late: Tensor
    late_there: Tensor
    begun: Tensor
    age: Tensor | None  # (Z,)
    ends: Tensor | None  # (N,) last block of each packed sequence, -1 for none
    lost: (
        Tensor | None
    )  # (B, Z, H, L) fp64: log-decay from the call's start to a block's first query
    window: int
    block: int
    scale: float
    softcap: float

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, Z, G, R."""
        B, S, H, _ = self.q.shape
        G = self.k.shape[2]
        return B, S // self.block, G, H // G

    @property
    def together(self) -> int:
        """Number of blocks of a segment: so few that their logits stay small."""
        B, Z, G, R = self.shape
        width = self.reach + self.kept.shape[-1]
        most = max(1, SCORES_AT_ONCE // (B * G * R * self.block * width))
        return -(-Z // -(-Z // most))

    @property
    def reach(self) -> int:
        """Keys of the blocks that the window of a block of queries reaches, its own included."""
        return self.k.shape[1] - self.q.shape[1] - self.kept.shape[-1]

    @property
    def segments(self) -> list[slice]:
        """The blocks of each segment."""
        Z, most = self.shape[1], self.together
        return [slice(z, min(Z, z + most)) for z in range(0, Z, most)]


class Segment:
    """Blocks of queries that are computed together, and what they read, in the dtype of sums."""

    def __init__(self, x: KeptCall, blocks: slice, carry: Carry | None) -> None:
        """The sources of these blocks.

        Args:
            carry: Latents before these blocks, (B, G, R, L) and (B, G, R, L, D); None without.
        """
        self.x, self.blocks, self.carry = x, blocks, carry
        self.dtype = computation_dtype(x.q.dtype)
        self.B, _, self.G, self.R = x.shape
        self.C, self.z, self.J = x.block, blocks.stop - blocks.start, x.kept.shape[-1]
        self.own = slice(blocks.start * x.block, blocks.stop * x.block)  # queries
        first = self.J + (blocks.start + 1) * x.block
        self.near = slice(first, first + x.reach + (self.z - 1) * x.block)  # slots of the window
        self.q, self.keys, self.values = self.queries(x.q), self.exact(x.k), self.exact(x.v)
        self.seen = self._seen()
        if carry is not None:
            self._read(carry)

    def queries(self, x_BSHK: Tensor) -> Tensor:
        """(B, z C, H, K) -> (X, R C, K): the heads of a group read the same keys."""
        blocks = x_BSHK[:, self.own].unflatten(1, (-1, self.C)).unflatten(3, (self.G, self.R))
        return blocks.permute(0, 3, 1, 4, 2, 5).to(self.dtype).flatten(3, 4).flatten(0, 2)

    def by_head(self, x_XRK: Tensor) -> Tensor:
        """(X, R C, K) -> (B G z R, C, K)."""
        return x_XRK.unflatten(1, (self.R, self.C)).flatten(0, 1)

    def back(self, y_XRK: Tensor) -> Tensor:
        """The inverse of :meth:`queries`."""
        y = y_XRK.view(self.B, self.G, self.z, self.R, self.C, -1)
        return y.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)

    def exact(self, x_BSGK: Tensor) -> Tensor:
        """The keys that each block reads, window and kept, (X, M, K)."""
        return torch.cat([self._window(x_BSGK), self.at(self.x.kept, x_BSGK)], 1)

    def _window(self, x_BSGK: Tensor) -> Tensor:
        """(X, reach, K)."""
        line = x_BSGK[:, self.near].to(self.dtype).unflatten(1, (-1, self.C)).permute(0, 3, 1, 2, 4)
        shifts = range(self.x.reach // self.C)
        return torch.cat([line[:, :, i : i + self.z] for i in shifts], 3).flatten(0, 2)

    def add_window(self, target_BSGK: Tensor, dx_XMK: Tensor) -> None:
        """The adjoint of :meth:`_window`."""
        dx = dx_XMK.unflatten(0, (self.B, self.G, self.z)).unflatten(3, (-1, self.C))
        if (foreign := self._foreign()) is not None:
            dx = dx.masked_fill(foreign[..., None, None], 0.0)  # zeros times NaN are NaN
        line = target_BSGK[:, self.near].unflatten(1, (-1, self.C)).permute(0, 3, 1, 2, 4)
        for i in range(dx.shape[3]):
            line[:, :, i : i + self.z] += dx[:, :, :, i]

    def at(self, places: Tensor, x_BSGK: Tensor) -> Tensor:
        """Rows of these places in these blocks, (X, places, K)."""
        index = places[:, :, self.blocks]
        rows = x_BSGK.flatten(0, 1).unflatten(1, (self.G, -1)).flatten(0, 1).flatten(1)
        return (
            rows.index_select(0, index.flatten())
            .to(self.dtype)
            .view(-1, index.shape[-1], rows.shape[1])
        )

    def add_at(self, places: Tensor, target_BSGK: Tensor, dx_XMK: Tensor) -> None:
        """The adjoint of :meth:`at`."""
        rows = target_BSGK.view(-1, dx_XMK.shape[-1])
        rows.index_add_(0, places[:, :, self.blocks].flatten(), dx_XMK.flatten(0, 1).to(rows.dtype))

    def _foreign(self) -> Tensor | None:
        """Which blocks of a window belong to an earlier packed sequence, (z, reach / C) bool."""
        if self.x.age is None:
            return None
        far = torch.arange(self.x.reach // self.C - 1, -1, -1, device=self.q.device)
        return far > self.x.age[self.blocks, None]

    def _seen(self) -> Tensor:
        """Whether a query sees each key: window, kept, sinks, latents; (B, G, z, 1, C, ...)."""
        x, C, z = self.x, self.C, self.z
        gap = torch.arange(x.reach, device=self.q.device) - (x.reach - C)
        band = (gap > -x.window) & (gap <= torch.arange(C, device=gap.device)[:, None])
        real = x.real[:, self.near].unflatten(1, (-1, C))
        real = torch.stack([real[:, i : i + z] for i in range(x.reach // C)], 2)
        if (foreign := self._foreign()) is not None:
            real = real & ~foreign[..., None]
        parts = [band & real.flatten(2)[:, None, :, None, None]]
        parts.append(x.kept_there[:, :, self.blocks, None, None])
        if x.sinks_seen is not None:
            parts.append(x.sinks_seen[:, None, self.blocks, None, None])
        if x.latent_q is not None:
            begun = x.begun[:, :, self.blocks, None, None, None]
            parts.append(begun.expand(*begun.shape[:-1], x.latent_q.shape[-1] - 1))
        shape = (self.B, self.G, z, 1, C, -1)
        return torch.cat([part.expand(shape) for part in parts], -1)

    def _read(self, carry: Carry) -> None:
        """The latents' means after each block's update, and the weights of their parts."""
        x, (G, R, z) = self.x, (self.G, self.R, self.z)
        assert x.latent_k is not None
        B, there = self.B, x.late_there[:, :, self.blocks]
        rows = x.latent_k.flatten(0, 1).unflatten(1, (G, -1)).flatten(0, 1).flatten(1)
        k = rows.index_select(0, x.late[:, :, self.blocks].flatten())
        k = k.view(B, G, z, -1, R, rows.shape[1] // R)  # (B, G, z, C, R, L)
        lost = None
        if x.lost is not None:
            lost = x.lost[:, self.blocks].unflatten(2, (G, R)).permute(0, 2, 1, 3, 4)
            k = k + lost[:, :, :, None]
        k = k.to(self.dtype).masked_fill(~there[..., None, None], -torch.inf)
        self.late_v = self.at(x.late, x.v)  # (X, C, D)
        top = k.detach().amax(3)
        self.e = exp_difference(k, top[:, :, :, None])
        mass = self.e.sum(3)
        total = (self.e.flatten(0, 2).flatten(2).mT @ self.late_v).view(*mass.shape, -1)
        # All that a block may have read, y: the carry, and blocks of this segment up to its own.
        tops = torch.cat([carry.top[:, :, None].detach(), top], 2)[:, :, None]
        if x.lost is not None and lost is not None:
            first = self.blocks.start
            before = x.lost[:, first - 1] if first else torch.zeros_like(x.lost[:, 0])
            since = torch.cat([before.view(B, G, 1, R, -1), lost], 2)
            tops = tops + (lost[:, :, :, None] - since[:, :, None]).to(self.dtype)
        block = torch.arange(z, device=k.device)[:, None]
        past = torch.arange(-1, z, device=k.device) <= block
        if x.age is not None:
            past = past & (block - torch.arange(-1, z, device=k.device) <= x.age[self.blocks, None])
        self.past = past
        tops = tops.masked_fill(~past[..., None, None], -torch.inf)
        self.top = tops.amax(3)
        share = exp_difference(tops, self.top[:, :, :, None])
        mass = torch.cat([carry.mass[:, :, None], mass], 2)
        self.total = torch.cat([(carry.mass[..., None] * carry.mean)[:, :, None], total], 2)
        self.mass = (share * mass[:, :, None]).sum(3)
        self.share = divide(share, self.mass[:, :, :, None])
        self.mean = torch.einsum("bgzyrl,bgyrld->bgzrld", self.share, self.total)

    def last(self) -> Carry:
        """The latents after the last of these blocks."""
        return Carry(self.top[:, :, -1], self.mass[:, :, -1], self.mean[:, :, -1])

    def log_mass(self) -> Tensor:
        """Log-masses after each block, -inf if nothing has been read."""
        empty = self.mass == 0
        return torch.where(empty, -torch.inf, self.top + torch.where(empty, 1.0, self.mass).log())

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Weights (X, R C, M + n + L) of exact keys, sinks, latents; tanh of capped logits."""
        x = self.x
        parts, tanh = [torch.bmm(self.q * x.scale, self.keys.mT)], None
        if x.sink_q is not None:
            self.sink_q, self.sink_k, self.sink_v = (
                self.queries(x.sink_q),
                *(self._sinks(far) for far in (x.sink_k, x.sink_v)),
            )
            parts.append(torch.bmm(self.sink_q * x.scale, self.sink_k.mT))
        if x.softcap:
            tanh = torch.tanh(torch.cat(parts, -1) / x.softcap)
            parts = [tanh * x.softcap]
        if x.latent_q is not None:
            latent_q = self.queries(x.latent_q)
            parts.append(latent_q[..., 1:] - latent_q[..., :1])
        logits = torch.cat(parts, -1)
        by_head = logits.view(self.B, self.G, self.z, self.R, self.C, -1)
        by_head = by_head.masked_fill(~self.seen, torch.finfo(self.dtype).min / 2)
        return torch.softmax(by_head, -1).view(logits.shape), tanh

    def _sinks(self, x_BZSGK: Tensor | None) -> Tensor:
        """The sinks of each block, (X, n, K)."""
        assert x_BZSGK is not None
        shared = x_BZSGK.shape[1] == 1
        own = x_BZSGK.expand(-1, self.z, -1, -1, -1) if shared else x_BZSGK[:, self.blocks]
        return own.permute(0, 3, 1, 2, 4).to(self.dtype).flatten(0, 2)

    def split(self, x_XRM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The columns of exact keys, sinks and latents."""
        n = 0 if self.x.sinks_seen is None else self.x.sinks_seen.shape[-1]
        M = self.keys.shape[1]
        return x_XRM[..., :M], x_XRM[..., M : M + n], x_XRM[..., M + n :]

    def forward(self) -> Tensor:
        """Outputs (B, z C, H, D)."""
        exact, far, latent = self.split(self.weights()[0])
        y = torch.bmm(exact, self.values)
        if self.x.sink_q is not None:
            y = y + torch.bmm(far, self.sink_v)
        if self.carry is not None:
            y = y + torch.bmm(self.by_head(latent), self.mean.flatten(0, 3)).view(y.shape)
        return self.back(y)

    def backward(
        self, dy_BSHD: Tensor, dA: Tensor, dmean: Tensor, into: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Add to the gradients of the call; returns those of the carry's log-mass and mean.

        Args:
            dy_BSHD: Gradient of the output of all blocks.
            dA, dmean: Gradients of log-masses and means after each block, (B, G, z, R, L, ...).
        """
        x, own = self.x, self.own
        p, tanh = self.weights()
        exact, far, latent = self.split(p)
        dy = self.queries(dy_BSHD)
        parts = [torch.bmm(dy, self.values.mT)]
        if x.sink_q is not None:
            parts.append(torch.bmm(dy, self.sink_v.mT))
        if self.carry is not None:
            mean = self.mean.flatten(0, 3)
            parts.append(torch.bmm(self.by_head(dy), mean.mT).view(*dy.shape[:2], -1))
        pulled = torch.cat(parts, -1).mul_(p)
        dlogits = pulled.addcmul_(p, pulled.sum(-1, keepdim=True), value=-1.0)
        if tanh is not None:
            dlogits[..., : tanh.shape[-1]] *= 1.0 - tanh.square()
        dnear, dfar, dlatent = self.split(dlogits)
        into["q"][:, own] = self.back(torch.bmm(dnear, self.keys) * x.scale)
        for name, dx in (
            ("k", torch.bmm(dnear.mT, self.q) * x.scale),
            ("v", torch.bmm(exact.mT, dy)),
        ):
            self.add_window(into[name], dx[:, : x.reach])
            self.add_at(x.kept, into[name], dx[:, x.reach :])
        if x.sink_q is not None:
            into["sink_q"][:, own] = self.back(torch.bmm(dfar, self.sink_k) * x.scale)
            self._add_sinks(into["sink_k"], torch.bmm(dfar.mT, self.sink_q) * x.scale)
            self._add_sinks(into["sink_v"], torch.bmm(far.mT, dy))
        if self.carry is None:
            return dA, dmean
        dlatent_q = F.pad(dlatent, (1, 0))
        dlatent_q[..., 0] = -dlatent.sum(-1)
        into["latent_q"][:, own] = self.back(dlatent_q)
        dmean = dmean + torch.bmm(self.by_head(latent).mT, self.by_head(dy)).view(self.mean.shape)
        # Gradients of the parts y whose sums are the means after z.
        lost = dA - (dmean * self.mean).sum(-1)
        dmass, dtotal = self._heard(lost[..., None])[..., 0], self._heard(dmean)
        own_total = dtotal[:, :, 1:].flatten(3, 4).flatten(0, 2)  # (X, R L, D)
        dk = torch.bmm(self.late_v, own_total.mT).view(self.e.shape)
        dk = self.e * (dk + dmass[:, :, 1:, None])
        self.add_at(x.late, into["latent_k"], dk.flatten(4).flatten(0, 2))
        self.add_at(x.late, into["v"], torch.bmm(self.e.flatten(4).flatten(0, 2), own_total))
        first, mass = dtotal[:, :, 0], self.carry.mass
        dA_0 = mass * ((first * self.carry.mean).sum(-1) + dmass[:, :, 0])
        return dA_0, mass[..., None] * first

    def _heard(self, x_BGzRLD: Tensor) -> Tensor:
        """Gradients of the parts y, summed over all means that contain them, (B, G, y, R, L, D)."""
        if self.x.age is None:
            return torch.einsum("bgzyrl,bgzrld->bgyrld", self.share, x_BGzRLD)
        # Packed sequences are kept apart, because zero times a number that is not finite is NaN.
        past, total = self.past[..., None, None, None], torch.zeros_like(self.total)
        for i in range(self.z):
            part = self.share[:, :, i, ..., None] * x_BGzRLD[:, :, i : i + 1]
            total = total + torch.where(past[i], part, 0.0)
        return total

    def _add_sinks(self, target_BZSGK: Tensor, dx_XSK: Tensor) -> None:
        """The adjoint of :meth:`_sinks`."""
        dx = dx_XSK.unflatten(0, (self.B, self.G, self.z)).permute(0, 2, 3, 1, 4)
        if target_BZSGK.shape[1] == 1:
            target_BZSGK += dx.sum(1, keepdim=True)
        else:
            target_BZSGK[:, self.blocks] += dx


def _first_carry(x: KeptCall) -> Carry | None:
    """The latents before the first block, (B, G, R, L)."""
    if x.latent_k is None:
        return None
    B, _, G, R = x.shape
    L, D = x.latent_k.shape[-1], x.v.shape[-1]
    if x.log_mass is None or x.mean is None:
        top = x.v.new_full((B, G, R, L), -torch.inf, dtype=computation_dtype(x.q.dtype))
        return Carry(top, torch.zeros_like(top), top.new_zeros(*top.shape, D))
    A = x.log_mass.view(B, G, R, L)
    return Carry(A.detach(), exp_difference(A, A.detach()), x.mean.view(B, G, R, L, D))


def _ends(x: KeptCall, part: Segment) -> tuple[Tensor, Tensor]:
    """For each packed sequence: its last block's number in a segment, and whether it is there."""
    assert x.ends is not None
    number = x.ends - part.blocks.start
    return number.clamp(0, part.z - 1), (number >= 0) & (number < part.z)


def _results(x: KeptCall, carries: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and log-mass and mean at the end of each sequence; empty ones without latents.

    Args:
        carries: Buffers for the latents before each segment, or nothing.
    """
    carry, outs = _first_carry(x), []
    A, mean = (x.v.new_empty(0, dtype=computation_dtype(x.q.dtype)) for _ in range(2))
    if carry is not None and x.ends is not None:
        A, mean = (y[0].expand(len(x.ends), *y.shape[1:]) for y in (carry.top, carry.mean))
    for i, blocks in enumerate(x.segments):
        if carry is not None:
            for buffer, y in zip(carries, carry, strict=False):
                buffer[i] = y
        part = Segment(x, blocks, carry)
        outs.append(part.forward().to(x.v.dtype))
        if carry is None:
            continue
        carry = part.last()
        if x.ends is None:
            A, mean = part.log_mass()[:, :, -1], carry.mean
        else:
            at, there = _ends(x, part)
            there = there[:, None, None, None]
            A = torch.where(there, part.log_mass()[0].transpose(0, 1)[at], A)
            mean = torch.where(there[..., None], part.mean[0].transpose(0, 1)[at], mean)
    if carry is not None:
        A, mean = A.flatten(1, 2), mean.flatten(1, 2)
    return torch.cat(outs, 1), A, mean


def _carries(x: KeptCall) -> tuple[Tensor, ...]:
    """Empty buffers for the latents before each segment."""
    dtype = computation_dtype(x.q.dtype)
    if x.latent_k is None:
        return tuple(x.v.new_empty(0, dtype=dtype) for _ in range(3))
    (B, _, G, R), L = x.shape, x.latent_k.shape[-1]
    top = x.v.new_empty((len(x.segments), B, G, R, L), dtype=dtype)
    return top, torch.empty_like(top), top.new_empty(*top.shape, x.v.shape[-1])


def _forward(x: KeptCall) -> tuple[Tensor, ...]:
    """Outputs of the op."""
    carries = _carries(x)
    return *_results(x, carries), *carries


def _fake(x: KeptCall) -> tuple[Tensor, ...]:
    """Empty outputs of the op."""
    carries, (B, _, G, R) = _carries(x), x.shape
    out = x.v.new_empty((*x.q.shape[:3], x.v.shape[-1]))
    if x.latent_k is None:
        return out, torch.empty_like(carries[0]), torch.empty_like(carries[0]), *carries
    N, L = B if x.ends is None else len(x.ends), x.latent_k.shape[-1]
    A = carries[0].new_empty(N, G * R, L)
    return out, A, A.new_empty(*A.shape, x.v.shape[-1]), *carries


def _backward(
    x: KeptCall, dout: Tensor, dA: Tensor, dmean: Tensor, *carries: Tensor
) -> dict[str, Tensor]:
    """The gradients of the op."""
    (_, _, G, R), dtype = x.shape, computation_dtype(x.q.dtype)
    into = {}
    for name in ("q", "latent_q", "sink_q"):
        if (own := getattr(x, name)) is not None:
            into[name] = torch.empty_like(own, memory_format=torch.contiguous_format)
    for name in ("k", "v", "sink_k", "sink_v", "latent_k"):
        if (own := getattr(x, name)) is not None:
            wider = torch.promote_types(own.dtype, dtype)
            into[name] = torch.zeros(own.shape, dtype=wider, device=own.device)
    if x.latent_k is not None:
        ends = dA.unflatten(1, (G, R)), dmean.unflatten(1, (G, R))
        first = [y if x.ends is None else torch.zeros_like(y[:1]) for y in ends]
        dA, dmean = first
    for i, blocks in reversed(list(enumerate(x.segments))):
        if x.latent_k is None:
            Segment(x, blocks, None).backward(dout, dA, dmean, into)
            continue
        part = Segment(x, blocks, Carry(*(y[i] for y in carries)))
        dA_z, dmean_z = part.top.new_zeros(part.top.shape), torch.zeros_like(part.mean)
        if x.ends is not None:
            at, there = _ends(x, part)
            for target, dy in zip((dA_z, dmean_z), ends, strict=True):
                own = dy.masked_fill(~there.view(-1, *[1] * (dy.ndim - 1)), 0.0)
                target[0].transpose(0, 1).index_add_(0, at, own)
        dA_z[:, :, -1] += dA
        dmean_z[:, :, -1] += dmean
        dA, dmean = part.backward(dout, dA_z, dmean_z, into)
    if x.log_mass is not None:
        into |= {"log_mass": dA.flatten(1, 2), "mean": dmean.flatten(1, 2)}
    return into


kept_op = differentiable_op(
    "kept",
    KeptCall,
    _fake,
    _forward,
    _backward,
    returns=["out", "log_mass", "mean"],
    gradients=(
        *("q", "k", "v", "latent_q", "latent_k", "log_mass", "mean"),
        *("sink_q", "sink_k", "sink_v"),
    ),
    saves=["top_z", "mass_z", "mean_z"],
)


class Decays(NamedTuple):
    """Log-decays from the start of the call, in fp64: small differences of them count."""

    total: Tensor  # (B, S, H, L) up to each slot
    late: Tensor  # (B, S, H, L): the logits' share, less the total when a source left the window

    @classmethod
    def of(cls, plan: Plan, latents: KeptLatents, state: KeptState | None) -> Decays | None:
        """The sums of a call; None without decay."""
        if latents.log_decay is None:
            return None
        g = latents.log_decay.double()
        old = None if state is None else state.log_decay
        total = plan.layout.laid(g, None if old is None else torch.zeros_like(old)).cumsum(1)
        S = plan.layout.S
        late = -total[:, (torch.arange(S, device=g.device) + plan.window).clamp_max(S - 1)]
        return cls(
            total, late if old is None else late + plan.layout.laid(torch.zeros_like(g), old)
        )

    def at_blocks(self, plan: Plan) -> Tensor:
        """(B, Z, H, L): the total at each block's first query, without gradient."""
        return self.total[:, plan.layout.front :: plan.layout.C].detach()

    def after(self, plan: Plan, A_NHL: Tensor) -> Tensor:
        """Log-masses at the end of each sequence, from those at the update of its last block."""
        layout, lost = plan.layout, self.at_blocks(plan)
        last = layout.final.clamp(0, layout.blocks - 1)
        packed = layout.block_ids is not None
        row = torch.zeros_like(last) if packed else torch.arange(len(last)).to(last)
        since = self.total[row, layout.end - 1]
        last = last if packed else torch.full_like(last, layout.blocks - 1)
        return A_NHL + (since - lost[row, last]).to(A_NHL.dtype)


def attention(
    plan: Plan, x: KeptInputs, op: Any = kept_op
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output, and with latents their log-mass and mean after the call.

    ``op`` takes a :class:`KeptCall` and returns as :data:`kept_op`, which other backends replace.
    """
    layout, none, state, sinks, latents = plan.layout, (None, None), x.state, x.sinks, x.latents
    keys, values = none if state is None else (state.keys, state.values)
    inputs = layout.queries(x.q), layout.laid(x.k, keys), layout.laid(x.v, values)
    late: tuple[Tensor | None, ...] = (None, None, None, None)
    decays = lost = None
    if latents is not None:
        old = None if state is None else state.latent_keys
        latent_k = layout.laid(latents.k, old)
        if (decays := Decays.of(plan, latents, state)) is not None:
            latent_k = latent_k + decays.late
            lost = decays.at_blocks(plan)
        late = (layout.queries(latents.q), latent_k, latents.log_mass, latents.mean)
    far: tuple[Tensor | None, ...] = (None, None, None)
    if sinks is not None:
        kept = (without_masked(sinks.mask, each) for each in (sinks.keys, sinks.values))
        ids = layout.block_ids
        kept = (each[:, None] if ids is None else each[ids][None] for each in kept)
        far = (layout.queries(sinks.q), *kept)
    found = (plan.real, plan.kept, plan.kept_there, plan.late, plan.late_there)
    numbers: Any = (x.window, layout.C, x.local.scale, x.local.softcap)
    ends = (layout.age, layout.ends, lost)
    given: Any = (*inputs, *late, *far)
    out, A, mean, *_ = op(
        *KeptCall(*given, plan.sinks_seen, *found, plan.heard(latents), *ends, *numbers)  # type: ignore[call-arg]
    )
    out = layout.back(out)
    if latents is None:
        return out, None, None
    return out, A if decays is None else decays.after(plan, A), mean


def state_after(plan: Plan, x: KeptInputs) -> KeptState:
    """The tokens that are held after the call."""
    layout, G, (after, there), latents = plan.layout, x.k.shape[2], plan.held(), x.latents
    old: Any = KeptState(*[None] * 7) if x.state is None else x.state  # type: ignore[arg-type]

    def groups(x_BSHL: Tensor) -> Tensor:
        return x_BSHL.unflatten(2, (G, -1))

    def held(x_BTGX: Tensor, old: Tensor | None) -> Tensor:
        x_BTGX = x_BTGX if old is None else torch.cat([old.to(x_BTGX.dtype), x_BTGX], 1)
        return taken(x_BTGX, source, there)

    def held_heads(x_BTHL: Tensor, old: Tensor | None) -> Tensor:
        return held(groups(x_BTHL), old if old is None else groups(old)).flatten(2, 3)

    source = layout.sources(after)
    exact = held(x.k, old.keys), held(x.v, old.values)
    scores = taken(plan.scores, after, there, -torch.inf)
    positions = taken(plan.positions, after, there, -1)
    latent_k = lost = None
    if latents is not None:
        latent_k = held_heads(latents.k, old.latent_keys)
    if latents is not None and (decays := Decays.of(plan, latents, x.state)) is not None:
        assert latents.log_decay is not None
        # Up to the last token: what a source had when it left, or nothing if it has not.
        last = (layout.end - 1)[:, None, None]
        total, left = groups(decays.total), torch.minimum(after + plan.window, last)
        everywhere = torch.ones_like(there)
        lost = taken(total, last.expand_as(left), everywhere) - taken(total, left, everywhere)
        lost = lost.masked_fill(~there[..., None, None], 0.0).flatten(2, 3)
        lost = lost.to(latents.log_decay.dtype)
        if old.log_decay is not None:
            lost = lost + held_heads(torch.zeros_like(latents.log_decay), old.log_decay)
    return KeptState(*exact, scores, positions, layout.before + layout.counts, latent_k, lost)
