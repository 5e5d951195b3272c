"""Token mixers: what they are given, what they keep between calls, and their common parts.

Shape suffixes: B batch (or N packed sequences), T tokens, E hidden size, H query heads, G key/value
heads, K key width, L latents per head, F feature width, D value width, W window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from latte.layers.checks import check_input, check_multiple, check_positive, check_state
from latte.layers.context_parallel import ShardedOps, across
from latte.layers.parts import InitializedModule, Rotary, RotaryEmbedding, of_single_tokens
from latte.layers.projections import project
from latte.layers.rollback import PastKeys, Recorded, advance_position, rollback
from latte.layers.weights import attention_weights, dense_weights, mixing_logits, with_weights
from latte.ops import LatteState, Partition, sliding_window_attention
from latte.ops.kept import KeptState
from latte.ops.pointwise import rotate, rotate_both
from latte.ops.state import LinearState, WindowState
from latte.ops.tensors import real_tokens, token_positions


class MixerState(NamedTuple):
    """The state of one layer: constant in size, except for full softmax attention.

    The first dimension of every tensor is the batch. Parts that a mixer does not use are None.
    Before the first token all parts are None: ``MixerState()`` is the empty state. Ops take it as
    their ``initial_state``, and return it with their own parts changed.

    Attributes:
        position: Number of real tokens seen, (B,) int64.
        latent: Log-mass and mean of each latent.
        linear: Sums of undirected linear attention.
        window: Last W-1 local keys and values (all of them for full softmax attention).
        rglru: State of the RG-LRU, (B, E) fp32.
        conv: Last inputs of the convolution, (B, K-1, E).
        short_conv: Last inputs of a mixer's own short convolution, (B, K-1, C).
        own: State of a mixer of another kind, (B, ...).
        pending: Latent keys (B, W, H, L) of the last W tokens, if the latents read a token only
            when it leaves the window; and those tokens' values, (B, 1, G, D) where the window holds
            all but the oldest.
        sinks: Local keys and values of a sequence's first tokens, if those stay visible.
        kept: Kept tokens and the window's, if some stay visible after they have left the window.
            There is then no ``window`` and no ``pending``.
        sources: Keys of all tokens so far, if set, for weights over the past: O(T) memory.
        recorded: Tokens that can be taken back, if set.
    """

    position: Tensor | None = None
    latent: LatteState | None = None
    linear: LinearState | None = None
    window: WindowState | None = None
    rglru: Tensor | None = None
    conv: Tensor | None = None
    short_conv: Tensor | None = None
    own: Tensor | None = None
    pending: WindowState | None = None
    sinks: WindowState | None = None
    kept: KeptState | None = None
    sources: PastKeys | None = None
    recorded: Recorded | None = None

    def record(self) -> MixerState:
        """This state, which records the tokens that are read from here on."""
        return self._replace(recorded=Recorded(self._replace(recorded=None)))


EMPTY = MixerState()


class Context(NamedTuple):
    """What all layers of a forward pass share about its tokens: the model makes it once.

    Attributes:
        key_mask: Mask, (B, T) bool, True = a real token; None if all are real.
        cu_seqlens: Bounds of N sequences packed into one row (B = 1), (N+1,) int32.
        output_final_state: Whether to return the states after these tokens.
        position: Number of real tokens before these, (B or N,) int64; None is 0.
        end: Number of real tokens after these; None if states are not returned.
        rotary: Rotary table of these tokens; None if each layer computes its own or has none.
        shards: Processes that hold the tokens before, op by op; None if the states hold them.
    """

    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    output_final_state: bool = False
    position: Tensor | None = None
    end: Tensor | None = None
    rotary: Any = None
    shards: ShardedOps | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
        position: Tensor | None = None,
        rotary: Any = None,
        shards: ShardedOps | None = None,
    ) -> Context:
        """The context of the tokens of ``x`` (B, T, ...)."""
        end = advance_position(position, key_mask, cu_seqlens, x) if output_final_state else None
        return cls(key_mask, cu_seqlens, output_final_state, position, end, rotary, shards)

    def across(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """The op, wrapped so that the tokens before may be in other processes."""
        return op if self.shards is None else across(op, self.shards)

    def real(self, x: Tensor) -> Tensor:
        """The mask (B, T) bool of the real tokens of ``x`` (B, T, ...)."""
        return real_tokens(x, self.key_mask)

    def positions(self, x: Tensor) -> Tensor:
        """The positions (B or 1, T) of the tokens of ``x`` (B, T, ...)."""
        return token_positions(x, self.key_mask, self.cu_seqlens, self.position)


class Projected(NamedTuple):
    """The projections of some tokens, before the mixer mixes them.

    Attributes:
        v: Values, (B, T, G, D).
        state: State before these tokens, in which the parts that projections change (``rglru``,
            ``conv``, ``short_conv``, ``own``) are already those after them.
        latent_q: Logits of p(l|t), (B, T, H, L), or (B, T, H, L+1) with the window's in column 0.
        latent_k: Logits of p(s|l,t), (B, T, H, L).
        q, k: Local queries (B, T, H, K) and keys (B, T, G, K), rotated.
        sink_q: Local queries for the sinks, in a rotation of their own, (B, T, H, K).
        log_decay: Log-decay of the latents at each token, (B, T, H, L).
        scores: Scores of the tokens, of which some stay visible, (B, T, G).
        features: Features phi(q) and phi(k) of linear attention, (B, T, H, F).
        extra: What else :meth:`Mixer._attend` needs, of any type.
    """

    v: Tensor
    state: MixerState = EMPTY
    latent_q: Any = None  # Any: a mixer knows which of its fields are not None
    latent_k: Any = None
    q: Any = None
    k: Any = None
    sink_q: Tensor | None = None
    log_decay: Tensor | None = None
    scores: Tensor | None = None
    features: tuple[Tensor, Tensor] | None = None
    extra: Any = None


class Mixer(InitializedModule):
    """Base of the layers that mix tokens: ``forward(x, ...) -> (out, state)``.

    A mixer defines :meth:`_project` and :meth:`_attend`, and sets the class attributes below. It
    may define :meth:`_step`, for decoding in fewer operations.

    Args:
        hidden_size: Width E of the input and output.
        num_heads: Number H of query heads.
        num_key_value_heads: Number G of key/value heads, dividing H; H if None.
        head_dim: Width of a head; ``hidden_size / num_heads`` if None.
        causal: Whether the layer is causal. Bidirectional layers have no state.

    Attributes:
        carries: Parts of a :class:`MixerState` that the mixer needs to continue a sequence.
        grows: Whether the state keeps every token, as that of full softmax attention does.
        uses: Fields of a model's configuration that the mixer reads, among those that not every
            mixer reads, such as ``num_latents``, ``sliding_window``, ``rope_theta``.
        splits: Whether every op that reads earlier tokens is called through
            :meth:`Context.across`, so that a sequence can be divided among processes. A subclass
            that changes the computation does not inherit it.
        window: Number of keys that a local query sees, its own included; None is all of the past.
        scale: Factor of the local logits, 1 / sqrt(K).
        softcap: Cap of the local logits, which become ``softcap * tanh(logit / softcap)``.
        sink_edge: Position from which later queries look at sinks; None without sinks.
    """

    carries: ClassVar[tuple[str, ...]] = ()
    grows: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = ()
    splits: Any = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if {"forward", "_project", "_attend"} & own.keys() and "splits" not in own:
            cls.splits = False
        if "step" in own and "_step" not in own:
            cls.steps = False  # a decoder calls _step

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        groups = num_heads if num_key_value_heads is None else num_key_value_heads
        check_multiple(name, num_heads=num_heads, num_key_value_heads=groups)
        if head_dim is None:
            check_multiple(name, hidden_size=hidden_size, num_heads=num_heads)
            head_dim = hidden_size // num_heads
        check_positive(name, hidden_size=hidden_size, head_dim=head_dim)
        self._set_heads(hidden_size, num_heads, groups, head_dim, causal)
        self.v_proj = nn.Linear(hidden_size, groups * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def _set_heads(
        self, hidden_size: int, num_heads: int, groups: int, head_dim: int, causal: bool = True
    ) -> None:
        self.hidden_size, self.num_heads, self.num_key_value_heads = hidden_size, num_heads, groups
        self.head_dim, self.causal = head_dim, causal
        self.window: int | None = None
        self.scale = 1.0 / math.sqrt(head_dim)
        self.softcap: float | None = None
        self.sink_edge: int | None = None
        self.rotary: RotaryEmbedding | None = None

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """The mixer of a model's configuration: ``latte.models.LatteConfig`` or a similar one."""
        return cls(**cls.options(config))

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        """The constructor's arguments from a configuration: here those of every mixer."""
        return {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "causal": config.is_causal,
        }

    @staticmethod
    def local_options(config: Any) -> dict[str, Any]:
        """The arguments of local attention from a configuration, without the window."""
        return {
            "rope_theta": config.rope_theta if config.position == "rope" else None,
            "softcap": config.attn_logit_softcapping,
        }

    # --- what is called -------------------------------------------------------------------------

    def forward(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: MixerState | None = None,
        output_final_state: bool = False,
        *,
        context: Context | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Mix the tokens of ``x``.

        Args:
            x_BTE: Input, (B, T, E).
            key_mask: Mask, (B, T) bool, True = a real token.
            cu_seqlens: Bounds of N sequences packed into one row (B = 1), (N+1,) int32.
            state: State that the call before returned.
            output_final_state: Whether to return the state after these tokens.
            context: What a model's layers share, in the place of mask, bounds and
                ``output_final_state``.

        Returns:
            Output (B, T, E) and the state after these tokens (None unless
            ``output_final_state``).

        Raises:
            ValueError: Shapes, dtypes or devices do not fit.
        """
        given = key_mask, cu_seqlens, state, output_final_state
        projected, context = self._begin(x_BTE, *given, context=context)
        out_BTHD, after = self._attend(x_BTE, projected, context)
        out_BTHD = self._output(out_BTHD, projected.v, x_BTE)
        return self.o_proj(out_BTHD.flatten(-2)), self._end(x_BTE, projected, after, context)

    def step(self, x_BE: Tensor, state: Any) -> Tensor:
        """Mix the next token of each row: :meth:`forward` in fewer operations, if :attr:`steps`.

        Hooks of this module are not called, nor those of the modules in :attr:`stepped`.

        Args:
            x_BE: Input, (B, E), contiguous.
            state: :class:`latte.layers.StepState`, the buffers of the state, which are overwritten.
                When all layers have read the token, the caller advances their step context.

        Returns:
            Output, (B, E).

        Raises:
            ValueError: Gradients are recorded, or x or the state are of another kind.
            TypeError: The mixer has no step.
        """
        if torch.is_grad_enabled() or x_BE.ndim != 2 or not hasattr(state, "step_context"):
            raise ValueError(
                f"{type(self).__name__}.step: expected x (B, E) and a StepState, without gradients "
                f"(torch.no_grad), got x {tuple(x_BE.shape)} and {type(state).__name__}, "
                f"{'with' if torch.is_grad_enabled() else 'without'} gradients"
            )
        out_BHD = self._step(x_BE, state, None)
        return state.step_context.plan.linear_maps(out_BHD.view(len(x_BE), -1), self.o_proj)[0]

    # Functions of a mixer, in files of their own: tokens taken back, and weights for inspection.
    rollback, _context_of = rollback, Context.of
    with_weights, attention_weights = with_weights, attention_weights
    mixing_logits, _weights = mixing_logits, dense_weights

    # --- what a mixer defines -------------------------------------------------------------------

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        """The values and logits of the tokens."""
        raise TypeError(f"{type(self).__name__} must define _project: Mixer is only a base class")

    def _attend(
        self, x_BTE: Tensor, projected: Projected, context: Context
    ) -> tuple[Tensor, MixerState | None]:
        """The mixture of each head, (B, T, H, D), and the state after the tokens.

        The state is ``projected.state`` with the parts that mixing changes. It may be None if it
        is not wanted.
        """
        raise TypeError(f"{type(self).__name__} must define _attend: Mixer is only a base class")

    def _output(self, mixture: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """The output of each head (..., H, D) from its mixture, its values (..., G, D) and x."""
        return mixture

    def _step(self, x_BE: Tensor, state: Any, rotary: Rotary | None) -> Tensor:
        """The output of each head, (B, H, D), for one token per row. Overwrites the state."""
        raise TypeError(f"{type(self).__name__} has no step")

    # --- what they are built with ---------------------------------------------------------------

    def _begin(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: MixerState | None = None,
        output_final_state: bool = False,
        *,
        context: Context | None = None,
    ) -> tuple[Projected, Context]:
        """The projections of a call's tokens, after checks of its arguments, and the context."""
        if context is None:
            start = None if state is None else getattr(state, "position", None)
            context = Context.of(x_BTE, key_mask, cu_seqlens, output_final_state, start)
        name = type(self).__name__
        check_input(name, x_BTE, self.hidden_size, getattr(self._modules["v_proj"], "weight", None))
        if not self.causal and (state is not None or context.output_final_state):
            raise ValueError(f"{name}: a bidirectional layer has no state to carry on")
        if state is None:
            state = EMPTY
        elif state is not EMPTY:
            check_state(name, state, MixerState, self.carries, context.cu_seqlens is not None)
        return self._project(x_BTE, state, context), context

    def _end(
        self, x_BTE: Tensor, projected: Projected, after: MixerState | None, context: Context
    ) -> MixerState | None:
        """The whole state after the tokens; None if it is not wanted."""
        if after is None or not context.output_final_state:
            return None
        latent, sources, recorded = after.latent, after.sources, after.recorded
        if latent is not None and len(latent) > 2:
            # A layer never merges states, so it needs no total log-decay.
            latent = LatteState(latent.log_mass, latent.mean)
        if sources is not None:
            sources = sources.and_then(projected, context.real(x_BTE))
        if recorded is not None:
            recorded = recorded.and_then(x_BTE, context.real(x_BTE), context.rotary)
        return after._replace(
            position=context.end, latent=latent, sources=sources, recorded=recorded
        )

    def _heads(self, flat_BTE: Tensor, heads: int) -> Tensor:
        return flat_BTE.unflatten(-1, (heads, -1))

    def _add_local(self, window: int | None, theta: float | None, softcap: float | None) -> None:
        """Add what local attention needs: window, softcap, rotation, and projections of q and k."""
        if window is not None:
            check_positive(type(self).__name__, window=window)
        self.window, self.softcap = window, softcap
        if theta is not None:
            self.rotary = RotaryEmbedding(self.head_dim, theta)
        E, K = self.hidden_size, self.head_dim
        self.q_proj = nn.Linear(E, self.num_heads * K, bias=False)
        self.k_proj = nn.Linear(E, self.num_key_value_heads * K, bias=False)

    def near(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        """Local queries and keys of x, rotated, and values."""
        G = self.num_key_value_heads
        q, k, v = project(x_BTE, self.q_proj, self.k_proj, self.v_proj)
        q_BTHK = q.unflatten(-1, (self.num_heads, -1))
        k_BTGK, v_BTGD = k.unflatten(-1, (G, -1)), v.unflatten(-1, (G, -1))
        return self._rotated(q_BTHK, k_BTGK, v_BTGD, state, context)

    def _rotated(
        self, q: Tensor, k: Tensor, v: Tensor, state: MixerState, context: Context
    ) -> Projected:
        """Queries and keys in the rotation of their positions, and the queries for the sinks."""
        rotary, sink_q = None, None if self.sink_edge is None else q
        if self.rotary is not None:
            rotary = context.rotary
            if rotary is None:
                rotary = self.rotary(context.positions(q), q.dtype, self.sink_edge)
            if sink_q is not None:
                sink_q = rotate(q, *rotary.sinks[:2])
            q, k = rotate_both(q, k, rotary.cos, rotary.sin)
        return Projected(v, state, q=q, k=k, sink_q=sink_q)

    def _softmax(
        self,
        window: int | None,
        near: Projected,
        context: Context,
        partition: Partition | None = None,
    ) -> tuple[Tensor, MixerState]:
        """Softmax attention over a window of the local keys, or over all of them (None).

        Sinks, and kept tokens, are those of ``partition``.
        """
        part = "kept" if partition is not None and partition.kept is not None else "window"
        out, tail = context.across(sliding_window_attention)(
            *(near.q, near.k, near.v),
            window=window,
            scale=self.scale,
            softcap=self.softcap,
            causal=self.causal,
            key_mask=context.key_mask,
            cu_seqlens=context.cu_seqlens,
            initial_state=getattr(near.state, part),
            output_final_state=context.output_final_state,
            partition=partition,
        )
        return out, near.state._replace(**{part: tail})

    def _local_step(
        self, x_BE: Tensor, state: Any, rotary: Rotary | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Rotary | None]:
        """q (B, H, K), k (B, G, K), v (B, G, D) of one token per row, and the table to rotate."""
        B, H, G = len(x_BE), self.num_heads, self.num_key_value_heads
        parts: Any = self._modules
        maps = parts["q_proj"], parts["k_proj"], parts["v_proj"]
        q, k, v = state.step_context.plan.linear_maps(x_BE, *maps)
        local = q.view(B, H, -1), k.view(B, G, -1), v.view(B, G, -1)
        return local, self._table(q, state, rotary)

    def _table(self, q: Tensor, state: Any, rotary: Rotary | None) -> Rotary | None:
        """The table by which a step rotates: that of the model, or this mixer's own."""
        if self.rotary is None or rotary is not None:
            return rotary
        place = state.step_context.position[:, None]
        return of_single_tokens(self.rotary(place, q.dtype, self.sink_edge))

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return (
            f"num_heads={self.num_heads}, num_key_value_heads={self.num_key_value_heads}, "
            f"head_dim={self.head_dim}, causal={self.causal}{window}"
        )
