"""Sinks beside the window, and latents that see a source when it leaves the window.

Every backend against the fp64 reference, values and all gradients; then laws, and the equation
spelled out with loops.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    flat,
    key_mask,
    latte_state,
    macchiato_inputs,
    randn,
    relative_error,
    values_and_gradients,
    window_state,
)

from latte.ops import (
    LatteState,
    Sinks,
    WindowState,
    cpp_backend,
    macchiato_attention,
    sliding_window_attention,
)
from latte.ops.torch_backend import macchiato as torch_macchiato
from latte.ops.torch_backend.window import window_op as torch_window_op

NATIVE = pytest.mark.skipif(cpp_backend.ABSENT is not None, reason="no native kernels")
FAST = pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=NATIVE)])
FLAGS = pytest.mark.parametrize(
    ("masked", "packed", "carried"),
    [(m, p, c) for m in (False, True) for p in (False, True) for c in (False, True)],
)
KINDS = pytest.mark.parametrize("kind", ["sinks", "delay", "both", "window"])


def sink_inputs(B, T, N, n, H, G, K, D, seed=40, scale=1.0):
    """Queries (B, T, H, K), keys (N, n, G, K) and values (N, n, G, D) of sinks."""
    shapes = ((B, T, H, K), (N, n, G, K), (N, n, G, D))
    q, k, v = (randn(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    return [q * scale, k * scale, v]


def attend(backend, kind, window, around, **options):
    """A function of an op's inputs, sinks and state, as far as the kind has them.

    Args:
        around: what has no gradient: masks of sinks, tail and pending sources, and positions.
    """
    options = {"output_final_state": True, "backend": backend, "window": window, **options}
    sink_mask, position, tail_mask, pending_mask = around

    def run(*tensors):
        tensors = list(tensors)
        given = {}
        inputs = [tensors.pop(0) for _ in range(3 if kind == "window" else 5)]
        if kind != "delay":
            given["sinks"] = Sinks(*(tensors.pop(0) for _ in range(3)), sink_mask, position)
        if kind == "window":
            if tensors:
                given["initial_state"] = WindowState(*tensors, tail_mask)
            return sliding_window_attention(*inputs, **given, **options)
        given["delay"] = kind != "sinks"
        if tensors:
            state = [LatteState(*tensors[:2]), WindowState(*tensors[2:4], tail_mask)]
            if given["delay"]:
                state.append(WindowState(*tensors[4:6], pending_mask))
            given["initial_state"] = tuple(state)
        return macchiato_attention(*inputs, **given, **options)

    return run


def case(
    kind,
    T,
    window,
    *,
    n=3,
    masked=False,
    packed=False,
    carried=False,
    scale=1.0,
    decay=None,
    **more,
):
    """A function of the backend's name, to values and gradients."""
    sizes = {"H": 4, "G": 2, "L": 3, "K": 6, "D": 5} | {
        name: more.pop(name) for name in list(more) if name in "HGLKD"
    }
    H, G, L, K, D = sizes.values()
    B, cu = (1, boundaries(T)) if packed else (2, None)
    N = B if cu is None else len(cu) - 1
    inputs = [*macchiato_inputs(B, T, **sizes, scale=scale)][2 if kind == "window" else 0 :]
    inputs += sink_inputs(B, T, N, n, H, G, K, D, scale=scale) if kind != "delay" else []
    sink_mask = torch.ones(N, n, dtype=torch.bool)
    sink_mask[0, n // 2 :] = False
    position = tail_mask = pending_mask = None
    if carried:
        position = torch.arange(N) * (window // 2) + n
        keys, values, tail_mask = window_state(N, window - 1, G, K, D)
        latents = latte_state(N, H, L, D)
        latents.log_mass[-1], latents.mean[-1] = -torch.inf, 0.0
        inputs += [] if kind == "window" else [*latents]
        inputs += [keys, values]
        if kind in ("delay", "both"):
            pending_mask = randn(N, window, seed=31) > -0.5
            inputs += [randn(N, window, H, L, seed=32), randn(N, window, G, D, seed=33)]
    options = {"key_mask": key_mask(B, T) if masked else None, "cu_seqlens": cu, **more}
    if decay is not None and kind != "window":
        shape = (H, L) if decay == "static" else (B, T, H, L)
        options["log_decay"] = -randn(*shape, seed=50).abs()
    around = (sink_mask, position, tail_mask, pending_mask)

    def run(backend, dtype=F64, computed=None):
        """``computed``: in this dtype, of the inputs rounded to ``dtype``."""
        fn = attend(backend, kind, window, around, **options)
        return values_and_gradients(fn, [x.to(dtype).to(computed or dtype) for x in inputs])

    return run


@FLAGS
@KINDS
@FAST
def test_it_agrees_with_the_reference(backend, kind, masked, packed, carried):
    options = {"masked": masked, "packed": packed, "carried": carried}
    small = [(T, 7) for T in (1, 6, 7, 8, 3 * 7 + 5)]
    for T, W in (*small, (130, 64), (140, 65), (66, 1), (70, 100)):
        run = case(kind, T, W, **options)
        assert_same(run(backend), run("reference"))


@FLAGS
@FAST
def test_a_soft_cap_and_large_logits_agree_with_the_reference(backend, masked, packed, carried):
    options = {"masked": masked, "packed": packed, "carried": carried}
    for more in ({"softcap": 2.0}, {"scale": 100.0}, {"n": 19}):
        run = case("both", 90, 20, **options, **more)
        assert_same(run(backend), run("reference"))


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize(("L", "K", "D"), [(1, 1, 1), (16, 64, 32), (33, 17, 96)])
@FAST
def test_odd_widths_and_groups_agree_with_the_reference(backend, G, L, K, D):
    run = case("both", 70, 20, G=G, L=L, K=K, D=D, masked=True, carried=True)
    assert_same(run(backend), run("reference"))


@pytest.mark.parametrize(("masked", "packed", "carried"), [(0, 0, 0), (1, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("kind", ["sinks", "delay", "both"])
@FAST
def test_one_softmax_agrees_with_the_reference(backend, kind, masked, packed, carried):
    options = {"masked": masked, "packed": packed, "carried": carried, "joint": True}
    for T, W, more in ((6, 7, {}), (26, 7, {"softcap": 2.0}), (140, 65, {}), (70, 20, {"G": 4})):
        run = case(kind, T, W, **options, **more)
        assert_same(run(backend), run("reference"))


@FLAGS
@pytest.mark.parametrize("decay", ["static", "gated"])
@FAST
def test_delayed_latents_may_forget(backend, decay, masked, packed, carried):
    for T, W in ((40, 7), (150, 64)):
        options = {"masked": masked, "packed": packed, "carried": carried, "decay": decay}
        run = case("both", T, W, **options)
        assert_same(run(backend), run("reference"))


@KINDS
@FAST
def test_tokens_by_the_thousand_agree_with_the_reference(backend, kind):
    """Several segments, and heads that go through them together."""
    run = case(kind, 1100, 70, H=2, G=1, L=2)
    assert_same(run(backend), run("reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@KINDS
@FAST
def test_low_precision_errs_at_most_twice_the_reference(backend, kind, dtype):
    run = case(kind, 257, 64, L=5, K=32, D=32)
    want = run("reference", dtype, F64)
    found, judge = run(backend, dtype), run("reference", dtype)
    for a, b, e in zip(found, judge, want, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e) + torch.finfo(torch.float32).eps


W = 6


def sequence(T, n=2, B=2, seed=0):
    """Macchiato's inputs, the sinks' queries, and their keys and values: the first n tokens'."""
    inputs = list(macchiato_inputs(B, T, seed=seed))
    return inputs, randn(B, T, 4, 6, seed=seed + 20), [x[:, :n] for x in inputs[3:]]


def mix(inputs, sink_q, kept, position=None, **options):
    """Both branches, delayed, with sinks that are all there."""
    mask = torch.ones(kept[0].shape[:2], dtype=torch.bool)
    sinks = Sinks(sink_q, *kept, mask, position)
    return macchiato_attention(*inputs, window=W, sinks=sinks, delay=True, **options)


@pytest.mark.parametrize("decay", [None, "static"])
@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("cpu", marks=NATIVE)])
def test_it_is_the_equation(backend, decay):
    """Spelled out with loops; a decay that stands still counts the tokens since the source."""
    T, n = 17, 2
    inputs, sink_q, kept = sequence(T, n, 1)
    latent_q, latent_k, q, k, v = inputs
    g = None if decay is None else -randn(4, 3, seed=60).abs()
    out, _ = mix(inputs, sink_q, kept, log_decay=g, backend=backend)
    for t in range(T):
        for h in range(4):
            near = range(max(0, t - W + 1), t + 1)
            far = [j for j in range(n) if t - j >= W]
            logits = [sink_q[0, t, h] @ kept[0][0, j, h // 2] for j in far]
            logits = torch.stack(logits + [q[0, t, h] @ k[0, s, h // 2] for s in near]) / 6**0.5
            values = torch.stack(
                [kept[1][0, j, h // 2] for j in far] + [v[0, s, h // 2] for s in near]
            )
            y = logits.softmax(-1) @ values
            if t >= W:
                p = latent_q[0, t, h].softmax(-1)
                past = torch.arange(t - W + 1)
                y = p[0] * y
                for latent in range(3):
                    weights = latent_k[0, past, h, latent]
                    weights = weights if g is None else weights + g[h, latent] * (t - past)
                    y = y + p[latent + 1] * (weights.softmax(-1) @ v[0, past, h // 2])
            assert_same([out[0, t, h]], [y], 1e-12)


@FAST
@pytest.mark.parametrize("cut", [0, 1, 2, W - 1, W, W + 1, 3 * W, 64, 70])
def test_split_is_whole(backend, cut):
    (inputs, sink_q, kept), g = sequence(71), -randn(2, 71, 4, 3, seed=61).abs()
    options = {"output_final_state": True, "backend": backend}
    whole, last = mix(inputs, sink_q, kept, log_decay=g, **options)
    first, state = mix(
        [x[:, :cut] for x in inputs], sink_q[:, :cut], kept, log_decay=g[:, :cut], **options
    )
    rest, end = mix(
        *([x[:, cut:] for x in inputs], sink_q[:, cut:], kept, torch.full((2,), cut)),
        **{"log_decay": g[:, cut:], "initial_state": state, **options},
    )
    assert_same([torch.cat([first, rest], 1), *flat(end)], [whole, *flat(last)], 1e-12)
    assert torch.equal(end[2].mask, last[2].mask)


@FAST
def test_gradients_flow_through_a_split(backend):
    inputs, sink_q, kept = sequence(30)
    leaves = [x.requires_grad_() for x in (*inputs, sink_q)]

    def whole(*xs):
        return mix(xs[:5], xs[5], [x[:, :2] for x in xs[3:5]], backend=backend)[0]

    def split(*xs):
        kept, state, outs = [x[:, :2] for x in xs[3:5]], None, []
        for start, stop in ((0, 4), (4, 5), (5, 17), (17, 30)):
            at = torch.full((2,), start)
            options = {"initial_state": state, "output_final_state": True, "backend": backend}
            part = [x[:, start:stop] for x in xs]
            out, state = mix(part[:5], part[5], kept, at, **options)
            outs.append(out)
        return torch.cat(outs, 1)

    assert_same(values_and_gradients(split, leaves), values_and_gradients(whole, leaves))


@FAST
def test_packed_is_separate(backend):
    T, bounds = 40, torch.tensor([0, 3, 3, 24, 25, 40], dtype=torch.int32)
    inputs, sink_q, _ = sequence(T, B=1)
    starts = bounds[:-1].long().clamp_max(T - 2)
    kept = [torch.stack([x[0, s : s + 2] for s in starts.tolist()]) for x in inputs[3:]]
    mask = (starts[:, None] + torch.arange(2)) < bounds[1:, None]
    options = {"window": W, "delay": True, "backend": backend}
    sinks = Sinks(sink_q, *kept, mask)
    packed, _ = macchiato_attention(*inputs, sinks=sinks, cu_seqlens=bounds, **options)
    for i in (0, 2, 3, 4):
        own, n = slice(int(bounds[i]), int(bounds[i + 1])), slice(i, i + 1)
        sinks = Sinks(sink_q[:, own], *(x[n] for x in kept), mask[n])
        alone, _ = macchiato_attention(*(x[:, own] for x in inputs), sinks=sinks, **options)
        assert_same([packed[:, own]], [alone], 1e-12)


@FAST
def test_padded_is_unpadded(backend):
    inputs, sink_q, kept = sequence(30)
    plain, _ = mix(inputs, sink_q, kept, backend=backend)
    longer = [torch.cat([torch.full_like(x[:, :7], 3.0), x], 1) for x in (*inputs, sink_q)]
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[:, :7] = False
    padded, _ = mix(longer[:5], longer[5], kept, key_mask=mask, backend=backend)
    assert_same([padded[:, 7:]], [plain], 1e-12)
    assert torch.equal(padded[:, :7], torch.zeros_like(padded[:, :7]))


@FAST
def test_rows_sum_to_one(backend):
    inputs, sink_q, kept = sequence(100)
    inputs[4], kept[1] = torch.ones_like(inputs[4]), torch.ones_like(kept[1])
    out, _ = mix(inputs, sink_q, kept, backend=backend)
    assert (out - 1).abs().max() < 1e-12


@FAST
def test_the_future_cannot_change_the_past(backend):
    inputs, sink_q, kept = sequence(200, n=3)
    out, _ = mix(
        [x.float() for x in inputs], sink_q.float(), [x.float() for x in kept], backend=backend
    )
    for cut in (1, 5, 6, 64, 70, 133):
        bad = math.nan if backend == "cpu" else 1e3  # PyTorch's chunks multiply by zeros
        changed = [torch.cat([x[:, :cut], bad * x[:, cut:]], 1).float() for x in (*inputs, sink_q)]
        first = [x[:, :3] for x in changed[3:5]]
        after, _ = mix(changed[:5], changed[5], first, backend=backend)
        assert torch.equal(after[:, :cut], out[:, :cut])


@FAST
def test_a_query_without_sources_gets_zeros(backend):
    inputs, sink_q, kept = sequence(20)
    leaves = [x.requires_grad_() for x in (*inputs, sink_q)]
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0] = False
    sinks = Sinks(sink_q, *kept, mask[:, :2])
    out, _ = macchiato_attention(
        *inputs, window=W, sinks=sinks, delay=True, key_mask=mask, backend=backend
    )
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert all(torch.equal(g[0], torch.zeros_like(g[0])) for g in grads)


@FAST
def test_a_sequence_that_is_not_finite_stays_alone(backend):
    inputs, sink_q, _ = sequence(130, B=3)
    leaves = [x.float() for x in (*inputs, sink_q)]

    def run(*xs):
        out, _ = mix(xs[:5], xs[5], [x[:, :2] for x in xs[3:5]], backend=backend)
        return out[[0, 2]]

    sound = values_and_gradients(run, leaves)
    for x in leaves:
        x[1, 65], x[1, 0] = math.nan, math.inf
    for x, y in zip(values_and_gradients(run, leaves), sound, strict=True):
        x, y = (z if len(z) == 2 else z[[0, 2]] for z in (x, y))
        torch.testing.assert_close(x, y)


@NATIVE
def test_bits_do_not_depend_on_other_heads():
    """Of long sequences, which several heads go through together."""
    inputs = [x.float() for x in macchiato_inputs(2, 1100, 5, 5)]
    sink_q, sink_k, sink_v = (x.float() for x in sink_inputs(2, 1100, 2, 3, 5, 5, 6, 5))
    position = torch.zeros(2, dtype=torch.long)
    fn = attend("cpu", "both", 70, (torch.ones(2, 3, dtype=torch.bool), position, None, None))
    tensors = (*inputs, sink_q, sink_k, sink_v)
    together = values_and_gradients(lambda *xs: fn(*xs)[0], tensors)
    for h in range(5):
        alone = values_and_gradients(lambda *xs: fn(*xs)[0], [x[:, :, h : h + 1] for x in tensors])
        assert torch.equal(alone[0], together[0][:, :, h : h + 1])


@NATIVE
def test_bits_do_not_depend_on_strides_or_old_memory():
    tensors = [*macchiato_inputs(2, 150), *sink_inputs(2, 150, 2, 3, 4, 2, 6, 5)]
    tensors += [*latte_state(2, 4, 3, 5), *window_state(2, 69, 2, 6, 5)[:2]]
    tensors = [x.float() for x in (*tensors, randn(2, 70, 4, 3), randn(2, 70, 2, 5))]
    masks = [torch.ones(2, n, dtype=torch.bool) for n in (3, 69, 70)]
    around = (masks[0], torch.tensor([0, 80]), *masks[1:])
    fn = attend("cpu", "both", 70, around, key_mask=key_mask(2, 150))
    wanted = values_and_gradients(fn, tensors)
    _ = [torch.full_like(x, math.nan) for x in wanted]
    found = values_and_gradients(lambda *xs: fn(*(x.mT.contiguous().mT for x in xs)), tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_gradients_by_differences_and_of_gradients():
    backend = None if cpp_backend.ABSENT is None else "reference"
    cu = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    inputs = [*macchiato_inputs(1, 6, 2, 1, 2, 3, 2), *sink_inputs(1, 6, 3, 2, 2, 1, 3, 2)]
    inputs += [randn(3, 2, 2), randn(3, 2, 2, 2), randn(3, 1, 1, 3), randn(3, 1, 1, 2)]
    inputs += [randn(3, 2, 2, 2), randn(3, 2, 1, 2)]
    masks = [randn(3, n, seed=n) > -1.0 for n in (2, 1, 2)]
    around = (masks[0], torch.tensor([0, 5, 1]), *masks[1:])
    fn = attend(backend, "both", 2, around, cu_seqlens=cu, softcap=1.5)

    def outputs(*xs):
        out, (latents, *_) = fn(*xs)
        return out, *latents

    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(outputs, leaves)
    few = [*macchiato_inputs(1, 4, 1, 1, 2, 2, 1), *sink_inputs(1, 4, 1, 1, 1, 1, 2, 1)]
    fn = attend(backend, "both", 2, (torch.ones(1, 1, dtype=torch.bool), None, None, None))
    leaves = [x.requires_grad_() for x in few]
    assert torch.autograd.gradgradcheck(lambda *xs: fn(*xs)[0], leaves)


@pytest.mark.parametrize("packed", [False, True])
@FAST
def test_it_compiles_in_one_graph(backend, packed):
    torch._dynamo.reset()
    B, cu = (1, boundaries(20)) if packed else (2, None)
    N = B if cu is None else len(cu) - 1
    around = (torch.ones(N, 2, dtype=torch.bool), torch.arange(N), None, None)
    options = {"key_mask": key_mask(B, 20), "cu_seqlens": cu}
    inputs = [*macchiato_inputs(B, 20), *sink_inputs(B, 20, N, 2, 4, 2, 6, 5)]
    fn = attend(backend, "both", 8, around, **options)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    assert_same(values_and_gradients(compiled, inputs), values_and_gradients(fn, inputs))


@NATIVE
def test_native_ops_keep_the_contract_of_a_custom_op():
    kinds, bounds = ["test_schema", "test_faketensor"], boundaries(20).long()
    inputs = [x.requires_grad_() for x in macchiato_inputs(1, 20)]
    sinks = sink_inputs(1, 20, 6, 2, 4, 2, 6, 5)
    sinks += [torch.ones(6, 2, dtype=torch.bool), torch.full((1, 20), 2)]
    pending = [randn(6, 8, 4, 3), randn(6, 8, 2, 5), torch.ones(6, 8, dtype=torch.bool)]
    around = [key_mask(1, 20), bounds, *latte_state(6, 4, 3, 5), None]
    tail = window_state(6, 7, 2, 6, 5)
    args = (*inputs, *around, *tail, *sinks, *pending, 8, 0.4, 0.0, True, True)
    checks = torch.library.opcheck(cpp_backend.macchiato_op, args, test_utils=kinds)
    args = (*inputs[2:], *around[:2], *tail, *sinks, 8, 0.4, 0.0)
    checks |= torch.library.opcheck(cpp_backend.window_op, args, test_utils=kinds)
    assert set(checks.values()) == {"SUCCESS"}


def test_ops_of_pytorch_keep_their_contracts():
    inputs = [x.requires_grad_() for x in macchiato_inputs(2, 20)]
    sinks = sink_inputs(2, 20, 2, 2, 4, 2, 6, 5)
    sinks = [x.requires_grad_() for x in sinks]
    sinks += [torch.ones(2, 2, dtype=torch.bool), torch.full((2, 20), 2)]
    none, local = [None] * 5, (8, 0.4, 0.0)
    checks = torch.library.opcheck(torch_window_op, (*inputs[2:], *none, *sinks, *local, True))
    late = [randn(2, 20, 2, 5).requires_grad_(), key_mask(2, 20), key_mask(2, 20)]
    args = (*inputs, *none, *[None] * 3, *sinks, *late, *local)
    checks |= torch.library.opcheck(torch_macchiato.causal_op, args)
    assert set(checks.values()) == {"SUCCESS"}


def test_what_does_not_fit_is_one_clear_line():
    inputs, sink_q, kept = sequence(9)
    mask = torch.ones(2, 2, dtype=torch.bool)
    sinks = Sinks(sink_q, *kept, mask)
    cases = [
        ("sinks must be a tuple (q, keys, values, mask, position)", {"sinks": kept}),
        ("sinks.q must have shape (B=2, T=9", {"sinks": sinks._replace(q=sink_q[:, 1:])}),
        ("sinks.keys must have shape (N=2", {"sinks": sinks._replace(keys=kept[0][:1])}),
        ("sinks.mask must be bool", {"sinks": sinks._replace(mask=mask.long())}),
        ("sinks.position must be int64", {"sinks": sinks._replace(position=torch.zeros(2))}),
        ("sinks.q must have the dtype of q", {"sinks": sinks._replace(q=sink_q.float())}),
        ("sinks need causal=True", {"sinks": sinks, "causal": False}),
        ("delay needs causal=True", {"delay": True, "causal": False}),
        ("as delay=True makes it", {"delay": True, "initial_state": (None, None)}),
    ]
    for message, options in cases:
        with pytest.raises(ValueError) as error:
            macchiato_attention(*inputs, window=W, **options)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="sinks need a window"):
        sliding_window_attention(*inputs[2:], window=None, sinks=sinks)


def test_no_sinks_are_none():
    inputs, sink_q, kept = sequence(9)
    none = Sinks(sink_q, *(x[:, :0] for x in kept), torch.ones(2, 0, dtype=torch.bool))
    plain, _ = sliding_window_attention(*inputs[2:], window=W)
    assert torch.equal(sliding_window_attention(*inputs[2:], window=W, sinks=none)[0], plain)
    empty = [x[:, :0] for x in inputs]
    sinks = Sinks(sink_q[:, :0], *kept, torch.ones(2, 2, dtype=torch.bool))
    out, state = macchiato_attention(
        *empty, window=W, sinks=sinks, delay=True, output_final_state=True
    )
    assert out.shape == (2, 0, 4, 5) and not state[2].mask.any()
    again, _ = mix(inputs, sink_q, kept, initial_state=state)
    assert_same([again], [mix(inputs, sink_q, kept)[0]], 1e-12)
