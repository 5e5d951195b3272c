"""The table of ops: what each takes and carries, which backends have it, and what holds of it.

A row of ``OPS`` is one public op with one choice of options. The laws (``test_laws.py``), the
tests of Triton's kernels and the checks on a GPU (``gpu_correctness.py``) all run over this table.
A new
op, or a new option of one, is a new row.

Shape letters: B batch, T tokens, N states (B, or the packed sequences), H query heads, G key/value
heads, L latents per head, M = L + 1, K key width, D value width, W window, n sinks, E channels,
C taps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import (
    Kept,
    KeptState,
    LatteState,
    LinearState,
    MacchiatoState,
    Partition,
    Sinks,
    WindowState,
    causal_conv1d,
    latte_attention,
    linear_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
    window_log_mass,
)
from latte.ops.tensors import computation_dtype
from tests.ops.helpers import assert_same, boundaries, key_mask
from tests.ops.helpers import flat as leaves

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SIZES = {"H": 4, "G": 2, "L": 3, "K": 6, "D": 5, "W": 8, "n": 3, "E": 5, "C": 3}
EVERY = ("reference", "torch", "cpu", "triton")
NOT_NATIVE = ("reference", "torch", "triton")
PYTORCH = ("reference", "torch")

Sizes = dict[str, int]
Normal = Callable[..., Tensor]  # (*shape) -> standard normal numbers of the call's dtype

# Inputs by the name of their parameter. Those of tokens begin with BT, those of sequences with N.
LATTE = {"q": "BTHL", "k": "BTHL", "v": "BTGD"}
WINDOW = {"q": "BTHK", "k": "BTGK", "v": "BTGD"}
MACCHIATO = {"latent_q": "BTHM", "latent_k": "BTHL", **WINDOW}
SINKS = {"sink_q": "BTHK", "sink_k": "NnGK", "sink_v": "NnGD"}
LINEAR = {"q": "BTHL", "k": "BTHL", "v": "BTHD"}
RG_LRU = {"x": "BTE", "recurrence_gate": "BTE", "input_gate": "BTE", "theta": "E"}
CONVOLUTION = {"x": "BTE", "weight": "EC", "bias": "E"}
QUERIES = {"latent_q", "q", "sink_q"}  # all other inputs of tokens are sources
LOGITS = QUERIES | {"latent_k", "k", "sink_k"}
VALUES = {"v", "sink_v"}
EXTREMES = ["jump", "fall", "dominant", "rising", "rising apart", "creeping", "alternating"]
EXTREMES += ["huge", "huge queries", "nothing seen"]


@dataclass(frozen=True, eq=False)
class Op:
    """One op with its options.

    Attributes:
        run: Function of the inputs, as keywords, and of the options that ops share. Returns the
            output and the final state.
        inputs: Shape of each input, in letters, by the name of its parameter.
        state: Function of (normal, N, sizes) that makes an initial state; None if the op has none.
        backends: Backends that have the op.
        past: Whether an output depends on earlier tokens alone.
        packed_states: Whether packed sequences take and give states.
        gaps: Whether masked tokens anywhere are as if they were not there. Else they keep their
            place, and this holds of padding at the ends alone.
        averages: Whether outputs are averages of the values.
        latent_keys: Name of the latents' key logits, whose gradients sum to zero over the tokens.
        kernel_length: Number of tokens that are several chunks of Triton's kernels and a rest.
        options: Options of every call; ``window`` comes from the sizes if an op has one.
    """

    run: Callable[..., tuple[Tensor, Any]]
    inputs: dict[str, str]
    state: Callable[[Normal, int, Sizes], Any] | None = None
    backends: tuple[str, ...] = EVERY
    past: bool = True
    packed_states: bool = True
    gaps: bool = False
    averages: bool = True
    latent_keys: str | None = None
    kernel_length: int = 37
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        """Whether there is a softmax over near keys."""
        return "BTGK" in self.inputs.values()

    @property
    def delayed(self) -> bool:
        """Whether latents read a source when it leaves the window."""
        return self.options.get("partition", Partition()).delay


def one_number(name: str, shape: str, normal: Normal, sizes: Sizes) -> Tensor:
    """An input of this name: what is special about it beside its shape."""
    x = normal(*(sizes[letter] for letter in shape))
    if name == "log_decay":  # the first latent never forgets
        x = -0.2 * x.abs()
        x[..., 0] = 0.0
    elif name == "theta":
        x = x - 3.0
    elif name == "sink_k" and shape[0] == "N" and sizes["n"] > 1:  # NaN: there is no such sink
        x[0, -1] = torch.nan
    return x


# --- states ---------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """In the dtype of sums and states."""
    return x.to(computation_dtype(x.dtype))


def latte_state(normal: Normal, N: int, s: Sizes) -> LatteState:
    """Some mass everywhere but in its first entry, which is empty."""
    log_mass, mean = wide(normal(N, s["H"], s["L"])), wide(normal(N, s["H"], s["L"], s["D"]))
    log_mass[0, 0], mean[0, 0] = -torch.inf, 0.0
    return LatteState(log_mass, mean)


def forgetting_state(normal: Normal, N: int, s: Sizes) -> Any:
    return LatteState(*latte_state(normal, N, s), -wide(normal(N, s["H"], s["L"])).abs())


def tail_of(normal: Normal, N: int, length: int, s: Sizes, keys: str = "GK") -> WindowState:
    """Slots of which some are empty, in turn in every second sequence."""
    k, v = (normal(N, length, *(s[c] for c in letters)) for letters in (keys, "GD"))
    slots = torch.arange(N * length, device=k.device).view(N, length)
    return WindowState(k, v, slots % 5 != 1)


def window_state(normal: Normal, N: int, s: Sizes) -> WindowState:
    return tail_of(normal, N, s["W"] - 1, s)


def full_state(normal: Normal, N: int, s: Sizes) -> WindowState:
    return tail_of(normal, N, 9, s)


def macchiato_state(normal: Normal, N: int, s: Sizes) -> Any:
    return MacchiatoState(latte_state(normal, N, s), window_state(normal, N, s))


def forgetting_macchiato_state(normal: Normal, N: int, s: Sizes) -> Any:
    return MacchiatoState(forgetting_state(normal, N, s), window_state(normal, N, s))


def delayed_state(normal: Normal, N: int, s: Sizes) -> Any:
    """Latents, of which one sequence's are all empty; tail; and what they have not read yet."""
    latents, tail = macchiato_state(normal, N, s)[:2]
    latents.log_mass[-1], latents.mean[-1] = -torch.inf, 0.0
    pending = tail_of(normal, N, s["W"], s, "HL")
    slots = torch.cat([pending.mask[:, :1], tail.mask], 1)
    return MacchiatoState(latents, tail, WindowState(pending.keys, pending.values[:, :1], slots))


