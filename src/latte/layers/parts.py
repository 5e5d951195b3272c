"""Small parts of the layers: norms, feed-forward networks, the convolution, and positions.

Shape suffixes: B batch, T tokens, E hidden size, H heads, K width per head or taps of the
convolution, M inner width.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.checks import check_input, check_positive
from latte.layers.context_parallel import ShardedOps, across
from latte.layers.native import (
    GATED,
    NORMS,
    READ,
    NormKind,
    is_hooked,
    linear_maps,
    native_weights,
)
from latte.layers.projections import project
from latte.layers.recomputation import recomputed
from latte.ops import causal_conv1d, decoding, pointwise
from latte.ops.step import conv_step

LayerNorm = nn.LayerNorm


class RMSNorm(nn.RMSNorm):
    """``w x / sqrt(mean(x^2) + eps)``, as in PyTorch. On a CPU it is faster and saves memory."""

    def forward(self, x_BTE: Tensor) -> Tensor:
        weight, eps = self.weight, self.eps
        if eps is None or weight is None:
            return super().forward(x_BTE)
        return pointwise.rms_norm(x_BTE, weight, eps)


READ[RMSNorm], NORMS[RMSNorm] = ("weight",), NormKind()


def add_and_norm(
    norm: nn.Module, x_BTE: Tensor, added_BTE: Tensor | None = None, *, lowers: bool = False
) -> tuple[Tensor, Tensor]:
    """``x + added``, or x, and its norm. Of an :class:`RMSNorm` it is one launch on a GPU.

    ``lowers``: only products read the norm, and autocast may lower it.
    """
    if type(norm) is RMSNorm and not is_hooked(norm):
        weight, eps = norm.weight, norm.eps
        if weight is not None and eps is not None:
            return pointwise.add_rms_norm(x_BTE, added_BTE, weight, eps, lowers=lowers)
    total = x_BTE if added_BTE is None else x_BTE + added_BTE
    return total, norm(total)


class InitializedModule(nn.Module):
    """A module with initial values of its own, which PyTorch and Transformers both use.

    Attributes:
        steps: Whether the module has a step that computes what its ``forward`` does, for one
            token per row. Set automatically: a subclass that changes the computation and not the
            step has none. A step of decoding calls ``step`` in the place of the module. It does so
            where :class:`latte.layers.plan.StepPlan` has found that nothing is passed over.
        stepped: Names of the sub-modules whose steps belong to this module's step.
    """

    steps: ClassVar[bool] = False
    stepped: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls).keys()
        if "steps" in own:
            return
        if {"step", "_step"} & own:
            cls.steps = True
        elif {"forward", "_project", "_attend", "_output"} & own:
            cls.steps = False

    def initial_values(self) -> dict[str, Tensor]:
        """Newly drawn values, by name, of the parameters that are not in a plain linear layer."""
        return {}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters to new draws of :meth:`initial_values`."""
        for name, value in self.initial_values().items():
            self.get_parameter(name).copy_(value)


def input_dtype(linear: nn.Module) -> torch.dtype:
    """The dtype of the inputs that a linear map takes, which a quantiser may have replaced."""
    weight = linear.weight
    floating = isinstance(weight, Tensor) and weight.is_floating_point()
    return weight.dtype if floating else torch.float32  # type: ignore[return-value]


def in_chunks(x: Tensor, chunks: int, length: int) -> Tensor:
    """(B, T, ...) -> (B, chunks, length, ...), with zeros (False) after the end."""
    short = chunks * length - x.shape[1]
    if short:
        x = torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], 1)
    return x.unflatten(1, (chunks, length))


