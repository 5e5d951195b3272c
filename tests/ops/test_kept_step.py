"""Steps with kept tokens against the op over the whole sequence: outputs, and what is held."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from latte.ops import (
    Kept,
    Partition,
    Sinks,
    cpp_backend,
    macchiato_attention,
    sliding_window_attention,
    use_backend,
)
from latte.ops.kept import KeptState
from latte.ops.kept_step import KeptBuffers, kept_step
from latte.ops.step import StepSinks
from latte.ops.tensors import computation_dtype
from tests.ops.helpers import F64, assert_same, macchiato_inputs, randn, relative_error

B, T, H, G, L, K, D, SINKS = 3, 40, 4, 2, 3, 6, 5, 3


@pytest.fixture(autouse=True, params=["torch", "cpu"])
def steps_by(request):
    """PyTorch's operations, then the native kernel."""
    if request.param == "cpu" and cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    with use_backend(request.param):
        yield


def real_tokens():
    """Rows at different positions, with padding at the beginning, within and at the end."""
    mask = randn(B, T, seed=11) > -0.4
    mask[0, :9], mask[1, -7:], mask[2] = False, False, True
    return mask


class Case:
    """A sequence and its op, of which steps go on after the first tokens.

    Attributes:
        numbers: count, window and block.
    """

    def __init__(
        self,
        count=4,
        window=5,
        block=4,
        *,
        forgets=None,
        sinks=0,
        latents=True,
        dtype=F64,
        masked=True,
        softcap=None,
        groups=G,
        same=False,
        packed=False,
        width=K,
    ):
        self.numbers: Any = {"count": count, "window": window, "block": block}
        self.latents, self.n, self.dtype, self.packed = latents, sinks, dtype, packed
        self.inputs = [x.to(dtype) for x in macchiato_inputs(B, T, H, groups, L, width, D)]
        scores = randn(B, T, groups, seed=30).mul(2).round()  # many equal ones
        scores[:, 3::7, 0], scores[:, 2::5, -1] = -torch.inf, torch.nan
        self.scores = (scores * 0 if same else scores).to(dtype)
        self.mask = real_tokens() if masked else torch.ones(B, T, dtype=torch.bool)
        wide = computation_dtype(dtype)
        self.decay = None
        if forgets:
            shape = (H, L) if forgets == "static" else (B, T, H, L)
            self.decay = -randn(*shape, seed=40).to(wide).abs()
        self.local = {"scale": 0.4, "softcap": softcap}
        self.angle = torch.tensor(0.7, dtype=F64)

    def far(self):
        """The first real tokens of each row, and queries that are turned for them."""
        if not self.n:
            return None
        q, k, v = self.inputs[2:]
        first = [self.mask[b].nonzero()[: self.n, 0] for b in range(B)]
        keys, values = (torch.stack([x[b, i] for b, i in enumerate(first)]) for x in (k, v))
        there = torch.ones(B, self.n, dtype=torch.bool)
        return Sinks(self.turned(q), keys, values, there)

    def turned(self, x):
        first, second = x.to(F64).chunk(2, -1)
        cos, sin = self.angle.cos(), self.angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x)

    def table(self):
        half = self.inputs[2].shape[-1] // 2
        cos, sin = (x.expand(1, 1, 1, half) for x in (self.angle.cos(), self.angle.sin()))
        return tuple(x.to(computation_dtype(self.dtype)) for x in (cos, torch.cat([-sin, sin], 2)))

    def op(self, stop, backend="reference"):
        """Outputs and the state after the first tokens."""
        own: Any = {"window": self.numbers["window"], **self.local, "key_mask": self.mask[:, :stop]}
        own |= {"output_final_state": True, "backend": backend}
        far, scores = self.far(), self.scores[:, :stop]
        far = far and far._replace(q=far.q[:, :stop])
        kept = Kept(scores, self.numbers["count"], self.numbers["block"], self.packed)
        given = [x[:, :stop] for x in self.inputs]
        if not self.latents:
            return sliding_window_attention(*given[2:], partition=Partition(far, kept=kept), **own)
        decay = self.decay
        decay = decay if decay is None or decay.ndim == 2 else decay[:, :stop]
        partition = Partition(far, True, True, kept)
        return macchiato_attention(*given, partition=partition, log_decay=decay, **own)

    def begin(self, start):
        """Buffers, latents and sinks after the first tokens."""
        _, state = self.op(start)
        held = state.kept if self.latents else state
        latent = [x.clone() for x in state.latent[:2]] if self.latents else None
        seen, far, sinks = held.seen.clone(), self.far(), None
        if far is not None:
            there = (torch.arange(self.n) < seen[:, None])[..., None, None]
            sinks = [(x * there).transpose(1, 2).contiguous() for x in far[1:3]]
        return KeptBuffers.of(held, **self.numbers), latent, sinks, seen

    def run(self, start, known=False, step=kept_step):
        """Outputs of the other tokens, (B, T - start, H, D), and what is held after each."""
        held, latent, sinks, seen = self.begin(start)
        outs, states = [], []
        for t in range(start, T):
            latent_q, latent_k, q, k, v = (x[:, t] for x in self.inputs)
            real = None if self.mask.all() else self.mask[:, t]
            decay = self.decay
            decay = decay if decay is None or decay.ndim == 2 else decay[:, t]
            late = (latent_q, latent_k, decay, *latent) if latent is not None else None
            far = None if sinks is None else StepSinks(*sinks, seen, self.table())
            update = bool((seen % self.numbers["block"] == 0).any()) if known else None
            out = step(
                *(q, k, v, self.scores[:, t], held, seen, real),
                **self.numbers,
                **self.local,
                sinks=far,
                latents=late,
                update=update,
            )
            seen = seen + (1 if real is None else real.long())
            outs.append(out)
            states.append(
                (held.state(seen, **self.numbers), latent and [x.clone() for x in latent])
            )
        return torch.stack(outs, 1), states

    def wide(self):
        """The same numbers in fp64."""
        made = copy.copy(self)
        made.dtype, made.inputs = F64, [x.to(F64) for x in self.inputs]
        made.scores = self.scores.to(F64)
        made.decay = None if self.decay is None else self.decay.to(F64)
        return made

    def check(self, start, tolerance=1e-12, **options):
        outs, states = self.run(start, **options)
        expected, _ = self.op(T)
        mask = self.mask[:, start:]
        assert outs.dtype == self.dtype
        assert_same([outs[mask]], [expected[:, start:][mask]], tolerance)
        for t in (start + 1, start + 7, start + 8, T):
            if t > T:
                continue
            _, state = self.op(t)
            held, latent = states[t - start - 1]
            whole = state.kept if self.latents else state
            for name, a, e in zip(KeptState._fields, held, whole, strict=True):
                assert (a is None) == (e is None), name
                if a is None:
                    continue
                assert a.dtype == e.dtype and a.is_contiguous(), name
                if name in ("log_decay",):
                    assert_same([a], [e], max(tolerance, 1e-12))
                else:
                    assert torch.equal(a, e), name
            if latent is not None:
                assert_same(latent, list(state.latent[:2]), tolerance)


