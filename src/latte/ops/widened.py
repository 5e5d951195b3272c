"""Linear maps in half precision on a CPU without instructions for them, computed in fp32.

PyTorch emulates such products: they take up to eight times as long as in fp32. Widening the weights
costs less from some 32 rows on. Weights stay in half precision in memory, sums are fp32 either way,
and outputs have the dtype of the inputs: only their last digits may differ.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from latte.ops.notices import constant_in_graphs

LEAST_ROWS = 32  # with fewer, widening the weights takes longer than the emulation
HALF = (torch.bfloat16, torch.float16)


@constant_in_graphs
def emulates(dtype: torch.dtype) -> bool:
    """Whether PyTorch emulates matrix products of this dtype on this CPU."""
    return _emulates(dtype)


@functools.cache
def _emulates(dtype: torch.dtype) -> bool:
    if dtype not in HALF or not torch.backends.mkldnn.is_available():
        return False
    asked: Any = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return not asked._is_mkldnn_bf16_supported()
    return not asked._is_mkldnn_fp16_supported()


class Widened(TorchFunctionMode):
    """Within it, ``F.linear`` of many rows in an emulated dtype is computed in fp32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not torch.is_autocast_enabled("cpu"):
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.numel() // max(input.size(-1), 1)
    if rows < LEAST_ROWS or weight.dtype != input.dtype or not _pays(input):
        return F.linear(input, weight, bias)
    wide = None if bias is None else bias.float()
    return F.linear(input.float(), weight.float(), wide).to(input.dtype)


def _pays(x: Tensor) -> bool:
    """Whether linear maps of tensors like ``x`` may be faster in fp32."""
    return x.is_cpu and emulates(x.dtype)


def widened(x: Tensor) -> AbstractContextManager[Any]:
    """A context for modules that read tensors like ``x``: :class:`Widened` where it pays."""
    return nullcontext() if torch.compiler.is_compiling() or not _pays(x) else Widened()


def widen_calls(model: nn.Module) -> None:
    """Run every call of the model within :class:`Widened`, by hooks, if its weights need it."""
    if not any(map(_pays, islice(model.parameters(), 1))):
        return
    mode = Widened()  # it has no state: calls may nest, and come from several threads

    def enter(*_: Any) -> None:
        mode.__enter__()

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