class GELUMLP(nn.Module):
    """``down(gelu(up(x)))``, with biases: the MLP of plain Latte (paper, section 5)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        check_positive("GELUMLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BTE)))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, three matrices without biases (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        check_positive("SwiGLU", hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        parts: Any = self._modules  # ten times as fast as a module's attributes
        maps = parts["gate_proj"], parts["up_proj"]
        weights = native_weights(x_BTE, maps, (nn.Linear, nn.Linear))
        if weights:
            return linear_maps(decoding.swiglu(x_BTE, *weights), parts["down_proj"])[0]
        gate, up = project(x_BTE, *maps)
        inner = pointwise.silu_product(gate, up)
        if not inner.requires_grad:
            return self.down_proj(inner)
        with recomputed((inner, functools.partial(pointwise.silu_product, gate, up))):
            return self.down_proj(inner)


READ[SwiGLU], GATED[SwiGLU] = (), decoding.swiglu


class CausalConv1d(InitializedModule):
    """``y_t = b + sum_i w_i x_{t-K+1+i}``, i = 0..K-1, per channel, no activation (eq. 18)."""

    def __init__(self, hidden_size: int, kernel_size: int = 3) -> None:
        super().__init__()
        check_positive("CausalConv1d", hidden_size=hidden_size, kernel_size=kernel_size)
        self.hidden_size = hidden_size
        self.weight = nn.Parameter(torch.empty(hidden_size, kernel_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        weight = torch.empty_like(self.weight).uniform_(-bound, bound)
        return {"weight": weight, "bias": torch.zeros_like(self.bias)}

    def forward(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: Tensor | None = None,
        output_final_state: bool = False,
        *,
        shards: ShardedOps | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, T, E) and the last K-1 inputs (B, K-1, E) (None unless asked for)."""
        check_input("CausalConv1d", x_BTE, self.hidden_size)
        op = causal_conv1d if shards is None else across(causal_conv1d, shards)
        return op(
            x_BTE,
            self.weight.to(x_BTE.dtype),
            self.bias.to(x_BTE.dtype),
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            initial_state=state,
            output_final_state=output_final_state,
        )

    def step(self, x_BE: Tensor, state: Tensor, real_B: Tensor | None) -> Tensor:
        """Output (B, E) of one token per row; the last inputs (B, K-1, E) are overwritten."""
        return conv_step(x_BE, self.weight, self.bias, state, real_B)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, kernel_size={self.weight.shape[1]}"


# The position encodings have no buffers. Angles are computed from the positions in fp64 (if the
# device has it), so that position 1,000,000 is as exact as position 1, and a model that is made on
# the meta device loses nothing.


class Rotary(NamedTuple):
    """Cosines and sines of the rotary angles, (B or 1, T, 1, K/2) each.

    ``sinks`` are those by which queries look at sinks, a Rotary too; None without sinks.
    """

    cos: Tensor
    sin: Tensor
    sinks: Any = None


def sink_edge(window: int | None, num_sinks: int) -> int | None:
    """The largest position from which queries look at sinks: the window's edge. None without."""
    return window + num_sinks - 1 if window and num_sinks else None


def _angles(positions_BT: Tensor, width: int, theta: float) -> Tensor:
    """``position * theta^(-2i/width)`` for i < width/2, (B, T, width/2)."""
    frequencies = _frequencies if torch.compiler.is_compiling() else _kept_frequencies
    return positions_BT[..., None] * frequencies(width, theta, positions_BT.device)


def _frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    wide = torch.float32 if device.type == "mps" else torch.float64
    return theta ** (-torch.arange(0, width, 2, dtype=wide, device=device) / width)


@functools.cache
def _kept_frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _frequencies(width, theta, device)


class RotaryEmbedding(nn.Module):
    """The rotary table of given positions (arXiv 2104.09864), for heads of an even width."""

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        check_positive("RotaryEmbedding", head_dim=head_dim)
        if head_dim % 2:
            raise ValueError(f"RotaryEmbedding: head_dim must be even, got {head_dim}")
        if not theta > 0:
            raise ValueError(f"RotaryEmbedding: theta must be positive, got {theta}")
        self.head_dim, self.theta = head_dim, theta

    def forward(
        self, positions_BT: Tensor, dtype: torch.dtype, sink_edge: int | None = None
    ) -> Rotary:
        """The table for heads of ``dtype``; half precisions are rotated in fp32.

        Queries look at sinks from a position of at most ``sink_edge``.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = _angles(positions_BT, self.head_dim, self.theta)[:, :, None]
        sinks = None
        if sink_edge is not None:
            sinks = self.forward(positions_BT.clamp_max(sink_edge), dtype)
        return Rotary(angles.cos().to(wide), angles.sin().to(wide), sinks)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, theta={self.theta}"


def apply_rotary(x_BTHK: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs (i, i + K/2) of each head, the layout of Hugging Face and GPT-NeoX."""
    return pointwise.rotate(x_BTHK, rotary[0], rotary[1])


def of_single_tokens(rotary: Rotary) -> Rotary:
    """The table in the format of :mod:`latte.ops.step`: sines with signs, (..., 2, K/2)."""
    sinks = None if rotary.sinks is None else of_single_tokens(rotary.sinks)
    return Rotary(rotary.cos, torch.cat([-rotary.sin, rotary.sin], 2), sinks)


class SinusoidalPositions(nn.Module):
    """Fixed encodings (B, T, E) of given positions: sines in the first half, then cosines.

    The frequencies are those of arXiv 1706.03762. An odd ``hidden_size`` drops the last cosine.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        check_positive("SinusoidalPositions", hidden_size=hidden_size)
        self.hidden_size = hidden_size

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Tensor:
        angles = _angles(positions_BT, self.hidden_size + self.hidden_size % 2, 10000.0)
        return torch.cat([angles.sin(), angles.cos()], -1)[..., : self.hidden_size].to(dtype)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}"
