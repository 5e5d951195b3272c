"""A call with kept tokens whose inputs were checked: its state, its backend, and dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops import reference_kept
from latte.ops.arguments import NO_SINKS, KeptInputs
from latte.ops.backend import choose
from latte.ops.checks import check_latte_state, check_shape, check_state_part, check_tangents
from latte.ops.cpp_backend import kept as native_kept
from latte.ops.isolation import View, isolated
from latte.ops.kept import Kept, KeptLatents, KeptState, comparable
from latte.ops.mxint8 import pack, packed_width, rounded, unpack
from latte.ops.state import LatteState, MacchiatoState, SeenSinks, Sinks, total_log_decay
from latte.ops.tensors import (
    Local,
    Sequences,
    computation_dtype,
    count_sequences,
    nothing_out,
    on_cpu,
)
from latte.ops.torch_backend import kept as torch_kept
from latte.ops.triton_backend import kept as triton_kept
from latte.ops.triton_backend.launch import window_unavailable

# The backends that have kept tokens.
KEPT: dict[str, Any] = {
    "reference": reference_kept,
    "torch": torch_kept,
    "cpu": native_kept,
    "triton": triton_kept,
}


def check_kept(
    op: str, kept: Kept | None, sizes: dict[str, int], q: Tensor, causal: bool
) -> Kept | None:
    """Kept tokens that fit the inputs; None if there are to be none."""
    if kept is None:
        return None
    if not isinstance(kept, Kept):
        raise ValueError(f"{op}: kept must be a Kept, got {type(kept).__name__}")
    for name, least in (("count", 0), ("block", 1)):
        number = getattr(kept, name)
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{op}: kept.{name} must be a number from {least} on, got {number!r}")
    check_shape(op, "kept.scores", kept.scores, "BTG", sizes)
    if not kept.scores.is_floating_point():
        raise ValueError(f"{op}: kept.scores must be floating point, got {kept.scores.dtype}")
    if kept.scores.device != q.device:
        raise ValueError(f"{op}: kept.scores must be on {q.device}, got {kept.scores.device}")
    if not kept.count:
        return None
    if not causal:
        raise ValueError(f"{op}: kept needs causal=True: no source leaves a bidirectional window")
    return kept._replace(scores=kept.scores.to(computation_dtype(q.dtype)))


def check_kept_state(
    op: str, state: Any, kept: Kept, window: int | None, N: int, *like: Tensor | None
) -> KeptState | None:
    """The state fits the call; as wide as k, v and the latent keys (None without latents).

    Whether its tokens are in the places of these sizes is checked on CPUs alone.
    """
    if state is None:
        return None
    if not isinstance(state, tuple) or not hasattr(state, "positions"):
        came = type(state).__name__
        raise ValueError(f"{op}: initial_state must be a KeptState with kept tokens, got {came}")
    k, v, latent_k = like
    assert k is not None
    assert v is not None
    assert window is not None
    slots = (N, kept.count + window + kept.block - 1)
    groups, sums = (*slots, k.shape[2]), comparable(kept.scores[:0]).dtype

    def rows(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        *heads, width = x.shape[2:]
        if kept.packed:
            return (*slots, *heads, packed_width(width)), torch.uint8
        return (*slots, *heads, width), x.dtype

    wanted: dict[str, Any] = {
        "keys": rows(k),
        "values": rows(v),
        "scores": (groups, sums),
        "positions": (groups, torch.int64),
        "seen": ((N,), torch.int64),
    }
    if latent_k is not None:
        shape = (*slots, *latent_k.shape[2:])
        wanted |= {"latent_keys": rows(latent_k), "log_decay": (shape, sums)}
    found: dict[str, Any] = {}
    for name, x in zip(KeptState._fields, state, strict=True):
        if x is not None and name not in wanted:
            came = type(x).__name__
            raise ValueError(f"{op}: initial_state.{name} must be None without latents, got {came}")
        if x is None and (name == "log_decay" or name not in wanted):
            found[name] = None
            continue
        shape, dtype = wanted[name]
        kind = "floating point" if dtype.is_floating_point else str(dtype).removeprefix("torch.")
        check_state_part(op, name, x, shape, kind, k.device)
        found[name] = x.to(dtype)
    fitting = KeptState(**found)
    if on_cpu(fitting.positions) and not fitting.is_of(kept.count, window, kept.block):
        raise ValueError(
            f"{op}: initial_state must be that of {kept.count} kept tokens, a window of {window}"
            f" and blocks of {kept.block}, got a state of other numbers"
        )
    return fitting


def macchiato(
    op: str,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    kept: Kept,
    local: Local,
    sequences: Sequences,
    sinks: Sinks | None,
    log_decay: Tensor | None,
    delay: bool,
    joint: bool,
    state: MacchiatoState | None,
    output_final_state: bool,
    backend: str | None,
) -> tuple[Tensor, Any]:
    """See :func:`latte.ops.macchiato_attention`."""
    latent_q, latent_k, q, k, v = inputs
    if not (delay and joint):
        raise ValueError(
            f"{op}: kept needs delay=True and joint=True, got delay={delay}, joint={joint}"
        )
    latent, held = None, None
    if state is not None:
        if not hasattr(state, "kept"):
            came = type(state).__name__
            raise ValueError(f"{op}: initial_state must be a MacchiatoState, got {came}")
        latent, held = state.latent, state.kept
        if state.window is not None or (latent is None) != (held is None):
            raise ValueError(
                f"{op}: initial_state must have latent and kept, as kept tokens make it, got "
                f"{', '.join(x for x in MacchiatoState._fields if getattr(state, x) is not None)}"
            )
    _check_alone(op, sequences, held)
    N = count_sequences(q.shape[0], sequences.cu_seqlens)
    latent = check_latte_state(op, latent, (N, *latent_k.shape[2:], v.shape[-1]), q)
    held = check_kept_state(op, held, kept, local.window, N, k, v, latent_k)
    before = (None, None) if latent is None else latent[:2]
    latents = KeptLatents(latent_q, latent_k, log_decay, *before)
    call = KeptInputs(q, k, v, kept, local, sequences, held, sinks, latents)
    out, after, held = attend(op, call, output_final_state, backend)
    if after is None or held is None:
        return out, None
    lost = total_log_decay(log_decay, latent, sequences.cu_seqlens)
    parts: dict[str, Any] = {"latent": LatteState(after.log_mass, after.mean, lost), "kept": held}
    return out, MacchiatoState(**parts) if state is None else state._replace(**parts)


def window(
    op: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    kept: Kept,
    local: Local,
    sequences: Sequences,
    sinks: Sinks | None,
    state: Any,
    output_final_state: bool,
    backend: str | None,
) -> tuple[Tensor, KeptState | None]:
    """See :func:`latte.ops.sliding_window_attention`."""
    q, k, v = qkv
    _check_alone(op, sequences, state)
    N = count_sequences(q.shape[0], sequences.cu_seqlens)
    held = check_kept_state(op, state, kept, local.window, N, k, v, None)
    call = KeptInputs(*qkv, kept, local, sequences, held, sinks)
    out, _, after = attend(op, call, output_final_state, backend)
    return out, after


def _check_alone(op: str, sequences: Sequences, state: Any) -> None:
    """Packed sequences begin without a state."""
    if sequences.cu_seqlens is not None and state is not None:
        raise ValueError(
            f"{op}: kept takes cu_seqlens or initial_state, got both: carry packed sequences on "
            "one by one"
        )


def attend(
    op: str, x: KeptInputs, output_final_state: bool, backend: str | None
) -> tuple[Tensor, LatteState | None, KeptState | None]:
    """Output, the latents (None without any), and the held tokens (None if not asked for)."""
    if x.kept.packed:
        out, after, held = attend(op, unpacked(x), output_final_state, backend)
        return out, after, held and _packed(held)
    x = _both_forget(x)
    q, k, v, kept, local, sequences, state, sinks, latents = x
    B, T, H, _ = q.shape
    every = (
        *(latents or ())[:2],
        *(q, k, v),
        *(sinks or ())[:3],
        *(latents or ())[2:],
        *(state or ()),
    )

    def refusal() -> str | None:
        L = 1 if latents is None else latents.k.shape[-1]
        return window_unavailable(q, x.window, q.shape[-1], v.shape[-1], L)

    named = f"{op} with kept tokens"
    form = True, None, True
    chosen = choose(named, backend, KEPT, q.device, refusal, inputs=every, form=form)
    if chosen != "reference":
        check_tangents(op, *every)
    if B * T == 0:
        N = count_sequences(B, sequences.cu_seqlens)
        inputs = (q, k, *(sinks or ())[:3], *(latents or ())[:3])
        out = nothing_out(v.repeat_interleave(H // v.shape[2], 2), *inputs)
        own = (None, None) if latents is None else latents[1:3]
        held = state or KeptState.empty(k, v, kept, x.window, N, *own)
        after = None
        if latents is not None:
            after = LatteState.empty_for(q, N, *latents.k.shape[2:], v.shape[-1])
            if latents.log_mass is not None and latents.mean is not None:
                after = LatteState(latents.log_mass, latents.mean)
        return out, after, held if output_final_state else None
    plan = KEPT[chosen].plan_of(x)

    def run(q: Any, k: Any, v: Any, *more: Any) -> tuple[Tensor, ...]:
        sink_q, sink_k, sink_v, latent_q, latent_k, log_mass, mean, log_decay, *held = more
        far = sinks and sinks._replace(q=sink_q, keys=sink_k, values=sink_v)
        late = latents and KeptLatents(latent_q, latent_k, log_decay, log_mass, mean)
        names = ("keys", "values", "latent_keys", "log_decay")
        before = state and state._replace(**dict(zip(names, held, strict=True)))
        found = KEPT[chosen].attention(
            plan, KeptInputs(q, k, v, kept, local, sequences, before, far, late)
        )
        return found if latents is not None else found[:1]

    given: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
    given |= zip(("sink_q", "sink_k", "sink_v"), sinks or NO_SINKS, strict=False)
    late: Any = latents or KeptLatents(*[None] * 5)  # type: ignore[arg-type]
    given |= {"latent_q": late.q, "latent_k": late.k, "log_mass": late.log_mass, "mean": late.mean}
    given |= {"log_decay": late.log_decay, "tail_k": None, "tail_v": None}
    given |= {"pending_k": None, "pending_v": None}
    view = View(sequences)
    if state is not None:
        there = (state.positions >= 0).any(2)
        given |= {"tail_k": state.keys, "tail_v": state.values, "pending_k": state.latent_keys}
        given |= {"pending_v": state.log_decay}
        view = view._replace(tail_mask=there, pending_mask=there)
    if sinks is not None:
        before = None if state is None else state.seen
        seen = SeenSinks.of(sinks._replace(position=before), x.window, sequences)
        view = view._replace(sink_mask=sinks.mask, sinks_seen=seen.seen)
    # Kernels keep sequences apart, but decays are summed over all packed ones.
    summed = sequences.cu_seqlens is not None and late.log_decay is not None
    apart = chosen == "triton" and not summed
    out, *found = run(*given.values()) if apart else isolated(run, view, given)
    last = KEPT[chosen].state_after(plan, x) if output_final_state else None
    return out, LatteState(*found) if found else None, last


def unpacked(x: KeptInputs) -> KeptInputs:
    """The same without a packed state, and with numbers that such a state can hold."""
    state, latents = x.state, x.latents
    if not x.kept.packed:
        return x
    if state is not None:
        keys, values = unpack(state.keys, x.v.dtype), unpack(state.values, x.v.dtype)
        state = state._replace(keys=keys, values=values)
        if latents is not None and state.latent_keys is not None:
            state = state._replace(latent_keys=unpack(state.latent_keys, latents.k.dtype))
    if latents is not None:
        latents = latents._replace(k=rounded(latents.k))
    kept, k, v = x.kept._replace(packed=False), rounded(x.k), rounded(x.v)
    return x._replace(k=k, v=v, kept=kept, state=state, latents=latents)


def _packed(state: KeptState) -> KeptState:
    """The state with keys, values and latent keys in 8 bits."""
    late = state.latent_keys
    late = late if late is None else pack(late)
    return state._replace(keys=pack(state.keys), values=pack(state.values), latent_keys=late)


def _both_forget(x: KeptInputs) -> KeptInputs:
    """The same, with log-decays of 0 for the state or the tokens if only the other has some."""
    state, latents = x.state, x.latents
    if state is None or latents is None:
        return x
    if latents.log_decay is None and state.log_decay is not None:
        none = torch.zeros_like(latents.k, dtype=state.log_decay.dtype)
        return x._replace(latents=latents._replace(log_decay=none))
    if latents.log_decay is not None and state.log_decay is None:
        assert state.latent_keys is not None
        none = torch.zeros_like(state.latent_keys, dtype=latents.log_decay.dtype)
        return x._replace(state=state._replace(log_decay=none))
    return x
