"""The diagonal recurrence h_t = a_t h_{t-1} + b_t, in about 2 sqrt(T) steps instead of T.

Time is cut into sqrt(T) chunks that are advanced together: once to learn what each does to its
incoming state, then, with the true incoming states, to write the outputs.

Shape suffixes: B batch, T tokens, N chunks, C chunk length, E channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients
from latte.ops.precision import full_precision
from latte.ops.torch_backend.pieces import spans

# Elements of one stretch of time, 16 MB in fp32.
PIECE = 1 << 22


def _advance(a_BTE: Tensor, b_BTE: Tensor, h_BE: Tensor, out_BTE: Tensor, back: bool) -> Tensor:
    """Scan one stretch into ``out`` and return its last state; ``back``: from its end."""
    B, T, E = a_BTE.shape
    C = 1 << max(0, round(math.log2(max(T, 1)) / 2))
    N = T // C
    whole, rest = slice(0, N * C), range(N * C, T)
    if back:
        whole, rest = slice(T - N * C, T), range(T - N * C - 1, -1, -1)
    if N:
        a, b, out = (x[:, whole].unflatten(1, (N, C)) for x in (a_BTE, b_BTE, out_BTE))
        order = range(C - 1, -1, -1) if back else range(C)
        end_BNE, decay_BNE = torch.zeros_like(b[:, :, 0]), torch.ones_like(a[:, :, 0])
        for c in order:
            torch.addcmul(b[:, :, c], a[:, :, c], end_BNE, out=end_BNE)
            decay_BNE *= a[:, :, c]
        state_BNE = torch.empty_like(end_BNE)
        for n in range(N - 1, -1, -1) if back else range(N):
            state_BNE[:, n] = h_BE
            h_BE = torch.addcmul(end_BNE[:, n], decay_BNE[:, n], h_BE)
        for c in order:
            torch.addcmul(b[:, :, c], a[:, :, c], state_BNE, out=state_BNE)
            out[:, :, c] = state_BNE
    for t in rest:
        h_BE = torch.addcmul(b_BTE[:, t], a_BTE[:, t], h_BE)
        out_BTE[:, t] = h_BE
    return h_BE


def scan(a_BTE: Tensor, b_BTE: Tensor, h0_BE: Tensor, back: bool = False) -> Tensor:
    """All h_t, forward in time or backward, in stretches that fit the allocator."""
    out_BTE = torch.empty_like(b_BTE, memory_format=torch.contiguous_format)
    B, T, E = a_BTE.shape
    stretches = spans(T, max(256, PIECE // max(1, B * E)))
    h_BE = h0_BE
    for span in reversed(stretches) if back else stretches:
        h_BE = _advance(a_BTE[:, span], b_BTE[:, span], h_BE, out_BTE[:, span], back)
    return out_BTE


@torch.library.custom_op("latte::linear_recurrence", mutates_args=())
@full_precision
def linear_recurrence(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t for a, b (B, T, E) and h0 (B, E), all of one dtype."""
    return scan(a, b, h0)


@linear_recurrence.register_fake
def _(a, b, h0):
    return torch.empty_like(b, memory_format=torch.contiguous_format)


@torch.library.custom_op("latte::linear_recurrence_backward", mutates_args=())
@full_precision
def linear_recurrence_backward(
    dh: Tensor, a: Tensor, h: Tensor, h0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """g_t = dh_t + a_{t+1} g_{t+1}; da_t = g_t h_{t-1}, db_t = g_t, dh0 = a_1 g_1."""
    following = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
    g = scan(following, dh, torch.zeros_like(h0), back=True)
    da = torch.empty_like(a, memory_format=torch.contiguous_format)
    torch.mul(g[:, 1:], h[:, :-1], out=da[:, 1:])
    torch.mul(g[:, 0], h0, out=da[:, 0])
    return da, g, (a[:, 0] * g[:, 0]).contiguous()


@linear_recurrence_backward.register_fake
def _(dh, a, h, h0):
    return empty_gradients(a, h, h0)


def _save(ctx, inputs, output):
    a, _, h0 = inputs
    ctx.save_for_backward(a, output, h0)


def _gradients(ctx, dh):
    return linear_recurrence_backward(dh, *ctx.saved_tensors)


linear_recurrence.register_autograd(_gradients, setup_context=_save)