CASES = {
    "plain": {},
    "forgetful": {"forgets": "gated"},
    "statically forgetful": {"forgets": "static", "sinks": SINKS},
    "sinks": {"sinks": SINKS, "forgets": "gated"},
    "capped": {"softcap": 2.0, "masked": False},
    "more sinks than the window has": {"sinks": 9, "window": 2, "block": 3},
    "the window alone": {"latents": False},
    "the window and sinks": {"latents": False, "sinks": SINKS},
    "more places than tokens": {"count": 2 * T, "forgets": "gated"},
    "one place": {"count": 1, "forgets": "gated"},
    "ties": {"same": True, "forgets": "gated"},
    "blocks of one": {"block": 1, "forgets": "gated", "sinks": SINKS},
    "a window of one": {"window": 1, "forgets": "gated", "sinks": SINKS},
    "both": {"window": 1, "block": 1},
    "a window of more than the text": {"window": T + 3},
    "a long block": {"block": 16, "forgets": "gated"},
    "a key head for each": {"groups": H, "forgets": "gated"},
    "8 bits": {"packed": True, "forgets": "gated", "sinks": SINKS, "width": 80},
    "8 bits in the window alone": {"packed": True, "latents": False, "sinks": SINKS},
}
EVERY = pytest.mark.parametrize("name", CASES)


