"""Decoding a token at a time: a layer's state in buffers that a step writes in place.

A :class:`StepState` is copied from a :class:`MixerState` once after a prompt. When the state is
read, it is copied back into a :class:`MixerState`. In between, the window is a ring, and nothing
is allocated. The owner of the buffers (the cache) passes them only to the layer's step.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, K key width, L latents per
head, W slots of a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.layers.mixer import MixerState
from latte.layers.parts import Rotary
from latte.layers.plan import UNPLANNED, LayerParts, StepPlan
from latte.layers.rollback import map_tensors
from latte.ops import decoding
from latte.ops.kept_step import KeptBuffers, kept_step, native_arguments, plain_factors
from latte.ops.state import (
    LatteState,
    LinearState,
    WindowState,
    oldest_alone,
    with_all_values,
)
from latte.ops.step import Ring, StepSinks, macchiato_step, native, number, window_step


@dataclass(eq=False)
class StepContext:
    """The position of each sequence of a batch, shared by the buffers of all layers.

    Attributes:
        position: Number of real tokens seen, (B,) int64.
        steps: Number of tokens per row since the buffers were made, padding included, () int64.
        slots: Slot of the next token, (1,) int64, for each ring size in slots; the key is 0 for a
            ring that grows.
        length: Number of used slots of a growing ring; None if all slots are read.
        real: Whether the current token of each row is a real one, (B,) bool; None if all are.
        phases: Number of real tokens of each row since its last multiple of ``block``; None if the
            host does not know.
        block: Number of tokens after which kept tokens are chosen anew; 0 if none are kept.
        ahead: A converted decoder's rotary tables of this and later positions.
        plan: What the current step calls and what it reads.
    """

    position: Tensor
    steps: Tensor
    slots: dict[int, Tensor] = field(default_factory=dict)
    length: int | None = None
    real: Tensor | None = None
    plan: StepPlan = UNPLANNED
    phases: list[int] | None = None
    block: int = 0
    ahead: Any = field(default=None, init=False)

    def count_phases(self, block: int) -> None:
        """Find the rows' phases, once, from their positions."""
        self.block, self.phases = block, (self.position % block).tolist()

    @property
    def update(self) -> bool | None:
        """Whether kept tokens of a row are chosen anew at this token; None if unknown."""
        return None if self.phases is None else 0 in self.phases

    def advance(self) -> None:
        """Advance to the next token, after all layers have read the current one."""
        one = number(1, self.position)
        self.position.add_(one if self.real is None else self.real)
        self.steps.add_(one)
        for size, slot in self.slots.items():
            slot.add_(one)
            if size:
                slot.remainder_(number(size, slot))
        if self.length is not None:
            self.length += 1
        if self.phases is not None:
            steps = [1] * len(self.phases) if self.real is None else self.real.tolist()
            pairs = zip(self.phases, steps, strict=True)
            self.phases = [(phase + step) % self.block for phase, step in pairs]
        self.forget()

    def forget(self) -> None:
        """Let go of what belongs to one token."""
        self.real, self.plan = None, UNPLANNED


