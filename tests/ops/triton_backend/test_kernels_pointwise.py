"""The pointwise Triton kernels: rotation, SwiGLU's product, a residual sum with its norm.

Shapes: B batch, T tokens, H heads, K width of a head, E width.
"""

from __future__ import annotations

import copy
from itertools import islice

import pytest
import torch

from latte.layers import projections, recurrent
from latte.layers.parts import RMSNorm, add_and_norm
from latte.models import LatteForCausalLM, preset_config
from latte.ops import pointwise, triton_backend, use_backend
from latte.ops.tensors import token_positions
from latte.ops.triton_backend import launch
from tests.ops.helpers import F64, boundaries, key_mask, randn, relative_error
from tests.ops.helpers import values_and_gradients as results
from tests.ops.triton_backend.kernel_helpers import DEVICE, Fences

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-3
PLACES = {
    "plain": (None, None),
    "padded": (key_mask(2, 37), None),
    "packed": (None, boundaries(37)),
}


def table(x, K, kind="plain"):
    """Cosines and sines of the angles of these tokens, for x's precision."""
    mask, cu = (y if y is None else y.to(x.device) for y in PLACES[kind])
    if x.shape[1] != 37:
        mask = cu = None
    angles = token_positions(x, mask, cu)[..., None, None] * torch.arange(1, K // 2 + 1).to(
        x.device
    )
    wide = F64 if x.dtype == F64 else F32
    return tuple(y.to(wide) for y in ((0.7 * angles.to(F64)).cos(), (0.7 * angles.to(F64)).sin()))


def rotated(kind):
    return lambda q, k: pointwise.rotate_both(q, k, *table(q, q.shape[-1], kind))


# What is called, and the shapes of its inputs.
CALLS = {
    "rotation": (rotated("plain"), [(2, 37, 4, 6), (2, 37, 2, 6)]),
    "padded": (rotated("padded"), [(2, 37, 3, 10), (2, 37, 1, 10)]),
    "packed": (rotated("packed"), [(1, 37, 2, 64), (1, 37, 2, 64)]),
    "one": (lambda q: pointwise.rotate(q, *table(q, 6)), [(2, 5, 3, 6)]),
    "product": (pointwise.silu_product, [(2, 37, 50), (2, 37, 50)]),
    "norm": (lambda x, w: pointwise.add_rms_norm(x, None, w, EPS), [(2, 37, 20), (20,)]),
    "sum": (lambda x, y, w: pointwise.add_rms_norm(x, y, w, EPS), [(3, 5, 33)] * 2 + [(33,)]),
    "empty": (lambda x, y, w: pointwise.add_rms_norm(x, y, w, EPS), [(2, 0, 8)] * 2 + [(8,)]),
    "nothing": (rotated("plain"), [(0, 5, 2, 4), (0, 5, 2, 4)]),
    "none": (pointwise.silu_product, [(2, 0, 4), (2, 0, 4)]),
}
EVERY = pytest.mark.parametrize("name", CALLS)


def given(name, dtype):
    """Inputs that are not contiguous, if they have that many dimensions."""
    found = []
    for seed, shape in enumerate(CALLS[name][1]):
        x = randn(*shape, seed=seed, scale=3.0).to(DEVICE, dtype)
        found.append(
            x if seed % 2 or x.ndim == 1 else x.transpose(0, 1).contiguous().transpose(0, 1)
        )
    return found


def run(name, backend, inputs):
    with use_backend(backend):
        return results(CALLS[name][0], inputs)


@pytest.fixture
def launched(monkeypatch):
    """The kernels' functions that were called, by name."""
    names = []

    def watched(name, fn):
        return lambda *given: names.append(name) or fn(*given)

    for name in ("rotate", "silu_product", "add_rms_norm"):
        monkeypatch.setattr(triton_backend, name, watched(name, getattr(triton_backend, name)))
    table = {"triton": triton_backend.silu_product}
    monkeypatch.setattr(pointwise, "SILU_PRODUCT", pointwise.SILU_PRODUCT | table)
    return names


