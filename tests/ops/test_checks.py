"""Bad arguments: one clear ValueError each, that says what was expected and what came."""

from __future__ import annotations

import math

import pytest
import torch

from latte.ops import (
    LatteState,
    WindowState,
    attention_weights,
    causal_conv1d,
    latte_attention,
    linear_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)
from tests.ops.helpers import latte_inputs, latte_state, macchiato_inputs, randn

q, k, v = latte_inputs(2, 6)
MACCHIATO = macchiato_inputs(2, 6)
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
STATE = latte_state(2, 2, 3, 5)


def case(fn, text, *args, **options):
    return pytest.param(fn, args, options, text, id=text)


CASES = [
    case(latte_attention, "q must have shape (B, T, H, L), got (2, 6, 2)", q[..., 0], k, v),
    case(
        latte_attention,
        "k must have shape (B=2, T=6, H=2, L=3), got (2, 6, 2, 2)",
        q,
        k[..., :2],
        v,
    ),
    case(latte_attention, "v must have shape (B=2, T=6, G, D), got (2, 5, 2, 5)", q, k, v[:, :5]),
    case(latte_attention, "heads that divides 2, got 3", q, k, randn(2, 6, 3, 5)),
    case(latte_attention, "q must be float32, bfloat16, float16 or float64", q.long(), k, v),
    case(
        latte_attention,
        "k must have the dtype of q, torch.float64, got torch.float32",
        q,
        k.float(),
        v,
    ),
    case(latte_attention, "v must be on the device of q, cpu, got meta", q, k, v.to("meta")),
    case(latte_attention, "backend must be None or one of", q, k, v, backend="cuda"),
    case(latte_attention, "backend 'triton' is not available", q, k, v, backend="triton"),
    case(
        latte_attention,
        "key_mask must have shape (B=2, T=6)",
        q,
        k,
        v,
        key_mask=torch.ones(2, 5).bool(),
    ),
    case(latte_attention, "key_mask must be bool", q, k, v, key_mask=torch.ones(2, 6)),
    case(latte_attention, "need a batch of 1, got 2", q, k, v, cu_seqlens=CU),
    case(latte_attention, "must rise from 0 to T=6", q[:1], k[:1], v[:1], cu_seqlens=CU[:2]),
    case(latte_attention, "cu_seqlens must be int32", q[:1], k[:1], v[:1], cu_seqlens=CU.float()),
    case(
        latte_attention,
        "cu_seqlens must be a tensor (N+1)",
        q[:1],
        k[:1],
        v[:1],
        cu_seqlens=[0, 6],
    ),
    case(
        latte_attention,
        "initial_state must be a tuple (log_mass, mean)",
        q,
        k,
        v,
        initial_state=STATE.mean,
    ),
    case(
        latte_attention,
        "initial_state.mean must have shape (2, 2, 3, 5), got (2, 2, 3, 4)",
        q,
        k,
        v,
        initial_state=LatteState(STATE.log_mass, STATE.mean[..., :4]),
    ),
    case(macchiato_attention, "L+1=4), one column more", MACCHIATO[0][..., 1:], *MACCHIATO[1:]),
    case(
        macchiato_attention, "window must be a positive number of keys, got 0", *MACCHIATO, window=0
    ),
    case(
        macchiato_attention, "initial_state must be the tuple", *MACCHIATO, initial_state=STATE.mean
    ),
    case(
        sliding_window_attention,
        "softcap must be None or a positive",
        *MACCHIATO[2:],
        window=4,
        softcap=-1.0,
    ),
    case(
        sliding_window_attention,
        "window must be a positive number of keys, got 2.5",
        *MACCHIATO[2:],
        window=2.5,
    ),
    case(
        sliding_window_attention,
        "a bidirectional window has no state",
        *MACCHIATO[2:],
        window=4,
        causal=False,
        output_final_state=True,
    ),
    case(linear_attention, "feature_map must be one of", q, k, v, feature_map="cosine"),
    case(rg_lru, "theta must have shape (E=4), got (3)", *[randn(2, 6, 4)] * 3, randn(3)),
    case(
        rg_lru,
        "initial_state.state must have shape (2, 4), got (1, 4)",
        *[randn(2, 6, 4)] * 3,
        randn(4),
        initial_state=randn(1, 4),
    ),
    case(causal_conv1d, "weight must have shape (E=4, K), got (3, 3)", randn(2, 6, 4), randn(3, 3)),
    case(attention_weights, "local q and k go together", *MACCHIATO[:3]),
    case(
        latte_attention,
        "initial_state.log_mass must be on cpu, got meta",
        q,
        k,
        v,
        initial_state=LatteState(*(x.to("meta") for x in STATE)),
    ),
    case(
        latte_attention,
        "initial_state.mean must be floating point, got torch.int64",
        q,
        k,
        v,
        initial_state=LatteState(STATE.log_mass, STATE.mean.long()),
    ),
    case(
        sliding_window_attention,
        "initial_state.mask must be bool, got torch.float32",
        *MACCHIATO[2:],
        window=3,
        initial_state=WindowState(randn(2, 2, 2, 6), randn(2, 2, 2, 5), torch.ones(2, 2)),
    ),
    case(linear_attention, "feature_map must be one of", q, k, v, feature_map=3),
    case(
        sliding_window_attention,
        "softcap must be None or a positive number, got 'a'",
        *MACCHIATO[2:],
        window=3,
        softcap="a",
    ),
    case(
        sliding_window_attention,
        "scale must be None or a finite number, got nan",
        *MACCHIATO[2:],
        window=3,
        scale=math.nan,
    ),
    case(
        macchiato_attention,
        "scale must be None or a finite number, got 'x'",
        *MACCHIATO,
        window=3,
        scale="x",
    ),
    case(
        sliding_window_attention,
        "window must be at most 9,223,372,036,854,775,807 keys, got 9,223,372,036,854,775,808",
        *MACCHIATO[2:],
        window=2**63,
    ),
    case(
        sliding_window_attention,
        "softcap must be None or a positive number, got inf",
        *MACCHIATO[2:],
        window=3,
        softcap=math.inf,
    ),
    case(
        sliding_window_attention,
        "initial_state.keys must have shape (2, 0, 2",
        *MACCHIATO[2:],
        window=None,
        initial_state=WindowState(randn(3), randn(3), torch.ones(3, dtype=torch.bool)),
    ),
    case(rg_lru, "theta must be on cpu, got meta", *[randn(2, 6, 4)] * 3, randn(4).to("meta")),
    case(rg_lru, "theta must be floating point", *[randn(2, 6, 4)] * 3, torch.ones(4).long()),
    case(causal_conv1d, "weight must be on cpu", randn(2, 6, 4), randn(4, 3).to("meta")),
    case(causal_conv1d, "bias must be floating", randn(2, 6, 4), randn(4, 3), torch.ones(4).bool()),
]