@dataclass
class StepState:
    """One layer's buffers, all contiguous; None for parts that its mixer does not have.

    The parts are those of a :class:`MixerState`. ``size`` is the number of slots of the ring, 0 if
    it grows. ``step_context`` is shared by all layers. With delayed latents, ``pending`` (B, H, W,
    L) holds the latent keys of the ring's tokens: the latents read a token when its slot is reused.
    ``sinks`` are keys and values (B, G, n, ...); slots of tokens not read yet are empty.
    ``kept_sizes`` are the numbers of kept tokens, of the window's keys, and of a block's tokens.
    """

    step_context: StepContext
    latent: LatteState | None = None
    linear: LinearState | None = None
    ring: Ring | None = None
    rglru: Tensor | None = None
    conv: Tensor | None = None
    short_conv: Tensor | None = None
    pending: Tensor | None = None
    sinks: tuple[Tensor, Tensor] | None = None
    kept: KeptBuffers | None = None
    size: int = 0
    kept_sizes: tuple[int, int, int] | None = None

    @classmethod
    def of(
        cls,
        state: MixerState,
        step_context: StepContext,
        *,
        room: int | None,
        masked: bool,
        kept_sizes: tuple[int, int, int] | None = None,
    ) -> StepState:
        """Buffers with a copy of a state.

        Args:
            room: Number of slots of the ring of a state that grows; None if it does not grow.
            masked: Whether to store which slots hold a real token. If not, all do.
            kept_sizes: As above, of a state with kept tokens.
        """
        parts = (state.latent, state.linear, None, state.rglru, state.conv, state.short_conv)
        made = cls(step_context, *map_tensors(_copy, parts))
        if state.sinks is not None:
            sink_k, sink_v, there = state.sinks
            blank = ~there[..., None, None]
            sink_k, sink_v = (_slots_first(x.masked_fill(blank, 0)) for x in (sink_k, sink_v))
            made.sinks = sink_k, sink_v
        if state.kept is not None:
            assert kept_sizes is not None
            made.kept, made.kept_sizes = KeptBuffers.of(state.kept, *kept_sizes), kept_sizes
        if state.window is None:
            return made
        held = state.window.mask.shape[1]
        slots = held + 1 if room is None else room
        made.size = slots if room is None else 0
        step_context.slots.setdefault(made.size, torch.full_like(step_context.position[:1], held))

        def ring(x_BTX: Tensor) -> Tensor:
            x_BXT = x_BTX.movedim(1, -2)
            ring_BXW = x_BXT.new_zeros(*x_BXT.shape[:-2], slots, x_BXT.shape[-1])
            ring_BXW[..., : x_BXT.shape[-2], :] = x_BXT
            return ring_BXW

        keys, values, mask = state.window
        if state.pending is not None:
            # The oldest of W tokens is in the slot that comes next.
            unread = with_all_values(state.pending, state.window)
            latent_k, values, mask = (x.roll(-1, 1) for x in unread)
            made.pending = ring(latent_k)
        mask_BW = ring(mask[..., None])[..., 0] if masked else None
        made.ring = Ring(ring(keys), ring(values), mask_BW)
        return made

    @property
    def slot(self) -> Tensor:
        """The ring's slot for the next token, (1,) int64."""
        return self.step_context.slots[self.size]

    def state(self) -> MixerState:
        """A copy of the state in the buffers."""
        latent, linear, rglru, conv, short_conv = map_tensors(
            torch.clone, (self.latent, self.linear, self.rglru, self.conv, self.short_conv)
        )
        if rglru is not None:
            # Zeros would mean the empty state, but this row has read a token.
            rglru += torch.finfo(rglru.dtype).tiny
        window = pending = sinks = None
        position = self.step_context.position.clone()
        if self.ring is not None:
            # The next slot holds the token that leaves the window.
            window = self._newest(self.ring.keys, self.ring, self.size - 1)
            if self.pending is not None:
                pending = oldest_alone(self._newest(self.pending, self.ring, self.size))
        if self.sinks is not None:
            keys, values = (_slots_first(x) for x in self.sinks)
            mask = torch.arange(keys.shape[1], device=position.device) < position[:, None]
            sinks = WindowState(keys, values, mask)
        kept = None
        if self.kept is not None and self.kept_sizes is not None:
            kept = self.kept.state(position, *self.kept_sizes)
        parts: Any = {"pending": pending, "sinks": sinks, "kept": kept}
        return MixerState(position, latent, linear, window, rglru, conv, short_conv, **parts)

    def _newest(self, keys: Tensor, ring: Ring, count: int) -> WindowState:
        """The ring's last ``count`` tokens (all, if it grows), oldest first, with these keys."""
        slots, device = ring.keys.shape[2], self.slot.device
        if self.size:
            order = (self.slot + slots - count + torch.arange(count, device=device)) % slots
        else:
            order = torch.arange(int(self.slot), device=device)
        keys, values = (x[:, :, order].transpose(1, 2).contiguous() for x in (keys, ring.values))
        if ring.mask is None:
            mask = torch.ones(keys.shape[:2], dtype=torch.bool, device=device)
        else:
            mask = ring.mask[:, order]
        return WindowState(keys, values, mask)

    @property
    def parts(self) -> tuple[Any, ...]:
        """All buffers, in nested tuples."""
        return (
            *(self.latent, self.linear, self.ring, self.rglru, self.conv, self.short_conv),
            *(self.pending, self.sinks, self.kept),
        )

    def attend(
        self,
        local: tuple[Tensor, Tensor, Tensor],
        scale: float,
        softcap: float | None = None,
        rotary: Rotary | None = None,
        latents: tuple[Tensor, Tensor, Tensor | None] | None = None,
        joint: bool = False,
        kept: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """The output of each head, (B, H, D), for the window's q, k and v of one token per row.

        It is that of the window alone, or mixed with the ``latents``: their q, k and log-decay.
        With kept tokens ``kept`` is this token's score (B, G), and the mixer's ``score_rise``.
        """
        step_context, sinks = self.step_context, self._sinks(rotary)
        table = None if rotary is None else rotary[:2]
        options: Any = {"scale": scale, "softcap": softcap, "rotary": table}
        if kept is not None:
            score, options["rise"] = kept
            return self._attend_kept(local, score, latents, sinks=sinks, **options)
        assert self.ring is not None
        where: Any = self.ring, self.slot, step_context.real
        if latents is None:
            length = None if self.size or step_context.length is None else step_context.length + 1
            return window_step(*local, *where, length=length, sinks=sinks, **options)
        assert self.latent is not None
        options |= {"log_decay": latents[2], "pending": self.pending, "joint": joint}
        state = self.latent.log_mass, self.latent.mean
        return macchiato_step(*latents[:2], *local, *state, *where, sinks=sinks, **options)

    def _sinks(self, rotary: Rotary | None) -> StepSinks | None:
        """The sinks, and how queries are rotated for them."""
        if self.sinks is None:
            return None
        far = None if rotary is None else rotary.sinks[:2]
        return StepSinks(*self.sinks, self.step_context.position, far)

    def kept_arguments(self, mixer: Any, x_BE: Tensor, rotary: Rotary | None) -> tuple[Any, ...]:
        """What the native op of :meth:`attend` with kept tokens and latents is given.

        Without what depends on the token; empty if it is not called with x, or with more.
        """
        held, latent, parts = self.kept, self.latent, mixer._modules
        if held is None or latent is None or self.kept_sizes is None or "q_norm" in parts:
            return ()
        if parts["latents"].log_decay(1) is not None:
            return ()
        sinks = self._sinks(rotary)
        if not native(latent.log_mass, x_BE, *plain_factors(held, sinks)):
            return ()
        table = None if rotary is None else rotary[:2]
        given: Any = held, self.step_context.position, None, *self.kept_sizes
        given += mixer.scale, mixer.softcap, table, sinks, mixer.score_rise
        more = native_arguments(*given)
        return latent.log_mass, latent.mean, None, *more

    def _attend_kept(
        self,
        local: tuple[Tensor, Tensor, Tensor],
        score: Tensor,
        latents: tuple[Tensor, Tensor, Tensor | None] | None,
        **options: Any,
    ) -> Tensor:
        """As :meth:`attend`, with kept tokens."""
        assert self.kept is not None
        assert self.kept_sizes is not None
        context, far = self.step_context, None
        if latents is not None and self.latent is not None:
            far = *latents, self.latent.log_mass, self.latent.mean
        count, window, block = self.kept_sizes
        options |= {"count": count, "window": window, "block": block, "update": context.update}
        given: Any = *local, score, self.kept, context.position, context.real
        return kept_step(*given, latents=far, **options)

    def map(self, fn: Callable[[Tensor], Tensor]) -> StepState:
        """The same with ``fn`` applied to each buffer (B, ...)."""
        made = StepState(self.step_context, *map_tensors(fn, self.parts))
        made.size, made.kept_sizes = self.size, self.kept_sizes
        return made


class WholeStep(NamedTuple):
    """What one call for all layers is given: the same for every token.

    Attributes:
        layers: Number of layers.
        call: The layers; None if some layer makes other calls.
        tables: Rotary tables, by their keys, which a token's are copied to.
    """

    layers: int
    call: decoding.Layers | None = None
    tables: Any = None

    @classmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def of(
        cls, layers: Sequence[LayerParts], x_BE: Tensor, states: Sequence[StepState], rotary: Any
    ) -> WholeStep:
        """That of some layers, for tokens like x (B, E)."""
        plan = states[0].step_context.plan
        none = cls(len(layers))
        tensors: list[Any] = []
        numbers: list[Any] = []
        if not isinstance(rotary, dict):
            return none
        tables = {key: map_tensors(_copy, table) for key, table in rotary.items()}
        for parts, state in zip(layers, states, strict=False):
            begin, end = plan.layer_arguments(parts, x_BE)
            kept = begin and state.kept_arguments(parts.mixer, x_BE, tables[parts.table])
            if not (kept and end):
                return none
            for x in (*begin, *kept, *end):
                (tensors if x is None or isinstance(x, Tensor) else numbers).append(x)
        call = decoding.Layers(tensors, torch.tensor(numbers, dtype=torch.float64))
        return cls(len(layers), call, tables)

    def run(self, x_BE: Tensor, rotary: Any) -> Tensor:
        """Hidden states (B, E) after all layers."""
        assert self.call is not None
        for key, table in self.tables.items():
            for place, x in zip(_angles(table), _angles(rotary[key]), strict=True):
                place.copy_(x)
        return self.call(x_BE.contiguous())


def _angles(table: Rotary) -> tuple[Tensor, ...]:
    return (*table[:2], *(table.sinks or ())[:2])


def run_layer(parts: LayerParts, x_BE: Tensor, state: StepState, rotary: Any = None) -> Tensor:
    """Hidden states (B, E) after a decoder layer, from those of one token per row before it.

    Args:
        parts: Modules of the layer.
        state: Buffers of the layer's state, which are overwritten.
        rotary: Rotary table; a dict of them if ``parts.table`` names one.
    """
    plan, mixer = state.step_context.plan, parts.mixer
    if parts.table is not None:
        rotary = rotary[parts.table]
    if begun := plan.begin_layer(parts, x_BE):
        mixed = mixer._begun_step(begun, state, rotary)
    else:
        mixed = mixer._step(plan.norm(parts.mixer_norm, x_BE), state, rotary)
    ended = plan.end_layer(parts, mixed, x_BE)
    if ended is not None:
        return ended
    mixed = mixed.view(len(x_BE), -1)
    output = mixer._modules["o_proj"]  # ten times as fast as a module's attribute
    if parts.post_mixer is None:
        x_BE = plan.linear_add(mixed, output, x_BE)
    else:
        x_BE = x_BE + plan.norm(parts.post_mixer, plan.linear_maps(mixed, output)[0])
    if parts.mlp is None:
        return x_BE
    if parts.post_mlp is None:
        return plan.feed_forward(parts.mlp, parts.mlp_norm, x_BE, True)
    inner = plan.feed_forward(parts.mlp, parts.mlp_norm, x_BE, False)
    return x_BE + plan.norm(parts.post_mlp, inner)


def run_layers(
    layers: Sequence[LayerParts],
    x_BE: Tensor,
    states: Sequence[StepState],
    rotary: Any = None,
    hidden_states: list[Tensor] | None = None,
) -> Tensor:
    """Hidden states (B, E) after decoder layers. A list gets the input of each layer, (B, 1, E)."""
    context = states[0].step_context
    wholes = context.plan.wholes
    if wholes is not None and hidden_states is None and context.real is None:
        whole = wholes.get(context)
        if whole is None or whole.layers != len(layers):
            whole = wholes[context] = WholeStep.of(layers, x_BE, states, rotary)
        if whole.call is not None:
            return whole.run(x_BE, rotary)
    for parts, state in zip(layers, states, strict=False):
        if hidden_states is not None:
            hidden_states.append(x_BE[:, None])
        x_BE = run_layer(parts, x_BE, state, rotary)
    return x_BE


def _slots_first(x: Tensor) -> Tensor:
    """(B, n, G, ...) -> (B, G, n, ...), and back: a copy."""
    return _copy(x.transpose(1, 2))


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
