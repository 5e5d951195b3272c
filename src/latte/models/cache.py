"""The cache of Latte models: one state of constant size per layer, in Transformers' Cache API.

A state is a :class:`latte.layers.MixerState`. Only the state of full softmax attention grows with
the sequence. B batch, T tokens.

While single tokens are decoded, the states are buffers that are written in place
(:mod:`latte.layers.step`). Only the cache holds these buffers: reading a layer gives a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from latte.layers.kept_range import KeptRange
from latte.layers.mixer import EMPTY, MixerState
from latte.layers.plan import StepPlan
from latte.layers.rollback import PastKeys, check_recorded, drop_newest, map_tensors
from latte.layers.step import StepContext, StepState
from latte.ops.backend import steps_in_place
from latte.ops.mxint8 import pack, unpack


class LatteCacheLayer(CacheLayerMixin):
    """One layer's state, and the number of tokens (padding included) that it has read.

    Args:
        grows: Whether the state keeps every token (full softmax attention). Then tokens can be
            removed at any time. Otherwise removal needs recording
            (:meth:`activate_past_recording`).
        kept_sizes: Numbers of kept tokens, of the window's keys and of a block's tokens; None
            without kept tokens.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, grows: bool = False, kept_sizes: tuple[int, int, int] | None = None) -> None:
        # The base's __init__ is not called: the attributes it sets are read-only properties here.
        self.grows, self.kept_sizes = grows, kept_sizes
        self.record_past = False
        self.is_compileable = False  # set by the cache if its buffers keep their addresses
        self.device: torch.device | None = None
        self.buffers: StepState | None = None
        self._state: MixerState | None = EMPTY  # None: the buffers hold it
        self._seen = 0

    @property
    def state(self) -> MixerState:
        """The state. It is safe to keep: later decoding does not change it."""
        if self._state is not None:
            return self._state
        assert self.buffers is not None
        return self.buffers.state()

    @state.setter
    def state(self, state: MixerState) -> None:
        self._seen = self.seen_tokens
        self._state = state
        if not self.is_compileable:
            self.buffers = None

    @property
    def seen_tokens(self) -> int:
        """The number of tokens read, padding included."""
        if self._state is not None:
            return self._seen
        assert self.buffers is not None
        return self._seen + int(self.buffers.step_context.steps)

    @seen_tokens.setter
    def seen_tokens(self, count: int) -> None:
        self._seen += count - self.seen_tokens

    @property
    def held(self) -> tuple[Any, ...]:
        """All tensors of the state, in nested tuples."""
        if self._state is not None:
            return self._state
        assert self.buffers is not None
        return self.buffers.parts

    @property
    def position(self) -> Tensor | None:
        """Number of valid tokens seen, (B,) int64; not a copy if buffers hold the state."""
        if self._state is not None:
            return self._state.position
        assert self.buffers is not None
        return self.buffers.step_context.position

    @property
    def is_written_in_place(self) -> bool:
        """Whether the buffers hold the state."""
        return self._state is None

    def write_in_place(self, buffers: StepState, seen: int) -> None:
        """Let these buffers hold the state from now on; ``seen`` tokens had been read by then."""
        self._state, self.buffers, self._seen = None, buffers, seen

    # --- the state, by the names of the design -------------------------------------------------

    @property
    def log_mass(self) -> Tensor | None:
        """Log-mass of the latents, (B, H, L); None for mixers without latents."""
        return None if self.state.latent is None else self.state.latent.log_mass

    @property
    def mean(self) -> Tensor | None:
        """Mean of the values that each latent has read, (B, H, L, D)."""
        return None if self.state.latent is None else self.state.latent.mean

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Keys of the window, oldest first, (B, G, W-1, K)."""
        return None if self.state.window is None else self.state.window.keys.transpose(1, 2)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Values of the window, oldest first, (B, G, W-1, D)."""
        return None if self.state.window is None else self.state.window.values.transpose(1, 2)

    @property
    def rglru(self) -> Tensor | None:
        """State of the RG-LRU, (B, E) fp32."""
        return self.state.rglru

    @property
    def conv(self) -> Tensor | None:
        """Last inputs of the convolution, (B, K-1, E)."""
        return self.state.conv

    # --- reading and writing -------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self._state is None or self._state.position is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate nothing: the first forward brings the state."""

    def update(self, state: MixerState, num_tokens: int) -> MixerState:  # type: ignore[override]
        """Replace the state by the one after ``num_tokens`` more tokens."""
        if state.recorded is not None and not self.record_past:
            state = state._replace(recorded=None)
        assert state.position is not None, "a mixer's final state always has a position"
        self.device = state.position.device
        self._seen = self.seen_tokens + num_tokens
        self._state = state
        if not self.is_compileable:
            self.buffers = None
        return state

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen_tokens + query_length, 0

    def reset(self) -> None:
        keeps_sources = self.state.sources is not None
        self.state = MixerState(sources=PastKeys()) if keeps_sources else EMPTY
        self._seen = 0
        if self.record_past:
            self.activate_past_recording()

    def keep_sources(self) -> None:
        """Keep the keys of every token, for weights over the past.

        Raises:
            ValueError: Tokens were read before whose keys were not kept.
        """
        if self.state.sources is None:
            if self.seen_tokens:
                raise ValueError(
                    "output_attentions needs the whole sequence at once, or from its first token "
                    "on, since a state does not tell its tokens apart: pass use_cache=False, or "
                    "ask for it with a new cache"
                )
            self.state = self.state._replace(sources=PastKeys())

    def turn_kept(self, span: KeptRange, at_B: Tensor, due_B: Tensor, turn: Any) -> None:
        """Turn the far kept keys of the rows that are due (:mod:`latte.layers.kept_range`)."""
        held = self._state.kept if self._state is not None else self.buffers.kept  # type: ignore[union-attr]
        if held is None:
            return
        at_B, due_B, *turn = (x.to(held.keys.device) for x in (at_B, due_B, *turn))
        keys, packed = held.keys, held.keys.dtype == torch.uint8
        keys = unpack(keys, torch.float32) if packed else keys
        keys = span.turned(keys, held.positions, at_B, due_B, turn)
        keys = pack(keys) if packed else keys
        if self._state is None:
            held.keys.copy_(keys)
        else:
            self._state = self._state._replace(kept=held._replace(keys=keys))  # type: ignore[arg-type]

    # --- the batch dimension -------------------------------------------------------------------

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.state = map_tensors(fn, self.state)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        device = self.device
        if device is not None:
            self._map(lambda x: x.to(device, non_blocking=True))

    # --- taking tokens back --------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Record every further token, so that :meth:`crop` can remove it.

        The record grows with every forward. ``crop`` empties it.
        """
        self.record_past = True
        if not self.grows and self.state.recorded is None:
            self.state = self.state.record()

    def check_crop(self, tokens_to_remove: int, mixer: Any) -> None:
        """Raise the errors of :meth:`LatteCache.crop`."""
        count = -tokens_to_remove
        if not 0 <= count <= self.seen_tokens:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, here -{self.seen_tokens} "
                f"to 0, got {tokens_to_remove}"
            )
        if self.grows or count in (0, self.seen_tokens):
            return
        if self.state.recorded is None:
            raise ValueError(
                "tokens were not recorded, so they cannot be taken back: call "
                "activate_past_recording() on the cache before they are processed"
            )
        check_recorded(self.state.recorded, count)
        if mixer is None:
            raise ValueError("crop needs the model that has filled this cache: it is gone")

    def crop(self, tokens_to_remove: int, mixer: Any = None) -> None:
        """As :meth:`LatteCache.crop`, checked; ``mixer`` is the layer that has read the tokens."""
        count = -tokens_to_remove
        if count and count == self.seen_tokens:
            self.reset()
            return
        if self.grows and count:
            self.state = drop_newest(self.state, count)
        elif count:
            self.state = mixer.rollback(self.state, count)
        elif self.state.recorded is not None:
            self.state = self.state.record()
        self.seen_tokens -= count


class LatteCache(Cache):
    """The states of all layers of a model; constant in size except for ``transformer++``.

        cache = LatteCache(model.config)
        out = model(input_ids, past_key_values=cache, use_cache=True)

    Args:
        config: Configuration of the model. It gives the number of layers, and
            ``state_grows(layer_idx)`` says which of them keep every token.
        offloading: Whether to keep each layer's state on the CPU while other layers compute.
        max_cache_len: Number of tokens that a growing state has room for. If it is given, the
            cache is static: buffers are allocated once and keep their addresses, so that
            ``torch.compile`` makes one graph for every step. None makes a dynamic cache.
    """

    layers: list[LatteCacheLayer]  # type: ignore[assignment]
    max_cache_len: int | None = None  # a property without a setter in Transformers 5.19

    def __init__(
        self, config: Any, offloading: bool = False, max_cache_len: int | None = None
    ) -> None:
        layers = range(config.num_hidden_layers)
        kept_sizes = getattr(config, "kept_sizes", lambda index: None)
        of = [(config.state_grows(index), kept_sizes(index)) for index in layers]
        super().__init__(layers=[LatteCacheLayer(*each) for each in of])
        self.offload_layers, self.max_cache_len = offloading, max_cache_len
        # A compiled step reads this. It would be compiled again for every value of a length.
        self.is_static = max_cache_len is not None
        self.step: StepContext | None = None  # set while a single token is read
        self.unfinished = False  # whether a forward has changed some layers, and not all
        self.model: _Reader | None = None  # the model that fills this cache
        self.captured: Any = None  # what replays its steps in `generate`, if they are captured
        for layer in self.layers:
            layer.is_compileable = self.is_static

    def state(self, layer_idx: int) -> MixerState:
        """The state from which layer ``layer_idx`` starts."""
        layer = self.layers[layer_idx]
        if self.offload_layers:
            layer.prefetch()
        return layer.state

    def update(  # type: ignore[override]
        self, state: MixerState | None, num_tokens: int, layer_idx: int, *args: Any, **kwargs: Any
    ) -> MixerState | None:
        """Store the state of layer ``layer_idx`` after ``num_tokens`` more tokens."""
        if state is not None:
            self.unfinished = True
            self.layers[layer_idx].update(state, num_tokens)
            if self.offload_layers:
                self.layers[layer_idx].offload()
        return state

    def reset(self) -> None:
        super().reset()
        self.unfinished = False

    def filled_by(self, model: Any) -> None:
        """Remember the model that fills this cache; a state's file names it."""
        self.model = _Reader(model)

    # --- single tokens, in place ---------------------------------------------------------------

    def begin(
        self, x_BTE: Tensor, key_mask: Tensor | None, decoder: Any = None
    ) -> list[StepState] | None:
        """Decide, before the layers run, whether this forward is a step that is done in place.

        Args:
            x_BTE: Embeddings of the new tokens, (B, T, E).
            key_mask: Mask of the valid tokens, (B, T) bool or None.
            decoder: The decoder; None if a step would not give all that is wanted.

        Returns:
            The buffers of all layers; None if this is not a step.

        Raises:
            ValueError: The forward before this one did not end, so that layers have read different
                tokens.
        """
        if self.unfinished:
            raise ValueError(
                "the forward before this one was interrupted, and has changed this cache in part:"
                " expected a new cache, or reset() on this one"
            )
        self.step = None
        single = decoder is not None and x_BTE.shape[1] == 1
        if not single or torch.is_grad_enabled() or self.offload_layers:
            return None
        if torch.compiler.is_compiling() and not self.is_static:
            return None  # moving buffers and a changing length would be compiled again and again
        kind = x_BTE.device.type
        if torch.is_autocast_enabled(kind) or not steps_in_place(kind, self.is_static):
            return None
        plan = StepPlan.of(decoder)
        if not plan.able:
            return None
        real = None if key_mask is None else key_mask[:, 0]
        if real is not None and kind == "cpu" and not self.is_static and bool(real.all()):
            real = None
        if not self._ready(real is not None) and not self._fill_buffers(real is not None):
            return None
        buffers = [layer.buffers for layer in self.layers if layer.buffers is not None]
        self.step = buffers[0].step_context
        self.step.real, self.step.plan = real, plan.begin(x_BTE)
        self.unfinished = True
        return buffers

    def end(self) -> None:
        """Advance to the next token, after all layers have run."""
        self.unfinished = False
        if self.step is not None:
            self.step.advance()
            self.step = None
        elif self.is_static:
            self._fill_buffers(masked=True)

    def forget_step(self) -> None:
        """Return to the state before a step that was begun and computed nothing."""
        self.unfinished, self.step = False, None
        for layer in self.layers:
            if layer.buffers is not None:
                layer.buffers.step_context.forget()

    def become_dynamic(self) -> None:
        """Turn a static cache into a dynamic one, with the states that it has."""
        self.captured, self.max_cache_len, self.is_static = None, None, False
        for layer in self.layers:
            layer.is_compileable = False
            if not layer.is_written_in_place:
                layer.buffers = None

    def _ready(self, masked: bool) -> bool:
        """Whether buffers hold all states and have room for one more token."""
        for layer in self.layers:
            if layer._state is not None or layer.buffers is None or layer.record_past:
                return False  # as `is_written_in_place`, without its calls
            ring, length = layer.buffers.ring, layer.buffers.step_context.length
            if ring is not None:
                if masked and ring.mask is None:
                    return False
                if layer.grows and length == ring.keys.shape[2]:
                    return False
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fill_buffers(self, masked: bool) -> bool:
        """Copy all states into buffers if decoding can continue in them. Returns whether it can.

        Raises:
            ValueError: There are more tokens than a static cache has room for.
        """
        states = [layer.state for layer in self.layers]
        seen, position = self.layers[0].seen_tokens, states[0].position
        for layer, state in zip(self.layers, states, strict=True):
            special = state.sources is not None or layer.record_past
            if special or state.position is None or layer.seen_tokens != seen:
                return False
        # A row that has read only padding has an empty state, which buffers do not represent.
        if position is None or not bool((position > 0).all()):
            return False
        step_context = StepContext(
            position.clone(), torch.zeros((), dtype=torch.long, device=position.device)
        )
        blocks = [layer.kept_sizes[2] for layer in self.layers if layer.kept_sizes is not None]
        if blocks and not self.is_static:
            step_context.count_phases(blocks[0])
        room = self.max_cache_len
        if room is None:
            step_context.length, room = seen, seen + max(64, seen // 4)
            windows = [
                x for state in states for x in (state.window, state.pending) if x is not None
            ]
            masked = masked or not all(bool(window.mask.all()) for window in windows)
        else:
            masked = True  # some slots hold no token yet
            if seen > room and any(layer.grows for layer in self.layers):
                raise ValueError(f"expected at most max_cache_len={room} tokens, got {seen}")
        made = [
            StepState.of(
                state,
                step_context,
                room=room if layer.grows else None,
                masked=masked,
                kept_sizes=layer.kept_sizes,
            )
            for layer, state in zip(self.layers, states, strict=True)
        ]
        for layer, buffers in zip(self.layers, self._at_home(made), strict=True):
            layer.write_in_place(buffers, seen)
        return True

    def _at_home(self, made: list[StepState]) -> list[StepState]:
        """These buffers. A static cache copies them to the addresses it used before."""
        if not self.is_static:
            return made

        def written(buffers: list[StepState]) -> list[Tensor]:
            step_context, parts = buffers[0].step_context, tuple(x.parts for x in buffers)
            return [
                *tensors_in(
                    (step_context.position, step_context.steps, *step_context.slots.values(), parts)
                )
            ]

        new, homes = written(made), [x.buffers for x in self.layers if x.buffers is not None]
        old = written(homes) if homes else []
        if [x.shape for x in old] == [x.shape for x in new]:
            for home, x in zip(old, new, strict=True):
                home.copy_(x)
            return homes
        for x in new:
            torch._dynamo.mark_static_address(x)
        return made

    # --- kept keys ------------------------------------------------------------------------------

    def turn_kept(self, decoder: Any, real: Tensor | None) -> None:
        """Turn far kept keys of rows whose next token is at a place where keys are turned.

        Args:
            decoder: The decoder, with ``kept_range`` and ``kept_turns``.
            real: Whether each row's next token is a real one, (B,) bool; None: all are.
        """
        first, span = self.layers[0], decoder.kept_range
        position = first.position
        if position is None:
            return
        in_place, in_graph = first.is_written_in_place, torch.compiler.is_compiling()
        if in_place:
            assert first.buffers is not None
            phases = first.buffers.step_context.phases
            if phases is not None and 0 not in phases:  # updates come at the start of a block
                return
        due = span.due(position, real)
        # A graph cannot ask whether an update is due, and a step must not wait for a GPU.
        unread = self.captured is not None or position.device.type != "cpu"
        if in_graph or (in_place and unread) or bool(due.any()):
            self._turn(decoder, position, due)

    def _turn(self, decoder: Any, at_B: Tensor, due_B: Tensor) -> None:
        turns = decoder.kept_turns(at_B.device)
        for layer, mixer in zip(self.layers, decoder.mixers, strict=False):
            layer.turn_kept(decoder.kept_range, at_B, due_B, turns[mixer.layer_kind])

    # --- the batch dimension -------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` to every tensor (B, ...), or to the buffers if these hold the states."""
        if not self._ready(False):
            for layer in self.layers:
                layer._map(fn)
            return
        buffers = [layer.buffers for layer in self.layers if layer.buffers is not None]
        step_context = replace(
            buffers[0].step_context, position=fn(buffers[0].step_context.position)
        )
        if step_context.phases is not None:
            step_context.count_phases(step_context.block)
        made = self._at_home([replace(x.map(fn), step_context=step_context) for x in buffers])
        for layer, x in zip(self.layers, made, strict=True):
            layer.buffers = x

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    # -------------------------------------------------------------------------------------------

    def keep_sources(self) -> None:
        """Keep the keys of every token, from the first on, for weights over the past."""
        if self.is_static:
            raise ValueError("a static cache keeps no sources for output_attentions")
        for layer in self.layers:
            layer.keep_sources()

    def activate_past_recording(self) -> None:
        if self.is_static:
            raise ValueError("a static cache records nothing: no tokens can be taken back")
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. 0 forgets which tokens were recorded.

        Tokens cannot be removed from a state of constant size. Its layer reads the remaining
        recorded tokens again, from the state before them.

        Raises:
            ValueError: The number is positive, there are fewer tokens, they were not recorded, or
                the model that read them is gone. The cache is then as it was.
        """
        decoder = None if self.model is None else self.model()
        mixers = [None] * len(self.layers) if decoder is None else decoder.mixers
        for layer, mixer in zip(self.layers, mixers, strict=False):
            layer.check_crop(tokens_to_remove, mixer)
        records = (layer.state.recorded for layer in self.layers)
        recorded = next((x for x in records if x is not None), None)
        for layer, mixer in zip(self.layers, mixers, strict=False):
            layer.crop(tokens_to_remove, mixer)
        span = getattr(decoder, "kept_range", None)
        if span is None or recorded is None or not tokens_to_remove or self.position is None:
            return
        # The remaining tokens were read again, and no kept keys were rotated meanwhile.
        start, stop = recorded.before.position, self.position
        at_B = torch.zeros_like(stop) if start is None else start
        at_B = (at_B + span.every - 1) // span.every * span.every
        while bool((at_B < stop).any()):
            self._turn(decoder, at_B, span.due(at_B, at_B < stop))
            at_B = at_B + span.every
        for layer in self.layers:  # from the rotated keys on
            if layer.state.recorded is not None:
                layer.state = layer.state.record()

    @property
    def position(self) -> Tensor | None:
        """Number of valid tokens seen (without padding), (B,) int64; None before the first."""
        position = self.layers[0].position
        return None if position is None else position.clone()

    @property
    def holds_places(self) -> bool:
        """Whether a layer keeps its last tokens, padding among them: a window, a convolution."""
        for layer in self.layers:
            state = layer.state
            kept = [state.conv, state.short_conv, state.pending]
            if any(x is not None for x in kept) or (state.window is not None and not layer.grows):
                return True
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether tokens were read. The base class skips layers without early allocation."""
        return all(layer.is_initialized for layer in self.layers)

    @property
    def batch_size(self) -> int:
        position = self.layers[0].position
        return -1 if position is None else position.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers' states."""
        held = tuple(layer.held for layer in self.layers)
        return sum(x.numel() * x.element_size() for x in tensors_in(held))


class _Reader(weakref.ref):
    """Reference to the model that fills a cache. A copy refers to it too; a pickle has None."""

    def __deepcopy__(self, memo: Any) -> _Reader:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for branch in tree:
            yield from tensors_in(branch)
