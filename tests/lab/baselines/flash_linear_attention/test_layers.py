"""The libraries' layers against their papers' equations, spelt token by token in fp64.

Values, and gradients of every parameter and of the input; at both lengths between which the layers
change kernels: up to 64 tokens a recurrence, then chunks (RetNet trains in chunks at any length).

Shape suffixes: T tokens, H heads, K key width, D value width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from latte.models.modeling import language_model
from latte.models.registry import find_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def heads(x: Tensor, number: int = 2) -> Tensor:
    return x.unflatten(-1, (number, -1))


def rms_norm(layer: Any, x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + layer.eps).rsqrt() * layer.weight


def gla(layer: Any, x: Tensor) -> Tensor:
    """arXiv 2312.06635: S_t = diag(alpha_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t / sqrt(K),
    alpha_t = sigmoid(x_t W_1 W_2 + b)^(1/16), y_t = W (RMSNorm(o_t) * swish(x_t W_r)).
    """
    q_THK, k_THK = heads(layer.q_proj(x)), heads(layer.k_proj(x))
    v_THD = heads(layer.v_proj(x))
    alpha_THK = torch.sigmoid(heads(layer.gk_proj(x))) ** (1 / 16)
    S_HKD = x.new_zeros(2, q_THK.shape[-1], v_THD.shape[-1])
    out = []
    for q, k, v, alpha in zip(q_THK, k_THK, v_THD, alpha_THK, strict=True):
        S_HKD = alpha[:, :, None] * S_HKD + k[:, :, None] * v[:, None, :]
        out.append(torch.einsum("hk,hkd->hd", q, S_HKD) * q.shape[-1] ** -0.5)
    y_THD = rms_norm(layer.g_norm_swish_gate, torch.stack(out)) * F.silu(heads(layer.g_proj(x)))
    return layer.o_proj(y_THD.flatten(1))


def retnet(layer: Any, x: Tensor) -> Tensor:
    """arXiv 2307.08621: S_t = gamma S_{t-1} + k_t v_t^T, o_t = S_t^T q_t / sqrt(K) with rotated
    q and k and gamma = 1 - 2^(-5-h), y_t = W (RMSNorm(o_t) * swish(x_t W_G)).
    """
    width = layer.head_k_dim
    times = torch.arange(len(x), dtype=x.dtype)
    angles = times[:, None] * 10000.0 ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    turn_TK = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(x: Tensor) -> Tensor:
        turned = torch.complex(*heads(x).chunk(2, -1)) * turn_TK
        return torch.cat([turned.real, turned.imag], -1)

    q_THK, k_THK = rotated(layer.q_proj(x)), rotated(layer.k_proj(x))
    v_THD = heads(layer.v_proj(x))
    gamma = 1 - 2.0 ** (-5 - torch.arange(2, dtype=x.dtype))
    S_HKD = x.new_zeros(2, width, v_THD.shape[-1])
    out = []
    for q, k, v in zip(q_THK, k_THK, v_THD, strict=True):
        S_HKD = gamma[:, None, None] * S_HKD + k[:, :, None] * v[:, None, :]
        out.append(torch.einsum("hk,hkd->hd", q, S_HKD) * width**-0.5)
    y_THD = rms_norm(layer.g_norm_swish_gate, torch.stack(out)) * F.silu(heads(layer.g_proj(x)))
    return layer.o_proj(y_THD.flatten(1))


def rwkv6(layer: Any, x: Tensor) -> Tensor:
    """arXiv 2404.05892 (Finch): o_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t,
    S_t = diag(w_t) S_{t-1} + k_t v_t^T, w_t = exp(-exp(d_t)),
    y_t = W (GroupNorm(o_t) * swish(g_t)); r, k, v, g and d from mixtures of x_t and x_{t-1} whose
    shares are functions of both.
    """
    delta = torch.cat([torch.zeros_like(x[:1]), x[:-1]]) - x
    low = torch.tanh(layer.x_proj[0].linear(x + delta * layer.x_proj[0].mu)).unflatten(-1, (5, -1))
    back = layer.x_proj[2].weight.unflatten(-1, (5, -1))
    shares = torch.einsum("tns,ens->nte", low, back) + layer.x_bias[:, None]
    r, w, k, v, g = (
        getattr(layer, f"{name}_proj").linear(x + delta * share)
        for name, share in zip("rwkvg", shares, strict=True)
    )
    w_THK, u_HK = torch.exp(-torch.exp(heads(w))), layer.bonus
    r_THK, k_THK, v_THD = heads(r), heads(k), heads(v)
    S_HKD = x.new_zeros(2, r_THK.shape[-1], v_THD.shape[-1])
    out = []
    for r_HK, k_HK, v_HD, w_HK in zip(r_THK, k_THK, v_THD, w_THK, strict=True):
        kv = k_HK[:, :, None] * v_HD[:, None, :]
        out.append(torch.einsum("hk,hkd->hd", r_HK, S_HKD + u_HK[:, :, None] * kv))
        S_HKD = w_HK[:, :, None] * S_HKD + kv
    norm = layer.g_norm
    o = F.group_norm(torch.stack(out).flatten(1), 2, norm.weight, norm.bias, norm.eps)
    return layer.o_proj(o * F.silu(g))


@pytest.mark.filterwarnings("ignore:According to Bo")
@pytest.mark.parametrize("length", [7, 70])
@pytest.mark.parametrize("equations", [gla, retnet, rwkv6])
def test_a_layer_is_its_papers_equations(
    equations: Callable[[Any, Tensor], Tensor], length: int
) -> None:
    torch.manual_seed(0)
    config = find_model(equations.__name__).config("tiny", **SMALL)
    layer = language_model(config).model.layers[0].attn
    with torch.no_grad():
        for parameter in layer.parameters():  # those that start at 0 or 1 too
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, weight = torch.randn(2, length, 32)
    exact = copy.deepcopy(layer).double()
    results = []
    for run in (lambda x: layer(x[None])[0][0], lambda x: equations(exact, x)):
        this = exact if results else layer
        given = x.detach().to(next(this.parameters()).dtype).requires_grad_()
        with torch.no_grad():
            plain = run(given)
        out = run(given)
        (out * weight).sum().backward()
        found = {"without gradients": plain, "out": out.detach(), "x": given.grad}
        results.append(found | {name: p.grad for name, p in this.named_parameters()})
    for name, expected in results[1].items():
        error = (results[0][name] - expected).abs().max() / expected.abs().max()
        assert error < 1e-4, f"{name}: {error:.1e}"
