"""Whatever the native ops are called with: one clear line, or what PyTorch's operations give."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from latte.layers import RMSNorm, SwiGLU
from latte.ops import (
    causal_conv1d,
    decoding,
    latte_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)
from tests.ops.cpp_backend import calls
from tests.ops.helpers import F64, macchiato_inputs, randn

OPS = sorted(
    name.removeprefix("latte::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("latte::cpu_")
)
# What of a raw call may be another: the number of rows, the height of weights, the logits' dtype.
FREE = re.compile(
    r"cpu_(linear\d?|swiglu|geglu|rms_norm|norm_rows) x (one dimension|dimension [01])"
    r"|cpu_linear\d? [abc] dimension 0"
    r"|cpu_(latents|layer_begin) (x (float|double|dimension 0)|latent_[qk] dimension 0)"
    r"|cpu_layer_begin down(_bias)? dimension 0"
    r"|cpu_layer_\w+ \w+_scales (float|double)"
    r"|cpu_quantised\w* (x (float|double|one dimension|dimension [01]))"
    r"|cpu_quantised\w* \w*scales\d? (float|double|dimension 1)"  # 17 to 32 outputs fill 32 rows
    r"|cpu_quantised_rows ids (one dimension (more|less)|no dimension|dimension [01])"
    r"|cpu_rotate x (float|dimension [02])"
    r"|cpu_kept_choice keys (double|dimension [012])"
    r"|cpu_mx_(pack|rounded) x (float|double|one dimension (more|less)|dimension \d)"
    r"|cpu_mx_unpack (rows|like) (one dimension (more|less)|dimension \d)"
    r"|cpu_mx_unpack like (float|double|no dimension)"
    r"|cpu_\w+_step (latent_[qk]|log_decay) (float|double|one dimension less)"
    r"|cpu_kept_step (score|latent_keys) (float|double)"
    r"|cpu_latte_step ([qk] (float|double)|v float)"
    r"|cpu_\w+_step (sink_)?(cos|sin) dimension [02]"
    r"|cpu_window_step q dimension 1"
    r"|cpu_convolution(_step)? (weight|bias) (float|double|dimension 1)"
)


# How far two orders of the same sums may be apart, for numbers of size 1.
WORST = {F64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def raw():
    """A valid call of every raw op."""
    return calls.raw_calls()


def copied(args):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in args]


def kernel(name):
    return getattr(torch.ops.latte, name).default


def named(name, args):
    """The arguments of a call with their place and their declaration."""
    return list(enumerate(zip(kernel(name)._schema.arguments, args, strict=True)))


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_dtype_or_shape_is_one_line(name, raw):
    """For each argument of each op that is registered."""
    refused = 0
    for i, (argument, x) in named(name, raw[name]):
        if not isinstance(x, torch.Tensor):
            continue
        for label, wrong in calls.wrong_tensors(x):
            args = copied(raw[name])
            args[i] = wrong
            try:
                with torch.no_grad():
                    kernel(name)(*args)
            except ValueError as error:
                told = (
                    "latte::cpu_" if name == "cpu_layers" else f"latte::{name}: "
                )  # a call's of it
                assert str(error).startswith(told) and "\n" not in str(error)
                refused += 1
            else:
                assert FREE.match(f"{name} {argument.name} {label}"), f"{argument.name}: {label}"
    assert refused


@pytest.mark.parametrize(
    ("name", "argument", "value", "said"),
    [
        ("cpu_window_step", "length", 10**6, "length must be from 1 to the window's slots"),
        ("cpu_window_step", "length", 0, "length must be from 1 to the window's slots"),
        ("cpu_window_step", "slot", torch.tensor([10**9]), "slot must be from 0 to"),
        ("cpu_macchiato_step", "slot", torch.tensor([-1]), "slot must be from 0 to"),
        ("cpu_macchiato_step", "sink_values", None, "must be given together"),
        ("cpu_macchiato_step", "position", -1, "position must be from 0 to"),
        ("cpu_kept_step", "window", 0, r"keys must have count \+ window \+ block - 1 slots"),
        ("cpu_kept_step", "count", 10**18, r"keys must have count \+ window \+ block - 1 slots"),
        ("cpu_kept_step", "seen", -1, "seen must be from 0 to"),
        ("cpu_kept_step", "mean", None, "latent_keys must be given together"),
        ("cpu_kept_step", "decays", None, "log_decay must be given with decays"),
        ("cpu_macchiato", "sinks_seen", 1000, "sinks_seen must be from 0 to"),
        ("cpu_macchiato", "mean", None, "log_mass and mean must be given together"),
        ("cpu_window", "tail_mask", None, "tail_k, tail_v and tail_mask must be given together"),
        ("cpu_window", "window", 0, "must be at least 1"),
        ("cpu_window", "causal", False, "causal must be True"),
        ("cpu_window_backward", "sink_q", None, "must be given together"),
        ("cpu_kept", "kept", 10**9, "kept must hold places of its own row"),
        ("cpu_kept", "late", -1, "late must hold places of its own row"),
        ("cpu_kept", "source", 10**9, "source must be from -1 to"),
        ("cpu_kept", "source", None, "source must be given with old_k"),
        ("cpu_kept", "old_latent_k", None, "old_latent_k must be given with old_k and latents"),
        ("cpu_kept", "block", 0, "the window and a block must be at least 1"),
        ("cpu_kept_choice", "window", 0, "blocks, block and window must be at least 1"),
        ("cpu_kept_choice", "block", 10**9, "keys must have slots for"),
        ("cpu_kept_choice", "kept", 10**9, "keys must have slots for"),
        ("cpu_kept_choice", "age", torch.tensor([10**9]), "age must be int64 of shape"),
        ("cpu_kept_backward", "mean", None, "log_mass and mean must be given together"),
    ],
)
def test_a_wrong_value_is_one_line(name, argument, value, said, raw):
    args = copied(raw[name])
    place = next(i for i, (a, _) in named(name, args) if a.name == argument)
    whole = isinstance(args[place], torch.Tensor) and isinstance(value, int)
    args[place] = torch.full_like(args[place], value) if whole else value
    with pytest.raises(ValueError, match=said):
        kernel(name)(*args)


def packed_calls():
    """Every op that takes packed sequences, as a function of their bounds, with T = 8."""
    latent_q, latent_k, q, k, v = (x.float() for x in macchiato_inputs(1, 8, 2, 2))
    x, weight, theta = randn(1, 8, 4).float(), randn(4, 3).float(), randn(4).float()
    return {
        "latte": lambda cu: latte_attention(latent_q[..., 1:], latent_k, v, cu_seqlens=cu)[0],
        "macchiato": lambda cu: macchiato_attention(
            latent_q, latent_k, q, k, v, window=4, cu_seqlens=cu
        )[0],
        "window": lambda cu: sliding_window_attention(q, k, v, window=4, cu_seqlens=cu)[0],
        "rg_lru": lambda cu: rg_lru(x, x, x, theta, cu_seqlens=cu)[0],
        "conv": lambda cu: causal_conv1d(x, weight, cu_seqlens=cu)[0],
    }


@pytest.mark.parametrize("op", packed_calls())
def test_bad_bounds_are_an_error_compiled_or_not(op):
    call = packed_calls()[op]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    good = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert torch.equal(compiled(good), call(good))
    for bad in ([0, 3, 50000], [1, 3, 8], [0, 3, 7], [0, 9, 8], [0, -3, 8]):
        bounds = torch.tensor(bad, dtype=torch.int32)
        for run in (call, compiled):
            with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T=8, got"):
                run(bounds)


@pytest.mark.parametrize("dims", [1, 2, 3, 5, 6, 8, 13])
def test_any_number_of_dimensions(dims):
    shape = (1,) * (dims - 3) + (2, 2, 16)[3 - min(dims, 3) :]
    x, weight, norm = randn(*shape).float(), randn(5, 16).float(), RMSNorm(16, eps=1e-6)
    nn.init.normal_(norm.weight)
    with torch.no_grad():
        torch.testing.assert_close(decoding.linear_maps(x, weight)[0], F.linear(x, weight))
        exact = F.rms_norm(x, (16,), norm.weight, 1e-6)
        for found in (norm(x), decoding.rms_norm(x, norm.weight, 1e-6)):
            torch.testing.assert_close(found, exact)
    layers, results = nn.Sequential(norm, SwiGLU(16, 8)), []
    for run in (layers, plainly(layers)):
        y = x.clone().requires_grad_()
        out = run(y)
        assert out.shape == x.shape
        results.append([out, *torch.autograd.grad(out.square().sum(), [y, *layers.parameters()])])
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def plainly(layers):
    """The same by PyTorch's operations."""
    norm, mlp = layers

    def run(x):
        x = F.rms_norm(x, (16,), norm.weight, 1e-6)
        return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))

    return run


