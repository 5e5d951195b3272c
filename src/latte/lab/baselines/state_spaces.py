"""Diagonal state spaces: H3 (Fu et al., arXiv 2212.14052) and S5 (Smith et al., arXiv 2208.04933).

Shape suffixes: B batch, T tokens, E hidden size, H heads, P and Q width of a head (of S5: P complex
states), M states of H3's shift SSM (its taps), N complex states of its diagonal SSM; complex states
stand for their conjugates too. J blocks of S5, R real states of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.lab.baselines.base import BaselineMixer, long_convolution, masked
from latte.layers.checks import check_multiple, check_positive
from latte.ops import causal_conv1d
from latte.ops.tensors import computation_dtype, full_precision

MIN_STEP, MAX_STEP = 0.001, 0.1  # of time, log-uniform at the start


class H3(BaselineMixer):
    """Algorithm 1: ``O = Q * SSM_diag(SSM_shift(K) V^T)`` per head, then a projection.

        Q, K, V = X W_q, X W_k, X W_v
        shift:  x_t = A x_{t-1} + B k_t,  y_t = C x_t + D k_t,  A the shift by one, B = e_1, so
                y_t = sum_{m<M} C_m k_{t-m} + D k_t
        diag:   x_t = e^{dt A} x_{t-1} + A^{-1} (e^{dt A} - 1) u_t,  y_t = 2 Re(C x_t) + D u_t,
                A diagonal and complex (zero-order hold of B = 1; 2 Re for the conjugate half)

    The product of shifted keys and values is an outer product within a head. It gives P^2
    sequences, which all go through the head's diagonal SSM. The queries contract them again. With P
    = 1, the default, channels are multiplied one by one. A starts as S4D-Lin, -1/2 + i pi n. The
    layer is causal up to rounding (see :func:`long_convolution`). It has no bidirectional form.

    Args:
        head_dim: Width P of a head, dividing E.
        num_states: Number of states of each SSM, even: M = ``num_states`` and N = ``num_states``
            / 2.
    """

    directions = (True,)
    undecayed = ("log_step", "log_real", "imaginary", "shift_skip", "diagonal_skip")

    def __init__(
        self, hidden_size: int, *, head_dim: int = 1, num_states: int = 64, causal: bool = True
    ) -> None:
        super().__init__(hidden_size, causal)
        check_multiple("H3", hidden_size=hidden_size, head_dim=head_dim)
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
        skip_HT = F.pad(self.diagonal_skip.to(dtype)[:, None], (0, length - 1))
        return kernel_HT + skip_HT

    def _mix(self, x_BTE: Tensor, key_mask: Tensor | None) -> Tensor:
        x_BTE = masked(x_BTE, key_mask)
        q, k, v = self.q_proj(x_BTE), self.k_proj(x_BTE), self.v_proj(x_BTE)
        dtype = computation_dtype(x_BTE.dtype)
        # The shift SSM is a convolution. Its last tap is for the present token, and D is added to
        # it.
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


def hippo_normal(size: int) -> tuple[Tensor, Tensor]:
    """HiPPO-N's eigenvalues with a positive imaginary part (R/2,) and eigenvectors (R, R/2), fp64.

    HiPPO-N is the normal part of HiPPO-LegS. It has -1/2 on the diagonal, -sqrt(n + 1/2) sqrt(k +
    1/2) below it, and the opposite sign above it. Without its diagonal it is skew-symmetric. So i
    times it is Hermitian, and has eigenvalues in pairs of opposite sign.
    """
    root = torch.sqrt(torch.arange(size, dtype=torch.float64, device="cpu") + 0.5)
    lower = torch.tril(root[:, None] * root[None, :], -1)
    # S v = i w v with S = lower^T - lower, and -i S is Hermitian with eigenvalues w.
    w, vectors = torch.linalg.eigh(-1j * (lower.mT - lower))
    positive = w > 0
    return torch.complex(torch.full_like(w, -0.5), w)[positive], vectors[:, positive]


@full_precision
def constant_scan(decay_P: Tensor, inputs_BTP: Tensor) -> Tensor:
    """``x_t = decay x_{t-1} + inputs_t`` for all t, in log2(T) parallel steps.

    This is the associative scan of the paper's appendix, ``(a, x) . (b, y) = (ab, bx + y)``. The
    decay is constant, so the first element of a pair is ``decay`` to a power of 2. It is exactly
    causal.
    """
    x_BTP, shift = inputs_BTP, 1
    while shift < x_BTP.shape[1]:
        x_BTP = x_BTP + F.pad(decay_P * x_BTP[:, :-shift], (0, 0, shift, 0))
        decay_P, shift = decay_P * decay_P, 2 * shift
    return x_BTP


class S5(BaselineMixer):
    """The S5 layer: a multi-input, multi-output SSM (section 3), then its gated activation.

        x' = Lambda x + B~ u,  y = Re(C~ x) + D u            Lambda diagonal, complex
        x_k = e^{Lambda dt} x_{k-1} + Lambda^{-1} (e^{Lambda dt} - 1) B~ u_k   (zero-order hold)
        out = gelu(y) * sigmoid(gelu(y) W)

    Lambda starts as HiPPO-N's eigenvalues, in ``num_blocks`` equal blocks. B~ = V^-1 B and C~ = C V
    with its eigenvectors V. Only one of each conjugate pair is kept, so the code has 2 Re. The
    steps dt are learnt, one per state. A bidirectional layer has a second scan from the end to the
    start, with its own C~.

    Args:
        num_states: Total number of real states; ``hidden_size`` if None.
        num_blocks: Number J of blocks. Each block has an even number of states.
    """

    undecayed = ("log_step", "log_real", "imaginary", "skip")

    def __init__(
        self,
        hidden_size: int,
        *,
        num_states: int | None = None,
        num_blocks: int = 1,
        causal: bool = True,
    ) -> None:
        super().__init__(hidden_size, causal)
        states = hidden_size if num_states is None else num_states
        check_multiple("S5", num_states=states, num_blocks=num_blocks)
        if states // num_blocks % 2:
            raise ValueError(
                f"S5: blocks must have an even number of states, got num_states={states} and"
                f" num_blocks={num_blocks}"
            )
        self.num_blocks, half = num_blocks, states // 2
        self.log_real = nn.Parameter(torch.empty(half))
        self.imaginary = nn.Parameter(torch.empty(half))
        self.log_step = nn.Parameter(torch.empty(half))
        # The last dimension has the real and the imaginary part.
        self.b = nn.Parameter(torch.empty(half, hidden_size, 2))
        self.c = nn.Parameter(torch.empty(1 if causal else 2, hidden_size, half, 2))
        self.skip = nn.Parameter(torch.empty(hidden_size))
        self.gate = nn.Linear(hidden_size, hidden_size, bias=False)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        size = 2 * len(self.log_real) // self.num_blocks
        if self.log_real.is_meta:
            return {}
        values, vectors = hippo_normal(size)
        dtype, device = torch.float64, "cpu"
        blocks = self.num_blocks
        # B and C are drawn in the real basis. Inputs of unit variance give outputs of unit
        # variance.
        b = torch.randn(blocks, size, self.hidden_size, dtype=dtype, device=device)
        c = torch.randn(*self.c.shape[:2], blocks, size, dtype=dtype, device=device)
        b = vectors.mH @ (b / math.sqrt(self.hidden_size)).to(vectors.dtype)
        c = (c / math.sqrt(size * blocks)).to(vectors.dtype) @ vectors
        spread = math.log(MAX_STEP / MIN_STEP) * torch.rand(len(self.log_step))
        return {
            "log_real": torch.log(-values.real).repeat(blocks),
            "imaginary": values.imag.repeat(blocks),
            "log_step": math.log(MIN_STEP) + spread,
            "b": torch.view_as_real(b.flatten(0, 1)),
            "c": torch.view_as_real(c.flatten(2)),
            "skip": torch.randn(self.hidden_size),
        }

    def eigenvalues(self, dtype: torch.dtype) -> Tensor:
        """Lambda (P,), with a real part below 0."""
        return torch.complex(-torch.exp(self.log_real.to(dtype)), self.imaginary.to(dtype))

    def discretise(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """e^{Lambda dt} (P,) and the discrete B (P, E)."""
        values_P = self.eigenvalues(dtype)
        step_P = values_P * torch.exp(self.log_step.to(dtype))
        b_PE = torch.view_as_complex(self.b.to(dtype).contiguous())
        return torch.exp(step_P), (torch.expm1(step_P) / values_P)[:, None] * b_PE

    def states(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """The states after each token, (B, T, P) complex, for each direction."""
        dtype = computation_dtype(x_BTE.dtype)
        decay_P, b_PE = self.discretise(dtype)
        inputs = x_BTE.to(b_PE.dtype) @ b_PE.mT
        ahead = constant_scan(decay_P, inputs)
        return (ahead,) if self.causal else (ahead, constant_scan(decay_P, inputs.flip(1)).flip(1))

    def _mix(self, x_BTE: Tensor, key_mask: Tensor | None) -> Tensor:
        x_BTE = masked(x_BTE, key_mask)
        dtype = computation_dtype(x_BTE.dtype)
        c_DEP = torch.view_as_complex(self.c.to(dtype).contiguous())
        y = self.skip.to(dtype) * x_BTE
        for state_BTP, c_EP in zip(self.states(x_BTE), c_DEP, strict=True):
            y = y + 2.0 * (state_BTP @ c_EP.mT).real
        y = F.gelu(y.to(x_BTE.dtype))
        return y * torch.sigmoid(self.gate(y))

    def extra_repr(self) -> str:
        states = 2 * len(self.log_real)
        return f"{super().extra_repr()}, num_states={states}, num_blocks={self.num_blocks}"
