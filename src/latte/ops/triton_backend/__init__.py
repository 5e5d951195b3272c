"""Latte on a GPU, in Triton: what the interface calls, with inputs that it has checked.

Each op is a file with its kernels and the custom op that launches them. The file is loaded at its
first use, and nothing imports Triton before that. ``launch`` defines which inputs the kernels
accept, and holds the tuned numbers. The steps of decoding are in ``step``. The code that chooses
them calls them directly.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, E channels, N sequences.
"""

from __future__ import annotations

from torch import Tensor

from latte.ops.arguments import Latte, Macchiato, Window
from latte.ops.state import LateSources, LatteState, SeenSinks, WindowState
from latte.ops.tensors import Local, Sequences, without_masked


def latte_attention(
    q_BTHL: Tensor,
    k_BTHL: Tensor,
    v_BTHD: Tensor,
    sequences: Sequences,
    earlier: tuple[Tensor, Tensor] | None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, LatteState]:
    """See :func:`latte.ops.latte_attention`."""
    from latte.ops.triton_backend.latte_bidirectional import bidirectional_op
    from latte.ops.triton_backend.latte_causal import causal_op, forgetting_op

    op = causal_op if sequences.causal else bidirectional_op
    if log_decay is not None:
        op = forgetting_op
    qkv = (q_BTHL, k_BTHL, without_masked(sequences.key_mask, v_BTHD))
    out, log_mass, mean, *_ = op(*Latte.of(qkv, sequences, earlier, log_decay))
    return out, LatteState(log_mass, mean)


def macchiato_attention(
    latent_q_BTHL: Tensor,
    latent_k_BTHL: Tensor,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    local: Local,
    sequences: Sequences,
    earlier: tuple[Tensor, Tensor] | None,
    tail: WindowState | None,
    log_decay: Tensor | None = None,
    sinks: SeenSinks | None = None,
    delay: bool = False,
    pending: WindowState | None = None,
    joint: bool = False,
) -> tuple[Tensor, LatteState]:
    """See :func:`latte.ops.macchiato_attention`; ``latent_q`` has L + 1 columns."""
    from latte.ops.triton_backend.macchiato import macchiato_op

    q_BTHK, sinks, local = _rising(q_BTHK, sinks, local)
    k_BTGK, v_BTGD = (without_masked(sequences.key_mask, x) for x in (k_BTGK, v_BTGD))
    late = None
    if delay:
        assert local.window is not None
        around = (sequences, _without_masked(pending), None if earlier is None else earlier[0])
        late = LateSources.of(latent_k_BTHL, v_BTGD, local.window, *around)
    latents, qkv = (latent_q_BTHL, latent_k_BTHL), (q_BTHK, k_BTGK, v_BTGD)
    states = (earlier, _without_masked(tail), log_decay, sinks, late)
    inputs = Macchiato.of(latents, qkv, local, sequences, *states, joint)
    out, log_mass, mean, *_ = macchiato_op(*inputs)
    return out, LatteState(log_mass, mean)


def sliding_window_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    local: Local,
    sequences: Sequences,
    tail: WindowState | None,
    sinks: SeenSinks | None = None,
) -> Tensor:
    """See :func:`latte.ops.sliding_window_attention`."""
    from latte.ops.triton_backend.window import window_op

    q_BTHK, sinks, local = _rising(q_BTHK, sinks, local)
    k_BTGK, v_BTGD = (without_masked(sequences.key_mask, x) for x in (k_BTGK, v_BTGD))
    qkv = (q_BTHK, k_BTGK, v_BTGD)
    return window_op(*Window.of(qkv, local, sequences, _without_masked(tail), sinks))


def _rising(
    q_BTHK: Tensor, sinks: SeenSinks | None, local: Local
) -> tuple[Tensor, SeenSinks | None, Local]:
    """With a scale above 0, as the kernels take the largest logit before they scale it."""
    if local.scale > 0:
        return q_BTHK, sinks, local
    sign = -1.0 if local.scale < 0 else 0.0
    sinks = None if sinks is None else sinks._replace(q=sinks.q * sign)
    return q_BTHK * sign, sinks, local._replace(scale=abs(local.scale) or 1.0)


def _without_masked(tail: WindowState | None) -> WindowState | None:
    if tail is None:
        return None
    keys, values = (without_masked(tail.mask, x) for x in (tail.keys, tail.values))
    return WindowState(keys, values, tail.mask)


def rg_lru(
    x_BTE: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    theta_E: Tensor,
    sequences: Sequences,
    initial_state: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.rg_lru`: h (B, T, E) and the last state (N, E), for T > 0."""
    from latte.ops.triton_backend.recurrence import beginnings, rg_lru_op

    begins = beginnings(x_BTE, sequences, initial_state, reverse)
    inputs = (x_BTE, recurrence_gate, input_gate, theta_E, initial_state)
    return rg_lru_op(*inputs, *sequences[:2], begins, reverse)[:2]


def causal_conv1d(
    x_BTE: Tensor,
    weight_EK: Tensor,
    bias_E: Tensor | None,
    sequences: Sequences,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.causal_conv1d`: y (B, T, E) and the new tail (N, K-1, E), for T > 0."""
    from latte.ops.triton_backend.convolution import convolution_op

    return convolution_op(x_BTE, weight_EK, bias_E, initial_state, *sequences[:2])