def forgetting_delayed_state(normal: Normal, N: int, s: Sizes) -> Any:
    return delayed_state(normal, N, s)._replace(latent=forgetting_state(normal, N, s))


def after_some(state: Callable[..., Any]) -> Callable[..., Any]:
    """A state with sinks: the op's own, and how many tokens each sequence has read before it."""

    def make(normal: Normal, N: int, s: Sizes) -> Any:
        inner = state(normal, N, s)
        device = leaves(inner)[0].device
        return inner, torch.arange(N, device=device) * (s["W"] // 2) + s["n"]

    return make


def held_tokens(normal: Normal, N: int, s: Sizes, latents: bool = True) -> KeptState:
    """Some tokens read; in every sequence the last kept place is empty."""
    n, C = (s.get(name, number) for name, number in KEPT_OPTIONS.items())
    W = s["W"]
    letters = ["GK", "GD", "G"]
    k, v, r = (normal(N, n + W + C - 1, *(s[c] for c in x)) for x in letters)
    seen = torch.arange(N, device=k.device) + W + 9 * C
    recent = seen[:, None] + torch.arange(1 - W - C, 0, device=k.device)
    recent = torch.where(recent > (seen[:, None] - 1) // C * C - W, recent, -1)
    old = torch.arange(n, device=k.device).expand(N, n)
    old = torch.where(old == n - 1, -1, 2 * old + s["n"])
    positions = torch.cat([old, recent], 1)[..., None].expand(r.shape)
    scores = torch.cat([r[:, :n].sort(dim=1, descending=True)[0], r[:, n:]], 1)
    scores = wide(scores).masked_fill(positions < 0, -torch.inf)
    k, v = (x * (positions >= 0)[..., None] for x in (k, v))
    late = normal(N, n + W + C - 1, s["H"], s["L"]) if latents else None
    if late is not None:
        late = late * (positions[..., :1] >= 0)[..., None]
    return KeptState(k, v, scores, positions.contiguous(), seen, late)


def held_window(normal: Normal, N: int, s: Sizes) -> KeptState:
    return held_tokens(normal, N, s, latents=False)


def kept_state(normal: Normal, N: int, s: Sizes) -> Any:
    """Forgetting latents, of which one sequence's are all empty, and what is held."""
    latents = forgetting_state(normal, N, s)
    latents.log_mass[-1], latents.mean[-1] = -torch.inf, 0.0
    held = held_tokens(normal, N, s)
    assert held.latent_keys is not None
    lost = -0.1 * wide(held.latent_keys).abs()
    lost[:, -s["W"] :] = 0.0  # these have not left the window
    return MacchiatoState(latents, kept=held._replace(log_decay=lost))


def linear_state(normal: Normal, N: int, s: Sizes) -> LinearState:
    normaliser = wide(normal(N, s["H"], s["L"])).exp()
    return LinearState(wide(normal(N, s["H"], s["L"], s["D"])), normaliser)


def rg_lru_state(normal: Normal, N: int, s: Sizes) -> Tensor:
    """The last sequence's is empty."""
    state = wide(normal(N, s["E"]))
    state[-1] = 0.0
    return state


def convolution_state(normal: Normal, N: int, s: Sizes) -> Tensor:
    return normal(N, s["C"] - 1, s["E"])


def map_state(fn: Callable[[Tensor], Tensor], state: Any) -> Any:
    """``fn`` of every tensor of a state."""
    if isinstance(state, Tensor):
        return fn(state)
    if hasattr(state, "_fields"):
        return type(state)(*(map_state(fn, x) for x in state))
    return None if state is None else tuple(map_state(fn, x) for x in state)


def with_leaves(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The tree with other floating-point tensors in the place of its own."""
    others = iter(tensors)
    return map_state(lambda x: next(others) if x.is_floating_point() else x, tree)


# --- what is called -------------------------------------------------------------------------------


def with_sinks(op: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """An op with sinks as inputs. A sink whose key is not a number is not there.

    The state is the op's, and how many tokens were read.
    """

    @functools.wraps(op)
    def run(
        *, sink_q: Tensor, sink_k: Tensor, sink_v: Tensor, initial_state: Any = None, **options: Any
    ) -> tuple[Tensor, Any]:
        state, position = initial_state or (None, None)
        there = ~sink_k.isnan().flatten(2).any(2)
        sinks = Sinks(sink_q, sink_k, sink_v, there, position)
        partition = options.pop("partition", Partition())._replace(sinks=sinks)
        out, state = op(partition=partition, initial_state=state, **options)
        if state is None:
            return out, None
        mask, cu = options.get("key_mask"), options.get("cu_seqlens")
        real = torch.ones(sink_q.shape[:2], device=out.device).bool() if mask is None else mask
        count = F.pad(real.long().cumsum(1), (1, 0))
        read = count[:, -1] if cu is None else count[0][cu.long()].diff()
        return out, (state, read if position is None else position + read)

    return run


@functools.wraps(window_log_mass)
def log_mass(*, backend: str, output_final_state: bool = False, **options: Any) -> Any:
    """PyTorch's operations alone compute it, and it carries nothing on."""
    return window_log_mass(**options), None


def with_kept(op: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """An op with kept tokens, whose score is the key's first number; and with sinks, if given."""

    @functools.wraps(op)
    def run(
        *, count: int, block: int, both: bool = False, sink_q: Tensor | None = None,
        sink_k: Tensor | None = None, sink_v: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        sinks = None
        if sink_q is not None and sink_k is not None and sink_v is not None:
            there = ~sink_k.isnan().flatten(2).any(2)
            sinks = Sinks(sink_q, sink_k, sink_v, there)
        partition = Partition(sinks, both, both, Kept(options["k"][..., 0].detach(), count, block))
        return op(partition=partition, **options)

    return run


DECAY = {"log_decay": "BTHL"}
KEPT_OPTIONS = {"count": 3, "block": 4}
sinks_macchiato = with_sinks(macchiato_attention)
sinks_window = with_sinks(sliding_window_attention)
BOTH_WAYS = {"causal": False}
OPS: dict[str, Op] = {
    "latte": Op(latte_attention, LATTE, latte_state, latent_keys="k", gaps=True),
    "bidirectional": Op(
        latte_attention,
        LATTE,
        latte_state,
        NOT_NATIVE,
        past=False,
        gaps=True,
        latent_keys="k",
        kernel_length=66,
        options=BOTH_WAYS,
    ),
    "forgetting": Op(latte_attention, LATTE | DECAY, forgetting_state, latent_keys="k", gaps=True),
    "macchiato": Op(macchiato_attention, MACCHIATO, macchiato_state, latent_keys="latent_k"),
    "macchiato-bidirectional": Op(
        macchiato_attention,
        MACCHIATO,
        None,
        NOT_NATIVE,
        past=False,
        latent_keys="latent_k",
        kernel_length=66,
        options=BOTH_WAYS,
    ),
    "macchiato-forgetting": Op(
        macchiato_attention,
        MACCHIATO | DECAY,
        forgetting_macchiato_state,
        latent_keys="latent_k",
    ),
    "sinks": Op(
        sinks_macchiato, MACCHIATO | SINKS, after_some(macchiato_state), latent_keys="latent_k"
    ),
    "delayed": Op(
        macchiato_attention,
        MACCHIATO,
        delayed_state,
        latent_keys="latent_k",
        options={"partition": Partition(delay=True)},
    ),
    "delayed-forgetting": Op(
        sinks_macchiato,
        MACCHIATO | {"log_decay": "HL"} | SINKS,
        after_some(forgetting_delayed_state),
        latent_keys="latent_k",
        options={"partition": Partition(delay=True)},
    ),
    "joint": Op(
        macchiato_attention,
        MACCHIATO,
        macchiato_state,
        packed_states=False,
        latent_keys="latent_k",
        options={"partition": Partition(joint=True)},
    ),
    "converted": Op(
        sinks_macchiato,
        MACCHIATO | SINKS,
        after_some(delayed_state),
        packed_states=False,
        latent_keys="latent_k",
        options={"partition": Partition(delay=True, joint=True)},
    ),
    "kept": Op(
        with_kept(macchiato_attention),
        MACCHIATO | DECAY | SINKS,
        kept_state,
        packed_states=False,
        gaps=True,
        latent_keys="latent_k",
        options=KEPT_OPTIONS | {"both": True},
    ),
    "kept-window": Op(
        with_kept(sliding_window_attention),
        WINDOW,
        held_window,
        packed_states=False,
        gaps=True,
        options=dict(KEPT_OPTIONS),
    ),
    "window": Op(sliding_window_attention, WINDOW, window_state, kernel_length=70),
    "window-bidirectional": Op(
        sliding_window_attention,
        WINDOW,
        None,
        NOT_NATIVE,
        past=False,
        kernel_length=70,
        options=BOTH_WAYS,
    ),
    "window-sinks": Op(sinks_window, WINDOW | SINKS, after_some(window_state), kernel_length=70),
    "full": Op(
        sliding_window_attention,
        WINDOW,
        full_state,
        PYTORCH,
        packed_states=False,
        gaps=True,
        options={"window": None},
    ),
    "full-bidirectional": Op(
        sliding_window_attention,
        WINDOW,
        None,
        PYTORCH,
        past=False,
        gaps=True,
        options={"window": None} | BOTH_WAYS,
    ),
    "log-mass": Op(log_mass, {"q": "BTHK", "k": "BTGK"}, None, ("torch",), averages=False),
    "linear": Op(
        linear_attention, LINEAR, linear_state, PYTORCH, gaps=True, options={"feature_map": "elu"}
    ),
    "linear-bidirectional": Op(
        linear_attention,
        LINEAR,
        linear_state,
        PYTORCH,
        past=False,
        gaps=True,
        options={"feature_map": "softplus"} | BOTH_WAYS,
    ),
    "rg_lru": Op(rg_lru, RG_LRU, rg_lru_state, gaps=True, averages=False),
    "rg_lru-reversed": Op(
        rg_lru,
        RG_LRU,
        rg_lru_state,
        past=False,
        gaps=True,
        averages=False,
        options={"reverse": True},
    ),
    "conv": Op(causal_conv1d, CONVOLUTION, convolution_state, averages=False),
    "conv-plain": Op(
        causal_conv1d, {"x": "BTE", "weight": "EC"}, convolution_state, averages=False
    ),
}


class Bench(NamedTuple):
    """One op on one backend, with a dtype, sizes and a device."""

    op: Op
    backend: str | None
    dtype: torch.dtype = F64
    sizes: Sizes = SIZES
    device: torch.device = torch.device("cpu")

    def sized(self, **sizes: int) -> Bench:
        return self._replace(sizes=self.sizes | sizes)

    def judge(self, dtype: torch.dtype = F64) -> Bench:
        """The same by the equations."""
        return self._replace(backend="reference", dtype=dtype)

    # -- inputs

    def normal(self, seed: int) -> Normal:
        generator = torch.Generator(self.device).manual_seed(seed)
        drawn = F64 if self.dtype == F64 else F32

        def normal(*shape: int) -> Tensor:
            x = torch.randn(*shape, generator=generator, device=self.device, dtype=drawn)
            return x.to(self.dtype)

        return normal

    def inputs(
        self, B: int, T: int, N: int | None = None, *, seed: int = 0, scale: float = 1.0
    ) -> list[Tensor]:
        """Random inputs, the logits of softmaxes times ``scale``."""
        sizes = self.sizes | {"B": B, "T": T, "N": B if N is None else N}
        sizes["M"] = sizes["L"] + 1
        normal = self.normal(seed)
        found = [one_number(name, shape, normal, sizes) for name, shape in self.op.inputs.items()]
        names = zip(self.op.inputs, found, strict=True)
        return [x * scale if name in LOGITS and scale != 1.0 else x for name, x in names]

    def extreme(self, kind: str, T: int, B: int = 1) -> list[Tensor]:
        """Latents' keys as the classic implementations fail on; or large queries."""
        inputs = self.inputs(B, T)
        time = torch.arange(T, device=self.device)[None, :, None, None].to(self.dtype)
        for name, _, x in self.shaped(inputs):
            if kind == "huge" and name in LOGITS or kind == "huge queries" and name == "q":
                x *= 1e4
            if name != self.op.latent_keys:
                continue
            if kind == "jump":
                x[:, T // 2 :] += 120.0
            elif kind == "fall":
                x[:, T // 2 :] -= 120.0
            elif kind == "dominant":
                x[:, T // 3] += 1e4
            elif kind == "rising":
                x += 70.0 * time
            elif kind == "rising apart":
                x[..., 1:] += 3.0 * time
            elif kind == "creeping":
                x += 0.5 * time
            elif kind == "alternating":
                x += 1.5e4 * (-1.0) ** time
            elif kind == "nothing seen":
                x[:, : T // 2, :, 1] = -torch.inf
                x[..., 2] = -torch.inf
        return inputs

    def state(self, N: int, seed: int = 7) -> Any:
        assert self.op.state is not None
        return self.op.state(self.normal(seed), N, self.sizes)

    def shaped(self, tensors: Sequence[Tensor]) -> Iterator[tuple[str, str, Tensor]]:
        """Name, shape in letters and tensor of the inputs, or of what goes with each of them."""
        named = zip(self.op.inputs.items(), tensors, strict=True)
        return ((name, shape, x) for (name, shape), x in named)

    def span(self, inputs: Sequence[Tensor], tokens: slice) -> list[Tensor]:
        """The inputs of these tokens."""
        return [x[:, tokens] if shape[:2] == "BT" else x for _, shape, x in self.shaped(inputs)]

    def rows(self, inputs: Sequence[Tensor], rows: slice | list[int]) -> list[Tensor]:
        """The inputs of these rows of a batch."""
        return [x[rows] if shape[0] in "BN" else x for _, shape, x in self.shaped(inputs)]

    def sequence(self, inputs: Sequence[Tensor], bounds: Sequence[int], n: int) -> list[Tensor]:
        """The inputs of packed sequence n."""
        part = self.span(inputs, slice(bounds[n], bounds[n + 1]))
        return [x[n : n + 1] if shape[0] == "N" else x for _, shape, x in self.shaped(part)]

    def taken(self, inputs: Sequence[Tensor], **orders: list[int]) -> list[Tensor]:
        """The inputs with these entries of a dimension, such as ``L=[2, 0, 1]``, in this order."""
        found = []
        for _, shape, x in self.shaped(inputs):
            for dim, letter in enumerate(shape):
                if letter in orders:
                    x = x.index_select(dim, torch.tensor(orders[letter], device=x.device))
            found.append(x)
        return found

    def filled(
        self, inputs: Sequence[Tensor], place: Any, value: float, queries: bool = False
    ) -> list[Tensor]:
        """Copies with ``value`` at these places of the sources' (B, T), or of the queries' too."""
        found = [x.clone() for x in inputs]
        for name, shape, x in self.shaped(found):
            if shape[:2] == "BT" and (queries or name not in QUERIES):
                # Decays are looked at: they must not be above 0.
                x[place] = -5.0 if name == "log_decay" and value > 0 else value
        return found

    def given(
        self,
        T: int,
        masked: bool = False,
        packed: bool = False,
        carried: bool = False,
        *,
        B: int = 2,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> tuple[list[Tensor], Any, dict[str, Any]]:
        """Inputs, state and options of a call with a mask, packed or from a state.

        As far as the op takes these together, and large logits and a soft cap.
        """
        op, mask = self.op, key_mask(1 if packed else B, T) if masked else None
        cu, goes_on = boundaries(T) if packed else None, op.state is not None
        goes_on = goes_on and (op.packed_states or not packed)
        B, N = (B, B) if cu is None else (1, len(cu) - 1)
        options: dict[str, Any] = {"softcap": softcap} if op.local and softcap else {}
        options["key_mask"] = None if mask is None else mask.to(self.device)
        options["cu_seqlens"] = None if cu is None else cu.to(self.device)
        # The final state of joint sequences exists, but none may go on from it.
        options["output_final_state"] = goes_on
        large = scale if op.averages and "feature_map" not in op.options else 1.0
        return (
            self.inputs(B, T, N, scale=large),
            self.state(N) if carried and goes_on else None,
            options,
        )

    # -- calls

    def call(self, inputs: Sequence[Tensor], state: Any = None, **options: Any) -> Any:
        """The output, and the final state if ``output_final_state``."""
        fixed = {"window": self.sizes["W"]} if self.op.local else {}
        given = dict(zip(self.op.inputs, inputs, strict=True)) | fixed | self.op.options
        given |= {x: self.sizes[x] for x in KEPT_OPTIONS.keys() & given.keys() & self.sizes.keys()}
        if state is not None:
            given["initial_state"] = state
        return self.op.run(**given, backend=self.backend, **options)

    def pieces(self, inputs: Sequence[Tensor], cuts: Sequence[int], **options: Any) -> Any:
        """The output and final state of one call after the other, which begin at the cuts."""
        T, mask = inputs[0].shape[1], options.pop("key_mask", None)
        state, outs = options.pop("state", None), []
        for a, b in zip([0, *cuts], [*cuts, T], strict=True):
            part = {} if mask is None else {"key_mask": mask[:, a:b]}
            now = self.span(inputs, slice(a, b))
            out, state = self.call(now, state, output_final_state=True, **part, **options)
            outs.append(out)
        return torch.cat(outs, 1), state

    def results(self, inputs: Sequence[Tensor], state: Any = None, **options: Any) -> list[Tensor]:
        """Outputs and final states, then the gradients of a random projection of them."""
        mine = [x.detach().clone().requires_grad_() for x in (*inputs, *leaves(state))]
        given = with_leaves(state, mine[len(inputs) :])
        return self.projected(self.call(mine[: len(inputs)], given, **options), mine)

    def projected(self, outputs: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, then the gradients that a random projection of them gives the inputs."""
        found = leaves(outputs)
        total = torch.zeros((), dtype=F64, device=self.device)
        generator = torch.Generator(self.device).manual_seed(99)
        for x in found:
            weights = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
            total = total + (torch.where(x.isfinite(), x, 0.0) * weights).double().sum()
        grads = torch.autograd.grad(total, inputs, allow_unused=True)
        zipped = zip(inputs, grads, strict=True)
        return [x.detach() for x in found] + [torch.zeros_like(x) if g is None else g
                                              for x, g in zipped]  # fmt: skip

    def agrees(self, T: int, *flags: bool, **given: Any) -> None:
        """Values and all gradients are those of the equations: in fp64 to rounding, else judged."""
        inputs, state, options = self.given(T, *flags, **given)
        if self.dtype == F64:
            wanted = equations(self.op, tuple(self.sizes.items()), T, *flags, **given)
            assert_same(self.results(inputs, state, **options), wanted)
        else:
            self.judged(inputs, state, **options)

    def gradient(self, name: str, results: int, state: Any = None) -> int:
        """Number of an input's gradient among that many :meth:`results`."""
        return results - len(self.op.inputs) - len(leaves(state)) + list(self.op.inputs).index(name)

    def judged(
        self,
        inputs: Sequence[Tensor],
        state: Any = None,
        *,
        ulps: float = 16.0,
        largest: float = 2.0,
        but: str | None = None,
        **options: Any,
    ) -> list[Tensor]:
        """Values and all gradients, which err at most twice what the equations do in that dtype.

        Args:
            ulps, largest: As for :func:`judge`.
            but: Name of an input whose gradient is not judged.
        """
        wide, exact = [lift(x) for x in inputs], map_state(lift, state)
        want = self.judge().results(wide, exact, **options)
        plain = self.judge(self.dtype).results(inputs, state, **options)
        got = self.results(inputs, state, **options)
        if but in self.op.inputs:
            place = self.gradient(but, len(got), state)
            got, plain, want = ([*x[:place], *x[place + 1 :]] for x in (got, plain, want))
        judge(got, plain, want, ulps=ulps, largest=largest)
        return got


@functools.lru_cache(maxsize=16)
def equations(
    op: Op, sizes: tuple[tuple[str, int], ...], T: int, *flags: bool, **given: Any
) -> Any:
    """What the reference gives, once for all backends that are compared with it."""
    bench = Bench(op, "reference", sizes=dict(sizes))
    inputs, state, options = bench.given(T, *flags, **given)
    return bench.results(inputs, state, **options)


def lift(x: Tensor) -> Tensor:
    """In fp64, if it is a number."""
    return x.double() if x.is_floating_point() else x


class Failed(AssertionError):
    """A check that did not hold, with what was found."""


def judge(
    got: Sequence[Tensor],
    plain: Sequence[Tensor],
    exact: Sequence[Tensor],
    *,
    ulps: float = 16.0,
    largest: float = 0.0,
    states: tuple[torch.dtype, float] | None = None,
    limits: Mapping[int, float] | None = None,
) -> str:
    """Every tensor errs at most twice what the judge in the same precision errs against fp64.

    Args:
        got: What a backend gives.
        plain: What the judge gives in the same precision.
        exact: What the judge gives in fp64.
        ulps: Ulps of fp32 that any tensor may err: the judge may be exact by luck.
        largest: Ulps of fp32 of the largest tensor, for gradients of logits. Each of these is a
            difference of sums that are as large as the other gradients.
        states: The inputs' dtype, and how much the other, wider tensors may err: a state is fp32
            also for half-precision inputs, where the judge rounds nothing.
        limits: Relative error that a tensor may have anyway, by its number.
    """
    worst, where = 0.0, 0
    eps = torch.finfo(F32).eps
    finite = [torch.where(torch.isfinite(e), e, 0.0) for e in exact]
    top = max((e.norm().item() for e in finite), default=0.0)
    for i, (a, b, e) in enumerate(zip(got, plain, exact, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Failed(f"tensor {i}: {a.dtype} {tuple(a.shape)}, expected {b.dtype}")
        dtype, seen = a.dtype, torch.isfinite(e)
        if not torch.equal(a[~seen].double(), e[~seen]):
            raise Failed(f"tensor {i}: other infinities, or NaN")
        a, b, e = (torch.where(seen, x.double(), 0.0) for x in (a, b, e))
        norm = max(e.norm().item(), 1e-30)
        error, limit = (a - e).norm().item(), 2 * (b - e).norm().item()
        limit = max(limit, eps * ulps * max(1.0, norm), eps * largest * top)
        if states is not None and dtype != states[0]:
            limit = max(limit, states[1] * norm)
        limit = max(limit, (limits or {}).get(i, 0.0) * norm)
        if not error <= limit:
            raise Failed(f"tensor {i}: error {error / norm:.2e}, allowed {limit / norm:.2e}")
        if error / limit > worst:
            worst, where = error / limit, i
    return f"at most {100 * worst:.0f}% of what is allowed (tensor {where})"
