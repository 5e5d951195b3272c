"""The RMSNorm, SwiGLU's product and the rotation of queries and keys, with their gradients.

``backend`` is ``"reference"``, ``"torch"``, ``"cpu"`` or ``"triton"``. None chooses as for other
ops (:mod:`latte.ops.backend`): the native kernels on a CPU, and Triton's where they were checked,
if they can serve the inputs, else ``"torch"``. The native kernels take fp32, fp64 and bf16 (the
RMSNorm: fp32 and fp64), Triton's fp32, bf16 and fp16. Kernels are not for ``torch.compile``, which
fuses these operations itself, for transforms of ``torch.func``, and for forward mode. The RMSNorm
of few rows without a gradient is :func:`latte.ops.decoding.rms_norm`.

Shape suffixes: B batch, T tokens, H heads, K width of a head, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops import backend as backends
from latte.ops import cpp_backend, decoding, reference, triton_backend
from latte.ops.backend import named_backend
from latte.ops.cpp_backend import pointwise as cpp_pointwise
from latte.ops.tensors import autocasts, on_cpu, product_dtype
from latte.ops.torch_backend import pointwise as torch_pointwise
from latte.ops.triton_backend import checked, launch

RMS_NORM = {
    "reference": reference.rms_norm,
    "torch": torch_pointwise.rms_norm,
    "cpu": cpp_pointwise.rms_norm,
    "triton": lambda x, weight, eps: triton_backend.add_rms_norm(x, None, weight, eps)[1],
}
SILU_PRODUCT = {
    "reference": reference.silu_product,
    "torch": torch_pointwise.silu_product,
    "cpu": cpp_pointwise.silu_product,
    "triton": triton_backend.silu_product,
}
ROTATE = {
    "reference": reference.rotate,
    "torch": torch_pointwise.rotate,
    "cpu": cpp_pointwise.rotate,
    "triton": lambda x, cos, sin: triton_backend.rotate(cos, sin, x)[0],
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
        same = gate.dtype == up.dtype
        native = same and decoding.takes(gate, compiled=False)
        if native and not torch.is_grad_enabled():
            return torch.ops.latte.cpu_glu(gate.contiguous(), up.contiguous())
        triton = not native and same and _on_triton("silu_product", gate, up)
        backend = "cpu" if native else "triton" if triton else _without_kernels()
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
        table = _has_table(x, cos)
        native = table and decoding.takes(x, compiled=False)
        if native and not torch.is_grad_enabled():
            tables = cos.contiguous(), sin.contiguous()
            return torch.ops.latte.cpu_rotate(x.contiguous(), *tables, 1.0)
        triton = not native and _turned_by_triton(cos, x)
        backend = "cpu" if native else "triton" if triton else _without_kernels()
    else:
        _check("rotate", backend, x)
    return ROTATE[backend](x, cos, sin)


def fuses(x: Tensor) -> bool:
    """Whether Triton's kernels, of which each computes several operations, may serve x."""
    return not x.is_cpu or "triton" in (backends.here.backend, backends.default)


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """:func:`rotate` of queries (B, T, H, K) and keys (B, T, G, K): one launch of Triton's."""
    if not torch.is_grad_enabled() and k.dtype == q.dtype and _has_table(q, cos):
        if decoding.takes(q, compiled=False) and type(k) is type(q) and k.is_cpu:
            tables, turn = (cos.contiguous(), sin.contiguous(), 1.0), torch.ops.latte.cpu_rotate
            return turn(q.contiguous(), *tables), turn(k.contiguous(), *tables)
    if _turned_by_triton(cos, q, k):
        return triton_backend.rotate(cos, sin, q, k)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def add_rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, *, lowers: bool = False
) -> tuple[Tensor, Tensor]:
    """``x + added``, or x for None, and its :func:`rms_norm`: one launch of Triton's.

    Their gradients are added in one launch too. ``lowers``: only products read the norm, so under
    autocast that launch rounds it as they would.
    """
    others = (weight,) if added is None else (weight, added)
    fits = x.shape[-1] <= launch.WIDEST_NORM and (added is None or added.shape == x.shape)
    if fits and _on_triton("add_rms_norm", x, *others):
        lowers = lowers and autocasts(x.device.type)
        dtype = product_dtype(x) if lowers else None
        return triton_backend.add_rms_norm(x, added, weight, eps, dtype)
    total = x if added is None else x + added
    return total, rms_norm(total, weight, eps)


def _has_table(x: Tensor, cos: Tensor) -> bool:
    """Whether a table of angles is one that the kernels read, for x."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return cos.dtype == wide and cos.shape[1:] == (x.shape[1], 1, x.shape[-1] // 2)


def _turned_by_triton(cos: Tensor, *xs: Tensor) -> bool:
    """Whether Triton's kernel is to rotate these, in one launch."""
    if not _on_triton("rotate", *xs):
        return False
    width = xs[0].shape[-1]
    fits = width <= launch.WIDEST_VALUE and all(x.shape[-1] == width for x in xs)
    return fits and _has_table(xs[0], cos)


def _on_triton(op: str, x: Tensor, *others: Tensor) -> bool:
    """Whether Triton's kernels are to serve a call that names no backend.

    They are the default where they were checked (:mod:`latte.ops.triton_backend.checked`).
    """
    named = named_backend()
    if named is None:
        gpu, form = x.device.type == checked.GPU, (True, None, False)
        if not gpu or checked.refused_call(op, form, False, x.device, (x,)) is not None:
            return False
    elif named != "triton" or launch.unavailable_for(x) is not None:
        return False
    plain = all(type(y) in decoding.PLAIN and y.device == x.device for y in (x, *others))
    plain = plain and all(y.dtype in launch.DTYPES for y in others)
    return plain and on_cpu(x, or_gpu=True)


def _without_kernels() -> str:
    return "reference" if named_backend() == "reference" else "torch"


def _check(op: str, backend: str, x: Tensor) -> None:
    """Whether a named backend is there for x. The kernels check dtypes and shapes themselves."""
    if backend not in RMS_NORM:
        raise ValueError(f"{op}: backend must be None or one of {tuple(RMS_NORM)}, got {backend!r}")
    if backend in ("cpu", "triton"):
        native = backend == "cpu"
        reason = cpp_backend.unavailable(x) if native else launch.unavailable_for(x)
        if reason is None and not on_cpu(x, or_gpu=not native):
            reason = "in torch.compile, transforms of torch.func and forward mode"
        if reason is not None:
            raise ValueError(f"{op}: backend {backend!r} is not available {reason}")
