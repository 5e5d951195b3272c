"""The state that each op passes from one process's tokens to the next process's.

Every process computes the state of its own tokens. All processes exchange these states in one
all-gather. Each process merges the states of the processes before it into the ``initial_state`` of
its op. The gradients return the same way: the gradient of an all-gather is a reduce-scatter.

Shape suffixes: B batch (1 where sequences are packed), T tokens, N packed sequences, H query heads,
G key/value heads, L latents per head, D value width, E channels, P slots of a tail, R processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.nn import functional as F

from latte.ops import (
    causal_conv1d,
    latte_attention,
    linear_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)
from latte.ops.state import (
    LatteState,
    LinearState,
    MacchiatoState,
    WindowState,
    final_window_state,
    last_tokens,
    merge_states,
)
from latte.ops.tensors import computation_dtype, full_precision, without_masked

State = tuple[Tensor, ...]


def all_gather(x_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all processes, (R, N), differentiable."""
    renamed = getattr(collectives, "all_gather_single_autograd", None)  # by PyTorch 2.13
    gather = renamed or collectives.all_gather_tensor_autograd
    return gather(x_N[None], 0, group).clone()  # waits for the exchange and gives a plain tensor


class Shard(NamedTuple):
    """The tokens of one process.

    Attributes:
        tokens: Number T of tokens of each row.
        begins: Whether the row's last sequence begins here. Later processes then need nothing
            from before.
    """

    tokens: int
    begins: bool


@dataclass(frozen=True)
class Shards:
    """The tokens of a group's processes in one forward pass, seen from one of them.

    Attributes:
        group: Processes, in the order of their tokens.
        every: Tokens of each process.
        position: Number of valid tokens before this process's, for each of its sequences, (B or N,)
            int64.
        last: Whether a token is of the packed row's last sequence, (1, T) bool; None: all are.
    """

    group: dist.ProcessGroup
    every: tuple[Shard, ...]
    position: Tensor
    last: Tensor | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @full_precision
    def run(
        self, op: Callable[..., Any], *inputs: Any, initial_state: Any = None, **options: Any
    ) -> tuple[Tensor, Any]:
        """The op's output for this process's tokens; its ``initial_state`` comes from the others.

        Raises:
            ValueError: The op has no state of constant size.
        """
        if op not in HANDOVERS or options.get("window", 1) is None:
            raise ValueError(
                f"context_parallel: {op.__name__} has no state of constant size to pass on"
            )
        handover = HANDOVERS[op]
        state = self.before(handover.own(self, *inputs, **options), handover)
        bounds, partition = options.get("cu_seqlens"), options.get("partition")
        if bounds is None or partition is None or not partition.joint:
            return op(*inputs, initial_state=handover.build(self, state), **options)
        # One softmax takes packed sequences or a state. Only the first sequence has one.
        state = handover.build(self, tuple(x[:1] for x in state))
        return _first_apart(op, inputs, state, **options), None

    def before(self, own: State, handover: Handover) -> State:
        """The state of all processes before this one, for each of this one's sequences."""
        filled = list(zip(own, handover.fills, strict=False))
        state = tuple(x.new_full(x.shape, fill) for x, fill in filled)
        gathered, states = self._gather(own)
        for shard, theirs in zip(self.every[: self.rank], states, strict=False):
            state = theirs if shard.begins else handover.follow(state, theirs, shard)
        # Process 0 uses no state of the others, but must take part in their backward pass.
        nothing = gathered[:0].sum()
        state = tuple(x + nothing.to(x.dtype) if x.is_floating_point() else x for x in state)
        rows = len(self.position) - len(state[0])
        if not rows:
            return state
        new = (x.new_full((rows, *x.shape[1:]), fill) for x, fill in filled)
        return tuple(torch.cat(pair) for pair in zip(state, new, strict=True))

    def _gather(self, own: State) -> tuple[Tensor, list[State]]:
        """The states of all processes, as one tensor (R, numbers) and as tuples of tensors."""
        dtype = torch.float64 if own[0].dtype == torch.float64 else torch.float32
        flat = torch.cat([x.reshape(-1).to(dtype) for x in own])
        gathered = flat.new_zeros(len(self.every), 0)
        if len(flat):  # a window of one token, or a convolution of one tap, has an empty state
            gathered = all_gather(flat, self.group)
        sizes = [x.numel() for x in own]
        states = [
            tuple(y.view(x.shape).to(x.dtype) for x, y in zip(own, row.split(sizes), strict=True))
            for row in gathered
        ]
        return gathered, states

    def of_last(self, key_mask: Tensor | None) -> Tensor | None:
        """The valid tokens of each row's last sequence, (B, T) bool; None: all are."""
        if self.last is None or key_mask is None:
            return self.last if key_mask is None else key_mask
        return self.last & key_mask


