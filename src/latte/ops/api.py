"""The public ops: check, choose a backend, dispatch. The work is done in the backends.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents per head, K key
width, D value width, F feature width, E channels, N states (B, or the packed sequences), W window,
n sinks.

Keywords that every op shares:

* ``key_mask`` (B, T) bool, True = a real token. A masked source contributes nothing, whatever its
  position. A query that sees no source gets zeros. A masked token between real ones keeps its place
  in a window and in a convolution: W keys are then fewer real tokens.
* ``cu_seqlens`` (N+1,) int32: bounds of N sequences packed into one row (B = 1). They never see
  each other. States then have N entries.
* ``initial_state``, ``output_final_state``: continue a sequence in a later call. Pass the final
  state of one call unchanged as the initial state of the next. Gradients flow through it.
* ``backend``: ``"reference"``, ``"torch"``, ``"cpu"`` or ``"triton"``. A backend that is named is
  always the one that runs. None uses the default. If no default is set, that is ``"cpu"`` where a
  native CPU kernel is available, ``"triton"`` on GPUs on which its kernels were checked, else
  ``"torch"`` (:mod:`latte.ops.backend`).

Inputs are fp32, bf16, fp16 or fp64. Half precisions are computed in fp32. States are fp32 (fp64
for fp64 inputs). The output has the dtype of ``v``. Bad arguments raise ``ValueError``.

NaN or infinity in an input stays in its own sequence, from its token on: outputs of other rows and
packed sequences, and of earlier tokens, are what they are without it, and so are the gradients of
other sequences. Triton's kernels let it reach earlier tokens of its own chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import cpp_backend, kept_call, reference, triton_backend
from latte.ops.arguments import NO_SINKS, NO_STATE, NO_WINDOW
from latte.ops.backend import choose, is_step
from latte.ops.checks import (
    check_floats,
    check_groups,
    check_inputs,
    check_latent_queries,
    check_latte_state,
    check_local,
    check_log_decay,
    check_macchiato_state,
    check_parameters,
    check_partition,
    check_sequences,
    check_shape,
    check_sinks,
    check_state,
    check_tangents,
    check_widths,
    check_window,
    check_window_state,
    sinks_alone,
)
from latte.ops.isolation import View, isolated
from latte.ops.kept import KeptState
from latte.ops.kept_call import check_kept
from latte.ops.state import (
    LatteState,
    LinearState,
    MacchiatoState,
    Partition,
    SeenSinks,
    WindowState,
    begun,
    final_window_state,
    oldest_alone,
    total_log_decay,
)
from latte.ops.tensors import Local, Sequences, computation_dtype, full_precision, nothing_out
from latte.ops.torch_backend import latte as torch_latte
from latte.ops.torch_backend import linear as torch_linear
from latte.ops.torch_backend import log_mass as torch_log_mass
from latte.ops.torch_backend import macchiato as torch_macchiato
from latte.ops.torch_backend import recurrence as torch_recurrence
from latte.ops.torch_backend import window as torch_window
from latte.ops.triton_backend.launch import (
    WIDEST_VALUE,
    unavailable,
    unavailable_for,
    window_unavailable,
)

# The backends of each op. They are called with checked inputs and all keywords.
LATTE: dict[str, Callable[..., tuple[Tensor, LatteState]]] = {
    "reference": reference.latte_attention,
    "torch": torch_latte.latte_attention,
    "cpu": cpp_backend.latte_attention,
    "triton": triton_backend.latte_attention,
}
MACCHIATO: dict[str, Callable[..., tuple[Tensor, LatteState]]] = {
    "reference": reference.macchiato_attention,
    "torch": torch_macchiato.macchiato_attention,
    "cpu": cpp_backend.macchiato_attention,
    "triton": triton_backend.macchiato_attention,
}
WINDOW: dict[str, Callable[..., Tensor]] = {
    "reference": reference.sliding_window_attention,
    "torch": torch_window.sliding_window_attention,
    "cpu": cpp_backend.sliding_window_attention,
    "triton": triton_backend.sliding_window_attention,
}
LINEAR: dict[str, Callable[..., tuple[Tensor, LinearState]]] = {
    "reference": reference.linear_attention,
    "torch": torch_linear.linear_attention,
}
RG_LRU: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "reference": reference.rg_lru,
    "torch": torch_recurrence.rg_lru,
    "cpu": cpp_backend.rg_lru,
    "triton": triton_backend.rg_lru,
}
CONVOLUTION: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "reference": reference.causal_conv1d,
    "torch": torch_recurrence.causal_conv1d,
    "cpu": cpp_backend.causal_conv1d,
    "triton": triton_backend.causal_conv1d,
}
PAPER = Partition()  # nothing beyond the paper
# The native and Triton backends have no kernels for full softmax attention: PyTorch computes it.
FULL = PYTORCH = ("reference", "torch")


@full_precision
def latte_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: LatteState | None = None,
    output_final_state: bool = False,
    log_decay: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, LatteState | None]:
    """Latte: linear-time attention whose weights are probabilities (paper, eq. 6-14).

    ``p(l|t) = softmax_l(q_t)``, ``p(s|l,t) = softmax_{s<=t}(k_s[l])`` and
    ``y_t = sum_l p(l|t) sum_{s<=t} p(s|l,t) v_s``. If bidirectional (``causal=False``), s runs
    over the whole sequence. The latent logits are not scaled. The result is exact for any finite
    logits.

    Args:
        q: Query logits over the latents, (B, T, H, L).
        k: Key logits over the sources, (B, T, H, L). A latent does not see a source of -inf.
        v: Values, (B, T, H, D), or (B, T, G, D) with G dividing H.
        initial_state: ``LatteState`` of (B or N, H, L) and (B or N, H, L, D).
        log_decay: Log of the factor by which each latent's past decays at a token, g <= 0. Shape
            (B, T, H, L), or (H, L) if it is the same for all tokens. Causal only. ``p(s|l,t)`` is
            then the softmax over s <= t of ``k_s[l] + g_{s+1}[l] + ... + g_t[l]`` (beyond the
            paper). At a masked token nothing decays.

    Returns:
        Output (B, T, H, D) and the final state (None unless ``output_final_state``).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or the backend is not available. On a CPU
            also if ``log_decay`` is above 0.
    """
    op = "latte_attention"
    sizes = check_inputs(op, {"q": q, "k": k, "v": v}, {"q": "BTHL", "k": "BTHL", "v": "BTGD"})
    (B, T, H, L), (G, D) = q.shape, v.shape[2:]
    check_groups(op, H, G, "v")
    sequences = Sequences(key_mask, cu_seqlens, causal)
    sequences, N = check_sequences(op, B, T, q.device, sequences)
    cu_seqlens = sequences.cu_seqlens
    initial_state = check_latte_state(op, initial_state, (N, H, L, D), q)
    log_decay = check_log_decay(op, log_decay, sizes, q, sequences)
    step = is_step((q, k, v, initial_state, log_decay), sequences)
    empty = functools.partial(_empty, (N, H, L, D), q)
    forgotten = (
        total_log_decay(log_decay, initial_state, cu_seqlens) if output_final_state else None
    )
    as_given = initial_state, log_decay
    if step:
        initial_state, log_decay = _forget_first(initial_state, log_decay)
    every = (q, k, v, log_decay, *(initial_state or ()))
    serves = LATTE if causal else _natively(LATTE, causal)
    at = (q.device, lambda: unavailable(q, L, D))
    form = (causal, as_given[1], False)
    chosen = choose(op, backend, serves, *at, step=step, inputs=every, form=form)
    if chosen != "reference":
        check_tangents(op, *every)
    if G != H and not (step and chosen == "triton"):
        v = v.repeat_interleave(H // G, 2)
    if B * T == 0:
        out, state = nothing_out(v, q, k, log_decay), as_given[0] or empty()
    elif step and chosen == "triton":
        from latte.ops.triton_backend.step import latte_step_op

        before, decay = as_given  # this kernel does the whole step
        A, mu, *_ = before or empty()
        out, *after = latte_step_op(q, k, v, key_mask, A, mu, decay)
        state = LatteState(*after)
    elif chosen not in PYTORCH:  # these kernels read only what a query sees
        earlier = None if initial_state is None else initial_state[:2]
        forgetting = {} if log_decay is None else {"log_decay": log_decay}
        out, state = LATTE[chosen](q, k, v, sequences, earlier, **forgetting)
    else:

        def run(q: Any, k: Any, v: Any, log_decay: Any, *earlier: Any) -> tuple[Tensor, ...]:
            forgetting = {} if log_decay is None else {"log_decay": log_decay}
            out, state = LATTE[chosen](q, k, v, sequences, earlier or None, **forgetting)
            return out, *state

        given = {"q": q, "latent_k": k, "v": v, "log_decay": log_decay}
        given |= zip(("log_mass", "mean"), initial_state or (), strict=False)
        out, *after = isolated(run, View(sequences), given)
        state = LatteState(*after)
    if not output_final_state:
        return out, None
    if forgotten is not None or len(state) > 2:
        state = LatteState(state[0], state[1], forgotten)
    return out, state


def _empty(sizes: tuple[int, int, int, int], q: Tensor) -> LatteState:
    """The state before any token, of N, H, L, D, for inputs like ``q``."""
    return LatteState.empty(*sizes, device=q.device, dtype=computation_dtype(q.dtype))


def _natively(serves: Collection[str], causal: bool) -> Collection[str]:
    """The available backends; the native kernels are causal only."""
    return serves if causal else [name for name in serves if name != "cpu"]


def _forget_first(
    state: LatteState | None, log_decay: Tensor | None
) -> tuple[LatteState | None, None]:
    """Apply the decay of a single step to the state, so that kernels without decay can run it."""
    if state is not None and log_decay is not None:
        state = LatteState(state.log_mass + log_decay[:, 0], *state[1:])
    return state, None


@full_precision
def macchiato_attention(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: MacchiatoState | None = None,
    output_final_state: bool = False,
    log_decay: Tensor | None = None,
    partition: Partition | None = None,
    backend: str | None = None,
) -> tuple[Tensor, MacchiatoState | None]:
    """Latte-Macchiato: latent attention whose state 0 is a sliding window (paper, eq. 15-17).

    ``y_t = p(0|t) SWA_t + sum_{l>=1} p(l|t) mu_t[l]``, with p a softmax over L+1 logits. The
    weights of each query form one normalised distribution over the past. ``window`` is the number
    of keys a query sees, its own included. If not causal, a query sees ``|s - t| <= window // 2``.

    Args:
        latent_q: Latent query logits, (B, T, H, L+1). Column 0 is the window's logit.
        latent_k: Latent key logits, (B, T, H, L). A latent does not see a source of -inf.
        q: Local queries, (B, T, H, K), after the position encoding.
        k: Local keys, (B, T, G, K), after the position encoding.
        v: Values of both branches, (B, T, G, D).
        scale: Factor of the local logits; 1 / sqrt(K) if None.
        softcap: Cap of the local logits, which become ``softcap * tanh(logit / softcap)``.
        log_decay: Log-decay of the latents, as for :func:`latte_attention`. The window does not
            decay. With delayed latents a source's weight decays from the token at which the latents
            read it. Decays (H, L) then give the same result as without delay, because the decay
            over W tokens is a factor that all sources share.
        partition: How the past is divided between the window and the latents, beyond the paper:
            sinks, delayed latents, one softmax for both, kept tokens. Causal only. With kept
            tokens outputs at masked tokens are zeros, and the state has ``latent`` and ``kept``.
        initial_state: :class:`MacchiatoState`, or any NamedTuple with its three fields. Parts that
            are None are those before the first token. ``pending.values`` may also have the values
            of all W tokens.

    Returns:
        Output (B, T, H, D) and the final state (None unless ``output_final_state``). The state is a
        :class:`MacchiatoState`. If the initial state is another NamedTuple, it is of that type, and
        its other fields are unchanged.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "macchiato_attention"
    sizes = check_inputs(
        op,
        {"latent_q": latent_q, "latent_k": latent_k, "q": q, "k": k, "v": v},
        {"latent_k": "BTHL", "q": "BTHK", "k": "BTGK", "v": "BTGD"},
    )
    check_latent_queries(op, latent_q, sizes, window=True)
    (B, T, H, L), K, (G, D) = latent_k.shape, q.shape[3], v.shape[2:]
    check_groups(op, H, G, "k and v")
    check_window(op, window)
    check_local(op, scale, softcap)
    sequences = Sequences(key_mask, cu_seqlens, causal)
    sequences, N = check_sequences(op, B, T, q.device, sequences)
    cu_seqlens = sequences.cu_seqlens
    sinks, delay, joint, kept = PAPER if partition is None else check_partition(op, partition)
    if sinks is not None:
        sinks = check_sinks(op, sinks, sizes, N, q, causal)
    if delay and not causal:
        raise ValueError(f"{op}: delay needs causal=True: no source leaves a bidirectional window")
    if joint and not causal:
        raise ValueError(f"{op}: joint needs causal=True, got False")
    if kept is not None and (kept := check_kept(op, kept, sizes, q, causal)) is not None:
        log_decay = check_log_decay(op, log_decay, sizes, q, sequences)
        inputs, local = (latent_q, latent_k, q, k, v), Local.of(window, scale, softcap, K)
        late = (log_decay, delay, joint, initial_state, output_final_state)
        return kept_call.macchiato(op, inputs, kept, local, sequences, sinks, *late, backend)
    latents, tail, unread = check_macchiato_state(
        op, initial_state, (N, H, L, D), window, delay, latent_k, k, v
    )
    if joint and cu_seqlens is not None and latents is not None:
        raise ValueError(
            f"{op}: joint takes cu_seqlens or initial_state, got both: carry packed sequences on "
            "one by one"
        )
    if not causal and (latents is not None or output_final_state):
        raise ValueError(f"{op}: a bidirectional window has no state to carry on")
    if log_decay is not None:
        log_decay = check_log_decay(op, log_decay, sizes, q, sequences)
    step = is_step((latent_q, latent_k, q, k, v, latents, tail, unread, log_decay), sequences)
    empty = functools.partial(_empty, (N, H, L, D), q)
    forgotten = None
    if output_final_state and (log_decay is not None or latents is not None):
        forgotten = total_log_decay(log_decay, latents, cu_seqlens)
    as_given = latents, log_decay
    if step:
        latents, log_decay = _forget_first(latents, log_decay)
    every = (latent_q, latent_k, q, k, v, log_decay, *(latents or ()), *(tail or ()))
    every = (*every, *(unread or ()), *(sinks or ()))

    def refusal() -> str | None:
        if not step:
            return window_unavailable(q, window, K, D, L)
        if K > WIDEST_VALUE:
            return f"for K={K}: expected K from 1 to {WIDEST_VALUE}"
        return unavailable(q, L, D)

    serves = MACCHIATO if causal else _natively(MACCHIATO, causal)
    form = (causal, as_given[1], sinks is not None or delay or joint)
    chosen = choose(op, backend, serves, q.device, refusal, step=step, inputs=every, form=form)
    if chosen != "reference":
        check_tangents(op, *every)
    local = Local.of(window, scale, softcap, K)
    seen_sinks = None if sinks is None else SeenSinks.of(sinks, window, sequences)
    fused = chosen in ("cpu", "triton")  # these kernels compute the log-mass themselves
    inputs = (latent_q, latent_k, q, k, v)
    held: list[WindowState] = []  # the windows' states after the call
    if step and chosen == "triton":
        before, decay = as_given  # this kernel does the whole step
        before = before or empty()
        tail = tail or WindowState.empty(k, v, window)
        if delay:
            unread = unread or WindowState.empty(latent_k, v, window + 1)
        out, latte_state, *held = _macchiato_step(
            inputs, local, key_mask, before, tail, unread, decay, seen_sinks, joint
        )
    elif B * T == 0:
        there = (latent_q, latent_k, q, k, *(() if sinks is None else sinks[:3]))
        out = nothing_out(v.repeat_interleave(H // G, 2), *there, log_decay)
        latte_state = as_given[0] or empty()
    else:
        options: dict[str, Any] = {} if seen_sinks is None else {"sinks": seen_sinks}
        if delay:
            options |= {"delay": True, "pending": unread}
        if fused:
            earlier = None if latents is None else latents[:2]
            options |= {"joint": True} if joint else {}
            options |= {} if log_decay is None else {"log_decay": log_decay}
            out, latte_state = MACCHIATO[chosen](
                *inputs, local, sequences, earlier, tail, **options
            )
        else:

            def run(latent_q: Any, latent_k: Any, q: Any, k: Any, v: Any, *more: Any) -> Any:
                log_decay, log_mass, mean, tail_k, tail_v, pending_k, pending_v, *far = more
                near = tail and tail._replace(keys=tail_k, values=tail_v)
                own = dict(options) if log_decay is None else options | {"log_decay": log_decay}
                kept = seen_sinks and seen_sinks._replace(q=far[0], keys=far[1], values=far[2])
                if kept is not None:
                    own["sinks"] = kept
                if delay and unread:
                    own["pending"] = unread._replace(keys=pending_k, values=pending_v)
                if joint:
                    mass = torch_log_mass.window_log_mass(q, k, local, sequences, near, kept)
                    latent_q = torch_log_mass.with_log_mass(latent_q, mass)
                earlier = None if latents is None else (log_mass, mean)
                inputs = (latent_q, latent_k, q, k, v, local, sequences, earlier, near)
                out, state = MACCHIATO[chosen](*inputs, **own)
                return out, *state

            view = View(
                sequences,
                tail_mask=tail and tail.mask,
                pending_mask=unread and unread.mask,
                sink_mask=seen_sinks and seen_sinks.mask,
                sinks_seen=seen_sinks and seen_sinks.seen,
            )
            names = ("latent_q", "latent_k", "q", "k", "v", "log_decay", "log_mass", "mean")
            values = (*inputs, log_decay, *(latents or NO_STATE)[:2])
            given = dict(zip(names, values, strict=True))
            given |= zip(("tail_k", "tail_v"), tail or NO_STATE, strict=False)
            given |= zip(("pending_k", "pending_v"), unread or NO_STATE, strict=False)
            given |= zip(("sink_q", "sink_k", "sink_v"), seen_sinks or NO_SINKS, strict=False)
            out, *found = isolated(run, view, given)
            latte_state = LatteState(*found)
    if not output_final_state:
        return out, None
    if not held:
        held.append(final_window_state(k, v, window, key_mask, cu_seqlens, tail))
        if delay:
            held.append(final_window_state(latent_k, v, window + 1, key_mask, cu_seqlens, unread))
    if delay:
        held[1] = oldest_alone(held[1])
    if forgotten is not None or len(latte_state) > 2:
        latte_state = LatteState(latte_state[0], latte_state[1], forgotten)
    pending = held[1] if delay else None
    if initial_state is None or not hasattr(initial_state, "pending"):
        return out, MacchiatoState(latte_state, held[0], pending)
    return out, initial_state._replace(latent=latte_state, window=held[0], pending=pending)


def _macchiato_step(
    inputs: tuple[Tensor, ...],
    local: Local,
    key_mask: Tensor | None,
    latents: LatteState,
    tail: WindowState,
    unread: WindowState | None,
    log_decay: Tensor | None,
    sinks: SeenSinks | None,
    joint: bool,
) -> tuple[Any, ...]:
    """One token by Triton's kernel: the output, then latents, tail and ``unread`` after it."""
    from latte.ops.triton_backend.step import macchiato_step_op

    before = (key_mask, *latents[:2], *tail)
    options = (local.scale, local.softcap or None, log_decay, *(sinks or NO_SINKS))
    late = (*(unread or NO_WINDOW), joint)
    out, log_mass, mean, *held = macchiato_step_op(*inputs, *before, *options, *late)
    after = out, LatteState(log_mass, mean), WindowState(*held[:3])
    return after if unread is None else (*after, WindowState(*held[3:]))


@full_precision
def window_log_mass(
    q: Tensor,
    k: Tensor,
    *,
    window: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: WindowState | None = None,
    partition: Partition | None = None,
) -> Tensor:
    """The logsumexp of a causal window's logits, which ``joint`` adds to the window's logit.

    Args:
        q, k, window, scale, softcap: Arguments as for :func:`macchiato_attention`.
        partition: Its ``sinks`` count too.
        initial_state: ``WindowState`` before the first token. Not together with ``cu_seqlens``.

    Returns:
        Log-mass (B, T, H), in fp32 (fp64 for fp64 inputs). For a query that sees no key it is close
        to the lowest finite number.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    op = "window_log_mass"
    sizes = check_inputs(op, {"q": q, "k": k}, {"q": "BTHK", "k": "BTGK"})
    check_groups(op, sizes["H"], sizes["G"], "k")
    check_window(op, window)
    check_local(op, scale, softcap)
    sequences = Sequences(key_mask, cu_seqlens)
    sequences, N = check_sequences(op, sizes["B"], sizes["T"], q.device, sequences)
    if cu_seqlens is not None and initial_state is not None:
        raise ValueError(f"{op}: expected cu_seqlens or initial_state, got both")
    initial_state = check_window_state(op, initial_state, window, N, k, None)
    sinks = check_sinks(op, sinks_alone(op, partition), sizes, N, q, causal=True)
    local = Local.of(window, scale, softcap, sizes["K"])
    seen = None if sinks is None else SeenSinks.of(sinks, window, sequences)

    def run(q: Any, k: Any, tail_k: Any, *far: Any) -> tuple[Tensor]:
        tail = initial_state and initial_state._replace(keys=tail_k)
        kept = seen and seen._replace(q=far[0], keys=far[1])
        return (torch_log_mass.window_log_mass(q, k, local, sequences, tail, kept),)

    given = {"q": q, "k": k, "tail_k": initial_state and initial_state.keys}
    given |= zip(("sink_q", "sink_k"), seen or NO_SINKS, strict=False)
    return isolated(run, _near(local, sequences, initial_state, seen), given)[0]


def _near(
    local: Local, sequences: Sequences, tail: WindowState | None, sinks: SeenSinks | None
) -> View:
    """What a query of a window sees."""
    masks = (tail and tail.mask, None, sinks and sinks.mask, sinks and sinks.seen)
    return View(sequences, local.window, False, *masks)


@full_precision
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: WindowState | KeptState | None = None,
    output_final_state: bool = False,
    partition: Partition | None = None,
    backend: str | None = None,
) -> tuple[Tensor, WindowState | KeptState | None]:
    """Softmax attention over a sliding window, in linear time and memory (paper, eq. 17).

    With ``window=w`` a query sees w keys, s in [t-w+1, t], as in Hugging Face and FlashAttention.
    If not causal, it sees ``|s - t| <= w // 2``. ``window=None`` is full softmax attention, whose
    state holds every key and value.

    Args:
        q: Queries, (B, T, H, K).
        k: Keys, (B, T, G, K), G dividing H.
        v: Values, (B, T, G, D).
        scale: Factor of the logits; 1 / sqrt(K) if None.
        softcap: Cap of the logits, which become ``softcap * tanh(logit / softcap)``.
        initial_state: ``WindowState`` with the last W-1 keys and values (causal only). With kept
            tokens it is the ``KeptState`` that came out.
        partition: Its ``sinks`` and ``kept`` tokens stay visible beside the window (causal, and
            with a window).

    Returns:
        Output (B, T, H, D) and the final ``WindowState`` (None unless ``output_final_state``).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "sliding_window_attention"
    sizes = check_inputs(op, {"q": q, "k": k, "v": v}, {"q": "BTHK", "k": "BTGK", "v": "BTGD"})
    (B, T, H, K), (G, D) = q.shape, v.shape[2:]
    check_groups(op, H, G, "k and v")
    check_window(op, window, optional=True)
    check_local(op, scale, softcap)
    sequences = Sequences(key_mask, cu_seqlens, causal)
    sequences, N = check_sequences(op, B, T, q.device, sequences)
    cu_seqlens = sequences.cu_seqlens
    carried = initial_state is not None or output_final_state
    if not causal and carried:
        raise ValueError(f"{op}: a bidirectional window has no state to carry on")
    if window is None and cu_seqlens is not None and carried:
        raise ValueError(f"{op}: full attention (window=None) carries no state when packed")
    sinks = check_sinks(op, sinks_alone(op, partition, kept=True), sizes, N, q, causal)
    kept = check_kept(op, partition and partition.kept, sizes, q, causal)
    if (sinks is not None or kept is not None) and window is None:
        what = "sinks need" if sinks is not None else "kept needs"
        raise ValueError(f"{op}: {what} a window, got window=None, which sees every token")
    if kept is not None:
        local, late = Local.of(window, scale, softcap, K), (initial_state, output_final_state)
        return kept_call.window(op, (q, k, v), kept, local, sequences, sinks, *late, backend)
    initial_state = check_window_state(op, initial_state, window, N, k, v)  # type: ignore[arg-type]
    every = (q, k, v, *(initial_state or ()), *(sinks or ()))
    serves = _natively(WINDOW, causal and window is not None)
    serves = FULL if window is None and backend is None else serves
    at = (q.device, lambda: window_unavailable(q, window, K, D))
    chosen = choose(op, backend, serves, *at, inputs=every, form=(causal, None, sinks is not None))
    if chosen != "reference" and window is not None:
        check_tangents(op, *every)
    state = None
    if output_final_state:
        state = final_window_state(k, v, window, key_mask, cu_seqlens, initial_state)
    if B * T == 0:
        inputs = (q, k, *(() if sinks is None else sinks[:3]))
        return nothing_out(v.repeat_interleave(H // G, 2), *inputs), state
    local = Local.of(window, scale, softcap, K)
    seen = None if sinks is None or window is None else SeenSinks.of(sinks, window, sequences)

    def run(q: Any, k: Any, v: Any, tail_k: Any, tail_v: Any, *far: Any) -> tuple[Tensor]:
        tail = initial_state and initial_state._replace(keys=tail_k, values=tail_v)
        options: dict[str, Any] = {}
        if seen is not None:
            options["sinks"] = seen._replace(q=far[0], keys=far[1], values=far[2])
        return (WINDOW[chosen](q, k, v, local, sequences, tail, **options),)

    given: dict[str, Any] = {"q": q, "k": k, "v": v}
    given |= zip(("tail_k", "tail_v"), initial_state or NO_STATE, strict=False)
    given |= zip(("sink_q", "sink_k", "sink_v"), seen or NO_SINKS, strict=False)
    if chosen not in PYTORCH:  # these kernels read only what a query sees
        return run(*given.values())[0], state
    return isolated(run, _near(local, sequences, initial_state, seen), given)[0], state


def _elu(x: Tensor) -> Tensor:
    """elu(x) + 1, without the cancellation of e^x - 1 + 1."""
    return torch.where(x > 0, x + 1.0, torch.exp(x.clamp(max=0.0)))


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": _elu,
    "exp": torch.exp,
    "softplus": F.softplus,
    "relu": F.relu,
}


@full_precision
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: LinearState | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, LinearState | None]:
    """Linear attention with a feature map: the paper's undirected model (eq. 4-5).

    ``y_t = S_t phi(q_t) / (phi(q_t) z_t)`` with ``S_t = sum_{s<=t} phi(k_s) v_s`` and
    ``z_t = sum_{s<=t} phi(k_s)``. Latte with p(l|t) proportional to ``e^{q_l} alpha_t[l]`` is
    this model with phi = exp.

    Args:
        q: Queries, (B, T, H, F).
        k: Keys, (B, T, H, F).
        v: Values, (B, T, H, D).
        feature_map: Feature map phi: ``"elu"`` (elu + 1), ``"exp"``, ``"softplus"``, ``"relu"`` or
            any callable that keeps the shape of the first dimensions. With None, q and k are
            already features, and must not be negative.

    Returns:
        Output (B, T, H, D) and the final ``LinearState`` (None unless ``output_final_state``).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "linear_attention"
    check_floats(op, {"q": q, "k": k, "v": v})
    named = isinstance(feature_map, str) and feature_map in FEATURE_MAPS
    if not (named or feature_map is None or callable(feature_map)):
        raise ValueError(
            f"{op}: feature_map must be one of {tuple(FEATURE_MAPS)}, a callable or None, "
            f"got {feature_map!r}"
        )
    dtype = computation_dtype(q.dtype)
    phi = FEATURE_MAPS[feature_map] if isinstance(feature_map, str) else feature_map
    q, k = q.to(dtype), k.to(dtype)
    if phi is not None:
        q, k = phi(q), phi(k)
    sizes: dict[str, int] = {}
    for name, x, letters in (("q", q, "BTHF"), ("k", k, "BTHF"), ("v", v, "BTHD")):
        check_shape(op, name, x, letters, sizes)
    check_widths(op, sizes)
    B, T, H, features, D = (sizes[c] for c in "BTHFD")
    sequences = Sequences(key_mask, cu_seqlens, causal)
    sequences, N = check_sequences(op, B, T, q.device, sequences)
    if initial_state is not None:
        shapes = ((N, H, features, D), (N, H, features))
        check_state(op, initial_state, LinearState._fields, shapes, q.device)
        initial_state = LinearState(*(x.to(dtype) for x in initial_state))
    chosen = choose(op, backend, LINEAR, q.device, lambda: None)
    if chosen != "reference" and cu_seqlens is not None:
        check_tangents(op, q, k, v, *(initial_state or ()))
    if T == 0:
        zeros = q.new_zeros(N, H, features, D)
        start = initial_state or LinearState(zeros, zeros[..., 0])
        return nothing_out(v, q, k), start if output_final_state else None

    def run(q: Any, k: Any, v: Any, *earlier: Any) -> tuple[Tensor, ...]:
        state = LinearState(*earlier) if earlier else None
        out, after = LINEAR[chosen](q, k, v, sequences, state)
        return out, *after

    given = {"q": q, "k": k, "v": v.to(dtype)}
    given |= zip(("memory", "normaliser"), initial_state or (), strict=False)
    out, *after = isolated(run, View(sequences), given)
    return out.to(v.dtype), LinearState(*after) if output_final_state else None


@full_precision
def rg_lru(
    x: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    theta: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Real-gated linear recurrent unit (Griffin, arXiv 2402.19427; paper, eq. 18-19).

    ``r, i = sigmoid(recurrence_gate), sigmoid(input_gate)``, ``log a_t = -8 r_t softplus(theta)``
    and ``h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)``. At the first token of a sequence a is 0
    and the factor of the input is 1. A masked token does not change the state.

    Args:
        x: Input, (B, T, E).
        recurrence_gate: Logits of r, (B, T, E).
        input_gate: Logits of i, (B, T, E).
        theta: Parameter of the decay, (E,).
        initial_state: State before the first token, (B or N, E). A row of zeros is the empty
            state: that sequence then starts at its first real token.
        reverse: Whether to run from the end of every sequence to its beginning.

    Returns:
        h (B, T, E) in the dtype of x, and the last state (B or N, E) in fp32 (fp64 for fp64
        inputs; None unless ``output_final_state``).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "rg_lru"
    inputs = {"x": x, "recurrence_gate": recurrence_gate, "input_gate": input_gate}
    sizes = check_inputs(op, inputs, dict.fromkeys(inputs, "BTE"), empty="BTE")
    check_parameters(op, x.device, sizes, theta=(theta, "E"))
    B, T, E = x.shape
    sequences = Sequences(key_mask, cu_seqlens)
    sequences, N = check_sequences(op, B, T, x.device, sequences)
    dtype = computation_dtype(x.dtype)
    if initial_state is not None:
        check_state(op, (initial_state,), ("state",), ((N, E),), x.device)
        initial_state = initial_state.to(dtype)
    every = (x, recurrence_gate, input_gate, theta, initial_state)
    step = is_step(every, sequences)
    at = (x.device, lambda: unavailable_for(x))
    form = (not reverse, None, False)
    chosen = choose(op, backend, RG_LRU, *at, step=step, inputs=every, form=form)
    if chosen != "reference":
        check_tangents(op, *every)
    if x.numel() == 0:
        last = x.new_zeros(N, E, dtype=dtype) if initial_state is None else initial_state
        out = nothing_out(x, recurrence_gate, input_gate, theta)
        return out, last if output_final_state else None

    op_of_backend, given = RG_LRU[chosen], (x, recurrence_gate, input_gate)
    if chosen in PYTORCH:

        def run(*tensors: Any) -> tuple[Tensor, ...]:
            return op_of_backend(*tensors[:3], theta, sequences, tensors[3], reverse)

        view = View(sequences, reverse=reverse)
        out, last = isolated(run, view, inputs | {"state": initial_state})
    else:  # these kernels read only what a token sees
        out, last = op_of_backend(*given, theta, sequences, initial_state, reverse)
    return out, begun(last, sequences) if output_final_state else None


@full_precision
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution, ``y_t = bias + sum_i weight[:, i] x_{t-K+1+i}``, i = 0..K-1.

    There is no activation. Masked inputs count as 0. Taps do not cross the bounds of packed
    sequences.

    Args:
        x: Input, (B, T, E).
        weight: Taps of each channel, (E, K). The last tap is multiplied by the current token.
        bias: Bias, (E,), or None.
        initial_state: Last K-1 inputs before the first token, oldest first, (B or N, K-1, E).

    Returns:
        y (B, T, E) in the dtype of x, and the last K-1 inputs (B or N, K-1, E) (None unless
        ``output_final_state``).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "causal_conv1d"
    sizes = check_inputs(op, {"x": x}, {"x": "BTE"}, empty="BTE")
    parameters = {"weight": (weight, "EK")} | ({} if bias is None else {"bias": (bias, "E")})
    check_parameters(op, x.device, sizes, **parameters)
    (B, T, E), K = x.shape, weight.shape[1]
    if K < 1:
        raise ValueError(f"{op}: weight must have at least one tap, got {tuple(weight.shape)}")
    sequences = Sequences(key_mask, cu_seqlens)
    sequences, N = check_sequences(op, B, T, x.device, sequences)
    if initial_state is not None:
        check_state(op, (initial_state,), ("state",), ((N, K - 1, E),), x.device)
    every = (x, weight, bias, initial_state)
    step = is_step(every, sequences)
    at = (x.device, lambda: unavailable_for(x))
    form = (True, None, False)
    chosen = choose(op, backend, CONVOLUTION, *at, step=step, inputs=every, form=form)
    if chosen in ("cpu", "triton") and x.numel() == 0:
        chosen = "torch"  # there is nothing to launch kernels for
    if chosen in ("cpu", "triton"):
        check_tangents(op, *every)
    out, tail = CONVOLUTION[chosen](x, weight, bias, sequences, initial_state)
    return out, tail if output_final_state else None


@full_precision
def attention_weights(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor | None = None,
    k: Tensor | None = None,
    *,
    window: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """The probabilities p(s|t) as a dense matrix (B, H, T, T), for inspection: O(T^2) memory.

    Without local ``q`` and ``k`` these are the weights of Latte (eq. 6-8), with latent_q and
    latent_k (B, T, H, L). With them they are the weights of Latte-Macchiato (eq. 15), with latent_q
    (B, T, H, L+1), q (B, T, H, K) and k (B, T, G, K). Every row sums to 1, with two exceptions. If
    the window of a query holds no source, its row sums to 1 - p(0|t). If there is no source at all,
    the row is zero. ``log_decay`` is that of :func:`latte_attention`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    op = "attention_weights"
    if (q is None) != (k is None):
        raise ValueError(f"{op}: local q and k go together, got one of them")
    local: dict[str, Any] = {} if q is None or k is None else {"q": q, "k": k}
    letters = {"latent_k": "BTHL"} | ({"q": "BTHK", "k": "BTGK"} if local else {})
    sizes = check_inputs(op, {"latent_q": latent_q, "latent_k": latent_k} | local, letters)
    check_latent_queries(op, latent_q, sizes, window=bool(local))
    if local:
        check_window(op, window)
        check_local(op, scale, softcap)
        check_groups(op, sizes["H"], sizes["G"], "k")
    sequences = Sequences(key_mask, cu_seqlens, causal)
    sequences, _ = check_sequences(op, sizes["B"], sizes["T"], latent_q.device, sequences)
    log_decay = check_log_decay(op, log_decay, sizes, latent_q, sequences)
    near = Local.of(window, scale, softcap, sizes.get("K", 1))
    return reference.attention_weights(latent_q, latent_k, q, k, near, sequences, log_decay)
