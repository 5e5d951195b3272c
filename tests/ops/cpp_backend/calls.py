"""Random valid calls of every native op, forward and backward, and wrong ones made of them.

Sizes are odd, strides any, tensors may be empty, sequences packed, masked and carried on. A call is
a function of its seed alone: numbers are uniform, of which PyTorch makes the same ones whatever
instructions the processor has. For tests, and for ``tests/sanitize`` in a process of its own.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, N states, W window, E channels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from latte.ops import (
    Kept,
    LatteState,
    Partition,
    Sinks,
    WindowState,
    causal_conv1d,
    decoding,
    kept_step,
    latte_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
    step,
)
from latte.ops.quantised import PANEL, ordered, quantise
from latte.ops.tensors import computation_dtype
from tests.ops.helpers import threads

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
ops: Any = torch.ops.latte
HELD: list[decoding.Layers] = []  # so that their raw calls can be made again


class Draw:
    """Sizes, flags and tensors, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.one(F32, F32, BF16, F16, F64)
        self.leaves: list[Tensor] = []

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def often(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def uniform(self, *shape: int) -> Tensor:
        """Numbers from -2 to 2, fp64."""
        return torch.rand(*shape, generator=self.generator, dtype=F64) * 4 - 2

    def strided(self, x: Tensor) -> Tensor:
        """The same numbers, laid out in memory in one of several ways."""
        how = self.random.randrange(6)
        if how == 0 and x.ndim > 1:
            order = self.random.sample(range(x.ndim), x.ndim)
            back = [order.index(d) for d in range(x.ndim)]
            return x.permute(order).contiguous().permute(back)
        if how == 1 and x.ndim:
            wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
            wide[..., 1::2] = x
            return wide[..., 1::2]
        if how == 2:
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        if how == 3 and x.ndim and x.shape[0] > 1:
            return x[:1].expand(x.shape)
        return x

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An input: of the call's dtype, in any layout, and with a gradient."""
        return self.leaf(self.uniform(*shape).to(dtype or self.dtype))

    def leaf(self, x: Tensor) -> Tensor:
        self.leaves.append(self.strided(x).detach().requires_grad_())
        return self.leaves[-1]

    def written(self, *shape: int, wide: bool = False) -> Tensor:
        """A contiguous state, which a step of decoding writes."""
        return self.uniform(*shape).to(computation_dtype(self.dtype) if wide else self.dtype)

    def mask(self, *shape: int) -> Tensor:
        return self.strided(self.uniform(*shape) > -1.0)

    def sequences(self, B: int, T: int) -> tuple[dict[str, Tensor | None], int]:
        """A mask and bounds, or not; and how many sequences there are."""
        options: dict[str, Tensor | None] = {}
        if self.often():
            options["key_mask"] = self.mask(B, T)
        if B != 1 or self.often(0.4):
            return options, B
        N = self.one(1, 2, 5)
        bounds = [0, *sorted(self.random.randint(0, T) for _ in range(N - 1)), T]
        cu = torch.tensor(bounds, dtype=self.one(torch.int32, torch.int64))
        options["cu_seqlens"] = torch.stack([cu, cu], 1)[:, 0] if self.often() else cu
        return options, N

    def shape(self) -> tuple[int, int]:
        return self.one(1, 1, 1, 2, 3, 0), self.one(0, 1, 2, 31, 63, 64, 65, 130, 257, 520)

    def heads(self) -> tuple[int, int]:
        G = self.one(1, 2, 3)
        return G * self.one(1, 2), G

    def rotary(self, B: int, K: int) -> tuple[Tensor, Tensor]:
        """A table for one token of each row."""
        angles = self.uniform(self.one(1, B), 1, 1, K // 2).to(computation_dtype(self.dtype))
        return self.strided(angles.cos()), torch.cat([-angles.sin(), angles.sin()], 2)

    def with_gradients(self, outputs: Any) -> list[Tensor]:
        """The outputs and the gradients of all inputs."""
        found = [x for x in _flat(outputs) if x.is_floating_point()]
        ends = [x for x in found if x.requires_grad]
        slopes = [self.strided(self.uniform(*x.shape).to(x.dtype)) for x in ends]
        grads = torch.autograd.grad(ends, self.leaves, slopes, allow_unused=True)
        return [x.detach() for x in found] + [g for g in grads if g is not None]


class Long(Draw):
    """Few sequences of few heads, that many threads share in parts."""

    def shape(self) -> tuple[int, int]:
        return self.one(1, 1, 2), self.one(1025, 2100, 2304, 2600)

    def heads(self) -> tuple[int, int]:
        return self.one((1, 1), (2, 1), (2, 2))


def _flat(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [x for item in tree or () for x in _flat(item)]


def attention(draw: Draw, kind: str) -> list[Tensor]:
    """Latte, the window, or both."""
    (B, T), (H, G) = draw.shape(), draw.heads()
    if T == 520 and draw.often(0.2):
        T = 1100  # from here on heads walk together
    L, K, D = draw.one(1, 3, 16, 33), draw.one(1, 6, 32), draw.one(1, 5, 17, 64)
    options, N = draw.sequences(B, T)
    options |= {"backend": "cpu", "output_final_state": True}
    wide, state = computation_dtype(draw.dtype), []
    latents, near = kind != "window", kind != "latte"
    delay = kind == "macchiato" and draw.often()
    if latents and draw.often():
        given = [draw.uniform(N, H, L).to(wide), draw.uniform(N, H, L, D).to(wide)]
        if N:
            given[0][0], given[1][0] = -torch.inf, 0.0
        state.append(LatteState(*(draw.leaf(x) for x in given)))
    if latents and draw.often(0.4):
        options["log_decay"] = -draw.uniform(*draw.one((B, T, H, L), (H, L))).abs().to(wide)
    W = draw.one(1, 2, 17, 64, 65, 130, 300)
    if near:
        options |= {"window": W, "softcap": draw.one(None, 3.0), "scale": draw.one(None, 0.3)}
        if draw.often(0.4):
            n = draw.one(1, 4, 9)
            position = draw.one(None, torch.arange(N) * 70)
            keys = draw.floats(B, T, H, K), draw.floats(N, n, G, K), draw.floats(N, n, G, D)
            options["partition"] = Partition(Sinks(*keys, draw.mask(N, n), position))
        if kind == "window" and draw.often() or state:
            tail = draw.floats(N, W - 1, G, K), draw.floats(N, W - 1, G, D)
            state.append(WindowState(*tail, draw.mask(N, W - 1)))
        if state and delay:
            pending = draw.floats(N, W, H, L), draw.floats(N, W, G, D)
            state.append(WindowState(*pending, draw.mask(N, W)))
    if state:
        options["initial_state"] = tuple(state) if kind == "macchiato" else state[0]
    q, k, v = draw.floats(B, T, H, K), draw.floats(B, T, G, K), draw.floats(B, T, G, D)
    latent_k = draw.floats(B, T, H, L)
    if kind == "window":
        return draw.with_gradients(sliding_window_attention(q, k, v, **options))
    if kind == "latte":
        v = draw.floats(B, T, H, D)
        return draw.with_gradients(latte_attention(draw.floats(B, T, H, L), latent_k, v, **options))
    packed_on = "cu_seqlens" in options and "initial_state" in options
    joint = not packed_on and draw.often(0.3)
    divided = options.pop("partition", Partition())._replace(delay=delay, joint=joint)
    options["partition"] = divided
    inputs = draw.floats(B, T, H, L + 1), latent_k, q, k, v
    return draw.with_gradients(macchiato_attention(*inputs, **options))


def kept_tokens(draw: Draw) -> list[Tensor]:
    """The window with kept tokens, mostly with latents; some go on from a call before."""
    (B, T), (H, G) = draw.shape(), draw.heads()
    L, K, D, n = draw.one(1, 3, 16), draw.one(1, 6, 32), draw.one(1, 5, 64), draw.one(1, 4)
    W, count, C = draw.one(1, 2, 17, 65), draw.one(1, 3, 64), draw.one(1, 4, 64, 70)
    given, N = draw.sequences(B, T)
    far, decays, sinks = draw.often(0.8), draw.often(0.7), draw.often(0.7)
    keys = (draw.floats(N, n, G, K), draw.floats(N, n, G, D), draw.mask(N, n)) if sinks else ()
    local = {"window": W, "softcap": draw.one(None, 3.0), "scale": draw.one(None, 0.3)}
    local |= {"backend": "cpu", "output_final_state": True}

    def run(tokens: int, state: Any, options: dict[str, Any]) -> tuple[Tensor, Any]:
        shared = {"initial_state": state, **local, **options}
        scores = draw.uniform(B, tokens, G).round().masked_fill(draw.mask(B, tokens, G), -1)
        far_keys = Sinks(draw.floats(B, tokens, H, K), *keys) if sinks else None
        partition = Partition(far_keys, far, far, Kept(scores.to(draw.dtype), count, C))
        inputs = [draw.floats(B, tokens, *x) for x in ((H, K), (G, K), (G, D))]
        if not far:
            return sliding_window_attention(*inputs, partition=partition, **shared)
        latents = draw.floats(B, tokens, H, L + 1), draw.floats(B, tokens, H, L)
        decay = -draw.uniform(B, tokens, H, L).abs().to(computation_dtype(draw.dtype))
        shared["log_decay"] = draw.leaf(decay) if decays else None
        return macchiato_attention(*latents, *inputs, partition=partition, **shared)

    state = None
    if "cu_seqlens" not in given and draw.often(0.7):
        _, state = run(draw.one(1, 70, 150), None, {})
    return draw.with_gradients(run(T, state, given))


def recurrence(draw: Draw) -> list[Tensor]:
    (B, T), E = draw.shape(), draw.one(1, 7, 32, 65, 600)
    options, N = draw.sequences(B, T)
    if draw.often():
        options["initial_state"] = draw.floats(N, E, dtype=computation_dtype(draw.dtype))
    inputs = [draw.floats(B, T, E) for _ in range(3)] + [draw.floats(E)]
    options |= {"backend": "cpu", "output_final_state": True, "reverse": draw.often(0.4)}
    return draw.with_gradients(rg_lru(*inputs, **options))


def convolution(draw: Draw) -> list[Tensor]:
    (B, T), E, K = draw.shape(), draw.one(1, 7, 32, 65), draw.one(1, 2, 3, 5)
    options, N = draw.sequences(B, T)
    if draw.often():
        options["initial_state"] = draw.floats(N, K - 1, E)
    bias = draw.floats(E) if draw.often() else None
    options |= {"backend": "cpu", "output_final_state": True}
    inputs = draw.floats(B, T, E), draw.floats(E, K), bias
    return draw.with_gradients(causal_conv1d(*inputs, **options))


def steps(draw: Draw) -> list[Tensor]:
    """Every step of decoding, with the states that they write."""
    B, (H, G), W, n = draw.one(1, 2, 3), draw.heads(), draw.one(1, 2, 9, 64), draw.one(1, 4)
    L, K, D, E = draw.one(1, 3, 33), draw.one(2, 6, 32), draw.one(1, 5, 64), draw.one(6, 30, 96)
    real = draw.mask(B) if draw.often() else None
    latents = draw.written(B, H, L, wide=True), draw.written(B, H, L, D, wide=True)
    if draw.often():
        latents[0][0], latents[1][0] = -torch.inf, 0.0
    decay = -draw.uniform(*draw.one((B, H, L), (H, L))).abs() if draw.often() else None
    latent_q, latent_k = draw.floats(B, H, L + 1), draw.floats(B, H, L)
    q, k, v = draw.floats(B, H, K), draw.floats(B, G, K), draw.floats(B, G, D)
    slots = draw.written(B, G, W, K), draw.written(B, G, W, D)
    ring = step.Ring(*slots, (draw.uniform(B, W) > 0) if draw.often() else None)
    slot = torch.tensor([draw.random.randrange(W)])

    sinks = None
    if draw.often():
        keys = draw.written(B, G, n, K), draw.written(B, G, n, D)
        position = torch.tensor([draw.random.randrange(W + n + 2) for _ in range(B)])
        sinks = step.StepSinks(*keys, position, draw.rotary(B, K) if draw.often() else None)
    pending = draw.written(B, H, W, L) if draw.often() else None
    local = {"scale": 0.3, "softcap": draw.one(None, 3.0), "sinks": sinks}
    local["rotary"] = draw.rotary(B, K) if draw.often() else None
    length = draw.one(None, draw.random.randint(1, W))
    P, x = E // 3, draw.floats(B, E)
    weights = [draw.written(*s) for s in ((3, P, P), (E,), (3, P, P), (E,), (E,))]
    state, taps = draw.written(B, E, wide=True), draw.one(1, 3, 4)
    tail, kernel = draw.written(B, taps - 1, E), draw.floats(E, taps, dtype=draw.one(F32, BF16))
    bias = draw.floats(E, dtype=draw.one(F32, BF16)) if draw.often() else None
    with torch.no_grad():
        latte = step.latte_step(latent_q[..., 1:], latent_k, v, *latents, real, log_decay=decay)
        more = {"log_decay": decay, "pending": pending, "joint": draw.often(0.3)}
        inputs = latent_q, latent_k, q, k, v, *latents, ring, slot, real
        both = step.macchiato_step(*inputs, **local, **more)
        near = step.window_step(q, k, v, ring, slot, real, length=length, **local)
        moved = ops.cpu_rg_lru_step(x, *weights, draw.floats(E), 1e-6, state, real)
        mixed = step.conv_step(x, kernel, bias, tail, real)
    outputs = [latte, both, near, moved, mixed, *latents, *ring[:2], state, tail]
    return [y.detach() for y in outputs]


def kept_steps(draw: Draw) -> list[Tensor]:
    """Some tokens with kept ones, from an empty state on, and what is held then."""
    B, (H, G), n, T = draw.one(1, 2, 3), draw.heads(), draw.one(1, 4), draw.one(1, 8, 40)
    count, window, block = draw.one(1, 3, 70), draw.one(1, 2, 9, 30), draw.one(1, 4, 17)
    L, K, D = draw.one(1, 3, 33), draw.one(2, 6, 32), draw.one(1, 5, 64)
    wide, M, often = computation_dtype(draw.dtype), count + window + block - 1, 0.8
    latents, forgets = draw.often(often), draw.often(often)
    held = kept_step.KeptBuffers(
        draw.written(B, G, M, K),
        draw.written(B, G, M, D),
        torch.full((B, G, M), -torch.inf, dtype=wide),
        torch.full((B, G, M), -1),
        draw.written(B, H, M, L) if latents else None,
        torch.zeros(B, H, M, L, dtype=wide) if latents and forgets else None,
    )
    state = torch.full((B, H, L), -torch.inf, dtype=wide), torch.zeros(B, H, L, D, dtype=wide)
    sinks, seen, outs = None, torch.zeros(B, dtype=torch.long), []
    if draw.often(often):
        keys = draw.written(B, G, n, K), draw.written(B, G, n, D)
        table = draw.rotary(B, K) if draw.often(often) else None
        sinks = step.StepSinks(*keys, seen, table)
    options = {"scale": 0.3, "softcap": draw.one(None, 3.0), "sinks": sinks}
    options["rotary"] = draw.rotary(B, K) if draw.often(often) else None
    masked, shape = draw.often(often), draw.one((B, H, L), (H, L))
    for _ in range(T):
        real = draw.mask(B) if masked else None
        decay = -draw.uniform(*shape).abs() if forgets else None
        late = (draw.floats(B, H, L + 1), draw.floats(B, H, L), decay, *state)
        inputs = draw.floats(B, H, K), draw.floats(B, G, K), draw.floats(B, G, D), draw.floats(B, G)
        options |= {"latents": late if latents else None, "count": count, "window": window}
        with torch.no_grad():
            outs.append(kept_step.kept_step(*inputs, held, seen, real, block=block, **options))
        seen += 1 if real is None else real
    held = held.state(seen, count, window, block)
    return [y.detach() for y in (*outs, *state, *held) if y is not None]


def rows(draw: Draw) -> list[Tensor]:
    """What lies between: of tensors of any number of dimensions."""
    E, M = draw.one(1, 7, 16, 100), draw.one(1, 3, 9, 130)
    shape = draw.one((), (1,), (3,), (2, 1, 2), (1, 1, 1, 1, 1, 1, 3), (2, 0), (1,) * 12)
    a, b, c = draw.floats(M, E), draw.floats(M + 1, E), draw.floats(M, E)
    x, weight, many = draw.floats(*shape, E), draw.floats(E), draw.one(1, 70, 300)
    heads = draw.uniform(draw.one(1, 2), many, 3, 2 * E).to(draw.dtype)
    angles = draw.uniform(draw.one(1, heads.shape[0]), many, 1, E).to(computation_dtype(draw.dtype))
    gate, up, dy = (draw.uniform(*shape, many, E).to(draw.dtype) for _ in range(3))
    exact = F64 if draw.dtype == F64 else F32
    z, scales, dz = gate.to(exact), weight.detach().to(exact).contiguous(), dy.to(exact)
    with torch.no_grad():
        found = [
            *(
                *decoding.linear_maps(x, a),
                *decoding.linear_maps(x, a, b),
                *decoding.linear_maps(x, a, b, c),
            ),
            decoding.linear_add(x, a, draw.uniform(*shape, M).to(draw.dtype)),
            *(
                decoding.swiglu(x, a, c),
                decoding.geglu(x, a, c),
                decoding.rms_norm(x, weight, 1e-6, 1.0),
            ),
            *(ops.cpu_glu(gate, up), *ops.cpu_glu_backward(dy, gate, up)),
            ops.cpu_rotate(heads, angles.cos(), angles.sin(), draw.one(1.0, -1.0)),
        ]
        normed, scale = ops.cpu_norm_rows(z, scales, 1e-6)
        found += [normed, *ops.cpu_norm_rows_backward(dz, z, scales, scale)]
        packed = ops.cpu_mx_pack(gate)
        found += [packed, ops.cpu_mx_unpack(packed, gate), ops.cpu_mx_rounded(gate)]
    return [y.detach() for y in found]


def quantised(draw: Draw) -> list[Tensor]:
    """Products with integers of 4 and 8 bits, in panels."""
    K, M = 32 * draw.one(1, 2, 3), 32 * draw.one(1, 2)
    shape = draw.one((), (1,), (3,), (2, 1, 2), (2, 0), (13,))
    dtype = draw.one(F32, F64, BF16)
    sizes = (M, K), (M, K), (K, M)

    def matrix(outputs: int, inputs: int) -> list[Tensor]:
        found = quantise(draw.uniform(outputs, inputs).float(), draw.one("int4", "int8"))
        return [ordered(found.weight, PANEL), found.scales.to(dtype)]

    x = draw.uniform(*shape, K).to(draw.dtype)
    gate, up, down = (matrix(*size) for size in sizes)
    norm = draw.uniform(K).to(draw.dtype), 1e-6, 1.0
    rows = quantise(draw.uniform(M - 13, K).float(), "int8")
    picked = ordered(rows.weight, PANEL), rows.scales.to(dtype)
    ids = torch.tensor([[M - 14, 0, 5]] * draw.one(0, 2), dtype=torch.long)
    with torch.no_grad():
        return [
            ops.cpu_quantised_rows(ids, *picked),
            *decoding.quantised_maps(x, *gate),
            *decoding.quantised_maps(x, *gate, *up),
            *decoding.quantised_maps(x, *gate, *up, *matrix(M - 13, K)),
            decoding.quantised_add(x, gate, draw.uniform(*shape, M).to(draw.dtype)),
            *(
                decoding.quantised_mlp(x, norm, (*gate, *up, *down), act, adds)
                for act, adds in ((decoding.swiglu, True), (decoding.geglu, False))
            ),
        ]


def layers(draw: Draw) -> list[Tensor]:
    """The begin and the end of a decoder layer, dense and quantised."""
    E, M, U, (H, G) = 32 * draw.one(1, 3), 32 * draw.one(1, 2), draw.one(1, 7), draw.heads()
    rows, K, L = draw.one(0, 1, 3), 32, draw.one(1, 5)
    four, exact = draw.often(), draw.one(F32, draw.dtype)

    def matrix(outputs: int, inputs: int) -> list[Tensor | None]:
        weight = draw.uniform(outputs, inputs) / 4
        if not four:
            return [weight.to(draw.dtype), None]
        found = quantise(weight.float(), draw.one("int4", "int8"))
        return [ordered(found.weight, PANEL), found.scales]

    def plain(*shape: int) -> Tensor:
        return draw.uniform(*shape).to(exact)

    x, norm = draw.floats(rows, E), (draw.uniform(E).to(draw.dtype), 1e-6, 1.0)
    maps = [y for heads in (H, G, G) for y in matrix(heads * K, E)]
    window = draw.one(0, 1)
    late = [plain(H * (L + window), E), plain(H * L, E), plain(H) if window else None]
    scored = [plain(U, E), plain(U), plain(G, U), plain(G)] if draw.often() else [None] * 4
    if draw.often(0.2):
        late, scored = [None] * 3, [None] * 4
    mixed, residual = (draw.uniform(rows, *size).to(draw.dtype) for size in ((H, K), (E,)))
    inner = [y for size in ((M, E), (M, E), (E, M)) for y in matrix(*size)]
    with torch.no_grad():
        *begun, _ = decoding.layer_begin(x, *norm, *maps, H, G, *late, *scored, 1e-6)
        if late[0] is not None:  # the scores are coarse, so the last bits may make a step of them
            begun += decoding.latents(x, *late, H)
        ended = decoding.layer_end(mixed, residual, *matrix(E, H * K), *norm, *inner, draw.often())
        return [*begun, ended]


def whole_layers(draw: Draw) -> list[Tensor]:
    """Some tokens through two layers with kept tokens, in one call each, and what is held then."""
    B, L, E, (H, G), wide = draw.one(1, 3), 3, 32, draw.heads(), computation_dtype(draw.dtype)
    seen, tensors, numbers, states = torch.zeros(B, dtype=torch.long), [], [], []

    def plain(*shape: int) -> Tensor:
        return (draw.uniform(*shape) / 4).to(draw.dtype)

    def maps(*outputs: int) -> list[Tensor | None]:
        return [x for size in outputs for x in (plain(size, E), None)]

    for _ in range(2):
        late = plain(H * (L + 1), E), plain(H * L, E), plain(H)
        scored = plain(2, E), plain(2), plain(G, 2), plain(G)
        held = kept_step.KeptBuffers(
            *(draw.written(B, G, 8, 4), draw.written(B, G, 8, 4)),
            torch.full((B, G, 8), -torch.inf, dtype=wide),
            torch.full((B, G, 8), -1),
            draw.written(B, H, 8, L),
        )
        state = torch.full((B, H, L), -torch.inf, dtype=wide), torch.zeros(B, H, L, 4, dtype=wide)
        states += *state, held.scores
        calls: list[Any] = [plain(E), 1e-6, 1.0, *maps(4 * H, 4 * G, 4 * G), H, G, *late, *scored]
        table = draw.rotary(B, 4)
        calls += 1e-6, *state, None
        calls += kept_step.native_arguments(held, seen, None, 3, 4, 2, 0.3, None, table, None)
        calls += plain(E, 4 * H), None, plain(E), 1e-6, 0.0, *maps(E, E, E), draw.often()
        for x in calls:
            (tensors if x is None or isinstance(x, Tensor) else numbers).append(x)
    outs, run = [], decoding.Layers(tensors, torch.tensor(numbers, dtype=F64))
    HELD.append(run)
    for _ in range(9):
        with torch.no_grad():
            outs.append(run(draw.uniform(B, E).to(draw.dtype)))
        seen += 1
    ops.cpu_layers_drop(torch.tensor([-1.0], dtype=F64))  # of none
    return [*outs, *states]


KINDS: dict[str, Callable[[Draw], list[Tensor]]] = {
    "layers": layers,
    "whole_layers": whole_layers,
    "quantised": quantised,
    "latte": lambda draw: attention(draw, "latte"),
    "macchiato": lambda draw: attention(draw, "macchiato"),
    "window": lambda draw: attention(draw, "window"),
    "kept": kept_tokens,
    "rg_lru": recurrence,
    "convolution": convolution,
    "steps": steps,
    "kept_steps": kept_steps,
    "rows": rows,
}


def call(kind: str, seed: int) -> list[Tensor]:
    """Outputs, gradients and written states of one call."""
    return KINDS[kind](Draw(seed))


def call_in_parts(kind: str, seed: int, count: int = 8, dtype: torch.dtype | None = None):
    """One call of attention (latte, macchiato, window) with long sequences, on many threads."""
    draw = Long(seed)
    draw.dtype = dtype or draw.dtype
    with threads(count):
        return attention(draw, kind)


class Recorder(TorchDispatchMode):
    """The arguments of the raw ops that are called: for each, those with the most tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("latte::")
        if name.startswith("cpu_"):
            known = self.calls.get(name, ())
            if _worth(args) > _worth(known):
                self.calls[name] = tuple(x.clone() if isinstance(x, Tensor) else x for x in args)
        return func(*args, **(kwargs or {}))


def _worth(args: tuple[Any, ...]) -> tuple[int, int]:
    """How many tensors there are, and how many have at least two elements in every dimension."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    return len(tensors), sum(x.numel() > 1 for x in tensors)


def raw_calls(seeds: int = 12) -> dict[str, tuple[Any, ...]]:
    """One valid call of every raw op, by name."""
    with Recorder() as recorder:
        for seed in range(seeds):
            for kind in KINDS:
                call(kind, seed)
    return recorder.calls


def wrong_tensors(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors like x but for one thing, which is named."""
    if x.is_floating_point():
        yield "int32", x.to(torch.int32)
        yield "float", x.to(F32 if x.dtype == BF16 else BF16)
        yield "double", x.to(F32 if x.dtype == F64 else F64)
    else:
        yield "float", x.to(F32)
        yield "int32", x.to(torch.int32)
    yield "one dimension more", x.unsqueeze(0)
    yield "one dimension less", x.new_zeros(x.shape[1:])
    if x.ndim > 1:
        yield "no dimension", x.new_zeros(())
    for d, size in enumerate(x.shape):
        yield f"dimension {d} of {size + 1}", x.new_zeros(_resized(x, d, size + 1))
        if size:
            yield f"dimension {d} of {size - 1}", x.new_zeros(_resized(x, d, size - 1))


def _resized(x: Tensor, d: int, size: int) -> list[int]:
    return [*x.shape[:d], size, *x.shape[d + 1 :]]