class Handover(NamedTuple):
    """The functions that pass an op's state from process to process.

    Attributes:
        fills: Values of the state's tensors before the first token. Latents without decay lack the
            last tensor.
        own: Function for the state after this process's tokens of the row's last sequence, from
            the empty state.
        follow: Function that merges a state with the state of a later shard.
        build: Function that makes the op's ``initial_state``.
    """

    fills: tuple[float, ...]
    own: Callable[..., State]
    follow: Callable[[State, State, Shard], State]
    build: Callable[[Shards, State], Any]


def _first_apart(
    op: Callable[..., Any], inputs: tuple[Any, ...], state: Any, cu_seqlens: Tensor, **options: Any
) -> Tensor:
    """The op's output for packed sequences, of which the first alone goes on from a state."""

    def part(begin: int, end: int | None, **own: Any) -> Tensor:
        mask, decay = options.get("key_mask"), options.get("log_decay")
        own["key_mask"] = None if mask is None else mask[:, begin:end]
        if decay is not None and decay.ndim == 4:  # (H, L) is the same for all tokens
            own["log_decay"] = decay[:, begin:end]
        return op(*(x[:, begin:end] for x in inputs), **options | own)[0]  # type: ignore[no-any-return]

    first = int(cu_seqlens[1])
    found = [part(0, first, initial_state=state)]
    if len(cu_seqlens) > 2:
        found.append(part(first, None, cu_seqlens=cu_seqlens[1:] - first))
    return torch.cat(found, 1)


# --- latents ------------------------------------------------------------------------------------


def _latents(
    shards: Shards,
    q: Tensor,
    k_BTHL: Tensor,
    v_BTGD: Tensor,
    *,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    **_: Any,
) -> State:
    """Log-mass (B, H, L) and mean (B, H, L, D), computed without queries.

    With decay, the total log-decay (B, H, L) follows.
    """
    dtype, real = computation_dtype(k_BTHL.dtype), shards.of_last(key_mask)
    k, v = k_BTHL.to(dtype), without_masked(real, v_BTGD.to(dtype))
    forgotten: State = ()
    if log_decay is not None:
        g = without_masked(real, log_decay.to(dtype).expand_as(k))
        # The total decay of a token is the sum over the tokens after it.
        k = k + F.pad(g.flip(1).cumsum(1)[:, :-1], (0, 0, 0, 0, 1, 0)).flip(1)
        forgotten = (g.sum(1),)
    if real is not None:
        k = k.masked_fill(~real[..., None, None], -torch.inf)
    top = k.detach().amax(1, keepdim=True)
    top = torch.where(torch.isneginf(top), 0.0, top)
    weights = torch.exp(k - top)
    mass = weights.sum(1)
    empty = mass == 0
    safe = torch.where(empty, 1.0, mass)
    grouped = weights.unflatten(2, (v.shape[2], -1))
    summed = torch.einsum("btgrl,btgd->bgrld", grouped, v).flatten(1, 2)
    log_mass = torch.where(empty, -torch.inf, top[:, 0] + torch.log(safe))
    return log_mass, summed / safe[..., None], *forgotten


def _followed_latents(before: State, own: State, shard: Shard) -> State:
    (log_mass, mean, *total), (own_mass, own_mean, *decay) = before, own
    merged = merge_states(log_mass + sum(decay), mean, own_mass, own_mean)
    return *merged, *(x + y for x, y in zip(total, decay, strict=True))


# --- tails: the last tokens of a window or of a convolution ---------------------------------------


