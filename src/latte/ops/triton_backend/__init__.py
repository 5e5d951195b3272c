"""Latte on a GPU, in Triton: what the interface calls, with inputs that it has checked.

Each op is a file with its kernels and the custom op that launches them, loaded at its first use:
before that nothing imports Triton. ``launch`` says what they serve, and holds what is tuned. The
steps of decoding, in ``step``, are called from where they are chosen.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, E channels, N sequences.
"""

from __future__ import annotations

from torch import Tensor

from latte.ops.state import LatteState, WindowState
from latte.ops.tensors import without_masked


def latte_attention(
    q_BTHL: Tensor,
    k_BTHL: Tensor,
    v_BTHD: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: LatteState | None,
) -> tuple[Tensor, LatteState]:
    """See :func:`latte.ops.latte_attention`."""
    from latte.ops.triton_backend.latte_bidirectional import bidirectional_op
    from latte.ops.triton_backend.latte_causal import causal_op

    earlier = (None, None) if initial_state is None else tuple(initial_state)
    op = causal_op if causal else bidirectional_op
    v_BTHD = without_masked(key_mask, v_BTHD)
    out, log_mass, mean = op(q_BTHL, k_BTHL, v_BTHD, key_mask, cu_seqlens, *earlier)[:3]
    return out, LatteState(log_mass, mean)


def macchiato_attention(
    latent_q_BTHL: Tensor,
    latent_k_BTHL: Tensor,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    *,
    window: int,
    scale: float,
    softcap: float | None,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    latte_state: LatteState | None,
    window_state: WindowState | None,
) -> tuple[Tensor, LatteState]:
    """See :func:`latte.ops.macchiato_attention`; ``latent_q`` has L + 1 columns."""
    from latte.ops.triton_backend.macchiato import macchiato_op

    earlier = (None, None) if latte_state is None else tuple(latte_state)
    k_BTGK, v_BTGD = without_masked(key_mask, k_BTGK), without_masked(key_mask, v_BTGD)
    out, log_mass, mean = macchiato_op(
        *(latent_q_BTHL, latent_k_BTHL, q_BTHK, k_BTGK, v_BTGD, key_mask, cu_seqlens),
        *(*earlier, *_tail(window_state), window, scale, softcap or 0.0, causal),
    )[:3]
    return out, LatteState(log_mass, mean)


def sliding_window_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    *,
    window: int,
    scale: float,
    softcap: float | None,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: WindowState | None,
) -> Tensor:
    """See :func:`latte.ops.sliding_window_attention`."""
    from latte.ops.triton_backend.window import window_op

    k_BTGK, v_BTGD = without_masked(key_mask, k_BTGK), without_masked(key_mask, v_BTGD)
    return window_op(
        *(q_BTHK, k_BTGK, v_BTGD, key_mask, cu_seqlens, *_tail(initial_state)),
        *(window, scale, softcap or 0.0, causal),
    )


def _tail(state: WindowState | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The earlier keys, values and flags, or three times None."""
    if state is None:
        return None, None, None
    keys, values = (without_masked(state.mask, x) for x in (state.keys, state.values))
    return keys, values, state.mask


def rg_lru(
    x_BTE: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    theta_E: Tensor,
    *,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.rg_lru`: h (B, T, E) and the last state (N, E), for T > 0."""
    from latte.ops.triton_backend.recurrence import beginnings, rg_lru_op

    begins = beginnings(x_BTE, key_mask, cu_seqlens, initial_state, reverse)
    return rg_lru_op(
        *(x_BTE, recurrence_gate, input_gate, theta_E, initial_state),
        *(key_mask, cu_seqlens, begins, reverse),
    )[:2]


def causal_conv1d(
    x_BTE: Tensor,
    weight_EK: Tensor,
    bias_E: Tensor | None,
    *,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.causal_conv1d`: y (B, T, E) and the new tail (N, K-1, E), for T > 0."""
    from latte.ops.triton_backend.convolution import convolution_op

    return convolution_op(x_BTE, weight_EK, bias_E, initial_state, key_mask, cu_seqlens)
