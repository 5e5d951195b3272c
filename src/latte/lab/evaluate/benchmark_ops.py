"""The ops that `latte benchmark` measures, with the shapes of their inputs, and how one is called.

The benchmarks of a clone (the folder `benchmarks`) measure them too. Nothing of models is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte import ops

OPS = ("latte", "macchiato", "window", "linear", "rg-lru", "softmax")


class MeasuredOp(NamedTuple):
    """An op with its sizes."""

    op: Callable[..., Tensor]  # of the inputs, and of options of the public function
    shapes: tuple[tuple[int, ...], ...]  # of the inputs

    @staticmethod
    def of(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> MeasuredOp:
        """The output alone of a public function that returns it with a state."""

        def op(*inputs: Tensor, **more: Any) -> Tensor:
            return function(*inputs, **options, **more)[0]

        return MeasuredOp(op, shapes)


def op_table(
    B: int, T: int, *, heads: int, latents: int, head_dim: int, window: int, backend: str | None
) -> dict[str, MeasuredOp]:
    """The ops at B sequences of T tokens, by name."""
    latent, local = (B, T, heads, latents), (B, T, heads, head_dim)
    mixture = (B, T, heads, latents + 1)
    channels = (B, T, heads * head_dim)
    by = {"backend": backend}
    near = {"window": window, **by}
    of = MeasuredOp.of
    return {
        "latte": of(ops.latte_attention, latent, latent, local, **by),
        "macchiato": of(ops.macchiato_attention, mixture, latent, local, local, local, **near),
        "window": of(ops.sliding_window_attention, local, local, local, **near),
        "linear": of(ops.linear_attention, latent, latent, local, feature_map="elu", **by),
        "rg-lru": of(ops.rg_lru, channels, channels, channels, channels[2:], **by),
        "softmax": MeasuredOp(softmax, (local, local, local)),
    }


def softmax(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
    """Causal softmax attention of PyTorch, on its own layout: (B, H, T, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def op_call(
    mode: str, op: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor | None = None
) -> Callable[[], Any]:
    """A call of the op: its output, or the gradients of <dy, output> for all inputs.

    Args:
        mode: "forward" or "forward+backward".
        dy: The output's gradient; by default one is drawn.
    """
    if mode == "forward":
        return torch.no_grad()(lambda: op(*inputs))
    leaves = [x.detach().requires_grad_() for x in inputs]
    if dy is None:
        with torch.no_grad():
            dy = torch.randn_like(op(*inputs))
    return lambda: torch.autograd.grad(op(*leaves), leaves, dy)
