"""Mega: a moving average, then gated attention with one head (Ma et al., arXiv 2209.10655).

Shape suffixes: B batch, T tokens, E hidden size, N averages per channel, Z width of queries and
keys, V width of values, C chunk length, J chunks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.lab.baselines.base import BaselineMixer, long_convolution, masked
from latte.layers.checks import check_input, check_positive
from latte.layers.parts import RotaryEmbedding, apply_rotary, in_chunks
from latte.ops.tensors import computation_dtype, full_precision


class MultiDimensionalEMA(nn.Module):
    """N damped moving averages of every channel (section 3.1).

        h_t = alpha * beta x_t + (1 - alpha * delta) * h_{t-1},   alpha, delta in (0, 1)
        y_t = eta . h_t

    In each channel h, alpha, beta, delta and eta have N numbers. The layer is a convolution with
    the kernel ``k_n = sum eta alpha beta (1 - alpha delta)^n``.
    """

    undecayed = ("alpha_logit", "delta_logit")

    def __init__(self, hidden_size: int, num_averages: int = 16) -> None:
        super().__init__()
        check_positive("MultiDimensionalEMA", hidden_size=hidden_size, num_averages=num_averages)
        self.hidden_size = hidden_size
        shape = (hidden_size, num_averages)
        self.alpha_logit = nn.Parameter(torch.empty(shape))
        self.delta_logit = nn.Parameter(torch.empty(shape))
        self.beta = nn.Parameter(torch.empty(shape))
        self.eta = nn.Parameter(torch.empty(shape))

    def coefficients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """alpha, beta, 1 - alpha delta and eta, (E, N) each."""
        alpha = torch.sigmoid(self.alpha_logit.to(dtype))
        decay = 1.0 - alpha * torch.sigmoid(self.delta_logit.to(dtype))
        return alpha, self.beta.to(dtype), decay, self.eta.to(dtype)

    def kernel(self, length: int, dtype: torch.dtype) -> Tensor:
        """k_n for n = 0..T-1, (E, T)."""
        alpha, beta, decay, eta = self.coefficients(dtype)
        steps_T = torch.arange(length, dtype=dtype, device=decay.device)
        powers_ENT = torch.exp(steps_T * torch.log(decay)[..., None])
        return torch.einsum("en,ent->et", eta * alpha * beta, powers_ENT)

    @full_precision
    def forward(self, x_BTE: Tensor) -> Tensor:
        """y (B, T, E). The inputs must be zero at masked tokens."""
        check_input("MultiDimensionalEMA", x_BTE, self.hidden_size)
        return long_convolution(x_BTE, self.kernel(x_BTE.shape[1], computation_dtype(x_BTE.dtype)))


class Mega(BaselineMixer):
    """Moving average equipped gated attention (section 3.2). X is the layer's input.

        X' = EMA(X)
        Z  = silu(X' W_z + b_z),  Q = kappa_q * Z + mu_q,  K = kappa_k * Z + mu_k
        V  = silu(X W_v + b_v)
        O  = softmax(Q K^T / sqrt(z) + b_rel) V
        gamma = silu(X' W_gamma + b_gamma),   phi = sigmoid(X' W_phi + b_phi)
        H  = silu(X' W_h + (gamma * O) U_h + b_h)
        Y  = phi * H + (1 - phi) * X

    ``forward`` returns Y - X, because the block adds its input. This input, before the norm, is the
    X of the last line (``residual``). The relative bias is a rotary one, ``b_rel[t, s] = <R_t a,
    R_s b>``. It depends only on t - s and has no limit of length. The paper uses a Laplace function
    in place of softmax outside language. It is not implemented here.

    The layer is causal up to rounding (see :func:`long_convolution`). A bidirectional layer has one
    more average, from the end to the start, and adds both.

    Args:
        num_averages: Number N of moving averages.
        attention_width: Width z of queries and keys, even; E / 4 if None, as in the paper's larger
            models.
        value_width: Width of the values; 2E if None, as in the paper.
        chunk_size: Number of tokens in a chunk, as in Mega-chunk (section 3.5). Attention stays
            within a chunk; only the average crosses chunks. Chunks are counted from the row's first
            token. None means no chunks.
    """

    gates_residual = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_averages: int = 16,
        attention_width: int | None = None,
        value_width: int | None = None,
        chunk_size: int | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__(hidden_size, causal)
        width = max(2, hidden_size // 4 // 2 * 2) if attention_width is None else attention_width
        values = 2 * hidden_size if value_width is None else value_width
        check_positive("Mega", attention_width=width, value_width=values)
        if width % 2:
            raise ValueError(f"Mega: attention_width must be even, got {width}")
        if chunk_size is not None:
            check_positive("Mega", chunk_size=chunk_size)
        self.chunk_size = chunk_size
        self.average = MultiDimensionalEMA(hidden_size, num_averages)
        self.average_back = None if causal else MultiDimensionalEMA(hidden_size, num_averages)
        self.z_proj = nn.Linear(hidden_size, width)
        self.v_proj = nn.Linear(hidden_size, values)
        self.reset_gate = nn.Linear(hidden_size, values)
        self.update_gate = nn.Linear(hidden_size, hidden_size)
        self.h_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        # Scale and shift of queries and keys, then the two vectors of the relative bias.
        self.kappa = nn.Parameter(torch.empty(2, width))
        self.mu = nn.Parameter(torch.empty(2, width))
        self.relative = nn.Parameter(torch.empty(2, width))
        self.rotary = RotaryEmbedding(width)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        values = {
            "kappa": 1.0 + 0.02 * torch.randn_like(self.kappa),
            "mu": torch.zeros_like(self.mu),
            "relative": 0.02 * torch.randn_like(self.relative),
        }
        for name in ("average", "average_back"):
            average = getattr(self, name)
            if average is not None:
                signs = 1.0 - 2.0 * (torch.arange(average.beta.shape[1]) % 2)  # 1, -1, 1, ...
                drawn = {key: torch.randn_like(p) for key, p in average.named_parameters()}
                drawn["alpha_logit"] *= 0.2
                drawn["delta_logit"] *= 0.2
                drawn["beta"] = 0.02 * drawn["beta"] + signs.to(drawn["beta"])
                drawn["eta"] /= math.sqrt(average.eta.shape[1])
                values |= {f"{name}.{key}": value for key, value in drawn.items()}
        return values

    def forward(
        self, x_BTE: Tensor, key_mask: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Y - X, (B, T, E); ``residual`` is the X of the last equation, ``x`` itself if None."""
        self._check(x_BTE, key_mask)
        if not x_BTE.shape[1]:
            return x_BTE
        h, phi = self._mix_gated(masked(x_BTE, key_mask), key_mask)
        return phi * (h - (x_BTE if residual is None else residual))

    def _mix_gated(self, x_BTE: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """H and phi, (B, T, E) each."""
        averaged = self.average(x_BTE)
        if self.average_back is not None:
            averaged = averaged + self.average_back(x_BTE.flip(1)).flip(1)
        averaged = averaged.to(x_BTE.dtype)
        z_BTZ = F.silu(self.z_proj(averaged))
        q_BTZ, k_BTZ = (z_BTZ * self.kappa[i] + self.mu[i] for i in (0, 1))
        out_BTV = self.attend(q_BTZ, k_BTZ, F.silu(self.v_proj(x_BTE)), key_mask)
        gamma_BTV = F.silu(self.reset_gate(averaged))
        h = F.silu(self.h_proj(averaged) + self.o_proj(gamma_BTV * out_BTV))
        return h, torch.sigmoid(self.update_gate(averaged))

    def attend(
        self, q_BTZ: Tensor, k_BTZ: Tensor, v_BTV: Tensor, key_mask: Tensor | None
    ) -> Tensor:
        """softmax(Q K^T / sqrt(z) + b_rel) V, within chunks if there are any, (B, T, V)."""
        B, T = q_BTZ.shape[:2]
        C = min(T, self.chunk_size or T)
        J = -(-T // C)
        seen = q_BTZ.new_ones(B, T, dtype=torch.bool) if key_mask is None else key_mask
        q, k, v, seen = (in_chunks(x, J, C) for x in (q_BTZ, k_BTZ, v_BTV, seen))
        logits = q @ k.mT / math.sqrt(q.shape[-1]) + self.relative_bias(C, q.dtype)
        visible = seen[:, :, None, :]
        if self.causal:
            visible = visible & visible.new_ones(C, C).tril()
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        weights = weights.masked_fill(~visible, 0.0)  # rows without a visible token
        return (weights.to(v.dtype) @ v).flatten(1, 2)[:, :T]

    def relative_bias(self, length: int, dtype: torch.dtype) -> Tensor:
        """b_rel (C, C). Entry (t, s) depends only on t - s."""
        positions = torch.arange(length, device=self.relative.device)[None]
        table = self.rotary(positions, dtype)
        a, b = (
            apply_rotary(vector.to(dtype).expand(1, length, 1, -1), table)[0, :, 0]
            for vector in self.relative
        )
        return a @ b.mT

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunk_size={self.chunk_size}"
