"""Bad arguments: one clear ValueError each, that says what was expected and what came."""

from __future__ import annotations

import math

import pytest
import torch

from latte.ops import (
    LatteState,
    MacchiatoState,
    Partition,
    Sinks,
    WindowState,
    attention_weights,
    causal_conv1d,
    latte_attention,
    linear_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
    window_log_mass,
)
from tests.ops.helpers import latte_inputs, latte_state, macchiato_inputs, randn

q, k, v = latte_inputs(2, 6)
MACCHIATO = macchiato_inputs(2, 6)
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
STATE = latte_state(2, 2, 3, 5)
LATENTS, TAIL = latte_state(2, 4, 3, 5), WindowState.empty(*MACCHIATO[3:], 3)
PENDING = WindowState.empty(MACCHIATO[1], MACCHIATO[4], 4)
SINKS = Sinks(randn(2, 6, 4, 6), *(x[:, :2] for x in MACCHIATO[3:]), torch.ones(2, 2).bool())
LATE, JOINT = Partition(delay=True), Partition(joint=True)


def bad(fn, **given):
    """Rows of the table for calls of ``fn``: the text of the error, and what it is about."""

    def row(text, **changes):
        return pytest.param(fn, given | changes, text, id=f"{fn.__name__}: {text}")

    return row


named = dict(zip(("latent_q", "latent_k", "q", "k", "v"), MACCHIATO, strict=True))
near = {name: named[name] for name in "qkv"}
latte, one = bad(latte_attention, q=q, k=k, v=v), {"q": q[:1], "k": k[:1], "v": v[:1]}
macchiato = bad(macchiato_attention, **named, window=3)
window = bad(sliding_window_attention, **near, window=3)
mass = bad(window_log_mass, q=near["q"], k=near["k"], window=3)
linear = bad(linear_attention, q=q, k=k, v=v)
gates = dict.fromkeys(("x", "recurrence_gate", "input_gate"), randn(2, 6, 4))
lru = bad(rg_lru, **gates, theta=randn(4))
conv = bad(causal_conv1d, x=gates["x"], weight=randn(4, 3))
far = {"latent_q": MACCHIATO[0], "latent_k": MACCHIATO[1]}
forgets = bad(latte_attention, q=q, k=k, v=v, log_decay=torch.zeros(2, 3))
late = bad(macchiato_attention, **named, window=3, partition=LATE)
came_out = "as delay=True makes it, that came out, got 2 parts"


def with_sinks(**changes):
    return Partition(SINKS._replace(**changes))


