"""The RMSNorm, SwiGLU's product and the rotation: every backend against the reference."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from latte.ops import pointwise, use_backend
from latte.ops.cpp_backend import ABSENT
from latte.ops.tensors import computation_dtype
from tests.ops.helpers import F64, randn, relative_error, values_and_gradients

NATIVE = pytest.mark.skipif(ABSENT is not None, reason=f"no native kernels: {ABSENT}")
BACKENDS = pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=NATIVE)])
OPS = pytest.mark.parametrize("name", ["rms_norm", "silu_product", "rotate"])
DTYPES = (F64, torch.float32, torch.bfloat16)
EPS = 1e-3


def angles(B, T, K, dtype=F64):
    turned = 0.7 * torch.arange(B * T * K // 2, dtype=F64).view(B, T, 1, K // 2)
    return tuple(x.to(computation_dtype(dtype)) for x in (turned.cos(), turned.sin()))


def inputs(name, B=2, T=7, width=6, dtype=F64):
    """Tensors that have gradients."""
    if name == "rms_norm":
        return randn(B, T, width).to(dtype), randn(width, seed=1).to(dtype)
    if name == "silu_product":
        return tuple(randn(B, T, width, seed=seed, scale=3.0).to(dtype) for seed in (0, 1))
    return (randn(B, T, 3, width).to(dtype),)


def call(name, backend, rows=1):
    """The op as a function of :func:`inputs`. ``rows``: how many rows the table of angles has."""
    op = getattr(pointwise, name)
    if name == "rms_norm":
        return lambda x, weight: op(x, weight, EPS, backend=backend)
    if name == "rotate":
        return lambda x: op(x, *angles(rows, *x.shape[1::2], x.dtype), backend=backend)
    return lambda gate, up: op(gate, up, backend=backend)


def errors(name, backend, given, rows=1):
    """Relative errors of output and gradients against the reference in fp64."""
    found = values_and_gradients(call(name, backend, rows), given)
    exact = values_and_gradients(call(name, "reference", rows), [x.to(F64) for x in given])
    assert all(x.dtype == given[0].dtype for x in found)
    return [relative_error(a, e) for a, e in zip(found, exact, strict=True)]


@BACKENDS
@OPS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "T", "width"), [(1, 1, 2), (2, 7, 6), (3, 65, 38), (2, 0, 4)])
def test_values_and_gradients_are_the_references(name, backend, dtype, B, T, width):
    """At most twice as far from fp64 as the reference is in the same precision."""
    if (name, backend, dtype) == ("rms_norm", "cpu", torch.bfloat16):
        pytest.skip("the kernel is for fp32 and fp64")
    given = inputs(name, B, T, width, dtype)
    for rows in {1, B}:
        allowed = errors(name, "reference", given, rows)
        for error, own in zip(errors(name, backend, given, rows), allowed, strict=True):
            assert error <= 2.0 * max(own, torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_norm_has_the_dtype_of_its_input(backend):
    x, weight = randn(2, 5, 6).bfloat16(), randn(6).float()
    found = pointwise.rms_norm(x, weight, EPS, backend=backend)
    assert found.dtype == torch.bfloat16
    exact = pointwise.rms_norm(x.to(F64), weight.to(F64), EPS, backend="reference")
    assert relative_error(found, exact) <= torch.finfo(torch.bfloat16).eps


@BACKENDS
@OPS
def test_strides_do_not_matter(name, backend):
    given = inputs(name, 2, 9, 10, torch.float32)
    laid_out = [
        lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        lambda x: torch.stack([x, -x], -1)[..., 0],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    ]
    expected = values_and_gradients(call(name, backend), given)
    for turn in laid_out:
        found = call(name, backend)(*(turn(x) if x.ndim > 1 else x for x in given))
        if backend == "cpu":
            assert torch.equal(found, expected[0])
        torch.testing.assert_close(found, expected[0])
    leaves = [x.requires_grad_() for x in given]
    slope = laid_out[1](torch.ones_like(expected[0]))
    plain = torch.autograd.grad(call(name, backend)(*leaves), leaves, slope.contiguous())
    for turn in laid_out:
        views = [turn(x) if x.ndim > 1 else x for x in leaves]
        found = torch.autograd.grad(call(name, backend)(*views), leaves, slope)
        for a, b in zip(found, plain, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("cpu", marks=NATIVE)])
@OPS
def test_gradients_of_every_order(name, backend):
    leaves = [x.requires_grad_() for x in inputs(name, 2, 3, 4)]
    assert torch.autograd.gradcheck(call(name, backend), leaves)
    try:
        assert torch.autograd.gradgradcheck(call(name, backend), leaves)
    except NotImplementedError as refusal:
        assert "has no second derivatives" in str(refusal) and backend != "reference"


@BACKENDS
@OPS
def test_inputs_alone_are_saved(name, backend):
    if (name, backend) == ("silu_product", "torch"):
        pytest.skip("PyTorch's operations save silu(gate) too")
    kept = []
    leaves = [x.requires_grad_() for x in inputs(name, 2, 9, 10, torch.float32)]
    table = angles(1, 9, 10, torch.float32)
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        call(name, backend)(*leaves)
    numbers = {"rms_norm": 2 * 9 * 11 + 10, "silu_product": 2 * 2 * 9 * 10}
    expected = numbers.get(name, sum(x.numel() for x in table))
    assert sum(x.numel() for x in kept) == expected


@OPS
def test_transforms_of_functions(name):
    given, slopes = inputs(name), inputs(name)
    fn, reference = call(name, None), call(name, "reference")
    dims = tuple(None if x.ndim == 1 else 0 for x in given)
    rows = [x if x.ndim == 1 else x[:, None] for x in given]
    torch.testing.assert_close(torch.func.vmap(fn, dims)(*rows)[:, 0], reference(*given))
    found, exact = (torch.func.jvp(f, given, slopes) for f in (fn, reference))
    torch.testing.assert_close(found, exact)


@OPS
def test_compiles_in_one_graph(name):
    torch._dynamo.reset()
    given = inputs(name)
    compiled = torch.compile(call(name, None), fullgraph=True, backend="aot_eager")
    found, exact = (values_and_gradients(f, given) for f in (compiled, call(name, "reference")))
    torch.testing.assert_close(found, exact)


def native_calls(fn):
    """Names of the native ops that run."""
    with torch.profiler.profile() as profile:
        fn()
    return {e.key.removeprefix("latte::") for e in profile.key_averages() if "latte::" in e.key}


@NATIVE
@OPS
def test_kernels_are_the_default_on_a_cpu(name):
    kernels = {"rms_norm": "cpu_norm_rows", "silu_product": "cpu_glu", "rotate": "cpu_rotate"}
    given = inputs(name, dtype=torch.float32)
    assert native_calls(lambda: call(name, None)(*given)) == {kernels[name]}
    assert not native_calls(lambda: call(name, None)(*(x.half() for x in given)))
    for named in ("torch", "triton", "reference"):
        with use_backend(named):
            assert not native_calls(lambda: call(name, None)(*given))
            like = "reference" if named == "reference" else "torch"
            assert torch.equal(call(name, None)(*given), call(name, like)(*given))


@NATIVE
def test_a_step_of_few_rows_is_one_kernel():
    x, weight = randn(2, 1, 6).float(), randn(6).float()
    norm = pointwise.rms_norm
    with torch.no_grad():
        assert native_calls(lambda: norm(x, weight, EPS)) == {"cpu_rms_norm"}
        many = x.expand(9, 1, 6).contiguous() if x.shape[0] == 1 else torch.cat([x] * 5)
        assert not native_calls(lambda: norm(many, weight, EPS))
        exact = norm(many, weight, EPS, backend="reference")
        torch.testing.assert_close(norm(many, weight, EPS), exact)


@NATIVE
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_ops_keep_the_contract_of_a_custom_op(dtype):
    ops, kinds, checks = torch.ops.latte, ["test_schema", "test_faketensor"], {}
    gate, up = inputs("silu_product", dtype=dtype)
    x, weight = inputs("rms_norm", dtype=F64 if dtype == F64 else torch.float32)
    (heads,), table = inputs("rotate", dtype=dtype), angles(1, 7, 6, dtype)
    _, scale = ops.cpu_norm_rows(x, weight, EPS)
    for op, args in (
        (ops.cpu_glu, (gate, up)),
        (ops.cpu_glu_backward, (gate, gate, up)),
        (ops.cpu_norm_rows, (x, weight, EPS)),
        (ops.cpu_norm_rows_backward, (x, x, weight, scale)),
        (ops.cpu_rotate, (heads, *table, -1.0)),
    ):
        checks |= torch.library.opcheck(op.default, args, test_utils=kinds)
        assert set(checks.values()) == {"SUCCESS"}


@OPS
def test_what_cannot_be_served_is_one_line(name):
    given = inputs(name, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"{name}: backend must be None or one of .*, got 'gpu'"):
        call(name, "gpu")(*given)
    absent = "here" if ABSENT is not None else "for tensors on meta"
    with pytest.raises(ValueError, match=f"{name}: backend 'cpu' is not available {absent}"):
        call(name, "cpu")(*(x.to("meta") for x in given))
    absent = "here" if ABSENT is not None else "in .*torch.func"
    with pytest.raises(ValueError, match=f"{name}: backend 'cpu' is not available {absent}"):
        torch.func.vmap(call(name, "cpu"), (0, None)[: len(given)])(given[0][None], *given[1:])


@NATIVE
def test_kernels_say_which_dtypes_they_take():
    x, weight = inputs("rms_norm", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x must be float32 or float64"):
        pointwise.rms_norm(x, weight, EPS, backend="cpu")
    with pytest.raises(ValueError, match="latte::cpu_glu: up must be float32"):
        pointwise.silu_product(x.float(), x, backend="cpu")
