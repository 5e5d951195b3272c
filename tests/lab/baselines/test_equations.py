"""Every comparator's layer against its paper's equations, spelt token by token in fp64."""

import math

import pytest
import torch
from torch.nn import functional as F

from latte.lab.baselines.low_rank import Linformer, Luna
from latte.lab.baselines.mega import Mega, MultiDimensionalEMA
from latte.lab.baselines.state_spaces import H3, S5, constant_scan, hippo_normal

TOLERANCE = {"atol": 1e-11, "rtol": 1e-11}


def inputs(length=9, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, width, dtype=torch.float64, generator=generator)


def made(kind, *sizes, **options):
    torch.manual_seed(0)
    layer = kind(*sizes, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():  # biases too, and relative ones that matter
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def affine(layer, x):
    return x @ layer.weight.T + (0.0 if layer.bias is None else layer.bias)


def average(ema, x):
    """y_t = eta . h_t, h_t = alpha beta x_t + (1 - alpha delta) h_{t-1}, channel by channel."""
    alpha, delta = torch.sigmoid(ema.alpha_logit), torch.sigmoid(ema.delta_logit)
    y = torch.zeros_like(x)
    for channel in range(x.shape[1]):
        h = torch.zeros(alpha.shape[1], dtype=x.dtype)
        for t in range(len(x)):
            u = ema.beta[channel] * x[t, channel]
            h = alpha[channel] * u + (1 - alpha[channel] * delta[channel]) * h
            y[t, channel] = ema.eta[channel] @ h
    return y


@pytest.mark.parametrize("length", [1, 2, 9])
@torch.no_grad()
def test_the_moving_average(length):
    torch.manual_seed(0)
    ema = MultiDimensionalEMA(3, 4).double()
    for parameter in ema.parameters():
        parameter.normal_()
    x = inputs(length, 3)
    torch.testing.assert_close(ema(x[None])[0], average(ema, x), **TOLERANCE)


@pytest.mark.parametrize(("causal", "chunk"), [(True, None), (True, 4), (False, None), (False, 4)])
@torch.no_grad()
def test_mega(causal, chunk):
    layer = made(Mega, 8, num_averages=3, chunk_size=chunk, causal=causal)
    x, residual = inputs(seed=1), inputs(seed=2)
    averaged = average(layer.average, x)
    if not causal:
        averaged += average(layer.average_back, x.flip(0)).flip(0)
    z = F.silu(affine(layer.z_proj, averaged))
    q, k = (layer.kappa[i] * z + layer.mu[i] for i in (0, 1))
    v = F.silu(affine(layer.v_proj, x))
    width = z.shape[1]
    out = torch.zeros_like(v)
    for t in range(9):
        seen = [s for s in range(9) if (s <= t or not causal)]
        if chunk is not None:
            seen = [s for s in seen if s // chunk == t // chunk]
        logits = []
        for s in seen:
            # <R_t a, R_s b> by pairs of complex numbers, an angle of (t - s) theta_i each.
            a, b = (torch.complex(*r.chunk(2)) for r in layer.relative)
            angles = (t - s) * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
            bias = (a * b.conj() * torch.exp(1j * angles)).real.sum()
            logits.append(q[t] @ k[s] / math.sqrt(width) + bias)
        weights = torch.stack(logits).softmax(0)
        out[t] = sum(w * v[s] for w, s in zip(weights, seen, strict=True))
    gamma = F.silu(affine(layer.reset_gate, averaged))
    phi = torch.sigmoid(affine(layer.update_gate, averaged))
    h = F.silu(affine(layer.h_proj, averaged) + affine(layer.o_proj, gamma * out))
    expected = phi * h + (1 - phi) * residual
    found = residual + layer(x[None], residual=residual[None])[0]
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("head_dim", [1, 2, 4])
@torch.no_grad()
def test_h3(head_dim):
    layer = made(H3, 8, num_states=6, head_dim=head_dim)
    x = inputs()
    q, k, v = (affine(p, x) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    # The shift SSM, with its matrices: A shifts by one, B = e_1.
    A = torch.diag(torch.ones(5, dtype=torch.float64), -1)
    shifted = torch.zeros_like(k)
    for channel in range(8):
        state = torch.zeros(6, dtype=torch.float64)
        for t in range(9):
            state = A @ state
            state[0] += k[t, channel]
            skip = layer.shift_skip[channel] * k[t, channel]
            shifted[t, channel] = layer.shift_c[channel] @ state + skip
    # The diagonal SSM of each head, with both conjugate halves.
    out = torch.zeros_like(v)
    for head in range(8 // head_dim):
        half = torch.complex(-torch.exp(layer.log_real[head]), layer.imaginary[head])
        c = torch.view_as_complex(layer.diagonal_c[head])
        a, c = torch.cat([half, half.conj()]), torch.cat([c, c.conj()])
        step = torch.exp(layer.log_step[head])
        decay = torch.exp(a * step)
        b = (decay - 1) / a
        channels = slice(head * head_dim, (head + 1) * head_dim)
        state = torch.zeros(head_dim, head_dim, 6, dtype=torch.complex128)
        for t in range(9):
            u = torch.outer(shifted[t, channels], v[t, channels])
            state = decay * state + b * u[..., None]
            memory = (state @ c).real + layer.diagonal_skip[head] * u
            out[t, channels] = q[t, channels] @ memory
    torch.testing.assert_close(layer(x[None])[0], affine(layer.o_proj, out), **TOLERANCE)


def test_hippo_normal_is_what_its_eigenvectors_say():
    size = 10
    expected = torch.zeros(size, size, dtype=torch.float64)
    for n in range(size):
        for k in range(size):
            root = math.sqrt((n + 0.5) * (k + 0.5))
            expected[n, k] = -0.5 if n == k else (-root if n > k else root)
    with torch.device("meta"):  # whatever the default device
        values, vectors = hippo_normal(size)
    assert len(values) == size // 2 and (values.imag > 0).all()
    both = torch.cat([vectors, vectors.conj()], 1)
    matrix = both @ torch.diag(torch.cat([values, values.conj()])) @ both.mH
    torch.testing.assert_close(matrix.real, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(both.mH @ both, torch.eye(size).to(both.dtype))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 33])
def test_the_scan_is_the_recurrence(length):
    torch.manual_seed(0)
    decay = torch.polar(torch.rand(4).double(), 6.0 * torch.rand(4).double())
    u = torch.randn(2, length, 4, dtype=torch.complex128)
    x, expected = torch.zeros(2, 4, dtype=torch.complex128), []
    for t in range(length):
        x = decay * x + u[:, t]
        expected.append(x)
    torch.testing.assert_close(constant_scan(decay, u), torch.stack(expected, 1), **TOLERANCE)


@pytest.mark.parametrize("blocks", [1, 2])
@torch.no_grad()
def test_s5_starts_as_the_real_system_of_its_paper(blocks):
    """Before training, the diagonal system is HiPPO-N's own, with B and C real in its basis."""
    torch.manual_seed(0)
    layer = S5(3, num_states=8, num_blocks=blocks).double()
    size = 8 // blocks
    eigenvalues, vectors = hippo_normal(size)
    b = torch.view_as_complex(layer.b).unflatten(0, (blocks, -1))
    for block in range(blocks):
        real = 2 * (vectors @ b[block]).real  # V B~, both halves of it
        again = vectors.mH @ real.to(vectors.dtype)
        torch.testing.assert_close(again, b[block], atol=1e-6, rtol=1e-6)
    values = layer.eigenvalues(torch.float64)
    torch.testing.assert_close(values, eigenvalues.repeat(blocks), atol=1e-5, rtol=1e-5)
    steps = torch.exp(layer.log_step)
    assert ((steps > 0.0009) & (steps < 0.11)).all()


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_s5(causal):
    layer = made(S5, 8, num_states=6, causal=causal)
    x = inputs()
    half = torch.complex(-torch.exp(layer.log_real), layer.imaginary)
    a = torch.cat([half, half.conj()])
    step = torch.exp(layer.log_step).repeat(2)
    decay = torch.exp(a * step)
    b = torch.view_as_complex(layer.b)
    b = ((decay - 1) / a)[:, None] * torch.cat([b, b.conj()])

    def run(sequence, c):
        c = torch.view_as_complex(c.contiguous())
        c = torch.cat([c, c.conj()], 1)
        state, found = torch.zeros(6, dtype=torch.complex128), []
        for u in sequence:
            state = decay * state + b @ u.to(b.dtype)
            found.append((c @ state).real)
        return torch.stack(found)

    y = layer.skip * x + run(x, layer.c[0])
    if not causal:
        y += run(x.flip(0), layer.c[1]).flip(0)
    y = F.gelu(y)
    expected = y * torch.sigmoid(affine(layer.gate, y))
    torch.testing.assert_close(layer(x[None])[0], expected, **TOLERANCE)


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(0, 1)


@torch.no_grad()
def test_luna_packs_and_unpacks():
    layer = made(Luna, 8, 2, num_memories=3, causal=False)
    x = inputs()

    def attend(queries, context, q_proj, k_proj, v_proj):
        """Multi-head softmax attention without an output projection."""
        q, k, v = (
            heads(affine(p, y), 2)
            for p, y in ((q_proj, queries), (k_proj, context), (v_proj, context))
        )
        weights = (q @ k.mT / math.sqrt(4)).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    packed = attend(layer.memories, x, layer.pack_q, layer.pack_k, layer.pack_v)
    unpacked = attend(x, packed, layer.unpack_q, layer.unpack_k, layer.unpack_v)
    torch.testing.assert_close(layer(x[None])[0], affine(layer.o_proj, unpacked), **TOLERANCE)


@pytest.mark.parametrize("length", [1, 9, 70])  # 70: more than one chunk
@torch.no_grad()
def test_causal_luna(length):
    layer = made(Luna, 8, 2, num_memories=3)
    x = inputs(length)

    def f(X, Y, Z):
        """F_t = X_t sum_{s<=t} Y_s^T Z_s / t."""
        total, found = torch.zeros(Y.shape[1], Z.shape[1], dtype=X.dtype), []
        for t in range(len(X)):
            total = total + torch.outer(Y[t], Z[t])
            found.append(X[t] @ total / (t + 1))
        return torch.stack(found)

    found = []
    for h in range(2):
        p = heads(affine(layer.pack_q, layer.memories), 2)[h]
        pk, pv, q, k = (
            heads(affine(project, x), 2)[h]
            for project in (layer.pack_k, layer.pack_v, layer.unpack_q, layer.unpack_k)
        )
        pack = F.softplus(p @ pk.T / math.sqrt(4))
        unpack = f(q, k, pack.T).softmax(-1)
        found.append(f(unpack, pack.T, pv))
    expected = affine(layer.o_proj, torch.cat(found, -1))
    torch.testing.assert_close(layer(x[None])[0], expected, **TOLERANCE)


@pytest.mark.parametrize("length", [1, 9, 12])
@torch.no_grad()
def test_linformer(length):
    layer = made(Linformer, 8, 2, max_length=12, projected_length=5)
    x = inputs(length)
    full = torch.cat([x, torch.zeros(12 - length, 8, dtype=x.dtype)])  # n is the longest length
    found = []
    for h in range(2):
        q, k, v = (heads(affine(p, full), 2)[h] for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        weights = (q @ (layer.key_projection @ k).T / math.sqrt(4)).softmax(-1)
        found.append(weights @ (layer.value_projection @ v))
    expected = affine(layer.o_proj, torch.cat(found, -1))[:length]
    torch.testing.assert_close(layer(x[None])[0], expected, **TOLERANCE)