def test_no_dimension_is_one_line():
    with pytest.raises(ValueError, match="x must have at least one dimension"):
        decoding.linear_maps(torch.tensor(1.0), torch.ones(2, 1))
    with pytest.raises(ValueError, match="x must have at least one dimension"):
        torch.ops.latte.cpu_norm_rows(torch.tensor(1.0), torch.ones(1), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_silu_of_infinities_is_pytorchs(dtype):
    gate = torch.tensor([-torch.inf, torch.inf, torch.nan, -1e4, -90.0, 0.0, 90.0], dtype=dtype)
    ones, found = torch.ones_like(gate), []
    for function in (torch.ops.latte.cpu_glu_backward, pytorchs_glu_backward):
        found.append([torch.ops.latte.cpu_glu(gate, ones), *function(ones, gate, ones)])
    found[1][0] = F.silu(gate)
    assert found[0][0][0].isnan() and found[0][1][0].isnan()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def pytorchs_glu_backward(dy, gate, up):
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    return torch.autograd.grad(F.silu(gate) * up, (gate, up), dy)


def test_what_pytorch_refuses_is_said_in_its_words():
    """More memory than there are addresses, for the output of one row."""
    endless = torch.zeros(1, 1).expand(1 << 60, 1)
    with pytest.raises(RuntimeError) as told:
        decoding.linear_maps(torch.zeros(1, 1), endless)
    recent = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)
    assert ("allocate" if recent else "see its message on stderr") in str(told.value)


