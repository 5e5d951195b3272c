"""The native ops without gradients: steps of decoding, dense maps of single tokens, pointwise ops.

A step overwrites the states that it gets (:mod:`latte.ops.step`). Dense maps and the RG-LRU's step
are for :mod:`latte.ops.decoding`, pointwise ops for :mod:`.pointwise`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from latte.ops.custom_ops import Written, custom_op, empty_gradients


class LatteStep(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_mass: Written
    mean: Written
    log_decay: Tensor | None
    real: Tensor | None


class MacchiatoStep(NamedTuple):
    latent_q: Tensor
    latent_k: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    log_mass: Written
    mean: Written
    log_decay: Tensor | None
    keys: Written
    values: Written
    mask: Written | None
    slot: Tensor
    cos: Tensor | None
    sin: Tensor | None
    real: Tensor | None
    scale: float
    softcap: float
    pending: Written | None
    sink_keys: Written | None
    sink_values: Written | None
    position: Tensor | None
    sink_cos: Tensor | None
    sink_sin: Tensor | None
    joint: bool


class WindowStep(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    keys: Written
    values: Written
    mask: Written | None
    slot: Tensor
    cos: Tensor | None
    sin: Tensor | None
    real: Tensor | None
    scale: float
    softcap: float
    length: int
    sink_keys: Written | None
    sink_values: Written | None
    position: Tensor | None
    sink_cos: Tensor | None
    sink_sin: Tensor | None


class RGLRUStep(NamedTuple):
    x: Tensor
    recurrence_weight: Tensor
    recurrence_bias: Tensor
    input_weight: Tensor
    input_bias: Tensor
    theta: Tensor
    norm: Tensor
    eps: float
    state: Written
    real: Tensor | None


class ConvolutionStep(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    tail: Written
    real: Tensor | None


class OneMap(NamedTuple):
    x: Tensor
    a: Tensor


class TwoMaps(NamedTuple):
    x: Tensor
    a: Tensor
    b: Tensor


class ThreeMaps(NamedTuple):
    x: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


class AddedMap(NamedTuple):
    x: Tensor
    weight: Tensor
    residual: Tensor


class GatedMaps(NamedTuple):
    x: Tensor
    gate: Tensor
    up: Tensor


class RMSNorm(NamedTuple):
    x: Tensor
    weight: Tensor
    eps: float
    offset: float


class Glu(NamedTuple):
    gate: Tensor
    up: Tensor


class GluBackward(NamedTuple):
    dy: Tensor
    gate: Tensor
    up: Tensor


class NormRows(NamedTuple):
    x: Tensor
    weight: Tensor
    eps: float


class NormRowsBackward(NamedTuple):
    dy: Tensor
    x: Tensor
    weight: Tensor
    scale: Tensor


class Rotate(NamedTuple):
    x: Tensor
    cos: Tensor
    sin: Tensor
    sign: float


def register() -> None:
    """Register all of them. The library must be loaded."""
    for name, step in (
        ("cpu_latte_step", LatteStep),
        ("cpu_macchiato_step", MacchiatoStep),
        ("cpu_window_step", WindowStep),
    ):
        custom_op(name, step, 1, lambda x: x.v.new_empty(*x.q.shape[:2], x.v.shape[2]))
    for name, like_x in (
        ("cpu_rg_lru_step", RGLRUStep),
        ("cpu_convolution_step", ConvolutionStep),
        ("cpu_rms_norm", RMSNorm),
        ("cpu_rotate", Rotate),
    ):
        custom_op(name, like_x, 1, lambda x: x.x.new_empty(x.x.shape))
    custom_op("cpu_linear", OneMap, 1, lambda x: _mapped(*x))
    custom_op("cpu_linear2", TwoMaps, 2, lambda x: (_mapped(x.x, x.a), _mapped(x.x, x.b)))
    custom_op("cpu_linear3", ThreeMaps, 3, lambda x: tuple(_mapped(x.x, w) for w in x[1:]))
    custom_op("cpu_linear_add", AddedMap, 1, lambda x: _mapped(x.x, x.weight))
    for name in ("cpu_swiglu", "cpu_geglu"):
        custom_op(name, GatedMaps, 1, lambda x: _mapped(x.x, x.gate))
    custom_op("cpu_glu", Glu, 1, lambda x: x.gate.new_empty(x.gate.shape))
    custom_op("cpu_glu_backward", GluBackward, 2, lambda x: empty_gradients(x.gate, x.up))
    custom_op("cpu_norm_rows", NormRows, 2, _norm_fake)
    custom_op(
        *("cpu_norm_rows_backward", NormRowsBackward, 2),
        lambda x: empty_gradients(x.x, x.weight),
    )


def _mapped(x: Tensor, weight: Tensor) -> Tensor:
    """Empty outputs of a linear map."""
    return x.new_empty(*x.shape[:-1], len(weight))


def _norm_fake(x: NormRows) -> tuple[Tensor, ...]:
    return *empty_gradients(x.x), x.x.new_empty(*x.x.shape[:-1], 1)
