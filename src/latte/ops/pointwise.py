"""The RMSNorm, SwiGLU's product and the rotation of queries and keys, with their gradients.

``backend`` is ``"reference"``, ``"torch"`` or ``"cpu"``. None chooses as for other ops
(:mod:`latte.ops.backend`): the native kernels on a CPU if they can serve the inputs, else
``"torch"``. The kernels take fp32, fp64 and bf16 (the RMSNorm: fp32 and fp64). They are not for
``torch.compile``, which fuses these operations itself, for transforms of ``torch.func``, and for
forward mode. The RMSNorm of few rows without a gradient is :func:`latte.ops.decoding.rms_norm`.

Shape suffixes: B batch, T tokens, H heads, K width of a head, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops import cpp_backend, decoding, reference
from latte.ops.backend import named_backend
from latte.ops.cpp_backend import pointwise as cpp_pointwise
from latte.ops.tensors import on_cpu
from latte.ops.torch_backend import pointwise as torch_pointwise

RMS_NORM = {
    "reference": reference.rms_norm,
    "torch": torch_pointwise.rms_norm,
    "cpu": cpp_pointwise.rms_norm,
}
SILU_PRODUCT = {
    "reference": reference.silu_product,
    "torch": torch_pointwise.silu_product,
    "cpu": cpp_pointwise.silu_product,
}
ROTATE = {
    "reference": reference.rotate,
    "torch": torch_pointwise.rotate,
    "cpu": cpp_pointwise.rotate,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """``w x / sqrt(mean(x^2) + eps)`` over the last dimension.

    Args:
        x: Input, (..., E).
        weight: Weight, (E,).

    Raises:
        ValueError: The backend is not available for these inputs.
    """
    if backend is None:
        few = torch.compiler.is_compiling() or x.numel() <= decoding.MOST_ROWS * x.size(-1)
        if few and decoding.serves(x) and decoding.fits(x, weight):
            return decoding.rms_norm(x, weight, eps)
        # A step of many rows is quicker by PyTorch's operations.
        worth = torch.is_grad_enabled() or not (x.ndim <= 2 or x.shape[1] == 1)
        worth = worth and x.dtype != torch.bfloat16
        native = worth and decoding.takes(x, compiled=False) and decoding.fits(x, weight)
        if native and not torch.is_grad_enabled():
            return torch.ops.latte.cpu_norm_rows(x.contiguous(), weight, eps)[0]
        backend = "cpu" if native else _without_kernels()
    else:
        _check("rms_norm", backend, x)
    return RMS_NORM[backend](x, weight, eps)


def silu_product(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """``silu(gate) up``, elementwise, for ``gate`` and ``up`` of one shape.

    Raises:
        ValueError: The backend is not available for these inputs.
    """
    if backend is None:
        native = gate.dtype == up.dtype and decoding.takes(gate, compiled=False)
        if native and not torch.is_grad_enabled():
            return torch.ops.latte.cpu_glu(gate.contiguous(), up.contiguous())
        backend = "cpu" if native else _without_kernels()
    else:
        _check("silu_product", backend, gate)
    return SILU_PRODUCT[backend](gate, up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, backend: str | None = None) -> Tensor:
    """The pairs (a, b) at (i, i + K/2) of each head become ``(a cos - b sin, b cos + a sin)``.

    Args:
        x: Queries or keys, (B, T, H, K), K even.
        cos, sin: Cosines and sines of the angles, (B or 1, T, 1, K/2) each, fp32 (fp64 for fp64).
            They have no gradients.

    Raises:
        ValueError: The backend is not available for these inputs.
    """
    if backend is None:
        table = cos.shape[1:] == (x.shape[1], 1, x.shape[-1] // 2)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        native = table and cos.dtype == wide and decoding.takes(x, compiled=False)
        if native and not torch.is_grad_enabled():
            tables = cos.contiguous(), sin.contiguous()
            return torch.ops.latte.cpu_rotate(x.contiguous(), *tables, 1.0)
        backend = "cpu" if native else _without_kernels()
    else:
        _check("rotate", backend, x)
    return ROTATE[backend](x, cos, sin)


def _without_kernels() -> str:
    return "reference" if named_backend() == "reference" else "torch"


def _check(op: str, backend: str, x: Tensor) -> None:
    """Whether a named backend is there for x. The kernels check dtypes and shapes themselves."""
    if backend not in RMS_NORM:
        raise ValueError(f"{op}: backend must be None or one of {tuple(RMS_NORM)}, got {backend!r}")
    if backend == "cpu":
        reason = cpp_backend.unavailable(x)
        if reason is None and not on_cpu(x):
            reason = "in torch.compile, transforms of torch.func and forward mode"
        if reason is not None:
            raise ValueError(f"{op}: backend 'cpu' is not available {reason}")
