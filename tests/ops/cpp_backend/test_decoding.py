"""Linear maps, SwiGLU and norms of single tokens by the native kernels, and who takes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

from latte.layers import RGLRU, RMSNorm, SwiGLU
from latte.layers.native import linear_maps, native_weights
from latte.layers.recurrent import STEP_KINDS
from latte.ops import decoding, use_backend
from latte.ops.quantised import PANEL, Matrix, ordered, quantise
from latte.ops.step import rg_lru_step
from tests.ops.helpers import F64, randn, relative_error

DTYPES = pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
SHAPES = pytest.mark.parametrize(("M", "E"), [(1, 1), (3, 7), (4, 16), (9, 31), (65, 100)])


def close(found, exact, dtype, terms=1):
    """As exact as a sum of so many terms in at least fp32, rounded to ``dtype`` at the end."""
    assert found.dtype == dtype
    summed = torch.finfo(F64 if dtype == F64 else torch.float32).eps * (4 + terms**0.5)
    assert relative_error(found.to(F64), exact) <= summed + torch.finfo(dtype).eps


@DTYPES
@SHAPES
@pytest.mark.parametrize("rows", [(0,), (1,), (3, 1), (2, 2), (7, 1), (8,)])
def test_linear_maps_and_swiglu(dtype, M, E, rows):
    x = randn(*rows, E).to(dtype)
    weights = [randn(n, E, seed=n).to(dtype) for n in (M, M + 1, M + 5)]
    wide = [x.to(F64) @ w.to(F64).mT for w in weights]
    for count in (1, 2, 3):
        found = decoding.linear_maps(x, *weights[:count])
        for y, exact in zip(found, wide, strict=False):
            close(y, exact, dtype, E)
    up = randn(M, E, seed=9).to(dtype)
    exact = F.silu(wide[0]) * (x.to(F64) @ up.to(F64).mT)
    close(decoding.swiglu(x, weights[0], up), exact, dtype, E)
    exact = F.gelu(wide[0], approximate="tanh") * (x.to(F64) @ up.to(F64).mT)
    close(decoding.geglu(x, weights[0], up), exact, dtype, E)
    residual = randn(*rows, M, seed=8).to(dtype)
    exact = residual.to(F64) + wide[0]
    close(decoding.linear_add(x, weights[0], residual), exact, dtype, E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("act", [decoding.swiglu, decoding.geglu])
def test_a_quantised_network_is_its_norm_maps_and_activation(act, kind, dtype):
    x, norm = randn(3, 64).to(dtype), (randn(64, seed=1).to(dtype), 1e-6, 1.0)
    sizes = (96, 64), (96, 64), (64, 96)
    found = [quantise(randn(*size, seed=n) / 8, kind) for n, size in enumerate(sizes)]
    exact = [Matrix(*each, 0).tile(0, len(each.weight), F64) for each in found]
    n = F.rms_norm(x.to(F64), (64,), 1 + norm[0].to(F64), 1e-6)
    bend = F.silu if act is decoding.swiglu else lambda y: F.gelu(y, approximate="tanh")
    expected = (bend(n @ exact[0]) * (n @ exact[1])) @ exact[2]
    integers = [y for q in found for y in (ordered(q.weight, PANEL), q.scales)]
    for adds in (False, True):
        out = decoding.quantised_mlp(x, norm, integers, act, adds)
        assert out.dtype == dtype
        # Rows are rounded to 15 bits twice; in bf16 the norm and the result are rounded too.
        bound = 2e-4 if dtype == torch.float32 else 6e-3
        assert relative_error(out.to(F64), expected + x.to(F64) * adds) <= bound


@DTYPES
@pytest.mark.parametrize("kind", [None, "int4", "int8"])
def test_begin_and_end_of_a_layer_are_their_parts(kind, dtype):
    """To the last bit, also for latents whose weights are more exact than x."""
    E, M, U, H, G, K, L = 64, 96, 16, 4, 2, 32, 3
    exact = torch.promote_types(dtype, torch.float32)

    def matrix(outputs, inputs, seed):
        weight = randn(outputs, inputs, seed=seed) / 8
        if kind is None:
            return [weight.to(dtype), None]
        found = quantise(weight.float(), kind)
        return [ordered(found.weight, PANEL), found.scales]

    def mapped(x, *maps):
        if kind is None:
            return decoding.linear_maps(x, *maps[::2])
        return decoding.quantised_maps(x, *maps)

    x, norm = randn(3, E).to(dtype), (randn(E, seed=1).to(dtype), 1e-6, 1.0)
    maps = [y for n, heads in enumerate((H, G, G)) for y in matrix(heads * K, E, n)]
    late = [randn(H * n, E, seed=n).to(exact) for n in (L + 1, L)]
    bias = randn(H, seed=4).to(exact)
    shapes = (U, E), (U,), (G, U), (G,)
    scored = [randn(*shape, seed=5 + n).to(exact) for n, shape in enumerate(shapes)]
    q, k, v, latent_q, latent_k, score = decoding.layer_begin(
        x, *norm, *maps, H, G, *late, bias, *scored, 1e-6
    )
    n = decoding.rms_norm(x, *norm)
    parts = [y.view(3, heads, K) for y, heads in zip(mapped(n, *maps), (H, G, G), strict=True)]
    own_q, own_k = (y.view(3, H, -1) for y in decoding.linear_maps(n.to(exact), *late))
    own_q[..., 0] += bias
    for found, expected in zip((q, k, v, latent_q, latent_k), (*parts, own_q, own_k), strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(decoding.latents(n, *late, bias, H), (own_q, own_k), strict=True):
        assert torch.equal(found, expected)
    up, up_bias, down, down_bias = (y.to(F64) for y in scored)
    wide = F.rms_norm(n.to(F64), (E,), eps=1e-6)
    wide = F.linear(F.gelu(F.linear(wide, up, up_bias)), down, down_bias)
    assert torch.equal(score, score.half().to(exact)) and relative_error(score, wide) <= 1e-3

    heads, (output, *inner) = (
        randn(3, H, K, seed=9).to(dtype),
        (matrix(*size, seed) for seed, size in enumerate(((E, H * K), (M, E), (M, E), (E, M)))),
    )
    flat = heads.view(3, -1)
    for act in (decoding.swiglu, decoding.geglu):
        given = [y for each in inner for y in each]
        found = decoding.layer_end(heads, x, *output, *norm, *given, act is decoding.geglu)
        if kind is None:
            y = decoding.linear_add(flat, output[0], x)
            both = act(decoding.rms_norm(y, *norm), inner[0][0], inner[1][0])
            expected = decoding.linear_add(both, inner[2][0], y)
        else:
            y = decoding.quantised_add(flat, output, x)
            expected = decoding.quantised_mlp(y, norm, given, act, True)
        assert torch.equal(found, expected)


@DTYPES
def test_strides_rows_and_threads_change_nothing(dtype):
    x, weight = randn(9, 100).to(dtype), randn(2000, 100, seed=1).to(dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(decoding.linear_maps(x, weight)[0])
    finally:
        torch.set_num_threads(before)
    # Alone and by twos, threes, ...: as many rows as share a row of weights, and more.
    parts = [
        torch.cat([decoding.linear_maps(rows, weight)[0] for rows in x.split(count)])
        for count in range(1, 9)
    ]
    turned = decoding.linear_maps(x.mT.contiguous().mT, weight)[0]
    assert all(torch.equal(y, results[0]) for y in (*results, *parts, turned))
    columns = weight.mT.contiguous().mT
    close(decoding.linear_maps(x, columns)[0], x.to(F64) @ weight.to(F64).mT, dtype, 100)


@DTYPES
@pytest.mark.parametrize("E", [1, 7, 100])
def test_rms_norm(dtype, E):
    x, weight = randn(2, 1, E).to(dtype), randn(E, seed=1).to(dtype)
    exact = F.rms_norm(x.to(F64), (E,), weight.to(F64), 1e-6)
    close(decoding.rms_norm(x, weight, 1e-6), exact, dtype, E)
    exact = F.rms_norm(x.to(F64), (E,), 1 + weight.to(F64), 1e-6)
    close(decoding.rms_norm(x, weight, 1e-6, 1.0), exact, dtype, E)
    assert (decoding.rms_norm(torch.zeros_like(x), weight, 1e-6) == 0).all()


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize(("E", "blocks"), [(6, 3), (21, 1), (96, 4)])
def test_rg_lru_with_its_gates_and_norm(E, blocks, scale):
    torch.manual_seed(0)
    rglru, norm = RGLRU(E, blocks), RMSNorm(E, eps=1e-6)
    with torch.no_grad():
        rglru.theta.add_(scale * torch.randn(E))
        rglru.input_gate.bias.normal_(), rglru.recurrence_gate.bias.normal_(), norm.weight.normal_()
    x, start = randn(3, E, scale=scale), randn(3, E, seed=2)
    real, results = torch.tensor([True, False, True]), []
    for dtype in (F64, torch.float32):
        rglru, norm, state = rglru.to(dtype), norm.to(dtype), start.to(dtype, copy=True)
        parts = rglru.recurrence_gate, rglru.input_gate, rglru, norm
        with torch.no_grad():
            weights = native_weights(x.to(dtype), parts, STEP_KINDS)
            z = decoding.rg_lru(x.to(dtype), weights, 1e-6, state, real)
        results.append((z, state))
    rglru, norm, state = rglru.to(F64), norm.to(F64), start.clone()
    with torch.no_grad():
        x_NBP = x.view(3, blocks, -1).transpose(0, 1)
        gates = rglru.recurrence_gate.step(x_NBP), rglru.input_gate.step(x_NBP)
        rg_lru_step(x, *gates, rglru.theta, state, real)
        expected = F.rms_norm(state, (E,), norm.weight, 1e-6), state
    for (z, after), worst in zip(results, (1e-12, 1e-5), strict=True):
        assert relative_error(z.to(F64), expected[0]) <= worst
        assert relative_error(after.to(F64), expected[1]) <= worst


def test_only_few_plain_rows_without_gradients_are_taken():
    linear, x = nn.Linear(6, 4, bias=False), torch.randn(1, 6)
    weight = linear.weight
    with torch.no_grad():
        assert decoding.serves(x) and decoding.fits(x, weight)
        assert not decoding.serves(torch.randn(9, 6)) and not decoding.serves(x.half())
        assert not decoding.fits(x.double(), weight) and not decoding.fits(x, weight.to("meta"))
        assert not decoding.fits(x, nn.Parameter(Special(weight)))
        assert not decoding.fits(x, weight.mT)
        assert not decoding.serves(x.to("meta")) and not decoding.serves(Special(x))
        with use_backend("torch"):
            assert not decoding.serves(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not decoding.serves(x)

        def mapped(y):
            assert not decoding.serves(y)
            return linear_maps(y, linear)[0]

        torch.testing.assert_close(torch.func.vmap(mapped)(x[None])[0], linear(x))
    assert not decoding.serves(x)
    assert linear_maps(x, linear)[0].requires_grad


def test_a_graph_holds_the_kernels():
    mlp, norm, x = SwiGLU(8, 12), RMSNorm(8, eps=1e-6), torch.randn(1, 1, 8)
    calls = []

    def backend(graph, inputs):
        calls.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return aot_eager(graph, inputs)

    def token(x):
        inner = mlp(norm(x))
        return inner, *linear_maps(x, mlp.gate_proj, mlp.up_proj)

    with torch.no_grad():
        for found, expected in zip(
            torch.compile(token, fullgraph=True, backend=backend)(x), token(x), strict=True
        ):
            assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert [name for name in calls if "latte" in name] == [
        f"latte.cpu_{name}" for name in ("rms_norm", "swiglu", "linear", "linear2")
    ]


class Special(torch.Tensor):
    """A tensor that stands for something else."""


def test_a_module_that_is_more_than_its_class_is_called():
    def made(change):
        linear = nn.Linear(6, 6, bias=False)
        return change(linear) or linear

    class Scaled(nn.Linear):
        pass

    changes = {
        "hook": lambda m: m.register_forward_hook(lambda *_: None) and None,
        "pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None) and None,
        "forward": lambda m: setattr(m, "forward", lambda x: x),
        "class": lambda m: Scaled(6, 6, bias=False),
        "bias": lambda m: nn.Linear(6, 6),
        "parametrization": lambda m: nn.utils.parametrizations.weight_norm(m) and None,
        "no weight": lambda m: delattr(m, "weight"),
    }
    with torch.no_grad():
        x, both = torch.randn(1, 6), (nn.Linear, nn.Linear)
        plain = made(lambda m: None)
        assert len(native_weights(x, (plain, plain), both)) == 2
        for name, change in changes.items():
            assert not native_weights(x, (plain, made(change)), both), name


def test_swiglu_of_a_token_is_that_of_many():
    mlp, x = SwiGLU(20, 33).to(F64), randn(1, 9, 20)
    with torch.no_grad():
        many = mlp(x)
        one = torch.cat([mlp(x[:, t : t + 1]) for t in range(9)], 1)
    torch.testing.assert_close(one, many)