@pytest.mark.parametrize(("fn", "args", "options", "text"), CASES)
def test_bad_arguments_are_told_in_one_line(fn, args, options, text):
    with pytest.raises(ValueError) as error:
        fn(*args, **options)
    message = str(error.value)
    assert text in message.replace(",)", ")"), message
    assert "\n" not in message and message.startswith(fn.__name__)


NO_WIDTH = [
    (latte_attention, (q[..., :0], k[..., :0], v), "L=0"),
    (latte_attention, (q, k, v[..., :0]), "D=0"),
    (
        macchiato_attention,
        (*MACCHIATO[:2], *(x[..., :0] for x in MACCHIATO[2:4]), MACCHIATO[4]),
        "K=0",
    ),
    (sliding_window_attention, tuple(x[..., :0] for x in (q, k, v)), "K=0, D=0"),
    (linear_attention, (q[..., :0], k[..., :0], v), "F=0"),
    (attention_weights, (q[..., :0], k[..., :0]), "L=0"),
]


@pytest.mark.parametrize(("fn", "args", "came"), NO_WIDTH)
def test_widths_are_at_least_one(fn, args, came):
    options = {"window": 3} if fn is sliding_window_attention else {}
    with pytest.raises(ValueError, match=f"at least 1, got .*{came}"):
        fn(*args, **options)


WHOLE = torch.tensor([0, q.shape[1]], dtype=torch.int32)
FORWARD = [
    (latte_attention, (q, k, v), {"causal": True}),
    (latte_attention, (q, k, v), {"causal": False}),
    (macchiato_attention, MACCHIATO, {"window": 3}),
    (sliding_window_attention, MACCHIATO[2:], {"window": 3}),
    (rg_lru, (*(randn(1, 6, 4, seed=s) for s in range(3)), randn(4)), {}),
    (linear_attention, (q[:1], k[:1], v[:1]), {"feature_map": "exp", "cu_seqlens": WHOLE}),
]


@pytest.mark.parametrize(("fn", "args", "options"), FORWARD)
def test_forward_mode_is_refused_where_it_would_give_zeros(fn, args, options):
    def through(i, backend):
        def op(x):
            return fn(*args[:i], x, *args[i + 1 :], backend=backend, **options)[0]

        return torch.func.jvp(op, (args[i],), (randn(*args[i].shape, seed=5),))[1]

    for i in range(len(args)):
        with pytest.raises(NotImplementedError, match="need backend='reference'"):
            through(i, "torch")
    assert through(0, "reference").abs().max() > 0


@pytest.mark.parametrize(("fn", "args", "options"), FORWARD[:-1])
def test_gradients_by_torch_func_name_the_backend_that_has_them(fn, args, options):
    def gradient(**backend):
        return torch.func.grad(lambda x: fn(x, *args[1:], **backend, **options)[0].sum())(args[0])

    for backend in ({}, {"backend": "torch"}):
        with pytest.raises(NotImplementedError, match="torch.func need backend='reference'"):
            gradient(**backend)
    x = args[0].detach().clone().requires_grad_()
    (exact,) = torch.autograd.grad(fn(x, *args[1:], **options)[0].sum(), x)
    torch.testing.assert_close(gradient(backend="reference"), exact)


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError):
        latte_attention(q, k, v, chunk_size=64)
