"""The source of the latent logits: x itself, a convolution of it, or an RG-LRU (eq. 18-19).

Shape suffixes: B batch, T tokens, E hidden size, H heads, L latents per head, K taps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.checks import check_choice, check_multiple
from latte.layers.kept_scores import KeptScores
from latte.layers.latent_fields import (
    FORGETTING,
    LATENT_INPUTS,
    LatentFields,
    check_half_lives,
    check_probability,
)
from latte.layers.mixer import Context, MixerState
from latte.layers.native import native_weights
from latte.layers.parts import (
    CausalConv1d,
    InitializedModule,
    RMSNorm,
    add_and_norm,
    input_dtype,
)
from latte.layers.projections import project
from latte.layers.recurrent import DECAY_RANGE, RGLRU, STEP_KINDS
from latte.layers.step import StepState
from latte.ops import decoding, pointwise
from latte.ops.step import in_dtype

HALF_LIFE_RANGE = LatentFields.half_life_range


class LatentInput(InitializedModule):
    """``none``: z = x. ``conv``: z = conv(x). ``rglru``: z = RMSNorm(RG-LRU(x)).

    If not causal, one RG-LRU runs in each direction, and their outputs are added before the norm.
    The convolution is always causal. ``rglru_decay_range`` is that of :class:`RGLRU`.
    """

    stepped = ("conv", "rglru")

    def __init__(
        self,
        hidden_size: int,
        kind: str = "none",
        *,
        num_blocks: int = 1,
        conv_kernel_size: int = 3,
        rglru_decay_range: Sequence[float] = DECAY_RANGE,
        rms_norm_eps: float = 1e-6,
        causal: bool = True,
    ) -> None:
        super().__init__()
        check_choice("LatentInput", "latent_input", kind, LATENT_INPUTS)
        self.kind, self.causal = kind, causal
        if kind == "conv":
            self.conv = CausalConv1d(hidden_size, conv_kernel_size)
        elif kind == "rglru":
            options: dict[str, Any] = {"decay_range": rglru_decay_range}
            self.rglru = RGLRU(hidden_size, num_blocks, **options)
            if not causal:
                self.backward_rglru = RGLRU(hidden_size, num_blocks, reverse=True, **options)
            self.norm = RMSNorm(hidden_size, eps=rms_norm_eps)

    @staticmethod
    def options(config: Any) -> dict[str, Any]:
        """The constructor's arguments from a model's configuration, without the kind."""
        return {
            "conv_kernel_size": config.conv_kernel_size,
            "rglru_decay_range": config.rglru_decay_range,
            "rms_norm_eps": config.norm_eps,
        }

    def forward(self, x: Tensor, state: MixerState, context: Context) -> tuple[Tensor, MixerState]:
        """z (B, T, E), and the state with its ``conv`` or ``rglru`` after the tokens."""
        if self.kind == "none":
            return x, state
        tokens = context.key_mask, context.cu_seqlens
        carry, shards = context.output_final_state, context.shards
        if self.kind == "conv":
            y, tail = self.conv(x, *tokens, state.conv, carry, shards=shards)
            return y, state._replace(conv=tail)
        h, last = self.rglru(x, *tokens, state.rglru, carry, shards=shards)
        if not self.causal:
            h = h + self.backward_rglru(x, *tokens)[0]
        kind = h.device.type  # meta has no autocast
        lowers = kind != "meta" and torch.is_autocast_enabled(kind) and pointwise.fuses(h)
        z = add_and_norm(self.norm, h, lowers=True)[1] if lowers else self.norm(h)
        return z, state._replace(rglru=last)

    def step(self, x_BE: Tensor, state: StepState) -> Tensor:
        """z (B, E) of one token per row; the state is written in place."""
        real = state.step_context.real
        if self.kind == "conv":
            assert state.conv is not None
            return self.conv.step(x_BE, state.conv, real)
        if self.kind == "rglru":
            assert state.rglru is not None
            parts: Any = self._modules  # ten times as fast as a module's attributes
            rglru, norm = parts["rglru"], parts["norm"]
            gates = rglru._modules["recurrence_gate"], rglru._modules["input_gate"]
            modules = (*gates, rglru, norm)
            weights = state.step_context.plan.weights(x_BE, modules, STEP_KINDS, len(x_BE))
            if weights and norm.eps is not None:
                return decoding.rg_lru(x_BE, weights, norm.eps, state.rglru, real)
            return norm(in_dtype(rglru.step(x_BE, state.rglru, real), x_BE.dtype))
        return x_BE

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"


class LatentLogits(InitializedModule):
    """The query and key logits over the latents of every head, and the latents' log-decay.

    The log-decay of a latent at a token is ``g = -softplus(b)`` (static), or ``-softplus(b + w z)``
    with z the latent input (gated). The weights w start at 0. The biases b start so that the
    half-lives of a head's latents, ln 2 / -g, are spread evenly on a logarithmic scale.

    Args:
        num_latents: Total number of latents over all heads, as in the paper. Each head has
            ``num_latents / num_heads``.
        window_logit: Whether each head has one more query logit, in column 0, for Macchiato's
            window.
        window_probability: Value of p(l=0), the window's probability, when all other logits are
            0. It is set by a bias on the window's logit; None adds no bias.
        forgetting: Kind of forgetting, ``"none"``, ``"static"`` or ``"gated"``.
        half_life_range: Shortest and longest initial half-life of a head's latents, in tokens.
        kept_groups: Number of key/value heads, if there are kept tokens: the module then has their
            scores, ``kept_scores``. 0: there are none.
        source: Other arguments of :class:`LatentInput`.
    """

    undecayed: tuple[str, ...] = ("decay_proj.weight",)
    stepped = ("input", "kept_scores")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_latents: int,
        latent_input: str = "none",
        *,
        window_logit: bool = False,
        window_probability: float | None = None,
        forgetting: str = "none",
        half_life_range: Sequence[float] = HALF_LIFE_RANGE,
        kept_groups: int = 0,
        **source: Any,
    ) -> None:
        super().__init__()
        check_choice("Latte", "forgetting", forgetting, FORGETTING)
        check_half_lives("Latte: half_life_range", half_life_range)
        if forgetting != "none" and not source.get("causal", True):
            raise ValueError(f"Latte: forgetting={forgetting!r} needs causal=True, got False")
        check_multiple("Latte", num_latents=num_latents, num_heads=num_heads)
        if window_probability is not None:
            check_probability("Latte: window_probability", window_probability)
            if not window_logit:
                raise ValueError("Latte: window_probability needs window_logit=True, got False")
        self.num_heads = num_heads
        self.input = LatentInput(hidden_size, latent_input, num_blocks=num_heads, **source)
        self.q_proj = nn.Linear(hidden_size, num_latents + num_heads * window_logit, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_latents, bias=False)
        self.window_probability = window_probability
        if window_probability is not None:
            self.window_bias = nn.Parameter(torch.empty(num_heads))
        self.forgetting, self.half_life_range = forgetting, half_life_range
        if forgetting != "none":
            self.decay_bias = nn.Parameter(torch.empty(num_latents))
        if forgetting == "gated":
            self.decay_proj = nn.Linear(hidden_size, num_latents, bias=False)
        if kept_groups:
            self.kept_scores = KeptScores(hidden_size, kept_groups)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        """The window's bias b, with e^b / (e^b + L) = ``window_probability``, and the decays."""
        values = {}
        latents = self.k_proj.out_features // self.num_heads
        if self.window_probability is not None:
            bias = math.log(latents * self.window_probability / (1 - self.window_probability))
            values["window_bias"] = torch.full_like(self.window_bias, bias)
        if self.forgetting != "none":
            low, high = (math.log(x) for x in self.half_life_range)
            place_L = (torch.arange(latents, dtype=torch.float64) + 0.5) / latents
            rate_L = math.log(2.0) / torch.exp(low + (high - low) * place_L)
            # The inverse of softplus, without e^x - 1 where x is small.
            bias_L = rate_L + torch.log(-torch.expm1(-rate_L))
            values["decay_bias"] = bias_L.repeat(self.num_heads).to(self.decay_bias)
        if self.forgetting == "gated":
            values["decay_proj.weight"] = torch.zeros_like(self.decay_proj.weight)
        return values

    @staticmethod
    def options(config: Any) -> dict[str, Any]:
        """The constructor's arguments from a model's configuration, without the window's."""
        own = ("num_latents", "latent_input", "forgetting", "half_life_range")
        return {name: getattr(config, name) for name in own} | LatentInput.options(config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs that the maps of this module take."""
        return input_dtype(self.k_proj)

    def forward(
        self, x: Tensor, state: MixerState, context: Context
    ) -> tuple[Tensor, Tensor, Tensor | None, MixerState]:
        """Logits q (B, T, H, L or L+1) and k (B, T, H, L), ``log_decay``, and the state.

        ``log_decay`` (B, T, H, L) is at least fp32. It is None if nothing is forgotten. The state
        has the parts of the latent input after the tokens.
        """
        z, state = self.input(x, state, context)
        heads = (self.num_heads, -1)
        gates = (self.decay_proj,) if self.forgetting == "gated" else ()
        q, k, *gate = project(z, self.q_proj, self.k_proj, *gates)
        q_BTHL = q.unflatten(-1, heads)
        if self.window_probability is not None:
            bias_HL = F.pad(self.window_bias[:, None], (0, q_BTHL.shape[-1] - 1))
            q_BTHL = q_BTHL + bias_HL.to(q_BTHL.dtype)
        log_decay = None
        if self.forgetting != "none":
            log_decay = self._log_decay(gate[0] if gate else None, k.shape[:-1])
        return q_BTHL, k.unflatten(-1, heads), log_decay, state

    def _log_decay(self, gate: Tensor | None, shape: Sequence[int]) -> Tensor | None:
        """-softplus(b + gate) (*shape, H, L); ``gate`` (*shape, H * L) or None."""
        if self.forgetting == "none":
            return None
        rate = self.decay_bias.to(torch.promote_types(self.decay_bias.dtype, torch.float32))
        rate = rate if gate is None else rate + gate
        return -F.softplus(rate).unflatten(-1, (self.num_heads, -1)).expand(*shape, -1, -1)

    def step(self, x_BE: Tensor, state: StepState) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits q (B, H, L or L+1) and k (B, H, L) of one token per row, and ``log_decay``."""
        parts: Any = self._modules
        z, B = parts["input"].step(x_BE, state), x_BE.shape[0]
        found: Any = state.step_context.plan.latents(self, z)
        if found:
            return *found, self.log_decay(B)
        heads = (B, self.num_heads, -1)
        gates = [parts["decay_proj"]] if self.forgetting == "gated" else []
        maps = parts["q_proj"], parts["k_proj"], *gates
        q_BX, k_BX, *gate = state.step_context.plan.linear_maps(z, *maps)
        q_BHL, k_BHL = q_BX.view(heads), k_BX.view(heads)
        if self.window_probability is not None:
            q_BHL.select(-1, 0).add_(self.window_bias)
        log_decay = self._log_decay(gate[0] if gate else None, (B,))
        return q_BHL, k_BHL, log_decay

    def log_decay(self, rows: int) -> Tensor | None:
        """The log-decays of one token per row, (B, H, L), where they do not depend on it."""
        return None if self.forgetting == "none" else self._log_decay(None, (rows,))

    def native(self, z: Tensor) -> tuple[Any, ...]:
        """The weights and the bias that a kernel reads with inputs z; empty if modules are called.

        The kernel casts z to the dtype of the weights.
        """
        maps: Any = self._modules["q_proj"], self._modules["k_proj"]
        z, bias = in_dtype(z, self.dtype), self._parameters.get("window_bias")
        weights = native_weights(z, maps, (nn.Linear, nn.Linear))
        if not weights or self.forgetting == "gated":
            return ()
        if self.window_probability is not None and not decoding.fits(z, bias):
            return ()
        return *weights, bias
