"""The arguments of the custom ops that several backends have, in one order for all of them.

Each class is the schema of an op (:mod:`latte.ops.custom_ops`): tensors, then numbers. A state that
a call continues from is all of its tensors, or None for each of them.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, N states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from latte.ops.state import LateSources, SeenSinks, WindowState
from latte.ops.tensors import Local, Sequences

Three = tuple[Tensor, Tensor, Tensor]
# An earlier state as ops take it: all of its tensors, or as many times None.
Earlier = tuple[Tensor | None, ...]

NO_STATE: Any = (None, None)
NO_WINDOW: Any = (None, None, None)
NO_SINKS: Any = (None, None, None, None, None)


def sinks_of(*tensors: Tensor | None) -> SeenSinks | None:
    """The sinks of an op's arguments."""
    return None if tensors[0] is None else SeenSinks(*tensors)  # type: ignore[arg-type]


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

    @classmethod
    def of(
        cls,
        qkv: Three,
        sequences: Sequences,
        earlier: tuple[Tensor, Tensor] | None,
        log_decay: Tensor | None = None,
    ) -> Latte:
        """The arguments of a call."""
        key_mask, cu_seqlens, _ = sequences
        log_mass, mean = earlier or NO_STATE
        return cls(*qkv, key_mask, cu_seqlens, log_mass, mean, log_decay)

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
    """Arguments of :func:`latte.ops.sliding_window_attention` with a window."""

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
    window: int
    scale: float
    softcap: float
    causal: bool

    @classmethod
    def of(
        cls,
        qkv: Three,
        local: Local,
        sequences: Sequences,
        tail: WindowState | None,
        sinks: SeenSinks | None,
    ) -> Window:
        """The arguments of a call."""
        key_mask, cu_seqlens, causal = sequences
        around = (key_mask, cu_seqlens, *(tail or NO_WINDOW), *(sinks or NO_SINKS))
        return cls(*qkv, *around, *local, causal)  # type: ignore[call-arg, arg-type]

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
        return sinks_of(self.sink_q, self.sink_k, self.sink_v, self.sink_mask, self.sinks_seen)


class Macchiato(NamedTuple):
    """Arguments of :func:`latte.ops.macchiato_attention`.

    With delayed latents, ``latent_k``, ``late_v`` and ``late_mask`` belong to the tokens that the
    latents read at each time, and ``begun`` says whether they have read any.
    """

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
    late_v: Tensor | None
    late_mask: Tensor | None
    begun: Tensor | None
    window: int
    scale: float
    softcap: float
    causal: bool = True
    joint: bool = False

    @classmethod
    def of(
        cls,
        latents: tuple[Tensor, Tensor],
        qkv: Three,
        local: Local,
        sequences: Sequences,
        earlier: tuple[Tensor, Tensor] | None,
        tail: WindowState | None,
        log_decay: Tensor | None,
        sinks: SeenSinks | None,
        late: LateSources | None,
        joint: bool = False,
    ) -> Macchiato:
        """The arguments of a call.

        Args:
            latents: Query and key logits of the latents.
            late: Sources that the latents read at each token, if they are late.
        """
        key_mask, cu_seqlens, causal = sequences
        latent_q, latent_k = latents
        if late is not None:
            latent_k = late.keys
        late_sources = NO_WINDOW if late is None else late[1:]
        return cls(  # type: ignore[call-arg]
            *(latent_q, latent_k, *qkv, key_mask, cu_seqlens, *(earlier or NO_STATE), log_decay),
            *(*(tail or NO_WINDOW), *(sinks or NO_SINKS), *late_sources),
            *(*local, causal, joint),
        )

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
    def earlier(self) -> Earlier:
        return self.log_mass, self.mean

    @property
    def tail(self) -> Earlier:
        return self.tail_k, self.tail_v, self.tail_mask

    @property
    def sinks(self) -> SeenSinks | None:
        return sinks_of(self.sink_q, self.sink_k, self.sink_v, self.sink_mask, self.sinks_seen)


class Convolution(NamedTuple):
    """Arguments of :func:`latte.ops.causal_conv1d`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