@EVERY
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_values_and_gradients_err_at_most_twice_the_references(launched, name, dtype):
    inputs = given(name, dtype)
    found = run(name, "triton", inputs)
    assert len(launched) == 1
    exact, plain = (run(name, "reference", [x.to(y) for x in inputs]) for y in (F64, dtype))
    for a, b, e in zip(found, plain, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        limit = max(2 * relative_error(b, e), 2 * torch.finfo(dtype).eps)
        assert relative_error(a, e) <= limit


@EVERY
def test_gradients_do_not_depend_on_strides_or_on_what_lies_around(name, monkeypatch):
    inputs, fences = given(name, F32), Fences()
    expected = run(name, "triton", [x.contiguous() for x in inputs])
    for a, e in zip(run(name, "triton", inputs), expected, strict=True):
        assert torch.equal(a, e)
    if name in ("empty", "nothing", "none"):
        return
    around = [fences.of(x) for x in inputs]
    with use_backend("triton"):
        out = CALLS[name][0](*around)
    fences.check()
    assert all(torch.isfinite(x).all() for x in (out if isinstance(out, tuple) else (out,)))


def test_a_residual_stream_in_fp32_takes_what_is_lower():
    """As under autocast: the sum has the wider dtype, and each gradient that of its input."""
    x, added, weight = given("sum", F32)
    low = added.to(BF16)
    for backend in ("triton", "torch"):
        leaves = [y.detach().clone().requires_grad_() for y in (x, low, weight)]
        with use_backend(backend):
            total, out = pointwise.add_rms_norm(*leaves, EPS)
        assert total.dtype == out.dtype == F32
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert [g.dtype for g in grads] == [F32, BF16, F32]
        found = [total, out, *grads]
        if backend == "triton":
            own = found
    for a, e in zip(own, found, strict=True):
        torch.testing.assert_close(a, e)


def test_products_read_a_norm_that_its_launch_has_rounded():
    """Autocast would round it in a launch of its own, to the same bits."""
    leaves, found = [y.requires_grad_() for y in given("sum", F32)], []
    slope = randn(3, 5, 33, seed=7).to(DEVICE, BF16)
    for lowers in (True, False):
        with use_backend("triton"), torch.autocast(torch.device(DEVICE).type, BF16):
            total, out = pointwise.add_rms_norm(*leaves, EPS, lowers=lowers)
        assert total.dtype == F32 and out.dtype == (BF16 if lowers else F32)
        low = out.to(BF16)
        found.append([total, low, *torch.autograd.grad(low, leaves, slope)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("lowered", [False, True], ids=["plain", "autocast"])
def test_a_layers_gradients_as_a_gpu_computes_them(monkeypatch, lowered):
    """They err at most as much as those of the modules, one by one."""
    torch.manual_seed(0)
    config = preset_config("latte-r-swa++", "tiny", num_hidden_layers=1, vocab_size=20)
    model, ids = LatteForCausalLM(config).to(DEVICE), torch.arange(40).view(2, 20).to(DEVICE) % 20
    exact, errors = copy.deepcopy(model).double(), []

    def gradients(of, lowered=False):
        with torch.autocast(torch.device(DEVICE).type, BF16, enabled=lowered):
            loss = of(ids, labels=ids).loss
        return [loss, *torch.autograd.grad(loss, list(of.parameters()))]

    with use_backend("reference"):
        expected = gradients(exact)
    for gpu in (False, True):
        for module in (projections, recurrent):
            monkeypatch.setattr(module, "on_gpu", lambda x, gpu=gpu: gpu)
        with use_backend("triton" if gpu else "reference", everywhere=True):
            found = gradients(model, lowered)
        errors.append([relative_error(a, e) for a, e in zip(found, expected, strict=True)])
    coarse = torch.finfo(BF16 if lowered else F32).eps
    for plain, own in zip(*errors, strict=True):
        assert own <= max(2 * plain, 4 * coarse)


def test_a_row_sums_its_part_of_the_weights_gradient(monkeypatch):
    """More rows than programs, and a number that they do not share evenly."""
    from latte.ops.triton_backend import pointwise as kernels

    inputs = [randn(1, 23, 6).float().to(DEVICE), randn(6, seed=1).float().to(DEVICE)]
    expected = run("norm", "reference", [x.to(F64) for x in inputs])
    monkeypatch.setattr(kernels, "NORM_PROGRAMS", 5)
    for a, e in zip(run("norm", "triton", inputs), expected, strict=True):
        assert relative_error(a, e) <= 1e-6


def test_hooks_other_norms_and_what_kernels_do_not_serve_take_pytorchs_way(launched):
    norm, x = RMSNorm(6, eps=EPS).to(DEVICE), randn(2, 5, 6).float().to(DEVICE)
    with use_backend("triton"):
        add_and_norm(norm, x, x)
        assert launched == ["add_rms_norm"]
        seen = []
        hook = norm.register_forward_hook(lambda *_: seen.append(1) and None)
        total, out = add_and_norm(norm, x, x)
        hook.remove()
        assert seen == [1] and torch.equal(total, 2 * x) and torch.equal(out, norm(2 * x))
        add_and_norm(torch.nn.LayerNorm(6).to(DEVICE), x)
        add_and_norm(norm.double(), x.double())
        wide = torch.ones(1, launch.WIDEST_NORM + 1, device=DEVICE)
        pointwise.add_rms_norm(wide, None, wide[0], EPS)
        pointwise.silu_product(x, x.double())
        torch.func.vmap(pointwise.silu_product)(x, x)
        table = torch.ones(1, 5, 1, 3, dtype=F64, device=DEVICE)
        pointwise.rotate_both(x[:, :, None], x[:, :, None], table, table)
    with use_backend("torch"):
        pointwise.add_rms_norm(x, x, norm.weight.float(), EPS)
    assert launched == ["add_rms_norm"]


def test_compiled_calls_are_pytorchs_operations_in_one_graph(launched):
    torch._dynamo.reset()
    counts = {name: len(CALLS[name][1]) for name in ("rotation", "product", "sum")}
    inputs = [x for name in counts for x in given(name, F32)]

    def calls(*xs):
        rest = iter(xs)
        return [CALLS[name][0](*islice(rest, count)) for name, count in counts.items()]

    compiled = torch.compile(calls, fullgraph=True, backend="aot_eager")
    with use_backend("triton"):
        found = results(compiled, inputs)
    assert not launched
    with use_backend("torch"):
        plain = results(calls, inputs)
    for a, e in zip(found, plain, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("name", ["product", "norm"])
def test_second_derivatives_are_refused(name):
    leaves = [x.requires_grad_() for x in given(name, F32)]
    with use_backend("triton"):
        out = CALLS[name][0](*leaves)
    out = out if isinstance(out, torch.Tensor) else out[1]
    with pytest.raises(NotImplementedError, match="has no second derivatives"):
        torch.autograd.grad(out.sum(), leaves, create_graph=True)


def test_what_kernels_do_not_take_is_one_line():
    x = randn(2, 3, 4)
    with pytest.raises(
        ValueError, match="silu_product: backend 'triton' is not available for .*64"
    ):
        pointwise.silu_product(x, x, backend="triton")
