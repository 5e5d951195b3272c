"""Where the latent logits come from: x itself, a convolution of it, or an RG-LRU (eq. 18-19).

Shape suffixes: B batch, T tokens, E hidden size, H heads, L latents per head, K taps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.convolution import CausalConv1d
from latte.layers.norms import RMSNorm
from latte.layers.recurrent import DECAY_RANGE, RGLRU
from latte.layers.state import MixerState
from latte.layers.validation import check_choice, check_divides, check_probability

LATENT_INPUTS = ("none", "conv", "rglru")


class LatentInputs(NamedTuple):
    """``z`` (B, T, E), the states to carry on, and what the undo log needs."""

    z: Tensor
    rglru: Tensor | None = None
    conv: Tensor | None = None
    rglru_log: Tensor | None = None
    conv_log: Tensor | None = None


class LatentInput(nn.Module):
    """``none``: z = x. ``conv``: z = conv(x). ``rglru``: z = RMSNorm(RG-LRU(x)).

    Without causality an RG-LRU runs in each direction and the two are summed before the norm;
    the convolution looks back in either case. ``rglru_decay_range`` is that of :class:`RGLRU`.
    """

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
            self.rglru = RGLRU(hidden_size, num_blocks, decay_range=rglru_decay_range)
            if not causal:
                self.backward_rglru = RGLRU(
                    hidden_size, num_blocks, reverse=True, decay_range=rglru_decay_range
                )
            self.norm = RMSNorm(hidden_size, eps=rms_norm_eps)

    def forward(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: MixerState | None = None,
        output_final_state: bool = False,
    ) -> LatentInputs:
        if self.kind == "none":
            return LatentInputs(x_BTE)
        state = state or MixerState()
        if self.kind == "conv":
            y, tail = self.conv(x_BTE, key_mask, cu_seqlens, state.conv, output_final_state)
            return LatentInputs(y, conv=tail, conv_log=x_BTE if state.recording else None)
        h, last = self.rglru(
            x_BTE,
            key_mask,
            cu_seqlens,
            state.rglru,
            output_final_state,
            full_precision=state.recording,
        )
        log = h if state.recording else None
        if not self.causal:
            h = h + self.backward_rglru(x_BTE, key_mask, cu_seqlens)[0]
        return LatentInputs(self.norm(h.to(x_BTE.dtype)), rglru=last, rglru_log=log)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"


def input_options(config: Any) -> dict[str, Any]:
    """The arguments of :class:`LatentInput` that a model's configuration gives, but its kind."""
    return {
        "conv_kernel_size": config.conv_kernel_size,
        "rglru_decay_range": config.rglru_decay_range,
        "rms_norm_eps": config.norm_eps,
    }


class LatentLogits(nn.Module):
    """The query and key logits over the latents of every head.

    Args:
        num_latents: over all heads, as in the paper: each head has ``num_latents / num_heads``.
        window_logit: one more query logit per head, in column 0, for the window of Macchiato.
        window_probability: adds a bias to that logit, such that with all other logits at 0 the
            window's probability p(l=0) is this.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_latents: int,
        latent_input: str = "none",
        *,
        window_logit: bool = False,
        window_probability: float | None = None,
        conv_kernel_size: int = 3,
        rglru_decay_range: Sequence[float] = DECAY_RANGE,
        rms_norm_eps: float = 1e-6,
        causal: bool = True,
    ) -> None:
        super().__init__()
        check_divides(
            "Latte", "num_heads", "num_latents", num_latents=num_latents, num_heads=num_heads
        )
        if window_probability is not None:
            check_probability("Latte: window_probability", window_probability)
            if not window_logit:
                raise ValueError("Latte: window_probability needs window_logit=True, got False")
        self.num_heads = num_heads
        self.input = LatentInput(
            hidden_size,
            latent_input,
            num_blocks=num_heads,
            conv_kernel_size=conv_kernel_size,
            rglru_decay_range=rglru_decay_range,
            rms_norm_eps=rms_norm_eps,
            causal=causal,
        )
        self.q_proj = nn.Linear(hidden_size, num_latents + num_heads * window_logit, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_latents, bias=False)
        self.window_probability = window_probability
        if window_probability is not None:
            self.window_bias = nn.Parameter(torch.empty(num_heads))
            self.reset_parameters()

    def initial_window_bias(self) -> float:
        """The logit b with e^b / (e^b + L) = ``window_probability``."""
        assert self.window_probability is not None
        latents = self.k_proj.out_features // self.num_heads
        return math.log(latents * self.window_probability / (1 - self.window_probability))

    def reset_parameters(self) -> None:
        """The window's bias; the projections have a method of their own."""
        if self.window_probability is not None:
            nn.init.constant_(self.window_bias, self.initial_window_bias())

    def forward(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: MixerState | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor, LatentInputs]:
        """Logits q (B, T, H, L or L+1) and k (B, T, H, L), and the input's states."""
        inputs = self.input(x_BTE, key_mask, cu_seqlens, state, output_final_state)
        heads = (self.num_heads, -1)
        q_BTHL = self.q_proj(inputs.z).unflatten(-1, heads)
        if self.window_probability is not None:
            bias_HL = F.pad(self.window_bias[:, None], (0, q_BTHL.shape[-1] - 1))
            q_BTHL = q_BTHL + bias_HL.to(q_BTHL.dtype)
        return q_BTHL, self.k_proj(inputs.z).unflatten(-1, heads), inputs
