"""The probabilities of Latte and Latte-Macchiato themselves, for looking at.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents per head, K key
width. The keywords are those of :mod:`latte.ops.api`.
"""

from __future__ import annotations

from torch import Tensor

from latte.ops import reference
from latte.ops.precision import full_precision
from latte.ops.validation import (
    check_floats,
    check_groups,
    check_sequences,
    check_shape,
    check_softcap,
    check_widths,
    check_window,
    computation_dtype,
)


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
) -> Tensor:
    """The probabilities p(s|t) themselves, (B, H, T, T), for looking at: O(T^2) memory.

    Without local ``q`` and ``k``: Latte (eq. 6-8), with latent_q and latent_k (B, T, H, L). With
    them: Latte-Macchiato (eq. 15), latent_q (B, T, H, L+1), q (B, T, H, K), k (B, T, G, K). Every
    row sums to 1, less p(0|t) where the window holds no source at all; a row without any source
    is all zeros.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    op = "attention_weights"
    if (q is None) != (k is None):
        raise ValueError(f"{op}: local q and k go together, got one of them")
    tensors = {"latent_q": latent_q, "latent_k": latent_k}
    if q is not None and k is not None:
        tensors |= {"q": q, "k": k}
    check_floats(op, tensors)
    sizes: dict[str, int] = {}
    check_shape(op, "latent_k", latent_k, "BTHL", sizes)
    wanted = {**sizes, "L": sizes["L"] + (q is not None)}
    check_shape(op, "latent_q", latent_q, "BTHL", wanted)
    if q is not None and k is not None:
        check_window(op, window)
        check_softcap(op, softcap)
        check_shape(op, "q", q, "BTHK", sizes)
        check_shape(op, "k", k, "BTGK", sizes)
        check_groups(op, sizes["H"], sizes["G"], "k")
    check_widths(op, sizes)
    check_sequences(op, sizes["B"], sizes["T"], latent_q.device, key_mask, cu_seqlens)
    dtype = computation_dtype(latent_q.dtype)
    if sizes["T"] == 0:
        return latent_q.new_zeros(sizes["B"], sizes["H"], 0, 0, dtype=dtype)
    return reference.attention_weights(
        latent_q.to(dtype),
        latent_k.to(dtype),
        None if q is None else q.to(dtype),
        None if k is None else k.to(dtype),
        window=window,
        scale=scale,
        softcap=softcap,
        causal=causal,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
    )
