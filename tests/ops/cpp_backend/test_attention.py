"""Native Latte, Macchiato, window: the contracts of their custom ops, and what they serve."""

from __future__ import annotations

import pytest
import torch

from latte.ops import cpp_backend, sliding_window_attention
from tests.ops.cpp_backend import calls
from tests.ops.helpers import (
    boundaries,
    key_mask,
    latte_state,
    macchiato_inputs,
    randn,
    seen_sinks,
    window_state,
)
from tests.ops.opdb import OPS, Bench


@pytest.mark.parametrize("op", ["macchiato", "latte", "window"])
def test_they_keep_the_contract_of_a_custom_op(op):
    """Once plain, and with all that an op may be given; the rest is compiled in other tests."""
    bounds, kinds = boundaries(20).long(), ["test_schema", "test_faketensor"]
    earlier = (*latte_state(6, 4, 3, 5), -randn(1, 20, 4, 3).abs())
    pending = randn(6, 8, 4, 3), randn(6, 8, 2, 5), torch.ones(6, 8, dtype=torch.bool)
    near = *window_state(6, 7, 2, 6, 5), *seen_sinks(1, 20, 6)
    more = {"latte": earlier, "window": near, "macchiato": (*earlier, *near, *pending)}[op]
    full = [key_mask(1, 20), bounds, *more]
    local = () if op == "latte" else (8, 0.4, 0.0)
    latent_q, *others = macchiato_inputs(1, 20, G=4 if op == "latte" else 2)
    given = {"latte": (latent_q[..., 1:], others[0], others[3]), "window": others[1:]}
    for around in ([None] * len(full), full):
        flags = {"latte": [], "window": [True], "macchiato": [around is full] * 2}[op]
        args = [x.requires_grad_() for x in given.get(op, (latent_q, *others))] + around
        args += [*local, *flags]
        called = getattr(cpp_backend, f"{op}_op")
        found = torch.library.opcheck(called, tuple(args), test_utils=kinds)
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("carried", [False, True])
def test_kept_tokens_keep_the_contract_of_a_custom_op(carried):
    """In fp64, where states and sums have one dtype."""
    bench = Bench(OPS["kept" if carried else "kept-window"], "cpu")
    with calls.Recorder() as recorder:
        bench.call(bench.inputs(2, 20, 2), bench.state(2) if carried else None)
    args = recorder.calls["cpu_kept"]
    for x in args:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    kinds = ["test_schema", "test_faketensor", "test_aot_dispatch_static"]
    found = torch.library.opcheck(torch.ops.latte.cpu_kept.default, args, test_utils=kinds)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", ["macchiato", "latte", "window"])
def test_they_serve_what_is_causal(op):
    native, torchs = Bench(OPS[op], "cpu"), Bench(OPS[op], "torch")
    inputs, default = native.inputs(1, 5), native._replace(backend=None)
    with pytest.raises(ValueError, match="backend 'cpu' is not available for this op"):
        native.call(inputs, causal=False)
    default.call(inputs, causal=False)
    out = native.call(inputs)[0]
    assert torch.equal(default.call(inputs)[0], out)
    torch.testing.assert_close(out, torchs.call(inputs)[0])
    if op == "window":
        with pytest.raises(ValueError, match="backend 'cpu' is not available for this op"):
            sliding_window_attention(*inputs, window=None, backend="cpu")
