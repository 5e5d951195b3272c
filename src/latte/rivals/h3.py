"""H3: a shift SSM and a diagonal SSM, multiplied in between (Fu et al., arXiv 2212.14052).

Shape suffixes: B batch, T tokens, E hidden size, H heads, P and Q width of a head, M states of the
shift SSM (its taps), N complex states of the diagonal SSM (each with its conjugate).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from latte.layers.checks import check_divides, check_positive
from latte.ops import causal_conv1d
from latte.ops.validation import computation_dtype
from latte.rivals.base import ComparatorMixer, masked
from latte.rivals.convolution import long_convolution

MIN_STEP, MAX_STEP = 0.001, 0.1  # of the diagonal SSM's time, log-uniform at the start


class H3(ComparatorMixer):
    """Algorithm 1: ``O = Q * SSM_diag(SSM_shift(K) V^T)`` per head, then a projection.

        Q, K, V = X W_q, X W_k, X W_v
        shift:  x_t = A x_{t-1} + B k_t,  y_t = C x_t + D k_t,  A the shift by one, B = e_1, so
                y_t = sum_{m<M} C_m k_{t-m} + D k_t
        diag:   x_t = e^{dt A} x_{t-1} + A^{-1} (e^{dt A} - 1) u_t,  y_t = 2 Re(C x_t) + D u_t,
                A diagonal and complex (zero-order hold of B = 1; 2 Re for the conjugate half)

    The product of shifted keys and values is an outer one within a head, of P^2 sequences, each
    through the head's diagonal SSM; queries contract it again. P = 1, the default, multiplies
    channel by channel. A starts as S4D-Lin, -1/2 + i pi n. Causal to rounding (see
    :func:`long_convolution`), and causal only.

    Args:
        head_dim: P, dividing E.
        num_states: of either SSM, M = ``num_states`` and N = ``num_states`` / 2; even.
    """

    directions = (True,)
    undecayed = ("log_step", "log_real", "imaginary", "shift_skip", "diagonal_skip")

    def __init__(
        self, hidden_size: int, *, head_dim: int = 1, num_states: int = 64, causal: bool = True
    ) -> None:
        super().__init__(hidden_size, causal)
        check_divides("H3", "head_dim", "hidden_size", hidden_size=hidden_size, head_dim=head_dim)
        check_positive("H3", num_states=num_states)
        if num_states % 2:
            raise ValueError(f"H3: num_states must be even, got {num_states}")
        self.head_dim = head_dim
        heads, half = hidden_size // head_dim, num_states // 2
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.shift_c = nn.Parameter(torch.empty(hidden_size, num_states))
        self.shift_skip = nn.Parameter(torch.empty(hidden_size))
        self.log_step = nn.Parameter(torch.empty(heads))
        self.log_real = nn.Parameter(torch.empty(heads, half))
        self.imaginary = nn.Parameter(torch.empty(heads, half))
        self.diagonal_c = nn.Parameter(torch.empty(heads, half, 2))  # real and imaginary part
        self.diagonal_skip = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        numbers = torch.arange(self.imaginary.shape[1]).expand_as(self.imaginary)
        spread = math.log(MAX_STEP / MIN_STEP) * torch.rand_like(self.log_step)
        return {
            "shift_c": torch.randn_like(self.shift_c) / math.sqrt(self.shift_c.shape[1]),
            "shift_skip": torch.randn_like(self.shift_skip),
            "log_step": math.log(MIN_STEP) + spread,
            "log_real": torch.full_like(self.log_real, math.log(0.5)),
            "imaginary": math.pi * numbers,
            "diagonal_c": torch.randn_like(self.diagonal_c) * math.sqrt(0.5),
            "diagonal_skip": torch.randn_like(self.diagonal_skip),
        }

    def diagonal_kernel(self, length: int, dtype: torch.dtype) -> Tensor:
        """k_n = 2 Re sum C e^{n dt A} (e^{dt A} - 1) / A, n = 0..T-1, plus D at 0: (H, T)."""
        a_HN = torch.complex(-torch.exp(self.log_real.to(dtype)), self.imaginary.to(dtype))
        step_A = a_HN * torch.exp(self.log_step.to(dtype))[:, None]
        c_HN = torch.view_as_complex(self.diagonal_c.to(dtype).contiguous())
        steps_T = torch.arange(length, dtype=dtype, device=a_HN.device)
        weight_HN = c_HN * torch.expm1(step_A) / a_HN
        kernel_HT = (
            2.0 * torch.einsum("hn,hnt->ht", weight_HN, torch.exp(step_A[..., None] * steps_T)).real
        )
        skip_HT = torch.nn.functional.pad(self.diagonal_skip.to(dtype)[:, None], (0, length - 1))
        return kernel_HT + skip_HT

    def _mix(self, x_BTE: Tensor, key_mask: Tensor | None) -> Tensor:
        x_BTE = masked(x_BTE, key_mask)
        q, k, v = self.q_proj(x_BTE), self.k_proj(x_BTE), self.v_proj(x_BTE)
        dtype = computation_dtype(x_BTE.dtype)
        # The shift SSM is a convolution whose last tap is the present, with D added to it.
        taps = self.shift_c.flip(1).to(dtype)
        taps = torch.cat([taps[:, :-1], taps[:, -1:] + self.shift_skip.to(dtype)[:, None]], 1)
        shifted, _ = causal_conv1d(k.to(dtype), taps)
        shape = (self.hidden_size // self.head_dim, self.head_dim)
        k_BTHP, v_BTHQ = (z.to(dtype).unflatten(-1, shape) for z in (shifted, v))
        product = k_BTHP[..., :, None] * v_BTHQ[..., None, :]
        kernel_HT = self.diagonal_kernel(x_BTE.shape[1], dtype)
        every_ET = kernel_HT.repeat_interleave(self.head_dim**2, 0)
        memory = long_convolution(product.flatten(2), every_ET).view_as(product)
        q_BTHP = q.to(dtype).unflatten(-1, shape)
        out = torch.einsum("bthp,bthpq->bthq", q_BTHP, memory)
        return self.o_proj(out.flatten(2).to(v.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, head_dim={self.head_dim}"