CASES = [
    latte("q must have shape (B, T, H, L), got (2, 6, 2)", q=q[..., 0]),
    latte("k must have shape (B=2, T=6, H=2, L=3), got (2, 6, 2, 2)", k=k[..., :2]),
    latte("v must have shape (B=2, T=6, G, D), got (2, 5, 2, 5)", v=v[:, :5]),
    latte("v must have a number of heads that divides 2, got 3", v=randn(2, 6, 3, 5)),
    latte("q must be float32, bfloat16, float16 or float64", q=q.long()),
    latte("k must have the dtype of q, torch.float64, got torch.float32", k=k.float()),
    latte("v must be on the device of q, cpu, got meta", v=v.to("meta")),
    latte("backend must be None or one of", backend="cuda"),
    latte("backend 'triton' is not available", backend="triton"),
    latte("key_mask must have shape (B=2, T=6)", key_mask=torch.ones(2, 5).bool()),
    latte("key_mask must be bool", key_mask=torch.ones(2, 6)),
    latte("need a batch of 1, got 2", cu_seqlens=CU),
    latte("must rise from 0 to T=6", **one, cu_seqlens=CU[:2]),
    latte("cu_seqlens must be int32", **one, cu_seqlens=CU.float()),
    latte("cu_seqlens must be a tensor (N+1)", **one, cu_seqlens=[0, 6]),
    latte("initial_state must be a tuple (log_mass, mean)", initial_state=STATE.mean),
    latte(
        "initial_state.mean must have shape (2, 2, 3, 5), got (2, 2, 3, 4)",
        initial_state=LatteState(STATE.log_mass, STATE.mean[..., :4]),
    ),
    latte(
        "initial_state.log_mass must be on cpu, got meta",
        initial_state=LatteState(*(x.to("meta") for x in STATE)),
    ),
    latte(
        "initial_state.mean must be floating point, got torch.int64",
        initial_state=LatteState(STATE.log_mass, STATE.mean.long()),
    ),
    forgets("log_decay needs causal=True", causal=False),
    forgets("log_decay must have shape (H=2, L=3), got (3, 2)", log_decay=torch.zeros(3, 2)),
    forgets("log_decay must have shape (B=2", log_decay=torch.zeros(2, 5, 2, 3)),
    forgets("must be at most 0, got values up to 0.5", log_decay=torch.full((2, 3), 0.5)),
    forgets("up to inf", log_decay=torch.tensor([[-1.0, torch.nan, torch.inf]] * 2)),
    forgets("log_decay must be float32", log_decay=torch.zeros(2, 3).long()),
    forgets("log_decay must be a tensor", log_decay=0.5),
    macchiato("L+1=4), one column more", latent_q=MACCHIATO[0][..., 1:]),
    macchiato("window must be a positive number of keys, got 0", window=0),
    macchiato("initial_state must be the tuple", initial_state=STATE.mean),
    macchiato("scale must be None or a finite number, got 'x'", scale="x"),
    macchiato("that came out, got 3 parts", initial_state=MacchiatoState(LATENTS, TAIL, PENDING)),
    macchiato("that came out, got 1 parts", initial_state=MacchiatoState(LATENTS)),
    macchiato("partition must be a Partition, got tuple", partition=(None, True, False)),
    macchiato("joint needs causal=True, got False", partition=JOINT, causal=False),
    macchiato(
        "joint takes cu_seqlens or initial_state, got both",
        **{name: x[:1] for name, x in named.items()},
        partition=JOINT,
        cu_seqlens=CU[[0, 2]],
        initial_state=tuple(type(x)(*(y[:1] for y in x)) for x in (LATENTS, TAIL)),
    ),
    late("delay needs causal=True", causal=False),
    late("as delay=True makes it", initial_state=(None, None)),
    late(came_out, initial_state=MacchiatoState(LATENTS, TAIL)),
    late(
        "initial_state.values must have shape (2, 3, 2, 5), got (2, 2, 2, 5)",
        initial_state=MacchiatoState(LATENTS, TAIL, PENDING._replace(values=PENDING[1][:, :2])),
    ),
    macchiato(
        "sinks must be a tuple (q, keys, values, mask, position)",
        partition=Partition([*SINKS[1:3]]),
    ),
    macchiato("sinks.q must have shape (B=2, T=6", partition=with_sinks(q=SINKS.q[:, 1:])),
    macchiato("sinks.keys must have shape (N=2", partition=with_sinks(keys=SINKS.keys[:1])),
    macchiato("sinks.mask must be bool", partition=with_sinks(mask=SINKS.mask.long())),
    macchiato("sinks.position must be int64", partition=with_sinks(position=torch.zeros(2))),
    macchiato("sinks.q must have the dtype of q", partition=with_sinks(q=SINKS.q.float())),
    macchiato("sinks need causal=True", partition=with_sinks(), causal=False),
    window("softcap must be None or a positive", softcap=-1.0),
    window("softcap must be None or a positive number, got 'a'", softcap="a"),
    window("softcap must be None or a positive number, got inf", softcap=math.inf),
    window("scale must be None or a finite number, got nan", scale=math.nan),
    window("window must be a positive number of keys, got 2.5", window=2.5),
    window(
        "window must be at most 9,223,372,036,854,775,807 keys, got 9,223,372,036,854,775,808",
        window=2**63,
    ),
    window("a bidirectional window has no state", causal=False, output_final_state=True),
    window(
        "initial_state.mask must be bool, got torch.float32",
        initial_state=TAIL._replace(mask=torch.ones(2, 2)),
    ),
    window(
        "initial_state.keys must have shape (2, 0, 2",
        window=None,
        initial_state=WindowState(randn(3), randn(3), torch.ones(3).bool()),
    ),
    window("sinks need a window", window=None, partition=with_sinks()),
    window("must have sinks alone, because there are no latents, got delay=True", partition=LATE),
    mass("got delay=False, joint=True", partition=JOINT),
    mass(
        "initial_state.keys must have shape", initial_state=WindowState(*(x[:, 1:] for x in TAIL))
    ),
    mass(
        "initial_state.keys must have shape (2", initial_state=WindowState(*(x[:1] for x in TAIL))
    ),
    mass("initial_state must be a tuple", initial_state="x"),
    mass("sinks.q must have shape", partition=with_sinks(q=SINKS.q[:, :3])),
    linear("feature_map must be one of", feature_map="cosine"),
    linear("feature_map must be one of ('elu'", feature_map=3),
    lru("theta must have shape (E=4), got (3)", theta=randn(3)),
    lru("theta must be on cpu, got meta", theta=randn(4).to("meta")),
    lru("theta must be floating point", theta=torch.ones(4).long()),
    lru("initial_state.state must have shape (2, 4), got (1, 4)", initial_state=randn(1, 4)),
    conv("weight must have shape (E=4, K), got (3, 3)", weight=randn(3, 3)),
    conv("weight must be on cpu", weight=randn(4, 3).to("meta")),
    conv("bias must be floating", bias=torch.ones(4).bool()),
    bad(attention_weights, **far)("local q and k go together", q=MACCHIATO[2]),
]


@pytest.mark.parametrize(("fn", "given", "text"), CASES)
def test_bad_arguments_are_told_in_one_line(fn, given, text):
    with pytest.raises(ValueError) as error:
        fn(**given)
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
