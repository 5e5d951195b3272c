"""The arguments of the ops: what the interface gives to a backend, and the schemas of custom ops.

The interface (:mod:`latte.ops.api`) makes a value of one of these classes from a checked call, and
each backend takes it. Such a class is also the schema of the backends' custom ops
(:mod:`latte.ops.custom_ops`): tensors, then numbers. A state that a call continues from is all of
its tensors, or None for each of them.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, E channels, N states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from latte.ops.kept import Kept, KeptLatents, KeptState
from latte.ops.state import LateSources, SeenSinks, Sinks
from latte.ops.tensors import Local, Sequences

Three = tuple[Tensor, Tensor, Tensor]
# An earlier state as ops take it: its tensors, or the same number of None.
Earlier = tuple[Tensor | None, ...]

NO_STATE: Any = (None, None)
NO_WINDOW: Any = (None, None, None)
NO_SINKS: Any = (None, None, None, None, None)

# The arguments that have gradients.
_STATE = ("log_mass", "mean", "log_decay")
_NEAR = ("tail_k", "tail_v", "sink_q", "sink_k", "sink_v")
LATTE_GRADIENTS = ("q", "k", "v", *_STATE)
WINDOW_GRADIENTS = ("q", "k", "v", *_NEAR)
MACCHIATO_GRADIENTS = ("latent_q", "latent_k", "q", "k", "v", *_STATE, *_NEAR)


class Latte(NamedTuple):
    """Arguments of :func:`latte.ops.latte_attention`; every head has values of its own."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    log_mass: Tensor | None
    mean: Tensor | None
    log_decay: Tensor | None = None

    @property
    def qkv(self) -> Three:
        return self.q, self.k, self.v

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.key_mask, self.cu_seqlens)

    @property
    def earlier(self) -> Earlier:
        return self.log_mass, self.mean


class Window(NamedTuple):
    """Arguments of :func:`latte.ops.sliding_window_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    tail_k: Tensor | None
    tail_v: Tensor | None
    tail_mask: Tensor | None
    sink_q: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    sink_mask: Tensor | None
    sinks_seen: Tensor | None
    window: int  # None means all keys, which no custom op takes.
    scale: float
    softcap: float
    causal: bool

    @property
    def qkv(self) -> Three:
        return self.q, self.k, self.v

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.key_mask, self.cu_seqlens, self.causal)

    @property
    def local(self) -> Local:
        return Local(self.window, self.scale, self.softcap)

    @property
    def tail(self) -> Earlier:
        return self.tail_k, self.tail_v, self.tail_mask

    @property
    def sinks(self) -> SeenSinks | None:
        """The sinks, if there are any."""
        tensors: Any = self[8:13]
        return None if self.sink_q is None else SeenSinks(*tensors)


class Macchiato(NamedTuple):
    """Arguments of :func:`latte.ops.macchiato_attention`, and of its native op."""

    latent_q: Tensor  # column 0 is the window's logit
    latent_k: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    log_mass: Tensor | None
    mean: Tensor | None
    log_decay: Tensor | None
    tail_k: Tensor | None
    tail_v: Tensor | None
    tail_mask: Tensor | None
    sink_q: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    sink_mask: Tensor | None
    sinks_seen: Tensor | None
    pending_k: Tensor | None
    pending_v: Tensor | None
    pending_mask: Tensor | None
    window: int
    scale: float
    softcap: float
    delay: bool
    joint: bool

    def near(self, causal: bool = True) -> Window:
        """The arguments of the window."""
        return Window(*self[2:7], *self[10:18], *self[21:24], causal)  # type: ignore[arg-type]

    def late(self, causal: bool) -> LateSources:
        """The sources that delayed latents read."""
        sequences = Sequences(self.key_mask, self.cu_seqlens, causal)
        pending: Any = self[18:21]
        return LateSources.of(
            *(self.latent_k, self.v, self.window, sequences, pending, self.log_mass)
        )


class Mixture(NamedTuple):
    """Arguments of the ops that compute :class:`Macchiato` from delayed sources, if it has some.

    With delayed latents, ``latent_k``, ``late_v`` and ``late_mask`` belong to the tokens that the
    latents read at each time, and ``begun`` says whether they have read any.
    """

    latent_q: Tensor
    latent_k: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    log_mass: Tensor | None
    mean: Tensor | None
    log_decay: Tensor | None
    tail_k: Tensor | None
    tail_v: Tensor | None
    tail_mask: Tensor | None
    sink_q: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    sink_mask: Tensor | None
    sinks_seen: Tensor | None
    late_v: Tensor | None
    late_mask: Tensor | None
    begun: Tensor | None
    window: int
    scale: float
    softcap: float
    causal: bool = True
    joint: bool = False

    @classmethod
    def of(cls, x: Macchiato, causal: bool) -> Mixture:
        """The arguments of a call."""
        latent_k, late = x.latent_k, NO_WINDOW
        if x.delay:
            latent_k, *late = x.late(causal)
        around = (*x[2:18], *late, *x[21:24], causal, x.joint)
        return cls(x.latent_q, latent_k, *around)  # type: ignore[call-arg]

    def near(self) -> Window:
        """The arguments of the window."""
        return Window(*self[2:7], *self[10:18], *self[21:24], self.causal)  # type: ignore[arg-type]

    @property
    def earlier(self) -> Earlier:
        return self.log_mass, self.mean


class KeptInputs(NamedTuple):
    """Arguments of a call with kept tokens, of the window alone or with latents.

    A backend (a module) makes a plan of them by ``plan_of``, which reads no values but scores and
    masks, and takes both in ``attention`` and ``state_after``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kept: Kept
    local: Local
    sequences: Sequences
    state: KeptState | None = None
    sinks: Sinks | None = None
    latents: KeptLatents | None = None

    @property
    def window(self) -> int:
        """Number of keys of the window."""
        assert self.local.window is not None
        return self.local.window


class Linear(NamedTuple):
    """Arguments of :func:`latte.ops.linear_attention`: features, in the dtype of the sums."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    memory: Tensor | None
    normaliser: Tensor | None
    causal: bool


class RGLRU(NamedTuple):
    """Arguments of :func:`latte.ops.rg_lru`."""

    x: Tensor
    recurrence_gate: Tensor
    input_gate: Tensor
    theta: Tensor
    initial_state: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    reverse: bool


class Convolution(NamedTuple):
    """Arguments of :func:`latte.ops.causal_conv1d`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
