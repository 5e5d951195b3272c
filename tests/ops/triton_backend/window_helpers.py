"""Sliding windows and Macchiato, called in one way for their kernels' tests.

Shape suffixes: B batch, T tokens, H query heads, G key heads, L latents, K key width, D value
width, N states, W window.
"""

from __future__ import annotations

from helpers import boundaries, key_mask, latte_state, macchiato_inputs, window_state
from kernel_helpers import DEVICE, judged
from torch import Tensor

from latte.ops import LatteState, WindowState, macchiato_attention, sliding_window_attention


def window(backend, q, k, v, *tail, tail_mask=None, window=16, **options):
    """``sliding_window_attention`` with its final state."""
    options = {"output_final_state": options.get("causal", True), **options}
    state = WindowState(*tail, tail_mask) if tail else None
    return sliding_window_attention(
        q, k, v, window=window, initial_state=state, backend=backend, **options
    )


def macchiato(backend, latent_q, latent_k, q, k, v, *earlier, tail_mask=None, **options):
    """``macchiato_attention`` with its final state."""
    options = {"output_final_state": options.get("causal", True), "window": 16, **options}
    state = None
    if earlier:
        state = (LatteState(*earlier[:2]), WindowState(*earlier[2:], tail_mask))
    return macchiato_attention(
        latent_q, latent_k, q, k, v, initial_state=state, backend=backend, **options
    )


def compare(
    op, T, *, masked=False, packed=False, carried=False,
    B=1, H=2, G=1, L=3, K=6, D=5, W=16, scale=1.0, **options,
) -> list[Tensor]:  # fmt: skip
    """The kernels against the reference on random inputs in fp32: values and all gradients."""
    cu = boundaries(T) if packed else None
    inputs = [*macchiato_inputs(B, T, H, G, L, K, D, scale)]
    if op is window:
        inputs = inputs[2:]
    if carried:
        N = B if cu is None else len(cu) - 1
        keys, values, flags = window_state(N, W - 1, G, K, D)
        if op is macchiato:
            inputs += [*latte_state(N, H, L, D, scale=scale)]
        inputs += [keys, values]
        options["tail_mask"] = flags.to(DEVICE)
    options["key_mask"] = key_mask(B, T).to(DEVICE) if masked else None
    options["cu_seqlens"] = None if cu is None else cu.to(DEVICE)
    return judged([x.float() for x in inputs], op, window=W, **options)