@EVERY
@pytest.mark.parametrize("start", [0, 13])
def test_steps_are_the_op_of_the_whole_sequence(name, start):
    Case(**CASES[name]).check(start, known=start == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("latents", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_low_precision(dtype, latents, packed):
    forgets = "gated" if latents else None
    case = Case(sinks=SINKS, forgets=forgets, latents=latents, dtype=dtype, packed=packed)
    outs, states = case.run(0)
    (exact, _), (rounded, whole) = case.wide().op(T), case.op(T)
    outs, exact, rounded = (x[case.mask] for x in (outs, exact, rounded))
    worst = max(2 * relative_error(rounded, exact), 4 * torch.finfo(dtype).eps)
    assert outs.dtype == dtype and relative_error(outs, exact) <= worst
    held, whole = states[-1][0], whole.kept if latents else whole
    for a, e in zip(held[:5], whole[:5], strict=True):
        assert a.dtype == e.dtype and torch.equal(a, e)


def test_padding_changes_nothing_whatever_stands_there():
    case = Case(forgets="gated", sinks=SINKS)
    held, latent, sinks, seen = case.begin(13)
    seen += 4 - seen % 4  # updates are due
    before = [x.clone() for x in (*held, *latent, *sinks)]
    nothing = [torch.full_like(x[:, 0], torch.nan) for x in (*case.inputs, case.scores, case.decay)]
    latent_q, latent_k, *local, decay = nothing
    kept_step(
        *(*local, held, seen, torch.zeros(B, dtype=torch.bool)),
        **case.numbers,
        **case.local,
        sinks=StepSinks(*sinks, seen),
        latents=(latent_q, latent_k, decay, *latent),
    )
    for x, same in zip((*held, *latent, *sinks), before, strict=True):
        assert torch.equal(x, same)


def test_a_window_forgets_what_is_not_finite():
    """A value that has left, and is not kept, is not there."""
    case, found = Case(latents=False, masked=False), []
    case.scores[:, 15] = -torch.inf
    for value in (torch.inf, 0.0):
        case.inputs[4][:, 15] = value
        found.append(case.run(12)[0][:, 10:])
    assert_same(found[:1], found[1:], 1e-12)


def test_sinks_without_a_table_of_their_own_have_the_windows():
    case, outs = Case(sinks=SINKS), []
    for own in (None, case.table()):
        held, latent, sinks, seen = case.begin(30)
        latent_q, latent_k, *local = (x[:, 30] for x in case.inputs)
        late = latent_q, latent_k, None, *latent
        options = {"sinks": StepSinks(*sinks, seen, own), "rotary": case.table(), "latents": late}
        outs.append(
            kept_step(
                *local, case.scores[:, 30], held, seen, **case.numbers, **case.local, **options
            )
        )
    assert torch.equal(*outs)


def test_it_is_one_graph_wherever_updates_are():
    case = Case(forgets="gated", sinks=SINKS, block=2)
    plain, _ = case.run(35)
    torch._dynamo.reset()
    with torch.no_grad():
        step = torch.compile(kept_step, fullgraph=True, backend="aot_eager")
        found, _ = case.run(35, step=step)
    assert_same([found], [plain], 1e-14)