@pytest.mark.parametrize("name", OPS)
def test_what_is_read_is_not_copied(name, raw):
    """Copy-on-write tensors share their memory still, if the op does not say that it writes."""
    args = copied(raw[name])
    shared = [torch._lazy_clone(x) if isinstance(x, torch.Tensor) else x for x in args]
    with torch.no_grad():
        kernel(name)(*shared)
    for _, (argument, x) in named(name, shared):
        if isinstance(x, torch.Tensor) and x.numel():
            written = argument.alias_info is not None and argument.alias_info.is_write
            assert torch._C._is_cow_tensor(x) != written, argument.name


def test_several_threads_at_once():
    """Python's threads, each with its own call: what one thread alone gives, to the bit."""
    kinds = [(kind, seed) for seed in range(8) for kind in calls.KINDS]
    alone = [calls.call(*kind) for kind in kinds]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda kind: calls.call(*kind), kinds * 2))
    for kind, expected, found in zip(kinds * 2, alone * 2, together, strict=True):
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=str(kind))


@pytest.mark.parametrize("instructions", ["default", "avx2", "avx512"])
def test_other_instructions_give_the_same(instructions, with_instructions):
    """Every op, forward and backward, as a processor without the best ones runs it."""
    code = (
        "import sys, torch\nfrom tests.ops.cpp_backend import calls\n"
        "found = {(k, s): calls.call(k, s) for k in calls.KINDS for s in range(10)}\n"
        "torch.save(found, sys.argv[1])\n"
    )
    for (kind, seed), found in with_instructions(instructions, code).items():
        expected = calls.call(kind, seed)
        # Some gradients are differences of larger ones: errors are those of the call's dtype.
        finite = [x[x.isfinite()].to(F64) for x in expected]
        top = max([1.0, *(x.abs().max().item() for x in finite if x.numel())])
        dtype = calls.Draw(seed).dtype
        if kind in ("quantised", "layers") and dtype == F64:
            dtype = torch.float32  # of its sums
        worst = top * WORST[dtype]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.isfinite(), b.isfinite()), (kind, seed)
            a, b = (torch.where(x.isfinite(), x, 0.0).to(F64) for x in (a, b))
            torch.testing.assert_close(a, b, rtol=0, atol=worst, msg=f"{kind} {seed}")
