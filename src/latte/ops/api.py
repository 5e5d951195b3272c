"""The public ops: check, choose a backend, dispatch. The work is done in the backends.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents per head, K key
width, D value width, F feature width, E channels, N states (B, or the packed sequences), W window,
n sinks.

Keywords that every op shares:

* ``key_mask`` (B, T) bool, True = a valid token. A masked source contributes nothing, whatever its
  position. A query that sees no source gets zeros. A masked token between real ones keeps its place
  in a window and in a convolution: W keys are then fewer valid tokens.
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

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import cpp_backend, kept_call, reference, reference_kept, triton_backend
from latte.ops.arguments import (
    NO_SINKS,
    NO_STATE,
    NO_WINDOW,
    RGLRU,
    Convolution,
    KeptInputs,
    Latte,
    Linear,
    Macchiato,
    Window,
)
from latte.ops.backend import choose, is_step
from latte.ops.checks import (
    check_floats,
    check_inputs,
    check_latent_queries,
    check_latte_state,
    check_local,
    check_log_decay,
    check_macchiato_state,
    check_parameter,
    check_partition,
    check_sequences,
    check_shape,
    check_sinks,
    check_state,
    check_tangents,
    check_widths,
    check_window_state,
    sinks_alone,
)
from latte.ops.isolation import isolating
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
from latte.ops.tensors import computation_dtype, full_precision, nothing_out
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

# The backends of each op. They take its checked arguments (:mod:`latte.ops.arguments`) and return
# the output and the final states. Those of ops with latents are also told whether they are causal.
Backends = dict[str, Callable[..., Any]]
LATTE: Backends = {
    "reference": isolating(reference.latte_attention),
    "torch": isolating(torch_latte.latte_attention),
    "cpu": cpp_backend.latte_attention,
    "triton": triton_backend.latte_attention,
}
MACCHIATO: Backends = {
    "reference": isolating(torch_log_mass.joint(reference.macchiato_attention)),
    "torch": isolating(torch_log_mass.joint(torch_macchiato.macchiato_attention)),
    "cpu": cpp_backend.macchiato_attention,
    "triton": triton_backend.macchiato_attention,
}
WINDOW: Backends = {
    "reference": isolating(reference.sliding_window_attention),
    "torch": isolating(torch_window.sliding_window_attention),
    "cpu": cpp_backend.sliding_window_attention,
    "triton": triton_backend.sliding_window_attention,
}
LINEAR: Backends = {
    "reference": isolating(reference.linear_attention),
    "torch": isolating(torch_linear.linear_attention),
}
RG_LRU: Backends = {
    "reference": isolating(reference.rg_lru),
    "torch": isolating(torch_recurrence.rg_lru),
    "cpu": cpp_backend.rg_lru,
    "triton": triton_backend.rg_lru,
}
CONVOLUTION: Backends = {
    "reference": reference.causal_conv1d,
    "torch": torch_recurrence.causal_conv1d,
    "cpu": cpp_backend.causal_conv1d,
    "triton": triton_backend.causal_conv1d,
}
# The native kernels are causal only.
BIDIRECTIONAL = ("reference", "torch", "triton")
# The native and Triton backends have no kernels for full softmax attention: PyTorch computes it.
FULL = PYTORCH = ("reference", "torch")
LOG_MASS = isolating(lambda x: (torch_log_mass.window_log_mass(x),))


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
        log_decay: Log of the factor by which each latent's past decays at a token, g <= 0. On a
            CPU values below -200 are taken as -200; elsewhere such values cost precision. Shape
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
    sizes = check_inputs(op, ("BTHL", "BTHL", "BTGD"), q=q, k=k, v=v)
    (B, T, H, L), (G, D) = q.shape, v.shape[2:]
    sequences, N = check_sequences(op, B, T, q, key_mask, cu_seqlens, causal)
    initial_state = check_latte_state(op, initial_state, (N, H, L, D), q)
    log_decay = check_log_decay(op, log_decay, sizes, q, sequences)
    state = NO_STATE if initial_state is None else initial_state[:2]
    call = Latte(q, k, v, key_mask, sequences.cu_seqlens, *state, log_decay)  # type: ignore[call-arg]
    step = is_step(call, sequences)
    serves = LATTE if causal else BIDIRECTIONAL
    at = (q.device, lambda: unavailable(q, L, D))
    form = causal, log_decay, False
    chosen = choose(op, backend, serves, *at, step=step, inputs=call, form=form)
    if chosen != "reference":
        check_tangents(op, *call)
    whole_step = step and chosen == "triton"  # by one kernel
    forgotten = None
    if output_final_state:
        forgotten = total_log_decay(log_decay, initial_state, sequences.cu_seqlens)
    if G != H and not whole_step:
        call = call._replace(v=v.repeat_interleave(H // G, 2))
    if B * T == 0:
        out = nothing_out(call.v, q, k, log_decay)
        log_mass, mean = (initial_state or LatteState.empty_for(q, N, H, L, D))[:2]
    elif whole_step:
        out, log_mass, mean = triton_backend.latte_step(call)
    else:
        call = _forgotten(call) if step and log_decay is not None else call
        out, log_mass, mean = LATTE[chosen](call, causal)
    return out, LatteState(log_mass, mean, forgotten) if output_final_state else None


def _forgotten(call: Any) -> Any:
    """A single token's call, with its decay applied to the state: backends then need no decay."""
    mass = call.log_mass
    return call._replace(
        log_mass=None if mass is None else mass + call.log_decay[:, 0], log_decay=None
    )


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
        initial_state: :class:`MacchiatoState`, or any NamedTuple with its fields. Parts that
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
    shapes = ("-", "BTHL", "BTHK", "BTGK", "BTGD")
    sizes = check_inputs(op, shapes, latent_q=latent_q, latent_k=latent_k, q=q, k=k, v=v)
    check_latent_queries(op, latent_q, latent_k, window=True)
    (B, T, H, L), K, (G, D) = latent_k.shape, q.shape[3], v.shape[2:]
    local = check_local(op, window, scale, softcap, K)
    sequences, N = check_sequences(op, B, T, q, key_mask, cu_seqlens, causal)
    cu_seqlens = sequences.cu_seqlens
    sinks, delay, joint, kept = check_partition(op, partition)
    if sinks is not None:
        sinks = check_sinks(op, sinks, sizes, N, q, causal)
    if delay and not causal:
        raise ValueError(f"{op}: delay needs causal=True: no source leaves a bidirectional window")
    if joint and not causal:
        raise ValueError(f"{op}: joint needs causal=True, got False")
    log_decay = check_log_decay(op, log_decay, sizes, q, sequences)
    inputs = (latent_q, latent_k, q, k, v)
    if kept is not None and (kept := check_kept(op, kept, sizes, q, causal)) is not None:
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
    state = NO_STATE if latents is None else latents[:2]
    seen = NO_SINKS if sinks is None else SeenSinks.of(sinks, window, sequences)
    near = (*(tail or NO_WINDOW), *seen, *(unread or NO_WINDOW))
    around = (key_mask, cu_seqlens, *state, log_decay, *near, *local, delay, joint)
    call = Macchiato(*inputs, *around)  # type: ignore[call-arg]
    every = call[:-5]  # tensors
    step = is_step(every, sequences)

    def refusal() -> str | None:
        if not step:
            return window_unavailable(q, window, K, D, L)
        if K > WIDEST_VALUE:
            return f"for K={K}: expected K from 1 to {WIDEST_VALUE}"
        return unavailable(q, L, D)

    serves = MACCHIATO if causal else BIDIRECTIONAL
    form = causal, log_decay, sinks is not None or delay or joint
    chosen = choose(op, backend, serves, q.device, refusal, step=step, inputs=every, form=form)
    if chosen != "reference":
        check_tangents(op, *every)
    whole_step = step and chosen == "triton"  # one kernel computes all, the states too
    forgotten = total_log_decay(log_decay, latents, cu_seqlens) if output_final_state else None
    if B * T == 0:
        there = (latent_q, latent_k, q, k, *(sinks or ())[:3], log_decay)
        out = nothing_out(v.repeat_interleave(H // G, 2), *there)
        log_mass, mean = (latents or LatteState.empty_for(q, N, H, L, D))[:2]
    elif whole_step:
        out, log_mass, mean, tail, unread = triton_backend.macchiato_step(call)
    else:
        call = _forgotten(call) if step and log_decay is not None else call
        out, log_mass, mean = MACCHIATO[chosen](call, causal)
    if not output_final_state:
        return out, None
    latents = LatteState(log_mass, mean, forgotten)
    if not whole_step:
        tail = final_window_state(k, v, window, key_mask, cu_seqlens, tail)
        if delay:
            unread = final_window_state(latent_k, v, window + 1, key_mask, cu_seqlens, unread)
    pending = None if unread is None else oldest_alone(unread)
    if initial_state is not None and hasattr(initial_state, "pending"):
        return out, initial_state._replace(latent=latents, window=tail, pending=pending)
    return out, MacchiatoState(latents, tail, pending)


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
        partition: Its ``sinks``, and ``kept`` tokens, count too. With kept tokens there can be no
            state, and time and memory are O(T^2).
        initial_state: ``WindowState`` before the first token. Not together with ``cu_seqlens``.

    Returns:
        Log-mass (B, T, H), in fp32 (fp64 for fp64 inputs). For a query that sees no key it is close
        to the lowest finite number.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    op = "window_log_mass"
    sizes = check_inputs(op, ("BTHK", "BTGK"), q=q, k=k)
    B, T, _, K = q.shape
    local = check_local(op, window, scale, softcap, K)
    sequences, N = check_sequences(op, B, T, q, key_mask, cu_seqlens, causal=True)
    if cu_seqlens is not None and initial_state is not None:
        raise ValueError(f"{op}: expected cu_seqlens or initial_state, got both")
    tail = check_window_state(op, initial_state, window, N, k, None)
    sinks = check_sinks(op, sinks_alone(op, partition, kept=True), sizes, N, q, causal=True)
    kept = check_kept(op, partition and partition.kept, sizes, q, causal=True)
    if kept is not None:
        if initial_state is not None:
            raise ValueError(f"{op}: expected kept tokens or initial_state, got both")
        call = KeptInputs(q, k, k, kept, local, sequences, None, sinks)
        return reference_kept.log_mass(kept_call.unpacked(call))
    seen = NO_SINKS if sinks is None else SeenSinks.of(sinks, window, sequences)
    # Values are not read, so keys are passed in their place.
    held = NO_WINDOW if tail is None else tail._replace(values=tail.keys)
    masses = Window(q, k, k, *sequences[:2], *held, *seen, *local, True)  # type: ignore[call-arg, arg-type]
    return LOG_MASS(masses)[0]


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
        Output (B, T, H, D) and the final ``WindowState``, with kept tokens the ``KeptState`` (None
        unless ``output_final_state``).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "sliding_window_attention"
    sizes = check_inputs(op, ("BTHK", "BTGK", "BTGD"), q=q, k=k, v=v)
    (B, T, H, K), (G, D) = q.shape, v.shape[2:]
    local = check_local(op, window, scale, softcap, K, full=True)
    sequences, N = check_sequences(op, B, T, q, key_mask, cu_seqlens, causal)
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
        late = (initial_state, output_final_state, backend)
        return kept_call.window(op, (q, k, v), kept, local, sequences, sinks, *late)
    tail = check_window_state(op, initial_state, window, N, k, v)  # type: ignore[arg-type]
    seen = NO_SINKS if sinks is None else SeenSinks.of(sinks, window, sequences)  # type: ignore[arg-type]
    around = (key_mask, cu_seqlens, *(tail or NO_WINDOW), *seen, *local, causal)
    call = Window(q, k, v, *around)
    every = call[:-4]  # tensors
    serves: Collection[str] = WINDOW if causal and window is not None else BIDIRECTIONAL
    if window is None and backend is None:
        serves = FULL
    at = (q.device, lambda: window_unavailable(q, window, K, D))
    chosen = choose(op, backend, serves, *at, inputs=every, form=(causal, None, sinks is not None))
    if chosen != "reference" and window is not None:
        check_tangents(op, *every)
    if B * T == 0:
        out = nothing_out(v.repeat_interleave(H // G, 2), q, k, *(sinks or ())[:3])
    else:
        (out,) = WINDOW[chosen](call)
    if not output_final_state:
        return out, None
    return out, final_window_state(k, v, window, key_mask, cu_seqlens, tail)


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
    check_floats(op, q=q, k=k, v=v)
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
    (B, T, H, features), D = q.shape, v.shape[3]
    sequences, N = check_sequences(op, B, T, q, key_mask, cu_seqlens, causal)
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
    around = (key_mask, sequences.cu_seqlens, *(initial_state or NO_STATE), causal)
    out, *after = LINEAR[chosen](Linear(q, k, v.to(dtype), *around))
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
            state: that sequence then starts at its first valid token.
        reverse: Whether to run from the end of every sequence to its beginning.

    Returns:
        h (B, T, E) in the dtype of x, and the last state (B or N, E) in fp32 (fp64 for fp64
        inputs; None unless ``output_final_state``).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "rg_lru"
    inputs: Any = {"x": x, "recurrence_gate": recurrence_gate, "input_gate": input_gate}
    sizes = check_inputs(op, ("BTE", "BTE", "BTE"), empty="BTE", **inputs)
    check_parameter(op, x, sizes, "theta", theta, "E")
    B, T, E = x.shape
    sequences, N = check_sequences(op, B, T, x, key_mask, cu_seqlens, causal=True)
    dtype = computation_dtype(x.dtype)
    if initial_state is not None:
        check_state(op, (initial_state,), ("state",), ((N, E),), x.device)
        initial_state = initial_state.to(dtype)
    gates = (recurrence_gate, input_gate, theta)
    call = RGLRU(x, *gates, initial_state, key_mask, sequences.cu_seqlens, reverse)
    every = call[:-1]  # tensors
    step = is_step(every, sequences)
    at = (x.device, lambda: unavailable_for(x))
    form = (not reverse, None, False)
    chosen = choose(op, backend, RG_LRU, *at, step=step, inputs=every, form=form)
    if chosen != "reference":
        check_tangents(op, *every)
    if x.numel() == 0:
        last = x.new_zeros(N, E, dtype=dtype) if initial_state is None else initial_state
        return nothing_out(x, *gates), last if output_final_state else None
    out, last = RG_LRU[chosen](call)
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
    sizes = check_inputs(op, ("BTE",), empty="BTE", x=x)
    check_parameter(op, x, sizes, "weight", weight, "EK")
    if bias is not None:
        check_parameter(op, x, sizes, "bias", bias, "E")
    (B, T, E), K = x.shape, weight.shape[1]
    if K < 1:
        raise ValueError(f"{op}: weight must have at least one tap, got {tuple(weight.shape)}")
    sequences, N = check_sequences(op, B, T, x, key_mask, cu_seqlens, causal=True)
    if initial_state is not None:
        check_state(op, (initial_state,), ("state",), ((N, K - 1, E),), x.device)
    call = Convolution(x, weight, bias, initial_state, key_mask, sequences.cu_seqlens)
    step = is_step(call, sequences)
    at = (x.device, lambda: unavailable_for(x))
    form = True, None, False
    chosen = choose(op, backend, CONVOLUTION, *at, step=step, inputs=call, form=form)
    if chosen not in PYTORCH and x.numel() == 0:
        chosen = "torch"  # there is nothing to launch kernels for
    if chosen not in PYTORCH:
        check_tangents(op, *call)
    out, tail = CONVOLUTION[chosen](call)
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
    local: Any = {} if q is None or k is None else {"q": q, "k": k}
    shapes = ("-", "BTHL", "BTHK", "BTGK") if local else ("-", "BTHL")
    sizes = check_inputs(op, shapes, latent_q=latent_q, latent_k=latent_k, **local)
    check_latent_queries(op, latent_q, latent_k, window=bool(local))
    near = None if q is None else check_local(op, window, scale, softcap, q.shape[-1])
    B, T = latent_k.shape[:2]
    sequences, _ = check_sequences(op, B, T, latent_q, key_mask, cu_seqlens, causal)
    log_decay = check_log_decay(op, log_decay, sizes, latent_q, sequences)
    return reference.attention_weights(latent_q, latent_k, q, k, near, sequences, log_decay)
