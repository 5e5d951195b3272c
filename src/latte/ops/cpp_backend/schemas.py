"""Schemas of the native ops without gradients: decoding steps, dense maps of tokens, pointwise ops.

A step overwrites its states, the arguments with an exclamation mark (:mod:`latte.ops.step`). Dense
maps and the RG-LRU's step are for :mod:`latte.ops.decoding`, pointwise ops for :mod:`.pointwise`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from latte.ops.custom_ops import NATIVE, empty_gradients

LATENTS = "Tensor(a!) log_mass, Tensor(b!) mean, Tensor? log_decay"
KEPT = """Tensor(a!)? log_mass, Tensor(b!)? mean, Tensor? log_decay, Tensor(c!) keys,
    Tensor(d!) values, Tensor(e!) scores, Tensor(f!) positions, Tensor(g!)? latent_keys,
    Tensor(h!)? decays"""
RING = """Tensor(c!) keys, Tensor(d!) values, Tensor(e!)? mask, Tensor slot, Tensor? cos,
    Tensor? sin, Tensor? real, float scale, float softcap"""
SINKS = """Tensor(g!)? sink_keys, Tensor(h!)? sink_values, Tensor? position, Tensor? sink_cos,
    Tensor? sink_sin"""


def register() -> None:
    """Register all of them. The library must be loaded."""
    for schema, fake in _ops().items():
        NATIVE.define("cpu_" + " ".join(schema.split()))  # on one line
        torch.library.register_fake(f"latte::cpu_{schema.partition('(')[0]}", fake)


def _ops() -> dict[str, Callable[..., Any]]:
    """Functions that make the empty outputs of each op, by its schema."""
    return {
        f"latte_step(Tensor q, Tensor k, Tensor v, {LATENTS}, Tensor? real) -> Tensor": (
            lambda q, k, v, *_: _heads(q, v)
        ),
        f"""macchiato_step(Tensor latent_q, Tensor latent_k, Tensor q, Tensor k, Tensor v,
            {LATENTS}, {RING}, Tensor(f!)? pending, {SINKS}, bool joint) -> Tensor""": (
            lambda latent_q, latent_k, q, k, v, *_: _heads(q, v)
        ),
        f"""window_step(Tensor q, Tensor k, Tensor v, {RING}, int length, {SINKS}) -> Tensor""": (
            lambda q, k, v, *_: _heads(q, v)
        ),
        f"""kept_step(Tensor? latent_q, Tensor? latent_k, Tensor q, Tensor k, Tensor v,
            Tensor score, {KEPT}, Tensor seen, Tensor? cos, Tensor? sin, Tensor? real, float scale,
            float softcap, int count, int window, int block, float rise,
            Tensor(i!)? sink_keys, Tensor(j!)? sink_values, Tensor? sink_cos, Tensor? sink_sin)
            -> Tensor""": (lambda latent_q, latent_k, q, k, v, *_: _heads(q, v)),
        """rg_lru_step(Tensor x, Tensor recurrence_weight, Tensor recurrence_bias,
            Tensor input_weight, Tensor input_bias, Tensor theta, Tensor norm, float eps,
            Tensor(a!) state, Tensor? real) -> Tensor""": _like_first,
        """convolution_step(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) tail, Tensor? real)
            -> Tensor""": _like_first,
        "linear(Tensor x, Tensor a) -> Tensor": _mapped,
        "linear2(Tensor x, Tensor a, Tensor b) -> (Tensor, Tensor)": _all_mapped,
        "linear3(Tensor x, Tensor a, Tensor b, Tensor c) -> (Tensor, Tensor, Tensor)": _all_mapped,
        "linear_add(Tensor x, Tensor weight, Tensor residual) -> Tensor": _mapped,
        "swiglu(Tensor x, Tensor gate, Tensor up) -> Tensor": _mapped,
        "geglu(Tensor x, Tensor gate, Tensor up) -> Tensor": _mapped,
        "quantised(Tensor x, Tensor weight, Tensor scales) -> Tensor": _by_scales,
        """quantised2(Tensor x, Tensor weight, Tensor scales, Tensor weight2, Tensor scales2)
            -> (Tensor, Tensor)""": _all_by_scales,
        """quantised3(Tensor x, Tensor weight, Tensor scales, Tensor weight2, Tensor scales2,
            Tensor weight3, Tensor scales3) -> (Tensor, Tensor, Tensor)""": _all_by_scales,
        """quantised_add(Tensor x, Tensor weight, Tensor scales, Tensor residual)
            -> Tensor""": _by_scales,
        """quantised_mlp(Tensor x, Tensor norm, float eps, float offset, Tensor gate,
            Tensor gate_scales, Tensor up, Tensor up_scales, Tensor down, Tensor down_scales,
            bool tanh, bool adds) -> Tensor""": lambda x, *given: _by_scales(x, *given[7:9]),
        "quantised_rows(Tensor ids, Tensor weight, Tensor scales) -> Tensor": (
            lambda ids, weight, scales: scales.new_empty(*ids.shape, weight.shape[1])
        ),
        """latents(Tensor x, Tensor latent_q, Tensor latent_k, Tensor? latent_bias, int heads)
            -> (Tensor, Tensor)""": lambda x, q, k, _, heads: _latents(x, q, k, heads),
        """layer_begin(Tensor x, Tensor norm, float eps, float offset, Tensor q, Tensor? q_scales,
            Tensor k, Tensor? k_scales, Tensor v, Tensor? v_scales, int heads, int groups,
            Tensor? latent_q, Tensor? latent_k, Tensor? latent_bias, Tensor? up, Tensor? up_bias,
            Tensor? down, Tensor? down_bias, float score_eps)
            -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""": _begun,
        """layer_end(Tensor x, Tensor residual, Tensor output, Tensor? output_scales, Tensor norm,
            float eps, float offset, Tensor gate, Tensor? gate_scales, Tensor up,
            Tensor? up_scales, Tensor down, Tensor? down_scales, bool tanh) -> Tensor""": (
            lambda x, residual, *_: residual.new_empty(residual.shape)
        ),
        "layers_hold(Tensor?[] tensors, Tensor numbers) -> Tensor": (
            lambda tensors, numbers: numbers.new_empty(1)
        ),
        "layers(Tensor x, Tensor held) -> Tensor": _like_first,
        "layers_drop(Tensor held) -> ()": lambda held: None,
        "rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor": _like_first,
        "glu(Tensor gate, Tensor up) -> Tensor": _like_first,
        "glu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)": (
            lambda dy, gate, up: empty_gradients(gate, up)
        ),
        "norm_rows(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)": (
            lambda x, *_: (*empty_gradients(x), x.new_empty(*x.shape[:-1], 1))
        ),
        """norm_rows_backward(Tensor dy, Tensor x, Tensor weight, Tensor scale)
            -> (Tensor, Tensor)""": lambda dy, x, weight, scale: empty_gradients(x, weight),
        "rotate(Tensor x, Tensor cos, Tensor sin, float sign) -> Tensor": _like_first,
        "mx_pack(Tensor x) -> Tensor": _packed,
        "mx_unpack(Tensor rows, Tensor like) -> Tensor": _unpacked,
        "mx_rounded(Tensor x) -> Tensor": _like_first,
    }


def _heads(q: Tensor, v: Tensor) -> Tensor:
    """Empty outputs (B, H, D) of one token."""
    return v.new_empty(*q.shape[:2], v.shape[2])


def _latents(x: Tensor, q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Empty logits of a token's latents, (B, H, ...)."""
    return tuple(w.new_empty(len(x), heads, len(w) // heads) for w in (q, k))


def _begun(x: Tensor, _: Tensor, __: float, ___: float, *given: Any) -> tuple[Tensor, ...]:
    """Empty q, k and v (B, heads, ...), latent logits, and scores (B, G)."""
    maps, (heads, groups), (q, k, *_rest) = given[:6], given[6:8], given[8:]
    made = []
    for weight, scales, count in zip(maps[::2], maps[1::2], (heads, groups, groups), strict=True):
        outputs = len(weight) if scales is None else scales.shape[1]
        made.append(x.new_empty(len(x), count, outputs // count))
    if q is None:
        return *made, *(x.new_empty(len(x), 0) for _ in range(3))
    down = given[13]
    score = q.new_empty(len(x), 0 if down is None else len(down))
    return *made, *_latents(x, q, k, heads), score


def _packed(x: Tensor) -> Tensor:
    """Empty rows with a byte for each number, and one for each 32 of them."""
    *shape, n = x.shape
    return x.new_empty(*shape, n + -(-n // 32), dtype=torch.uint8)


def _unpacked(rows: Tensor, like: Tensor) -> Tensor:
    *shape, width = rows.shape
    return like.new_empty(*shape, width - -(-width // 33))


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _mapped(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """Empty outputs of a linear map."""
    return x.new_empty(*x.shape[:-1], len(weight))


def _all_mapped(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(_mapped(x, weight) for weight in weights)


def _by_scales(x: Tensor, _: Tensor, scales: Tensor, *__: Tensor) -> Tensor:
    """Empty outputs of a quantised map. Its integers may be of more outputs."""
    return x.new_empty(*x.shape[:-1], scales.shape[1])


def _all_by_scales(x: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
    return tuple(_by_scales(x, *maps[m : m + 2]) for m in range(0, len(maps), 2))