def _window(
    shards: Shards,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> State:
    """Keys (B, P, G, K), values (B, P, G, D) and mask (B, P) of the last P = W-1 tokens."""
    k, v = without_masked(key_mask, k), without_masked(key_mask, v)
    tail = final_window_state(k, v, window, key_mask, cu_seqlens, None)
    return _of_last(tail, cu_seqlens)


def _convolution(
    shards: Shards,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> State:
    """The last P = K-1 inputs (B, P, E)."""
    tail = last_tokens(without_masked(key_mask, x), weight.shape[1] - 1, cu_seqlens, None)
    return _of_last((tail,), cu_seqlens)


def _of_last(state: State, cu_seqlens: Tensor | None) -> State:
    """The state of the last packed sequence; of rows that are not packed, all states."""
    return tuple(state) if cu_seqlens is None else tuple(x[-1:] for x in state)


def _followed_tail(before: State, own: State, shard: Shard) -> State:
    """The last tokens of both shards: a short shard replaces only some of the earlier tokens."""
    kept = max(own[0].shape[1] - shard.tokens, 0)
    pairs = zip(before, own, strict=True)
    return tuple(torch.cat([x[:, x.shape[1] - kept :], y[:, kept:]], 1) for x, y in pairs)


# --- Macchiato: both ------------------------------------------------------------------------------


def _macchiato(
    shards: Shards,
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **options: Any,
) -> State:
    window = _window(shards, q, k, v, **options)
    return *window, *_latents(shards, latent_q, latent_k, v, **options)


def _followed_macchiato(before: State, own: State, shard: Shard) -> State:
    window = _followed_tail(before[:3], own[:3], shard)
    return *window, *_followed_latents(before[3:], own[3:], shard)


# --- linear attention -----------------------------------------------------------------------------


def _linear(
    shards: Shards,
    q: Tensor,
    k_BTHF: Tensor,
    v_BTHD: Tensor,
    *,
    key_mask: Tensor | None = None,
    **_: Any,
) -> State:
    """Memory (B, H, F, D) and normaliser (B, H, F) of features."""
    dtype, real = computation_dtype(k_BTHF.dtype), shards.of_last(key_mask)
    k, v = (without_masked(real, x.to(dtype)) for x in (k_BTHF, v_BTHD))
    return torch.einsum("bthf,bthd->bhfd", k, v), k.sum(1)


def _added(before: State, own: State, shard: Shard) -> State:
    return tuple(x + y for x, y in zip(before, own, strict=True))


# --- RG-LRU ---------------------------------------------------------------------------------------


def _rg_lru(
    shards: Shards,
    x: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    theta: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> State:
    """The last h (B, E) from zero, and the logarithm of the product of all decays (B, E).

    A row's first valid token is read in another way than those after it: whether it has been read
    before is known from the position.
    """
    dtype = computation_dtype(x.dtype)
    start = _begun(shards, x.new_zeros(len(shards.position), x.shape[2], dtype=dtype))
    options |= {"initial_state": start, "output_final_state": True}
    inputs = x, recurrence_gate, input_gate, theta
    last = rg_lru(*inputs, key_mask=key_mask, cu_seqlens=cu_seqlens, **options)[1]
    assert last is not None
    gate = without_masked(shards.of_last(key_mask), torch.sigmoid(recurrence_gate.to(dtype)))
    log_a = -8.0 * F.softplus(theta.to(dtype)) * gate.sum(1)
    return *_of_last((last,), cu_seqlens), log_a


def _begun(shards: Shards, h_NE: Tensor) -> Tensor:
    """The RG-LRU's state: not zeros, which mean empty, in a row where a token was read."""
    return h_NE + (shards.position > 0)[:, None].to(h_NE.dtype) * torch.finfo(h_NE.dtype).tiny


def _decayed(before: State, own: State, shard: Shard) -> State:
    return before[0] * torch.exp(own[1]) + own[0], before[1] + own[1]


HANDOVERS: dict[Callable[..., Any], Handover] = {
    latte_attention: Handover(
        (-torch.inf, 0.0, 0.0),
        _latents,
        _followed_latents,
        lambda shards, state: LatteState(*state[:2]),
    ),
    macchiato_attention: Handover(
        (0.0, 0.0, 0.0, -torch.inf, 0.0, 0.0),
        _macchiato,
        _followed_macchiato,
        lambda shards, state: MacchiatoState(LatteState(*state[3:5]), WindowState(*state[:3])),
    ),
    sliding_window_attention: Handover(
        (0.0, 0.0, 0.0), _window, _followed_tail, lambda shards, state: WindowState(*state)
    ),
    causal_conv1d: Handover((0.0,), _convolution, _followed_tail, lambda shards, state: state[0]),
    linear_attention: Handover(
        (0.0, 0.0), _linear, _added, lambda shards, state: LinearState(*state)
    ),
    rg_lru: Handover((0.0, 0.0), _rg_lru, _decayed, lambda shards, state: _begun(shards, state[0])),
}
