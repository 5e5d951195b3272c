"""Double backward: the ops by PyTorch operations that can be differentiated twice.

The backward passes of the kernels cannot be differentiated. For second derivatives, autograd
differentiates these functions instead. They compute the equations of the reference, with memory
O(T^2).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import reference
from latte.ops.arguments import Latte, Macchiato, Window
from latte.ops.state import WindowState


def latte(x: Latte, causal: bool = True) -> tuple[Tensor, ...]:
    """Output and final state."""
    state = None if x.log_mass is None or x.mean is None else (x.log_mass, x.mean)
    sequences = x.sequences._replace(causal=causal)
    out, last = reference.latte_attention(*x.qkv, sequences, state, x.log_decay)
    return out, *last


def window(x: Window | Macchiato) -> tuple[Tensor, ...]:
    """Output."""
    tail = window_of(*x.tail)
    return (reference.sliding_window_attention(*x.qkv, x.local, x.sequences, tail, x.sinks),)


def macchiato(x: Macchiato) -> tuple[Tensor, ...]:
    """Output and final state. The logits of the mixture are complete: ``joint`` is not read."""
    share = F.softmax(x.latent_q, -1)[..., :1]
    v, key_mask = (x.v, x.key_mask) if x.late_v is None else (x.late_v, x.late_mask)
    if x.begun is not None:  # without latent mass all of the distribution is the window's
        share = torch.where(x.begun[..., None, None], share, 1.0)
    v = v.repeat_interleave(x.q.shape[2] // v.shape[2], 2)
    around = (key_mask, x.cu_seqlens, *x.earlier, x.log_decay)
    far, *last = latte(Latte(x.latent_q[..., 1:], x.latent_k, v, *around), x.causal)
    (near,) = window(x)
    return (share * near + (1 - share) * far).to(x.v.dtype), *last


def window_of(*tensors: Tensor | None) -> WindowState | None:
    """The state of these tensors; None for no state."""
    return None if tensors[0] is None else WindowState(*tensors)  # type: ignore[arg-type]
