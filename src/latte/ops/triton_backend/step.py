"""One step of decoding as a custom op: new state in new buffers, nothing waits for the host.

For inference: these ops have no gradient. All shapes follow from the inputs' shapes, so that a step
can be captured in a CUDA graph.

Shape suffixes: B rows, H query heads, G key/value heads, L latents, K key width, D value width,
P = W - 1 slots of the window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients as contiguous_buffers
from latte.ops.precision import full_precision
from latte.ops.triton_backend.latte import readable
from latte.ops.triton_backend.launch import launch

MOST_ELEMENTS = 4096  # of a tile of keys, values or means
WARPS = 8


def step_tiles(L: int, K: int, D: int) -> dict[str, int]:
    """What is fixed when the kernel is compiled; neither B nor the window matters."""
    BK, BD = (max(16, 1 << (width - 1).bit_length()) for width in (K, D))
    return {
        "BQ": 1 << L.bit_length(),  # at least L + 1
        "BL": min(1 << (L - 1).bit_length(), MOST_ELEMENTS // BD),
        "BP": min(MOST_ELEMENTS // max(BK, BD), 128),
        "BK": BK,
        "BD": BD,
        "num_warps": WARPS,
    }


def _contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in tensors)


@torch.library.custom_op("latte::triton_latte_step", mutates_args=())
@full_precision
def latte_step_op(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, log_mass: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Latte: q, k (B, 1, H, L), v (B, 1, G, D), state -> y (B, 1, H, D), state."""
    from latte.ops.triton_backend.step_kernel import step

    (B, _, H, L), (G, D) = q.shape, v.shape[2:]
    q, k, v, log_mass, mean = _contiguous(q, k, v, log_mass, mean)
    outputs = (q.new_empty((B, 1, H, D)), torch.empty_like(log_mass), torch.empty_like(mean))
    launch(
        q.device,
        step[(B * H,)],
        *(q, k, None, None, v, readable(key_mask), log_mass, mean, None, None, None),
        *(*outputs, None, None, None),
        *(1.0, None, H, G, L, 1, D, 0),
        WINDOW=0,
        **step_tiles(L, 1, D),
    )
    return outputs


@latte_step_op.register_fake
def _(q, k, v, key_mask, log_mass, mean):
    B, _, H, _ = q.shape
    return q.new_empty((B, 1, H, v.shape[-1])), *contiguous_buffers(log_mass, mean)


@torch.library.custom_op("latte::triton_macchiato_step", mutates_args=())
@full_precision
def macchiato_step_op(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    log_mass: Tensor,
    mean: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Macchiato: latent_q (B, 1, H, L+1), ..., both states -> y (B, 1, H, D), both states."""
    from latte.ops.triton_backend.step_kernel import step

    (B, _, H, L), (G, K), D = latent_k.shape, k.shape[2:], v.shape[-1]
    inputs = _contiguous(latent_q, latent_k, q, k, v)
    state = _contiguous(log_mass, mean, keys, values)
    out = v.new_empty((B, 1, H, D))
    log_mass1, mean1, keys1, values1 = (torch.empty_like(x) for x in state)
    slots = mask.contiguous().view(torch.uint8)
    slots_after = torch.empty_like(slots)
    launch(
        q.device,
        step[(B * H,)],
        *(*inputs, readable(key_mask), *state, slots),
        *(out, log_mass1, mean1, keys1, values1, slots_after),
        *(scale, softcap, H, G, L, K, D, mask.shape[1]),
        WINDOW=1,
        **step_tiles(L, K, D),
    )
    return out, log_mass1, mean1, keys1, values1, slots_after.view(torch.bool)


@macchiato_step_op.register_fake
def _(latent_q, latent_k, q, k, v, key_mask, log_mass, mean, keys, values, mask, scale, softcap):
    B, _, H, _ = latent_k.shape
    state = contiguous_buffers(log_mass, mean, keys, values, mask)
    return v.new_empty((B, 1, H, v.shape[-1])), *state
