"""S5: one diagonal state space of all channels, by a parallel scan (arXiv 2208.04933).

Shape suffixes: B batch, T tokens, E hidden size, P complex states (each with its conjugate),
J blocks, R real states of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.checks import check_divides
from latte.ops.precision import full_precision
from latte.ops.validation import computation_dtype
from latte.rivals.base import ComparatorMixer, masked

MIN_STEP, MAX_STEP = 0.001, 0.1  # log-uniform at the start


def hippo_normal(size: int) -> tuple[Tensor, Tensor]:
    """HiPPO-N's eigenvalues with a positive imaginary part (R/2,) and eigenvectors (R, R/2), fp64.

    HiPPO-N is the normal part of HiPPO-LegS: -1/2 on the diagonal,
    -sqrt(n + 1/2) sqrt(k + 1/2) below it and the opposite sign above. Less its diagonal it is
    skew-symmetric, so that i times it is Hermitian, with eigenvalues in pairs of opposite sign.
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

    The associative scan of the paper's appendix, ``(a, x) . (b, y) = (ab, bx + y)``; as the decay
    does not change, the first element of a pair is its power of 2. Exactly causal.
    """
    x_BTP, shift = inputs_BTP, 1
    while shift < x_BTP.shape[1]:
        x_BTP = x_BTP + F.pad(decay_P * x_BTP[:, :-shift], (0, 0, shift, 0))
        decay_P, shift = decay_P * decay_P, 2 * shift
    return x_BTP


class S5(ComparatorMixer):
    """The S5 layer: a multi-input, multi-output SSM (section 3), then its gated activation.

        x' = Lambda x + B~ u,  y = Re(C~ x) + D u            Lambda diagonal, complex
        x_k = e^{Lambda dt} x_{k-1} + Lambda^{-1} (e^{Lambda dt} - 1) B~ u_k   (zero-order hold)
        out = gelu(y) * sigmoid(gelu(y) W)

    Lambda starts as HiPPO-N's eigenvalues, in ``num_blocks`` equal blocks, and B~ = V^-1 B,
    C~ = C V with its eigenvectors V. One of each conjugate pair is kept, hence 2 Re. The steps dt
    are learnt, one per state. Bidirectional: a second scan from the end to the start, with a
    readout C~ of its own.

    Args:
        num_states: in total, real; ``hidden_size`` if None.
        num_blocks: J; each block has an even number of states.
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
        check_divides("S5", "num_blocks", "num_states", num_states=states, num_blocks=num_blocks)
        if states // num_blocks % 2:
            raise ValueError(
                f"S5: blocks must have an even number of states, got num_states={states} and"
                f" num_blocks={num_blocks}"
            )
        self.num_blocks, half = num_blocks, states // 2
        self.log_real = nn.Parameter(torch.empty(half))
        self.imaginary = nn.Parameter(torch.empty(half))
        self.log_step = nn.Parameter(torch.empty(half))
        # The last dimension is real and imaginary part.
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
        # B and C are drawn in the real basis, with unit variance out of unit variance in.
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
        """Lambda (P,), its real part below 0."""
        return torch.complex(-torch.exp(self.log_real.to(dtype)), self.imaginary.to(dtype))

    def discretise(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """e^{Lambda dt} (P,) and the discrete B (P, E)."""
        values_P = self.eigenvalues(dtype)
        step_P = values_P * torch.exp(self.log_step.to(dtype))
        b_PE = torch.view_as_complex(self.b.to(dtype).contiguous())
        return torch.exp(step_P), (torch.expm1(step_P) / values_P)[:, None] * b_PE

    def states(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """The states after each token, (B, T, P) complex, of either direction."""
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
